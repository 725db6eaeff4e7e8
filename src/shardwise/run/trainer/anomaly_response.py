"""What is done about an anomalous step: ranks agree on what is wrong and which tensor of which rank was the first, and
then stop, leave its batch out, or go back to a checkpoint, as the policy says.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.records.step_log import StepLog, read_log
from shardwise.run.faults.agreement import (
    RankGroup,
    all_gather_texts,
    all_reduce_max,
    broadcast_from_first,
    require_on_all_ranks,
)
from shardwise.run.faults.rank_status import set_stage
from shardwise.run.parallel.world import World
from shardwise.run.recipe import POLICIES
from shardwise.run.trainer.anomaly_detector import AnomalyDetector, StepAnomaly
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.interfaces import CheckpointStore, StepTrainer
from shardwise.run.trainer.run_reporter import RunReporter
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.values.errors import InputError
from shardwise.values.units import pluralize

MAX_SHOWN = 3  # ranks in a message


def agree_on_anomaly(
    trouble: StepAnomaly | None, judge: AnomalyDetector, step: int, world: World
) -> StepAnomaly | None:
    """Of what each rank finds wrong with a step the gravest, the same on all ranks.

    Ranks that compute the same may find different things all the same, where the memory of one of them is damaged.
    """
    gravest = all_reduce_max(
        world, 0 if trouble is None else len(POLICIES) - POLICIES.index(trouble.policy), "what is wrong"
    )
    if not gravest:
        return None
    policy = POLICIES[len(POLICIES) - gravest]
    found = all_gather_texts(world, trouble.text if trouble is not None and trouble.policy == policy else "")
    return StepAnomaly(step, policy, judge.actions[policy], next(filter(None, found)))


def first_non_finite(engine: TrainingEngine, own_loss: float, world: World) -> str:
    """The first tensor that is not finite, by rank, unit and name, the same on all ranks, which call this together.

    Weights come first, for they make all else; then gradients in the order of the backward pass, in which what is not finite
    spreads. Gradients are summed over the ranks when they are looked at, so that the rank is found from `own_loss`, the loss of
    each rank's own targets.
    """
    weights = all_gather_texts(world, next(_non_finite(engine, _weights(engine)), ""))
    if any(weights):
        return _list_ranks(weights, "weight")
    losses = all_gather_texts(world, "" if math.isfinite(own_loss) else f"its own targets have a loss of {own_loss}")
    gradients = all_gather_texts(world, next(_non_finite(engine, _gradients(engine), backward=True), ""))
    found = [_list_ranks(some, what) for some, what in ((losses, ""), (gradients, "gradient")) if any(some)]
    return "; ".join(found) or "every weight and every gradient is finite"


def _weights(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    for group in engine.groups:
        tensors = ((name, view) for name, view in group.views.items() if isinstance(view, Tensor))
        yield from tensors if group.whole else ()
        yield from ((one.name, group.state[one.start : one.start + one.size]) for one in group.intervals())


def _gradients(engine: TrainingEngine) -> Iterator[tuple[str, Tensor]]:
    for group in engine.groups:
        if group.group.trained:
            yield from ((one.name, group.gradient_shard[one.start : one.start + one.size]) for one in group.intervals())


def _non_finite(
    engine: TrainingEngine, tensors: Iterator[tuple[str, Tensor]], *, backward: bool = False
) -> Iterator[str]:
    """Those that are not finite, in the order of the units or against it, in words."""
    units = [one.name for path, _ in engine.instance.units for one in engine.instance.parameters_by_unit[path].values()]
    order = {name: place for place, name in reversed(list(enumerate(units)))}
    for name, tensor in sorted(tensors, key=lambda pair: order[pair[0]], reverse=backward):
        count = tensor.numel() - int(tensor.isfinite().sum())
        if count:
            unit, _, weight = name.rpartition(".")
            yield f"{weight} of unit {unit} has {count:,} of {tensor.numel():,} elements that are not finite"


def _list_ranks(by_rank: list[str], what: str) -> str:
    ranks = [rank for rank, text in enumerate(by_rank) if text]
    more = f" and {len(ranks) - MAX_SHOWN} ranks more" if len(ranks) > MAX_SHOWN else ""
    return ", ".join(f"rank {rank}: {what + ' ' if what else ''}{by_rank[rank]}" for rank in ranks[:MAX_SHOWN]) + more


@dataclass
class AnomalyResponse:
    """The policies of a run at work. All ranks call each of these together."""

    settings: RunSettings
    world: RankGroup
    trainer: StepTrainer
    checkpoints: CheckpointStore
    num_rewinds: int = 0

    def resume(self) -> None:
        """Of a run that goes on: what its log tells of the steps before, so that the next are judged as if it had not stopped."""
        if not self.trainer.judge.is_active:
            return
        numbers: list[float] = []
        if self.world.rank == 0 and self.settings.out.log.exists():
            log = read_log(self.settings.out.log)
            good = _good_steps(log)[-self.settings.recipe.spike_window :]
            numbers = [sum(event["event"] == "rewind" for event in log.events), *(one for pair in good for one in pair)]
        found = broadcast_from_first(self.world, numbers, "the earlier steps in the log")
        self.num_rewinds = int(found[0]) if found else 0
        self.trainer.judge.restore(zip(found[1::2], found[2::2], strict=True))

    def respond(self, trouble: StepAnomaly, watch: RunReporter | None) -> None:
        """Do what the policy of a step's trouble says. Raises `InputError` on one rank where the run ends."""
        match trouble.action:
            case "skip":
                self._record(watch, trouble, "its batch is left out: no weight was updated")
            case "rewind":
                self._rewind(trouble, watch)
            case _:
                self._record(watch, trouble, "the run ends")
                self._end(
                    f"{trouble}: a lower --learning-rate or a longer --warmup, from the last checkpoint with --resume, "
                    f"or another --policy {trouble.policy.replace('_', '-')}=ACTION, is required"
                )

    def _rewind(self, trouble: StepAnomaly, watch: RunReporter | None) -> None:
        limit = self.settings.recipe.max_rewinds
        if self.num_rewinds == limit:
            self._record(watch, trouble, "the run ends")
            self._end(
                f"{trouble}: the run has gone back {pluralize(limit, 'time')}, which recipe.max_rewinds allows; data or a recipe "
                "that train are required"
            )
        set_stage(f"reading a checkpoint, for step {trouble.step} was wrong")
        found = require_on_all_ranks(self.world, lambda: self.checkpoints.restore(self.trainer.state()))
        if found is None:
            self._record(watch, trouble, "the run ends")
            self._end(f"{trouble}: there is no checkpoint to go back to; --checkpoint-every is required")
            return
        for problem in found.damaged.values():
            self._warn(problem)
        self.trainer.restore(found.values)
        self.trainer.skip_to(trouble.step)
        self.num_rewinds += 1
        batches = pluralize(trouble.step - found.step, "batch")
        self._record(watch, trouble, f"the weights are those of step {found.step} again, and {batches} are passed over",
                     to_step=found.step, num_rewinds=self.num_rewinds)  # fmt: skip

    def _record(self, watch: RunReporter | None, trouble: StepAnomaly, done: str, **more: int) -> None:
        if watch is not None:
            line: Mapping[str, Any] = {
                "policy": trouble.policy,
                "found": trouble.text,
                "where": trouble.where,
                "done": done,
            }
            watch.event(trouble.action, trouble.step, {**line, **more}, f"{trouble}: {done}")

    def _warn(self, problem: str) -> None:
        if self.world.rank == 0:
            print(f"warning: {problem}", file=sys.stderr, flush=True)

    def _end(self, problem: str) -> None:
        """All ranks end; the first says why."""

        def refuse() -> None:
            raise InputError(problem)

        require_on_all_ranks(self.world, refuse)


def _good_steps(log: StepLog) -> list[tuple[float, float]]:
    """Loss and norm of the steps that were judged to be as they should be."""
    wrong = {event["step"] for event in log.events if "policy" in event}
    return [(record.loss, record.grad_norm) for record in log.steps if record.step not in wrong]
