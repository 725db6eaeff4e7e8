"""Weights that rest in a narrow format with a scale for each tile, and are taken by products as they rest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.engine.torch.quantise import CASTS, Quantised, quantised
from shardwise.floats.number_format import NumberFormat
from shardwise.floats.scaling import Scaling


@dataclass(frozen=True, slots=True, eq=False)
class Tiled:
    """A weight of a `shape`: `elements` [.., M, K] in a narrow format, and the `scales` [.., R, C] of its tiles; of a stack of
    matrices it has all. `turned`: where it is used rows and columns are exchanged."""

    shape: torch.Size
    elements: Tensor
    scales: Tensor
    to_format: NumberFormat
    scaling: Scaling
    turned: bool = False

    @classmethod
    def zeros(
        cls, shape: torch.Size, num_stacked: int, num_rows: int, to: NumberFormat, scaling: Scaling, device: torch.device
    ) -> Tiled:  # fmt: skip
        """One of zeros: of a shape the first dims are those of a stack, the next those of its rows."""
        stack, rows = shape[:num_stacked], shape[num_stacked : num_stacked + num_rows].numel()
        columns = shape[num_stacked + num_rows :].numel()
        blocks = (-(-size // (tile or size)) for size, tile in zip((rows, columns), scaling.weight_block, strict=True))
        elements = torch.zeros(*stack, rows, columns, dtype=CASTS[to.name], device=device)
        return cls(shape, elements, torch.ones(*stack, *blocks, device=device), to, scaling)

    @property
    def dtype(self) -> torch.dtype:
        return self.elements.dtype

    @property
    def device(self) -> torch.device:
        return self.elements.device

    def to(self, dtype: torch.dtype) -> Tiled:
        """Itself: products take it as it is, in whatever format the others are used."""
        return self

    def transpose(self, first: int, second: int) -> Tiled:
        """With rows and columns of each matrix of a stack exchanged."""
        shape = torch.Size((*self.shape[:first], self.shape[second], self.shape[first]))
        return replace(self, shape=shape, turned=not self.turned)

    def __iter__(self) -> Iterator[Tiled]:
        """The matrices of a stack."""
        for elements, scales in zip(self.elements, self.scales, strict=True):
            yield replace(self, shape=self.shape[1:], elements=elements, scales=scales)

    def assign(self, values: Tensor) -> None:
        """Cast values of its shape."""
        elements, scales = (one.view(-1, *one.shape[-2:]) for one in (self.elements, self.scales))
        for matrix, into, its_scales in zip(values.reshape(elements.shape), elements, scales, strict=True):
            cast = quantised(matrix, self.to_format, self.scaling.weight_block, self.scaling.kind)
            into.copy_(cast.elements)
            its_scales.copy_(cast.scales)

    def operand(self, *, by_columns: bool) -> Quantised:
        """As a product takes one matrix: by its rows, or by its columns as rows."""
        one = Quantised(self.elements.float(), self.scales, torch.ones((), device=self.device))
        return Quantised(one.elements.t(), one.scales.t(), one.whole) if by_columns else one
