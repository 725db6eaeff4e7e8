"""Moments in 8 bits with a scale for each block, as `floats.dynamic` defines them, on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.floats.dynamic import numbers_named


@dataclass(frozen=True, slots=True, eq=False)
class Blocked:
    """Elements [n] as `codes` [n] of a format, by its name, and the `scales` of its blocks, counted from the first element.

    What the formulas of optimizers need of a tensor it has too: a part of it, its values in a format, and other values in place.
    """

    codes: Tensor
    scales: Tensor
    format: str

    @classmethod
    def zeros(cls, size: int, format: str, device: torch.device) -> Blocked:
        """So many elements of 0."""
        numbers = numbers_named(format)
        (zero,) = (numbers.values == 0.0).nonzero()[0]
        codes = torch.full((size,), int(zero), dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros(-(-size // numbers.blocks.size), device=device), format)

    @property
    def dtype(self) -> torch.dtype:
        """That of the values which it stands for."""
        return self.scales.dtype

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return numbers_named(self.format).blocks.size

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, part: slice) -> Blocked:
        """Some elements from the beginning of a block on, as views."""
        start, stop, _ = part.indices(len(self))
        if start % self.block:
            raise ValueError(f"a part begins at element {start}; a multiple of {self.block} is required")
        return Blocked(self.codes[start:stop], self.scales[start // self.block : -(-stop // self.block)], self.format)

    def to(self, dtype: torch.dtype) -> Tensor:
        """The values [n]."""
        numbers, _ = _tables(self.format, self.codes.device)
        return (numbers[self.codes.int()] * self._spread(self.scales)).to(dtype)

    def copy_(self, values: Tensor) -> Blocked:
        """Take on other values [n]."""
        _, limits = _tables(self.format, self.codes.device)
        values = values.to(self.dtype)
        padded = F.pad(values, (0, -len(values) % self.block)).view(-1, self.block)
        self.scales.copy_(padded.abs().amax(1))
        scaled = values / self._spread(self.scales.where(self.scales > 0, 1.0))
        self.codes.copy_(torch.bucketize(scaled, limits, right=True, out_int32=True))
        return self

    def _spread(self, scales: Tensor) -> Tensor:
        """The scale of each element [n]."""
        return scales.repeat_interleave(self.block)[: len(self)]


@lru_cache
def _tables(format: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The numbers of a format, and the limits between them, on a device."""
    numbers = numbers_named(format)
    return torch.from_numpy(numbers.values).to(device), torch.from_numpy(numbers.limits).to(device)
