"""What a run is made of, as the loop sees it: protocols of the trainer and of its checkpoints, and how each component is
made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.records.step_log import StepRecord
from shardwise.records.step_memory_and_collectives import StepInspection
from shardwise.records.step_trace import RankTrace
from shardwise.run.checkpoints.checkpointer import RestoreResult, SaveResult
from shardwise.run.data.batches import Batches
from shardwise.run.faults.agreement import RankGroup
from shardwise.run.recipe import Device, TrainingRecipe
from shardwise.run.trainer.anomaly_detector import AnomalyDetector, StepAnomaly
from shardwise.search.plan import Plan

TrainerState = Mapping[str, Any]


class StepTrainer(Protocol):
    """What runs the steps of a plan on a rank. `step` is the number of steps done."""

    @property
    def step(self) -> int: ...
    @property
    def judge(self) -> AnomalyDetector: ...
    @property
    def anomaly(self) -> StepAnomaly | None:
        """What was wrong with the last step."""

    def train_step(self) -> StepRecord:
        """Run the next step."""

    def resize(self, ramp: BatchRamp, /) -> None:
        """From the next step on take batches as a ramp has them."""

    def skip_to(self, step: int, /) -> None:
        """Go on behind step `step`; what lies between is left out."""

    def inspected_step(self) -> tuple[StepRecord, StepInspection]:
        """Run the next step, and watch what it holds and issues."""

    def profiled_step(self) -> tuple[StepRecord, RankTrace]:
        """Run the next step, and record what this rank does in it."""

    def validation_loss(self, held_out: Batches, /) -> float:
        """Mean loss of the first step of `held_out`, which is every sequence of the held-out text, in nats per target."""

    def state(self) -> TrainerState:
        """All that a checkpoint keeps: this rank's pieces, and plain values."""

    def restore(self, values: TrainerState, /) -> None:
        """Go on where the plain values of a checkpoint say; the pieces are loaded already."""


class CheckpointStore(Protocol):
    """The checkpoints of a run; every rank calls each of these in the same order."""

    def restore(self, state: TrainerState, /) -> RestoreResult | None:
        """Fill the pieces of a state from the newest one that is as it was written; None where there is none at all."""

    def save(self, step: int, state: TrainerState, /) -> None:
        """Write one; it is there when this returns."""

    def start(self, step: int, state: TrainerState, /) -> None:
        """Begin to write one, beside the steps that follow."""

    def finished(self) -> Sequence[SaveResult]:
        """What has been completed since this was last asked."""

    def __enter__(self) -> CheckpointStore: ...
    def __exit__(self, *raised: Any) -> None:
        """Wait until what was begun is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """How each of them is made. `join` meets the other ranks, on the devices that are asked for, and `leave` parts with them.
    `probe` gives seconds of short work of a plan by name."""

    join: Callable[[Plan, TrainingRecipe, Device], RankGroup]
    leave: Callable[[], None]
    probe: Callable[[Plan, RankGroup], Mapping[str, float]]
    trainer: Callable[[Plan, TrainingRecipe, Batches, Any], StepTrainer]
    checkpoints: Callable[[Path, TrainingRecipe], CheckpointStore]
