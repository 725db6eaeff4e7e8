"""What is done about a step that was found to be wrong, by its policy, and the record of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import InputError
from shardwise.measurement.log import Log, read_log
from shardwise.train.flags import Settings
from shardwise.train.parts import Checkpoints, Trainer, World
from shardwise.train.policy import Trouble
from shardwise.train.together import agreed, from_first
from shardwise.train.waits import begin_stage
from shardwise.train.watch import Watch
from shardwise.units import counted


@dataclass
class Remedies:
    """The policies of a run at work. All ranks call each of these together."""

    settings: Settings
    world: World
    trainer: Trainer
    checkpoints: Checkpoints
    num_rewinds: int = 0

    def resume(self) -> None:
        """Of a run that goes on: what its log tells of the steps before, so that the next are judged as if it had not stopped."""
        if not self.trainer.judge.remembers:
            return
        numbers: list[float] = []
        if self.world.rank == 0 and self.settings.out.log.exists():
            log = read_log(self.settings.out.log)
            good = _good_steps(log)[-self.settings.recipe.spike_window :]
            numbers = [sum(event["event"] == "rewind" for event in log.events), *(one for pair in good for one in pair)]
        found = from_first(self.world, numbers, "the earlier steps in the log")
        self.num_rewinds = int(found[0]) if found else 0
        self.trainer.judge.restore(zip(found[1::2], found[2::2], strict=True))

    def apply(self, trouble: Trouble, watch: Watch | None) -> None:
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

    def _rewind(self, trouble: Trouble, watch: Watch | None) -> None:
        limit = self.settings.recipe.max_rewinds
        if self.num_rewinds == limit:
            self._record(watch, trouble, "the run ends")
            self._end(
                f"{trouble}: the run has gone back {counted(limit, 'time')}, which recipe.max_rewinds allows; data or a recipe "
                "that train are required"
            )
        begin_stage(f"reading a checkpoint, for step {trouble.step} was wrong")
        found = agreed(self.world, lambda: self.checkpoints.restore(self.trainer.state()))
        if found is None:
            self._record(watch, trouble, "the run ends")
            self._end(f"{trouble}: there is no checkpoint to go back to; --checkpoint-every is required")
            return
        for problem in found.damaged.values():
            self._warn(problem)
        self.trainer.restore(found.values)
        self.trainer.pass_over(trouble.step)
        self.num_rewinds += 1
        batches = counted(trouble.step - found.step, "batch")
        self._record(watch, trouble, f"the weights are those of step {found.step} again, and {batches} are passed over",
                     to_step=found.step, num_rewinds=self.num_rewinds)  # fmt: skip

    def _record(self, watch: Watch | None, trouble: Trouble, done: str, **more: int) -> None:
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

        agreed(self.world, refuse)


def _good_steps(log: Log) -> list[tuple[float, float]]:
    """Loss and norm of the steps that were judged to be as they should be."""
    wrong = {event["step"] for event in log.events if "policy" in event}
    return [(record.loss, record.grad_norm) for record in log.steps if record.step not in wrong]
