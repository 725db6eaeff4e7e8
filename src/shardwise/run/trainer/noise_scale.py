"""The gradient noise scale of a run: samples that steps add to their records, and the batch size that follows from
them, which the first rank decides for all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from shardwise.batch_size.batch_schedule import NoiseScaleBatches
from shardwise.batch_size.noise_estimators import NoiseSample, RunningNoise, noise_sample_of_parts
from shardwise.batch_size.run_noise import noise_sample_of
from shardwise.layout import Layout
from shardwise.records import StepRecord
from shardwise.records.step_log import BATCH_EVENT
from shardwise.run.data.batches import Batches
from shardwise.run.faults.agreement import RankGroup, broadcast_from_first
from shardwise.run.trainer.batch_schedule import complete_schedule
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.interfaces import EarlierLog, StepTrainer
from shardwise.run.trainer.run_reporter import RunReporter
from shardwise.search import Plan


def noise_sample(squares: float, norm: float, targets: Iterable[int]) -> NoiseSample | None:
    """Return the noise sample of a step.

    `squares`: the sum of the squared norms of the gradients of parts with so many `targets`; `norm`: the norm of their
    sum. None if the norms are not finite, or the batch has a single part, as a schedule may make it.
    """
    tokens = [count for count in targets if count]
    if len(tokens) < 2 or not (math.isfinite(squares) and math.isfinite(norm)):
        return None
    return noise_sample_of_parts(squares, norm**2, tokens)


def targets_of_parts(batches: Batches, step: int, layout: Layout, num_parts: int) -> Iterator[int]:
    """Yield the targets of each part of a step's gradient whose norm is taken (`ShardingScheme.replica_axes`). A part is the
    micro-batches of one of `num_parts` groups of replicas."""
    replicas_per_part = layout.num_replicas // num_parts
    for targets in batches.targets_of_replicas(step, layout.num_replicas, layout.micro_batch_seqs):
        starts = range(0, len(targets), replicas_per_part)
        yield from (sum(targets[start : start + replicas_per_part]) for start in starts)


@dataclass
class BatchResizer:
    """Chooses the batch by the noise scale; without such a schedule it does nothing. All ranks call each method
    together. The average is made from the log's records, so that a run that was stopped in between decides the same."""

    plan: Plan
    settings: RunSettings
    world: RankGroup
    trainer: StepTrainer
    batches: Batches
    _average: RunningNoise = field(default_factory=RunningNoise)

    def __post_init__(self) -> None:
        schedule = complete_schedule(self.plan, self.settings.recipe)
        self._schedule = schedule if isinstance(schedule, NoiseScaleBatches) else None

    def resume(self, earlier_log: EarlierLog) -> None:
        """Add the samples of the steps before, from the log of a run that goes on."""
        if self._schedule is not None and (log := earlier_log()):
            for record in log.steps:
                self._add(record)

    def step(self, record: StepRecord, reporter: RunReporter | None) -> None:
        """Add a completed step; when a decision is due, the next steps may get another batch."""
        if self._schedule is None:
            return
        self._add(record)
        if record.step % self._schedule.every:
            return
        decision = broadcast_from_first(self.world, [self._choose_num_seqs(self._schedule)], "the batch by noise scale")
        num_seqs, current_seqs = int(decision[0]), self.batches.ramp.sequences(record.step)
        if num_seqs and num_seqs != current_seqs:
            self.trainer.resize(self.batches.ramp.then(record.step, num_seqs))
            if reporter is not None:
                self._report(reporter, record.step, num_seqs)

    def _add(self, record: StepRecord) -> None:
        sample = noise_sample_of(record)
        if sample is not None:
            self._average.add(sample)

    def _choose_num_seqs(self, schedule: NoiseScaleBatches) -> int:
        """Return the sequences of the next batches; 0 as long as there is no estimate."""
        noise = self._average.tokens
        return 0 if noise is None else schedule.batch(noise) // self.plan.job.seq_len

    def _report(self, reporter: RunReporter, step: int, num_seqs: int) -> None:
        tokens, noise = num_seqs * self.plan.job.seq_len, self._average.tokens
        message = (
            f"step {step}: batches of {tokens:,} tokens from the next one on, by a noise scale of {noise:,.0f} tokens"
        )
        reporter.event(BATCH_EVENT, step, {"batch_tokens": tokens, "noise_tokens": noise}, message)
