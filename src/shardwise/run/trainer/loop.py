"""The steps of a run, what is due between them and at its end, and the loss at which it ends, the same on all ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from shardwise.records.loss_target import LossTarget
from shardwise.records.step_log import CHECKPOINT, EPOCHS, INSPECTED, TARGET, StepRecord, cut_log, read_log
from shardwise.records.step_memory_and_collectives import STEPS as MEMORY_STEPS
from shardwise.records.step_memory_and_collectives import memory_of, write_memory
from shardwise.records.step_trace import write_trace
from shardwise.run.checkpoints.checkpointer import Restored
from shardwise.run.faults.agreement import RankGroup, agreed, largest
from shardwise.run.faults.rank_status import begin_stage
from shardwise.run.faults.stop_request import StopRequest, exit_code
from shardwise.run.machine_resources import used
from shardwise.run.trainer.anomaly_response import Remedies
from shardwise.run.trainer.batch_schedule import ramp_state, resumed_ramp
from shardwise.run.trainer.flags import Settings
from shardwise.run.trainer.interfaces import Checkpoints, State, Trainer
from shardwise.run.trainer.machine_probe import Measuring
from shardwise.run.trainer.noise_scale import Resizing
from shardwise.run.trainer.preflight import Data, run_of
from shardwise.run.trainer.run_reporter import Watch, write_summary
from shardwise.run.trainer.stragglers import Pace
from shardwise.search.plan import Plan
from shardwise.values.errors import InputError
from shardwise.values.units import counted


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its exit code (0, or 128 and the signal that stopped it), and on the first rank its summary."""

    code: int
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Loop:
    """A run that may start."""

    plan: Plan
    settings: Settings
    world: RankGroup
    data: Data
    trainer: Trainer
    checkpoints: Checkpoints
    measuring: Measuring
    stop: StopRequest

    def to_its_end(self) -> Ended:
        """Every step that is left, or those until it is asked to stop; a checkpoint at the end of either."""
        if self.world.rank == 0:
            self._say_what_is_not_modelled()
        if self.settings.resume:
            self._resume()
        remedies = Remedies(self.settings, self.world, self.trainer, self.checkpoints)
        reaching = Reaching(self.settings, self.world)
        resizing = Resizing(self.plan, self.settings, self.world, self.trainer, self.data.train)
        if self.settings.resume:
            for one in (remedies, reaching, resizing):
                one.resume()
        self.measuring.begin()
        first = self.trainer.step
        self.stop.in_order()
        with self._watch() if self.world.rank == 0 else nullcontext() as watch:
            stopped = self._steps(watch, remedies, reaching, resizing)
            begin_stage(f"the end, after step {self.trainer.step}")
            if self.trainer.step > first:
                agreed(self.world, lambda: self.checkpoints.save(self.trainer.step, self._state()))
                self._log_checkpoints(watch)
            self.measuring.end()
            if stopped:
                self._say_how_to_go_on(watch, stopped)
                return Ended(exit_code(stopped), self._summary({}) if self.trainer.step > first else {})
            return Ended(0, self._summary(self._validate(watch)))

    def _say_what_is_not_modelled(self) -> None:
        model = self.plan.model
        if model.numerics.unread:
            print(
                f"warning: {model.name}: its configuration sets {'; '.join(model.numerics.unread)}, which is not modelled: the "
                "trained model computes other values than one that transformers builds",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def _resume(self) -> None:
        """Go on from the latest checkpoint; from the start where the run ended before its first."""
        begin_stage("reading the checkpoint")
        found = agreed(self.world, lambda: self.checkpoints.restore(self.trainer.state()))
        if found is not None:
            self.trainer.restore(found.values)
            ramp = agreed(
                self.world, lambda: resumed_ramp(self.plan, self.settings.recipe, found.values, self.trainer.step)
            )
            self.trainer.resize(ramp)
            if self.world.rank == 0 and found.damaged:
                self._say_what_is_lost(found)
        agreed(self.world, self._require_steps)
        agreed(self.world, self._write_how_it_goes_on)

    def _say_what_is_lost(self, found: Restored) -> None:
        ramp, last = self.data.train.ramp, max(found.damaged)
        tokens = (ramp.first_sample(last) - ramp.first_sample(found.step)) * self.plan.job.seq_len
        for problem in found.damaged.values():
            print(f"warning: {problem}", file=sys.stderr)
        print(
            f"warning: going on from the checkpoint of step {found.step}; {counted(last - found.step, 'step')} ({tokens:,} "
            f"tokens) are lost and run again; what is damaged is kept as step-*.damaged in {self.settings.out.checkpoints}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def _write_how_it_goes_on(self) -> None:
        """On the first rank: say in the folder what is run from now on, and take out of its log what will be run again."""
        out = self.settings.out
        if self.world.rank == 0:
            out.write(run_of(self.plan, self.settings.recipe, self.data))
            if out.log.exists():
                cut_log(out.log, self.trainer.step)

    def _require_steps(self) -> None:
        if self.trainer.step >= self.settings.recipe.steps:
            raise InputError(
                f"--steps: the run in {self.settings.out.path} has done {self.trainer.step} of {self.settings.recipe.steps}; a "
                "larger --steps is required to go on"
            )

    def _watch(self) -> Watch:
        return Watch(self.plan, self.settings, device=str(self.world.device), first_step=self.trainer.step)

    def _state(self) -> State:
        """What a checkpoint keeps."""
        return {**self.trainer.state(), **ramp_state(self.data.train.ramp, self.trainer.step)}

    def _steps(self, watch: Watch | None, remedies: Remedies, reaching: Reaching, resizing: Resizing) -> int:
        """The steps, but for what follows the last one. The signal that stopped them, or 0."""
        recipe, trainer = self.settings.recipe, self.trainer
        first, inspected = trainer.step, self._inspected_from(trainer.step + 1)
        pace = Pace(self.world, self.plan, recipe.slow_factor)
        if stopped := self._asked_to_stop():
            return stopped
        while trainer.step < recipe.steps and not reaching.is_reached:
            begin_stage(f"step {trainer.step + 1}")
            record, marks = self._next(first, inspected)
            if watch:
                seen = self.data.train.ramp.first_sample(record.step) * self.plan.job.seq_len
                watch.step(record, {"n_tokens_seen": seen, **used(str(self.world.device)), **self._epochs(), **marks})
            if trainer.trouble is not None:
                remedies.apply(trainer.trouble, watch)
            pace.step(record, watch)
            self._log_checkpoints(watch)
            reaching.step(record, watch)
            resizing.step(record, watch)
            if trainer.step < recipe.steps and not reaching.is_reached:
                if stopped := self._asked_to_stop():
                    return stopped
                self._between(watch)
        return 0

    def _inspected_from(self, step: int) -> int:
        """The first step from one on that is not recorded, counted from 0; the last one where there is none."""
        last = self.settings.recipe.steps - 1
        return next((one for one in range(step, last) if one + 1 not in self.settings.profile), last)

    def _profiled(self) -> StepRecord:
        """A step whose timeline is recorded, each rank's in a file of its own."""
        record, trace = self.trainer.profiled_step()
        write_trace(self.settings.out, trace)
        return record

    def _log_checkpoints(self, watch: Watch | None) -> None:
        for saved in self.checkpoints.finished():
            if watch:
                more = {"stall_s": saved.stall_s, "write_s": saved.write_s, "num_bytes": saved.num_bytes}
                watch.event(CHECKPOINT, saved.step, more)

    def _asked_to_stop(self) -> int:
        """The signal by which any rank is asked to stop, on all ranks; 0: none."""
        return largest(self.world, self.stop.signal, "the question whether to stop")

    def _next(self, first: int, inspected: int) -> tuple[StepRecord, Mapping[str, Any]]:
        """The next step of a run that began after the `first` ones, and what its line of the log adds about recording."""
        step, profile = self.trainer.step, self.settings.profile
        if step + 1 in profile and step != inspected:
            return self._profiled(), {INSPECTED: True}
        if step == inspected or (profile and step < first + MEMORY_STEPS):
            return self._inspected(measures=step == inspected), {INSPECTED: True}
        return self.trainer.train_step(), {}

    def _inspected(self, *, measures: bool) -> StepRecord:
        """A step that is watched from below; one of them is what the run measures."""
        record, seen = self.trainer.inspected_step()
        if measures:
            self.measuring.step(record, seen)
        if self.settings.profile:
            write_memory(self.settings.out, memory_of(record.step, self.world.rank, seen))
        return record

    def _between(self, watch: Watch | None) -> None:
        """What is due between two steps."""
        recipe, step = self.settings.recipe, self.trainer.step
        if recipe.validate_every and step % recipe.validate_every == 0:
            begin_stage(f"the validation after step {step}")
            self._validate(watch)
        if recipe.checkpoint_every and step % recipe.checkpoint_every == 0:
            begin_stage(f"the checkpoint of step {step}")
            agreed(self.world, lambda: self.checkpoints.start(step, self._state()))

    def _epochs(self) -> dict[str, float]:
        """How often each source of a mixture has been passed through, as a step's line has it."""
        epochs = zip(self.data.names, self.data.train.epochs(self.trainer.step), strict=True)
        return {EPOCHS + name: count for name, count in epochs} if len(self.data.names) > 1 else {}

    def _validate(self, watch: Watch | None) -> Mapping[str, float]:
        """The loss of each source's held-out text."""
        losses = {name: self.trainer.validation_loss(batches) for name, batches in self.data.held_out.items()}
        mean = self.data.mean(losses)
        if watch and mean is not None:
            watch.validation(self.trainer.step, mean, losses if len(self.data.names) > 1 else {})
        return losses

    def _say_how_to_go_on(self, watch: Watch | None, stopped: int) -> None:
        if watch:
            watch.say(
                f"stopped by {signal.Signals(stopped).name} after step {self.trainer.step} of {self.settings.recipe.steps}, with "
                f"a checkpoint in {self.settings.out.checkpoints}; to go on: {self.settings.resume_command}"
            )

    def _summary(self, held_out: Mapping[str, float]) -> Mapping[str, Any]:
        """What came out, on the first rank, which keeps it in the folder."""
        if self.world.rank > 0:
            return {}
        device, steps = str(self.world.device), self.trainer.step
        return write_summary(self.plan, self.settings, self.data, device=device, steps=steps, held_out=held_out)


@dataclass
class Reaching:
    """The first rank, which has the log, decides; all ranks call each of these together. Without a target no run reaches it."""

    settings: Settings
    world: RankGroup
    is_reached: bool = False

    def __post_init__(self) -> None:
        target = self.settings.recipe.to_loss
        self._target = None if target is None else LossTarget(target)

    def resume(self) -> None:
        """Of a run that goes on: the losses of the steps before, from its log."""
        if self._target is not None:
            if self.world.rank == 0 and self.settings.out.log.exists():
                self.is_reached = any(self._target.add(one.loss) for one in read_log(self.settings.out.log).steps)
            self._agree()

    def step(self, record: StepRecord, watch: Watch | None) -> None:
        """A step is done."""
        if self._target is None:
            return
        self.is_reached = self.world.rank == 0 and self._target.add(record.loss)
        self._agree()
        if self.is_reached and watch is not None:
            steps, loss = self._target.steps, self._target.target
            said = f"the smoothed loss is {loss:g} after {steps:.1f} steps: the run ends"
            watch.event(TARGET, record.step, {"loss": loss, "steps": steps}, said)

    def _agree(self) -> None:
        self.is_reached = bool(largest(self.world, int(self.is_reached), "the question whether the loss is reached"))
