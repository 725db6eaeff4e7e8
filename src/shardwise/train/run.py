"""A run on one rank: from the checks before it starts to its summary."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InputError
from shardwise.measurement.folder import write_json
from shardwise.measurement.log import INSPECTED, cut_log, read_log
from shardwise.measurement.record import StepRecord
from shardwise.measurement.summary import summarised
from shardwise.planning.codec import load_plan
from shardwise.planning.plan import Plan
from shardwise.planning.runnable import require_runnable
from shardwise.precision import precision_named
from shardwise.train.admission import Data, admit, require_world, run_of
from shardwise.train.checkpoint.checkpointer import Restored
from shardwise.train.device_memory import device_bytes, used
from shardwise.train.fit import require_memory
from shardwise.train.flags import Settings
from shardwise.train.measure import Measuring
from shardwise.train.parts import Checkpoints, Parts, Trainer, World
from shardwise.train.speak import first_of_host_speaks
from shardwise.train.stop import StopRequest, exit_code
from shardwise.train.together import agreed, largest
from shardwise.train.watch import Watch, throughput_of
from shardwise.units import counted


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its exit code (0, or 128 and the signal that stopped it), and on the first rank its summary."""

    code: int
    summary: Mapping[str, Any]


def run(settings: Settings, parts: Parts) -> Ended:
    """Train on this rank, one of as many as the plan has devices; torchrun's environment says which.

    Raises `ShardwiseError` on one rank where something is wrong, and `SystemExit` with its code on the others.
    """
    plan, world = _joined(settings, parts)
    try:
        data = agreed(world, lambda: _admitted(plan, settings, parts, world))
        measuring = Measuring(world, settings.out, lambda: parts.probe(plan, world))  # while the device is empty
        trainer = agreed(world, lambda: parts.trainer(plan, settings.recipe, data.train, world))
        if not settings.resume:
            agreed(world, lambda: settings.out.create(run_of(plan, settings.recipe, data)) if world.rank == 0 else None)
        checkpoints = agreed(
            world, lambda: parts.checkpoints(settings.out.checkpoints, settings.recipe.keep_checkpoints)
        )
        try:
            return Run(plan, settings, world, data, trainer, checkpoints, measuring).to_its_end()
        finally:
            checkpoints.close()
    finally:
        parts.leave()


def _joined(settings: Settings, parts: Parts) -> tuple[Plan, World]:
    """What has to hold before the ranks can meet."""
    with first_of_host_speaks():
        plan = load_plan(settings.plan)
        require_runnable(plan.layout, precision_named(plan.job.precision))
        require_world(plan, int(os.environ.get("WORLD_SIZE", "1")))
        return plan, parts.join(plan, settings.recipe, settings.device)


def _admitted(plan: Plan, settings: Settings, parts: Parts, world: World) -> Data:
    """What is checked on each rank."""
    if world.rank == 0:
        settings.out.require_place(resume=settings.resume, force=settings.force)
    data = admit(plan, settings)
    device, on_host = str(world.device), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    shared = f" (this host over its {on_host} processes)" if device == "cpu" and on_host > 1 else ""
    require_memory(plan, device_bytes(device, on_host), device + shared)
    return data


@dataclass(frozen=True, slots=True)
class Run:
    """A run that may start."""

    plan: Plan
    settings: Settings
    world: World
    data: Data
    trainer: Trainer
    checkpoints: Checkpoints
    measuring: Measuring

    def to_its_end(self) -> Ended:
        """Every step that is left, or those until it is asked to stop; a checkpoint at the end of either."""
        if self.world.rank == 0:
            self._say_what_is_not_modelled()
        if self.settings.resume:
            self._resume()
        self.measuring.begin()
        with StopRequest() as stop, self._watch() if self.world.rank == 0 else nullcontext() as watch:
            stopped = self._steps(watch, stop)
            agreed(self.world, lambda: self.checkpoints.save(self.trainer.step, self.trainer.state()))
            self.measuring.end()
            if stopped:
                self._say_how_to_go_on(watch, stopped)
                return Ended(exit_code(stopped), self._summary(None))
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
        found = agreed(self.world, lambda: self.checkpoints.restore(self.trainer.state()))
        if found is not None:
            self.trainer.restore(found.values)
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

    def _steps(self, watch: Watch | None, stop: StopRequest) -> int:
        """The steps, but for what follows the last one. The signal that stopped them, or 0."""
        recipe, trainer = self.settings.recipe, self.trainer
        inspected = min(trainer.step + 1, recipe.steps - 1)  # the second one from here, where there are two
        while trainer.step < recipe.steps:
            marks = {INSPECTED: True} if trainer.step == inspected else {}
            record = self._inspected() if marks else trainer.train_step()
            if watch:
                seen = self.data.train.ramp.first_sample(record.step) * self.plan.job.seq_len
                watch.step(record, {"n_tokens_seen": seen, **used(str(self.world.device)), **marks})
            if trainer.step < recipe.steps:
                if stopped := largest(self.world, stop.signal):
                    return stopped
                self._between(watch)
        return 0

    def _inspected(self) -> StepRecord:
        """A step that is watched from below."""
        record, seen = self.trainer.inspected_step()
        self.measuring.step(record, seen)
        return record

    def _between(self, watch: Watch | None) -> None:
        """What is due between two steps."""
        recipe, step = self.settings.recipe, self.trainer.step
        if recipe.validate_every and step % recipe.validate_every == 0:
            self._validate(watch)
        if recipe.checkpoint_every and step % recipe.checkpoint_every == 0:
            agreed(self.world, lambda: self.checkpoints.start(step, self.trainer.state()))

    def _validate(self, watch: Watch | None) -> float | None:
        if self.data.held_out is None:
            return None
        loss = self.trainer.validation_loss(self.data.held_out)
        if watch:
            watch.validation(self.trainer.step, loss)
        return loss

    def _say_how_to_go_on(self, watch: Watch | None, stopped: int) -> None:
        if watch:
            watch.say(
                f"stopped by {signal.Signals(stopped).name} after step {self.trainer.step} of {self.settings.recipe.steps}, with "
                f"a checkpoint in {self.settings.out.checkpoints}; to go on: {self.settings.resume_command}"
            )

    def _summary(self, held_out_loss: float | None) -> Mapping[str, Any]:
        """What came out, on the first rank, which keeps it in the folder."""
        if self.world.rank > 0:
            return {}
        out = self.settings.out
        found = summarised(
            read_log(out.log), throughput_of(self.plan, str(self.world.device)), log_path=str(out.log),
            held_out_loss=held_out_loss, unigram_entropy_nats=self.data.train.shards.index.unigram_entropy_nats,
        )  # fmt: skip
        write_json(out.summary, found)
        return found
