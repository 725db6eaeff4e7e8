"""Scales of products that follow from the largest sizes of earlier steps, the same on every process."""

from __future__ import annotations

from torch import Tensor

from shardwise.engine.torch.delayed import UnitScales, delayed_scales
from shardwise.lowering.instance import Instance
from shardwise.train.formats import DTYPES
from shardwise.train.parallel.exchange import Exchange
from shardwise.train.recipe import Recipe


class SharedScales:
    """Those of a run, in the `model`; None: its precision recipe has no such scales, and nothing is done."""

    def __init__(self, instance: Instance, recipe: Recipe, exchange: Exchange) -> None:
        self.model = delayed_scales(instance, recipe.delayed, exchange.world.device)
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
            seen = self.exchange.largest_now(self.model.seen.to(self.control), self.axes)
            self.model.end_step(seen.float())

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of them, by name."""
        return {} if self.model is None else self.model.state()
