"""The batch of a run by its noise scale: what its first rank decides, from the log, and all ranks do."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.batch.samples import NoiseAverage
from shardwise.batch.schedule import NoiseSchedule
from shardwise.data.batches import Batches
from shardwise.measurement.log import BATCH, read_log
from shardwise.measurement.record import StepRecord
from shardwise.planning.plan import Plan
from shardwise.planning.run_noise import sample_of
from shardwise.train.batching import settled_schedule
from shardwise.train.flags import Settings
from shardwise.train.parts import Trainer, World
from shardwise.train.together import from_first
from shardwise.train.watch import Watch


@dataclass
class Resizing:
    """All ranks call each of these together; a schedule that is not by noise scale changes nothing here.

    The average is made of what the log has, whether the run was stopped in between or not, so that it decides the same.
    """

    plan: Plan
    settings: Settings
    world: World
    trainer: Trainer
    batches: Batches
    _average: NoiseAverage = field(default_factory=NoiseAverage)

    def __post_init__(self) -> None:
        found = settled_schedule(self.plan, self.settings.recipe)
        self._schedule = found if isinstance(found, NoiseSchedule) else None

    def resume(self) -> None:
        """Of a run that goes on: what its log has of the steps before."""
        if self._schedule is not None and self.world.rank == 0 and self.settings.out.log.exists():
            for record in read_log(self.settings.out.log).steps:
                self._add(record)

    def step(self, record: StepRecord, watch: Watch | None) -> None:
        """A step is done: where a decision is due, the next ones may have another batch."""
        if self._schedule is None:
            return
        self._add(record)
        if record.step % self._schedule.every:
            return
        found = from_first(self.world, [self._decided(self._schedule)], "the batch by noise scale")
        num_seqs, before = int(found[0]), self.batches.ramp.sequences(record.step)
        if num_seqs and num_seqs != before:
            self.trainer.resize(self.batches.ramp.then(record.step, num_seqs))
            if watch is not None:
                self._report(watch, record.step, num_seqs)

    def _add(self, record: StepRecord) -> None:
        sample = sample_of(record)
        if sample is not None:
            self._average.add(sample)

    def _decided(self, schedule: NoiseSchedule) -> int:
        """Sequences of the next batches; 0 as long as there is no estimate."""
        noise = self._average.tokens
        return 0 if noise is None else schedule.batch(noise) // self.plan.job.seq_len

    def _report(self, watch: Watch, step: int, num_seqs: int) -> None:
        tokens, noise = num_seqs * self.plan.job.seq_len, self._average.tokens
        said = (
            f"step {step}: batches of {tokens:,} tokens from the next one on, by a noise scale of {noise:,.0f} tokens"
        )
        watch.event(BATCH, step, {"batch_tokens": tokens, "noise_tokens": noise}, said)
