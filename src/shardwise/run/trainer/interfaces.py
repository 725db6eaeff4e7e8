"""Protocols of the trainer and of its checkpoints as the loop sees them, and the factories of a run's components."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardwise.batch_size import BatchRamp
from shardwise.records import RankTrace, StepInspection, StepLog, StepRecord
from shardwise.run.checkpoints.checkpointer import RestoreResult, SaveResult
from shardwise.run.data.batches import Batches
from shardwise.run.faults.agreement import RankGroup
from shardwise.run.recipe import Device, TrainingRecipe
from shardwise.run.trainer.anomaly_detector import AnomalyDetector, StepAnomaly
from shardwise.search import Plan

TrainerState = Mapping[str, Any]
EarlierLog = Callable[[], StepLog | None]  # the log of a run that goes on; None on all ranks but the first


class StepTrainer(Protocol):
    """Runs the steps of a plan on a rank. `step` is the number of completed steps."""

    @property
    def step(self) -> int: ...
    @property
    def detector(self) -> AnomalyDetector: ...
    @property
    def anomaly(self) -> StepAnomaly | None:
        """The anomaly of the last step, if any."""

    @property
    def step_graph(self) -> str | None:
        """Why the passes of steps are not replayed as a graph, or "captured"; None without a GPU."""

    def train_step(self) -> StepRecord:
        """Run the next step."""

    def resize(self, ramp: BatchRamp, /) -> None:
        """Take batches from a ramp from the next step on."""

    def skip_to(self, step: int, /) -> None:
        """Continue after step `step`, leaving out the batches between."""

    def inspected_step(self) -> tuple[StepRecord, StepInspection]:
        """Run the next step, and record its memory and collectives."""

    def profiled_step(self) -> tuple[StepRecord, RankTrace]:
        """Run the next step, and record this rank's timeline."""

    def validation_loss(self, held_out: Batches, /) -> float:
        """Return the mean loss, in nats per target, of the first step of `held_out`: every held-out sequence."""

    def state(self) -> TrainerState:
        """Return what a checkpoint keeps: this rank's shards, and plain values."""

    def restore(self, values: TrainerState, /) -> None:
        """Continue from the plain values of a checkpoint, whose shards are loaded already."""


class CheckpointStore(Protocol):
    """The checkpoints of a run; every rank calls each method in the same order."""

    def restore(self, state: TrainerState, /) -> RestoreResult | None:
        """Fill the shards of a state from the newest undamaged checkpoint; return None if there is no checkpoint at
        all."""

    def save(self, step: int, state: TrainerState, /) -> None:
        """Write a checkpoint; it is complete on return."""

    def start(self, step: int, state: TrainerState, /) -> None:
        """Start writing a checkpoint while the steps continue."""

    def finished(self) -> Sequence[SaveResult]:
        """Return the checkpoints completed since the last call."""

    def __enter__(self) -> CheckpointStore: ...
    def __exit__(self, *raised: Any) -> None:
        """Wait until every started checkpoint is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComponents:
    """Factories of a run's components. `join` meets the other ranks, on the requested devices, and `leave` ends the
    process group. `probe` returns the seconds of short pieces of a plan's work by name."""

    join: Callable[[Plan, TrainingRecipe, Device], RankGroup]
    leave: Callable[[], None]
    probe: Callable[[Plan, RankGroup], Mapping[str, float]]
    trainer: Callable[[Plan, TrainingRecipe, Batches, Any], StepTrainer]
    checkpoints: Callable[[Path, TrainingRecipe], CheckpointStore]
