"""FP8 scales of products from the amax of earlier steps (`values.precision.DelayedScaling`), equal on all ranks.

A tensor that products with weights take has one scale in a step: for all its casts, in whichever pass and micro-batch,
of all experts, on all ranks. Letters: N tensors of the model, S steps of their history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from shardwise.run.kernels.matmul import product_formats
from shardwise.run.mixed_precision import DTYPES
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.recipe import TrainingRecipe
from shardwise.step import RankProgram, unit_paths
from shardwise.step.collectives import operands_by_path
from shardwise.values.precision import DelayedScaling


class AmaxScaler:
    """Scales of a whole model, equal on every rank.

    `factors` [N] multiply this step's casts; `history` [N, S] has the amax of earlier steps, newest first; `seen` [N]
    is the amax on this rank in this step. Differs from Transformer Engine, whose history has an entry for each
    micro-batch: here it has one for each step, so that scales do not depend on the number of micro-batches.
    """

    def __init__(self, rows: Mapping[str, Mapping[str, int]], largest: Tensor, delayed: DelayedScaling) -> None:
        self.rows, self.delayed = rows, delayed
        self.largest = largest * 2.0**-delayed.margin
        self.factors, self.seen = torch.ones_like(largest), torch.zeros_like(largest)
        self.history = torch.zeros(len(largest), delayed.history, device=largest.device)

    def of(self, path: str) -> UnitScales | None:
        """Return the scales of the unit at a path; None: it has none."""
        return UnitScales(self, self.rows[path]) if path in self.rows else None

    def end_step(self, step_amax: Tensor) -> None:
        """Push the amax [N] over all ranks in a step onto the history, and compute the next factors."""
        finite_amax = torch.where(step_amax.isfinite(), step_amax, 0.0)
        self.history.copy_(torch.cat([finite_amax[:, None], self.history[:, :-1]], dim=1))
        amax = self.history.amax(dim=1) if self.delayed.algorithm == "max" else finite_amax
        fresh = (self.largest / amax).clamp(max=torch.finfo(torch.float32).max)
        self.factors.copy_(torch.where(amax > 0, fresh, self.factors))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps, by name."""
        return {"scale_factors": self.factors, "amax_history": self.history}


@dataclass(frozen=True, slots=True)
class UnitScales:
    """Scales of one unit, by the names of its tensors (`run.kernels.matmul.OperandScales`)."""

    model: AmaxScaler
    rows: Mapping[str, int]

    def factor(self, name: str, tensor: Tensor) -> Tensor:
        """Return the scale factor of a tensor, and record its amax for later steps."""
        row = self.rows[name]
        amax = self.model.seen[row]
        torch.maximum(amax, tensor.abs().amax().float(), out=amax)
        return self.model.factors[row]


def build_amax_scaler(instance: RankProgram, delayed: DelayedScaling, device: torch.device) -> AmaxScaler | None:
    """Return a model's scales before its first step: 1, as in Transformer Engine; None without delayed scaling."""
    formats = product_formats(instance.precision)
    if formats is None or not formats.scaling.is_delayed:
        return None
    names, numbers = operands_by_path(instance.architecture), count()
    kinds = dict(unit_paths(instance.architecture))
    rows = {path: dict(zip(unit_names, numbers, strict=False)) for path, unit_names in names.items()}
    maxima: list[float] = []
    for path, unit_names in names.items():
        tensors = instance.unit(kinds[path]).tensors
        maxima += [formats.of(tensors[name]).to.max for name in unit_names]
    return AmaxScaler(rows, torch.tensor(maxima, device=device), delayed)


class SharedAmaxScaler:
    """Scales of a run, in `model`; None: its precision recipe has no delayed scaling, and nothing is done."""

    def __init__(self, instance: RankProgram, recipe: TrainingRecipe, exchange: MeshCollectives) -> None:
        self.model = build_amax_scaler(instance, recipe.delayed, exchange.world.device)
        self.exchange, self.axes = exchange, instance.amax_axes
        self.control = DTYPES[instance.control_dtype]

    def of(self, path: str) -> UnitScales | None:
        """Return the scales of the unit at a path."""
        return None if self.model is None else self.model.of(path)

    def begin_step(self) -> None:
        """Forget amax values from outside of a step, such as an evaluation."""
        if self.model is not None:
            self.model.seen.zero_()

    def end_step(self) -> None:
        """Compute the next step's scales from the amax over all ranks."""
        if self.model is not None:
            amax = self.exchange.max_and_wait(self.model.seen.to(self.control), self.axes)
            self.model.end_step(amax.float())

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of all scales."""
        if self.model is not None:
            yield from (self.model.largest, self.model.factors, self.model.seen, self.model.history)

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that a checkpoint keeps, by name."""
        return {} if self.model is None else self.model.state()
