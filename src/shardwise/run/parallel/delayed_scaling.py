"""Scales of products from the largest sizes of earlier steps, as `floats.delayed` defines them, equal on all ranks.

A tensor that products with weights take has one scale in a step: that of all its casts, in whichever pass and
micro-batch, of all experts together, and on all ranks. Letters: N tensors of the model, S steps of their history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from shardwise.run.kernels.matmul import ProductFormats, product_formats
from shardwise.run.mixed_precision import DTYPES
from shardwise.run.parallel.collectives import MeshCollectives
from shardwise.run.recipe import TrainingRecipe
from shardwise.step.collectives import operands_by_path
from shardwise.step.parameters import unit_paths
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import DelayedScaling


class AmaxScaler:
    """Those of a whole model, the same on every rank: `factors` [N], which this step's casts multiply by, the `history` [N, S] of
    largest sizes with the newest first, and what this rank has `seen` [N] in this step.

    Differs from Transformer Engine, whose history has an entry for each micro-batch: here it is the step's, so that the scales do
    not depend on how a batch is cut.
    """

    def __init__(self, rows: Mapping[str, Mapping[str, int]], largest: Tensor, delayed: DelayedScaling) -> None:
        self.rows, self.delayed = rows, delayed
        self.largest = largest * 2.0**-delayed.margin
        self.factors, self.seen = torch.ones_like(largest), torch.zeros_like(largest)
        self.history = torch.zeros(len(largest), delayed.history, device=largest.device)

    def of(self, path: str) -> UnitScales | None:
        """Those of the unit at a path; None: it has none."""
        return UnitScales(self, self.rows[path]) if path in self.rows else None

    def end_step(self, seen: Tensor) -> None:
        """Take the largest sizes [N] that all ranks have seen in a step into the history."""
        sizes = torch.where(seen.isfinite(), seen, 0.0)
        self.history.copy_(torch.cat([sizes[:, None], self.history[:, :-1]], dim=1))
        amax = self.history.amax(dim=1) if self.delayed.algorithm == "max" else sizes
        fresh = (self.largest / amax).clamp(max=torch.finfo(torch.float32).max)
        self.factors.copy_(torch.where(amax > 0, fresh, self.factors))

    def state(self) -> dict[str, Tensor]:
        """What a run goes on with, by name."""
        return {"scale_factors": self.factors, "amax_history": self.history}


@dataclass(frozen=True, slots=True)
class UnitScales:
    """Those of one unit, by the names of its tensors (`run.kernels.matmul.OperandScales`)."""

    model: AmaxScaler
    rows: Mapping[str, int]

    def factor(self, name: str, values: Tensor) -> Tensor:
        """By what a tensor is multiplied, whose values are seen."""
        row = self.rows[name]
        seen = self.model.seen[row]
        torch.maximum(seen, values.abs().amax().float(), out=seen)
        return self.model.factors[row]


def build_amax_scaler(instance: RankProgram, delayed: DelayedScaling, device: torch.device) -> AmaxScaler | None:
    """Those of a model before its first step: factors of 1, as Transformer Engine begins. None where scales do not follow from
    earlier steps."""
    narrow = product_formats(instance.precision)
    if narrow is None or not narrow.scaling.is_delayed:
        return None
    names, numbers = operands_by_path(instance.architecture), count()
    kinds = dict(unit_paths(instance.architecture))
    rows = {path: dict(zip(of_unit, numbers, strict=False)) for path, of_unit in names.items()}
    largest = [one for path, of_unit in names.items() for one in _format_maxima(instance, narrow, kinds[path], of_unit)]
    return AmaxScaler(rows, torch.tensor(largest, device=device), delayed)


def _format_maxima(instance: RankProgram, narrow: ProductFormats, unit: str, names: Iterable[str]) -> list[float]:
    tensors = instance.unit(unit).tensors
    return [narrow.of(tensors[name]).to.max for name in names]


class SharedAmaxScaler:
    """Those of a run, in the `model`; None: its precision recipe has no such scales, and nothing is done."""

    def __init__(self, instance: RankProgram, recipe: TrainingRecipe, exchange: MeshCollectives) -> None:
        self.model = build_amax_scaler(instance, recipe.delayed, exchange.world.device)
        self.exchange, self.axes = exchange, instance.amax_axes
        self.control = DTYPES[instance.control_dtype]

    def of(self, path: str) -> UnitScales | None:
        """Those of the unit at a path."""
        return None if self.model is None else self.model.of(path)

    def begin_step(self) -> None:
        """What was seen outside of a step does not count."""
        if self.model is not None:
            self.model.seen.zero_()

    def end_step(self) -> None:
        """The scales of the next step follow from the largest sizes that any process has seen."""
        if self.model is not None:
            seen = self.exchange.max_and_wait(self.model.seen.to(self.control), self.axes)
            self.model.end_step(seen.float())

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of them, by name."""
        return {} if self.model is None else self.model.state()
