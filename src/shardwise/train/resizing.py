"""The batches of a run at work: what its checkpoints keep of them, and how it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.data.batches import Batches
from shardwise.planning.plan import Plan
from shardwise.train.batching import BATCH_RAMP, resumed_ramp
from shardwise.train.parts import Trainer
from shardwise.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Resizing:
    """All ranks call each of these together."""

    plan: Plan
    recipe: Recipe
    trainer: Trainer
    batches: Batches

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the batches of the steps before it."""
        return {BATCH_RAMP: [list(value) for value in self.batches.ramp.before(self.trainer.step).values]}

    def resume(self, values: Mapping[str, Any]) -> None:
        """Go on behind the batches that a checkpoint has. Raises `InputError` for one that does not have them."""
        self.trainer.resize(resumed_ramp(self.plan, self.recipe, values, self.trainer.step))
