"""The steps of a run, what is due between them and at its end, and the target loss that ends it, the same on all ranks."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwise.records import StepLog, StepRecord, read_log
from shardwise.records.step_inspection import NUM_RECORDED_STEPS as MEMORY_STEPS
from shardwise.records.step_inspection import build_memory_trace, write_memory_trace, write_trace
from shardwise.records.step_log import (
    CHECKPOINT_EVENT,
    EPOCHS_PREFIX,
    INSPECTED,
    TARGET_EVENT,
    StepsToLoss,
    truncate_log,
)
from shardwise.run.checkpoints.checkpointer import RestoreResult
from shardwise.run.faults.agreement import RankGroup, all_reduce_max, require_on_all_ranks
from shardwise.run.faults.rank_status import set_stage
from shardwise.run.faults.stop_request import StopRequest, exit_code
from shardwise.run.kernels.attention_backends import chosen_backends
from shardwise.run.kernels.tensor_cores import product_kernels
from shardwise.run.machine_resources import memory_used
from shardwise.run.trainer.anomaly_response import AnomalyResponse
from shardwise.run.trainer.batch_schedule import ramp_state, resume_ramp
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.interfaces import CheckpointStore, EarlierLog, StepTrainer, TrainerState
from shardwise.run.trainer.machine_probe import MachineProbe
from shardwise.run.trainer.noise_scale import BatchResizer
from shardwise.run.trainer.preflight import RunData, describe_run
from shardwise.run.trainer.run_identity import RunIdentity, checkpoint_problems, version_changes
from shardwise.run.trainer.run_reporter import RunReporter, write_summary
from shardwise.run.trainer.stragglers import StragglerDetector
from shardwise.search import Plan
from shardwise.values import InputError, pluralize


@dataclass(frozen=True, slots=True)
class RunEnd:
    """End of a run: its exit code (0, or 128 plus the signal that stopped it), and on the first rank its summary."""

    code: int
    summary: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """A run that is ready to start."""

    plan: Plan
    settings: RunSettings
    world: RankGroup
    data: RunData
    identity: RunIdentity
    trainer: StepTrainer
    checkpoints: CheckpointStore
    measuring: MachineProbe
    stop: StopRequest

    def run_to_end(self) -> RunEnd:
        """Run all remaining steps, or until a request to stop; write a checkpoint at the end of either."""
        if self.settings.resume:
            self._resume()
        anomaly_response = AnomalyResponse(self.settings, self.world, self.trainer, self.checkpoints)
        loss_check = LossTargetCheck(self.settings, self.world)
        resizer = BatchResizer(self.plan, self.settings, self.world, self.trainer, self.data.train)
        if self.settings.resume:
            earlier_log = cache(self._earlier_log)  # read only if one of them needs it, and once for all
            for component in (anomaly_response, loss_check, resizer):
                component.resume(earlier_log)
        self.measuring.begin()
        first_step = self.trainer.step
        self.stop.in_order()
        if self.world.rank == 0 and self.world.rendezvous is not None:
            self.world.rendezvous.record_first_step()
        with self._open_reporter() if self.world.rank == 0 else nullcontext() as reporter:
            stopped = self._steps(reporter, anomaly_response, loss_check, resizer)
            set_stage(f"the end, after step {self.trainer.step}")
            if self.trainer.step > first_step:
                require_on_all_ranks(self.world, lambda: self.checkpoints.save(self.trainer.step, self._state()))
                self._log_checkpoints(reporter)
            self.measuring.end()
            if stopped:
                self._print_resume_command(reporter, stopped)
                return RunEnd(exit_code(stopped), self._summary({}) if self.trainer.step > first_step else {})
            return RunEnd(0, self._summary(self._validate(reporter)))

    def _resume(self) -> None:
        """Continue from the latest checkpoint, or from the start if there is none."""
        set_stage("reading the checkpoint")
        restored = require_on_all_ranks(self.world, lambda: self.checkpoints.restore(self.trainer.state()))
        if restored is not None:
            require_on_all_ranks(self.world, lambda: self._require_checkpoint_of_run(restored))
            self.trainer.restore(restored.values)
            ramp = require_on_all_ranks(
                self.world, lambda: resume_ramp(self.plan, self.settings.recipe, restored.values, self.trainer.step)
            )
            self.trainer.resize(ramp)
            if self.world.rank == 0 and restored.damaged:
                self._warn_lost_steps(restored)
        require_on_all_ranks(self.world, self._require_steps)
        require_on_all_ranks(self.world, self._record_resumed_run)

    def _require_checkpoint_of_run(self, restored: RestoreResult) -> None:
        """Raise `InputError` on the first rank if the checkpoint is of another run, unless the user goes on all the same; name
        other versions than those that wrote it."""
        if self.world.rank > 0:
            return
        problems = checkpoint_problems(self.identity, restored.step, restored.values)
        if problems and not self.settings.force:
            raise InputError(*problems)
        for text in (*problems, *version_changes(restored.values)):
            print(f"warning: {text}", file=sys.stderr, flush=True)

    def _earlier_log(self) -> StepLog | None:
        """Return the log of a run that goes on, on the first rank if there is one."""
        path = self.settings.out.log
        return read_log(path) if self.world.rank == 0 and path.exists() else None

    def _warn_lost_steps(self, restored: RestoreResult) -> None:
        ramp, last_damaged = self.data.train.ramp, max(restored.damaged)
        tokens = (ramp.first_sample(last_damaged) - ramp.first_sample(restored.step)) * self.plan.job.seq_len
        for problem in restored.damaged.values():
            print(f"warning: {problem}", file=sys.stderr)
        print(
            f"warning: going on from the checkpoint of step {restored.step}; {pluralize(last_damaged - restored.step, 'step')} "
            f"({tokens:,} tokens) are lost and run again; what is damaged is kept as "
            f"step-*.damaged in {self.settings.out.checkpoints}",
            file=sys.stderr, flush=True,
        )  # fmt: skip

    def _record_resumed_run(self) -> None:
        """Write on the first rank what is run from now on, and cut from the log the steps that will be run again."""
        out = self.settings.out
        if self.world.rank == 0:
            out.write_inputs(describe_run(self.plan, self.settings.recipe, self.data))
            if out.log.exists():
                truncate_log(out.log, self.trainer.step)

    def _require_steps(self) -> None:
        if self.trainer.step >= self.settings.recipe.steps:
            raise InputError(
                f"--steps: the run in {self.settings.out.path} has done {self.trainer.step} of {self.settings.recipe.steps}; a "
                "larger --steps is required to go on"
            )

    def _open_reporter(self) -> RunReporter:
        return RunReporter(self.plan, self.settings, device=str(self.world.device), first_step=self.trainer.step)

    def _state(self) -> TrainerState:
        """Return what a checkpoint keeps."""
        # ranks on other hosts may have other versions: the first rank's are kept
        run = self.identity.checkpoint_state() if self.world.rank == 0 else {}
        return {**self.trainer.state(), **ramp_state(self.data.train.ramp, self.trainer.step), **run}

    def _steps(
        self, reporter: RunReporter | None, anomaly_response: AnomalyResponse, loss_check: LossTargetCheck,
        resizer: BatchResizer,
    ) -> int:  # fmt: skip
        """Run the steps, without the work after the last one; return the signal that stopped them, or 0."""
        recipe, trainer = self.settings.recipe, self.trainer
        first_step, inspected = trainer.step, self._inspected_from(trainer.step + 1)
        stragglers = StragglerDetector(self.world, self.plan, recipe.slow_factor)
        if stopped := self._stop_signal():
            return stopped
        while trainer.step < recipe.steps and not loss_check.is_reached:
            set_stage(f"step {trainer.step + 1}")
            record, extra_fields = self._run_step(first_step, inspected)
            if reporter:
                num_tokens_seen = self.data.train.ramp.first_sample(record.step) * self.plan.job.seq_len
                memory, epochs = memory_used(str(self.world.device)), self._epochs()
                kernels = _kernel_choices(trainer) if trainer.step == first_step + 1 else {}
                fields = {"n_tokens_seen": num_tokens_seen, **memory, **epochs, **kernels, **extra_fields}
                reporter.step(record, fields)
            if trainer.anomaly is not None:
                anomaly_response.respond(trainer.anomaly, reporter)
            stragglers.step(record, reporter)
            self._log_checkpoints(reporter)
            loss_check.step(record, reporter)
            resizer.step(record, reporter)
            if trainer.step < recipe.steps and not loss_check.is_reached:
                if stopped := self._stop_signal():
                    return stopped
                self._periodic_work(reporter)
        return 0

    def _inspected_from(self, step: int) -> int:
        """Return the first step at or after `step` (both counted from 0) that is not profiled, or else the last step."""
        last = self.settings.recipe.steps - 1
        return next((candidate for candidate in range(step, last) if candidate + 1 not in self.settings.profile), last)

    def _run_profiled(self) -> StepRecord:
        """Run a step whose timeline is recorded, each rank's in a file of its own."""
        record, trace = self.trainer.profiled_step()
        write_trace(self.settings.out, trace)
        return record

    def _log_checkpoints(self, reporter: RunReporter | None) -> None:
        for saved in self.checkpoints.finished():
            if reporter:
                details = {"stall_s": saved.stall_s, "write_s": saved.write_s, "num_bytes": saved.num_bytes}
                reporter.event(CHECKPOINT_EVENT, saved.step, details)

    def _stop_signal(self) -> int:
        """Return a signal that stops any rank, or 0, on all ranks."""
        return all_reduce_max(self.world, self.stop.signal, "the question whether to stop")

    def _run_step(self, first_step: int, inspected: int) -> tuple[StepRecord, Mapping[str, Any]]:
        """Run the next step of a run that began after `first_step`; return its record and the fields it adds to the
        log."""
        step, profile = self.trainer.step, self.settings.profile
        if step + 1 in profile and step != inspected:
            return self._run_profiled(), {INSPECTED: True}
        if step == inspected or (profile and step < first_step + MEMORY_STEPS):
            return self._run_inspected(measures=step == inspected), {INSPECTED: True}
        return self.trainer.train_step(), {}

    def _run_inspected(self, *, measures: bool) -> StepRecord:
        """Run a step whose memory and collectives are recorded; with `measures` they become those of the run."""
        record, inspection = self.trainer.inspected_step()
        if measures:
            self.measuring.step(record, inspection)
        if self.settings.profile:
            write_memory_trace(self.settings.out, build_memory_trace(record.step, self.world.rank, inspection))
        return record

    def _periodic_work(self, reporter: RunReporter | None) -> None:
        """Validate and save a checkpoint where these are due between two steps."""
        recipe, step = self.settings.recipe, self.trainer.step
        if recipe.validate_every and step % recipe.validate_every == 0:
            set_stage(f"the validation after step {step}")
            self._validate(reporter)
        if recipe.checkpoint_every and step % recipe.checkpoint_every == 0:
            set_stage(f"the checkpoint of step {step}")
            require_on_all_ranks(self.world, lambda: self.checkpoints.start(step, self._state()))

    def _epochs(self) -> dict[str, float]:
        """Return the epochs of each source of a mixture, as fields of a step's log line."""
        epochs = zip(self.data.names, self.data.train.epochs(self.trainer.step), strict=True)
        return {EPOCHS_PREFIX + name: count for name, count in epochs} if len(self.data.names) > 1 else {}

    def _validate(self, reporter: RunReporter | None) -> Mapping[str, float]:
        """Return the loss of each source's held-out text."""
        losses = {name: self.trainer.validation_loss(batches) for name, batches in self.data.held_out.items()}
        mean = self.data.mean_loss(losses)
        if reporter and mean is not None:
            reporter.validation(self.trainer.step, mean, losses if len(self.data.names) > 1 else {})
        return losses

    def _print_resume_command(self, reporter: RunReporter | None, signum: int) -> None:
        if reporter:
            reporter.print_line(
                f"stopped by {signal.Signals(signum).name} after step {self.trainer.step} of {self.settings.recipe.steps}, with "
                f"a checkpoint in {self.settings.out.checkpoints}; to go on: {self.settings.resume_command}"
            )

    def _summary(self, held_out: Mapping[str, float]) -> Mapping[str, Any]:
        """Write the summary on the first rank and return it; {} on others."""
        if self.world.rank > 0:
            return {}
        device, steps = str(self.world.device), self.trainer.step
        return write_summary(self.plan, self.settings, self.data, device=device, steps=steps, held_out=held_out)


@dataclass
class LossTargetCheck:
    """Check of whether a run has reached its target loss; without a target it never does. The first rank, which has the log,
    decides; all ranks call each method together."""

    settings: RunSettings
    world: RankGroup
    is_reached: bool = False

    def __post_init__(self) -> None:
        target = self.settings.recipe.to_loss
        self._target = None if target is None else StepsToLoss(target)

    def resume(self, earlier_log: EarlierLog) -> None:
        """Add the losses of the steps before, from the log of a run that goes on."""
        if self._target is not None:
            if log := earlier_log():
                self.is_reached = any(self._target.add_loss(record.loss) for record in log.steps)
            self._agree()

    def step(self, record: StepRecord, reporter: RunReporter | None) -> None:
        """Check the loss of a completed step."""
        if self._target is None:
            return
        self.is_reached = self.world.rank == 0 and self._target.add_loss(record.loss)
        self._agree()
        if self.is_reached and reporter is not None:
            steps, loss = self._target.steps, self._target.target
            message = f"the smoothed loss is {loss:g} after {steps:.1f} steps: the run ends"
            reporter.event(TARGET_EVENT, record.step, {"loss": loss, "steps": steps}, message)

    def _agree(self) -> None:
        self.is_reached = bool(
            all_reduce_max(self.world, int(self.is_reached), "the question whether the loss is reached")
        )


def _kernel_choices(trainer: StepTrainer) -> dict[str, Any]:
    """Return the fields of the log with the kernels of attention that the first step chose, where products of quantized operands
    ran, and whether a GPU replays the passes of steps as a graph, or why not; none where nothing was chosen."""
    choices = {
        "attention_kernels": chosen_backends(), "product_kernels": product_kernels(), "step_graph": trainer.step_graph,
    }  # fmt: skip
    return {name: choice for name, choice in choices.items() if choice}
