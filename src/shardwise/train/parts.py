"""What a run is made of, as the loop sees it: the ranks' world, the trainer, and where its checkpoints are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch

from shardwise.batch.ramp import BatchRamp
from shardwise.data.batches import Batches
from shardwise.measurement.inspection import Inspection
from shardwise.measurement.record import StepRecord
from shardwise.measurement.trace import RankTrace
from shardwise.planning.plan import Plan
from shardwise.train.checkpoint.checkpointer import Restored, Saved
from shardwise.train.flags import Device
from shardwise.train.meeting import Meeting
from shardwise.train.policy import Judge, Trouble
from shardwise.train.recipe import Recipe
from shardwise.train.transport.interface import Transport

State = Mapping[str, Any]


class World(Protocol):
    """The ranks of a run: this one's number, how many there are, this one's pipeline stage, device and transport, and how they
    met, where there are several."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def stage(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def transport(self) -> Transport: ...
    @property
    def meeting(self) -> Meeting | None: ...


class Trainer(Protocol):
    """What runs the steps of a plan on a rank. `step` is the number of steps done."""

    @property
    def step(self) -> int: ...
    @property
    def judge(self) -> Judge: ...
    @property
    def trouble(self) -> Trouble | None:
        """What was wrong with the last step."""

    def train_step(self) -> StepRecord:
        """Run the next step."""

    def resize(self, ramp: BatchRamp, /) -> None:
        """From the next step on take batches as a ramp has them."""

    def pass_over(self, step: int, /) -> None:
        """Go on behind step `step`; what lies between is left out."""

    def inspected_step(self) -> tuple[StepRecord, Inspection]:
        """Run the next step, and watch what it holds and issues."""

    def profiled_step(self) -> tuple[StepRecord, RankTrace]:
        """Run the next step, and record what this rank does in it."""

    def validation_loss(self, held_out: Batches, /) -> float:
        """Mean loss of the first step of `held_out`, which is every sequence of the held-out text, in nats per target."""

    def state(self) -> State:
        """All that a checkpoint keeps: this rank's pieces, and plain values."""

    def restore(self, values: State, /) -> None:
        """Go on where the plain values of a checkpoint say; the pieces are loaded already."""


class Checkpoints(Protocol):
    """The checkpoints of a run; every rank calls each of these in the same order."""

    def restore(self, state: State, /) -> Restored | None:
        """Fill the pieces of a state from the newest one that is as it was written; None where there is none at all."""

    def save(self, step: int, state: State, /) -> None:
        """Write one; it is there when this returns."""

    def start(self, step: int, state: State, /) -> None:
        """Begin to write one, beside the steps that follow."""

    def finished(self) -> Sequence[Saved]:
        """What has been completed since this was last asked."""

    def __enter__(self) -> Checkpoints: ...
    def __exit__(self, *raised: Any) -> None:
        """Wait until what was begun is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How each of them is made. `join` meets the other ranks, on the devices that are asked for, and `leave` parts with them.
    `probe` gives seconds of short work of a plan by name."""

    join: Callable[[Plan, Recipe, Device], World]
    leave: Callable[[], None]
    probe: Callable[[Plan, World], Mapping[str, float]]
    trainer: Callable[[Plan, Recipe, Batches, Any], Trainer]
    checkpoints: Callable[[Path, Recipe], Checkpoints]


def own_parts() -> Parts:
    """Those of Shardwise's engine."""
    from shardwise.train import trainer, world
    from shardwise.train.checkpoint import Checkpointer
    from shardwise.train.issued import instance_of
    from shardwise.train.probe import probe

    def join(plan: Plan, recipe: Recipe, device: Device) -> World:
        timeout = timedelta(seconds=recipe.timeout_s)
        place, meeting = world.start(device, timeout)
        return world.World(instance_of(plan, recipe).mesh, place, meeting=meeting, timeout=timeout)

    def checkpoints(folder: Path, recipe: Recipe) -> Checkpoints:
        return Checkpointer(
            folder,
            keep=recipe.keep_checkpoints,
            keep_every=recipe.keep_every,
            timeout=timedelta(seconds=recipe.timeout_s),
        )

    return Parts(join=join, leave=world.stop, probe=probe, trainer=trainer.Trainer, checkpoints=checkpoints)
