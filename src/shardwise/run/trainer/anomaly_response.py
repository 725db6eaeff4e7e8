"""Respond to an anomalous step: ranks agree on the anomaly and on the first tensor that shows it, and then stop, leave
its batch out, or go back to a checkpoint, as the policy says."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shardwise.records import StepLog
from shardwise.run.faults.agreement import (
    RankGroup,
    all_gather_texts,
    all_reduce_max,
    broadcast_from_first,
    require_on_all_ranks,
)
from shardwise.run.faults.rank_status import join_first, set_stage
from shardwise.run.parallel.world import World
from shardwise.run.recipe import POLICIES
from shardwise.run.trainer.anomaly_detector import AnomalyDetector, StepAnomaly
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.interfaces import CheckpointStore, EarlierLog, StepTrainer
from shardwise.run.trainer.run_reporter import RunReporter
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.values import InputError, pluralize


def agree_on_anomaly(
    anomaly: StepAnomaly | None, detector: AnomalyDetector, step: int, world: World
) -> StepAnomaly | None:
    """Return the gravest of the anomalies that the ranks found in a step, the same on all ranks. Ranks that compute the
    same may still find different anomalies, when the memory of one of them is damaged."""
    severity = 0 if anomaly is None else len(POLICIES) - POLICIES.index(anomaly.policy)
    gravest = all_reduce_max(world, severity, "what is wrong")
    if not gravest:
        return None
    policy = POLICIES[len(POLICIES) - gravest]
    texts = all_gather_texts(world, anomaly.text if anomaly is not None and anomaly.policy == policy else "")
    return StepAnomaly(step, policy, detector.actions[policy], next(filter(None, texts)))


def first_non_finite(engine: TrainingEngine, local_loss: float, world: World) -> str:
    """Describe the first tensor that is not finite, by rank, unit and name; all ranks call this and get the same text.

    Weights come first, since all else follows from them; then gradients in the order of the backward pass, in which
    non-finite values spread. Gradients are summed over the ranks by then, so the rank is found from `local_loss`, the
    loss of each rank's own targets.
    """
    weights = all_gather_texts(world, next(_non_finite(engine, _weights(engine)), ""))
    if any(weights):
        return _list_ranks(weights, "weight")
    loss_text = "" if math.isfinite(local_loss) else f"its own targets have a loss of {local_loss}"
    losses = all_gather_texts(world, loss_text)
    gradients = all_gather_texts(world, next(_non_finite(engine, _gradients(engine), backward=True), ""))
    findings = [_list_ranks(texts, label) for texts, label in ((losses, ""), (gradients, "gradient")) if any(texts)]
    return "; ".join(findings) or "every weight and every gradient is finite"


def _weights(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    for group in engine.groups:
        tensors = ((name, view) for name, view in group.views.items() if isinstance(view, Tensor))
        yield from tensors if group.is_gathered else ()
        yield from ((shard.name, group.state[shard.start : shard.start + shard.size]) for shard in group.intervals())


def _gradients(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    for group in engine.groups:
        if group.group.trained:
            yield from (
                (shard.name, group.gradient_shard[shard.start : shard.start + shard.size])
                for shard in group.intervals()
            )


def _non_finite(
    engine: TrainingEngine, tensors: Iterator[tuple[str, Tensor]], *, backward: bool = False
) -> Iterator[str]:
    """Describe each non-finite tensor, in forward or backward order of the units."""
    units = [
        parameter.name
        for path, _ in engine.instance.units
        for parameter in engine.instance.parameters_by_unit[path].values()
    ]
    order = {name: index for index, name in reversed(list(enumerate(units)))}
    for name, tensor in sorted(tensors, key=lambda pair: order[pair[0]], reverse=backward):
        count = tensor.numel() - int(tensor.isfinite().sum())
        if count:
            unit, _, weight = name.rpartition(".")
            yield f"{weight} of unit {unit} has {count:,} of {tensor.numel():,} elements that are not finite"


def _list_ranks(by_rank: list[str], label: str) -> str:
    prefix = f"{label} " if label else ""
    return join_first(
        [f"rank {rank}: {prefix}{text}" for rank, text in enumerate(by_rank) if text], " and {} ranks more"
    )


@dataclass
class AnomalyResponse:
    """The anomaly policies of a run. All ranks call each method together."""

    settings: RunSettings
    world: RankGroup
    trainer: StepTrainer
    checkpoints: CheckpointStore
    num_rewinds: int = 0

    def resume(self, earlier_log: EarlierLog) -> None:
        """Restore the detector and the number of rewinds from the log of a run that goes on."""
        if not self.trainer.detector.is_active:
            return
        numbers: list[float] = []
        if log := earlier_log():
            good_steps = _good_steps(log)[-self.settings.recipe.spike_window :]
            numbers = [
                sum(event["event"] == "rewind" for event in log.events),
                *(number for pair in good_steps for number in pair),
            ]
        received = broadcast_from_first(self.world, numbers, "the earlier steps in the log")
        self.num_rewinds = int(received[0]) if received else 0
        self.trainer.detector.restore(zip(received[1::2], received[2::2], strict=True))

    def respond(self, anomaly: StepAnomaly, reporter: RunReporter | None) -> None:
        """Take the action of an anomaly's policy. Raises `InputError` on one rank if the run ends."""
        match anomaly.action:
            case "skip":
                self._record(reporter, anomaly, "its batch is left out: no weight was updated")
            case "rewind":
                self._rewind(anomaly, reporter)
            case _:
                self._record(reporter, anomaly, "the run ends")
                self._end(
                    f"{anomaly}: a lower --learning-rate or a longer --warmup, from the last checkpoint with --resume, "
                    f"or another --policy {anomaly.policy.replace('_', '-')}=ACTION, is required"
                )

    def _rewind(self, anomaly: StepAnomaly, reporter: RunReporter | None) -> None:
        limit = self.settings.recipe.max_rewinds
        if self.num_rewinds == limit:
            self._record(reporter, anomaly, "the run ends")
            self._end(
                f"{anomaly}: the run has gone back {pluralize(limit, 'time')}, which recipe.max_rewinds allows; data or a recipe "
                "that train are required"
            )
        set_stage(f"reading a checkpoint, for step {anomaly.step} was wrong")
        restored = require_on_all_ranks(self.world, lambda: self.checkpoints.restore(self.trainer.state()))
        if restored is None:
            self._record(reporter, anomaly, "the run ends")
            self._end(f"{anomaly}: there is no checkpoint to go back to; --checkpoint-every is required")
            return
        for problem in restored.damaged.values():
            self._warn(problem)
        self.trainer.restore(restored.values)
        self.trainer.skip_to(anomaly.step)
        self.num_rewinds += 1
        batches = pluralize(anomaly.step - restored.step, "batch")
        self._record(reporter, anomaly, f"the weights are those of step {restored.step} again, and {batches} are passed over",
                     to_step=restored.step, num_rewinds=self.num_rewinds)  # fmt: skip

    def _record(self, reporter: RunReporter | None, anomaly: StepAnomaly, outcome: str, **details: int) -> None:
        if reporter is not None:
            line = {"policy": anomaly.policy, "found": anomaly.text, "where": anomaly.where, "done": outcome, **details}
            reporter.event(anomaly.action, anomaly.step, line, f"{anomaly}: {outcome}")

    def _warn(self, problem: str) -> None:
        if self.world.rank == 0:
            print(f"warning: {problem}", file=sys.stderr, flush=True)

    def _end(self, problem: str) -> None:
        """End all ranks; the first one reports why."""

        def refuse() -> None:
            raise InputError(problem)

        require_on_all_ranks(self.world, refuse)


def _good_steps(log: StepLog) -> list[tuple[float, float]]:
    """Return loss and norm of the steps without anomaly."""
    wrong = {event["step"] for event in log.events if "policy" in event}
    return [(record.loss, record.grad_norm) for record in log.steps if record.step not in wrong]
