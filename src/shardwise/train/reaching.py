"""Whether a run has reached the loss that it is to end at, the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.measurement.log import TARGET, read_log
from shardwise.measurement.record import StepRecord
from shardwise.measurement.target import LossTarget
from shardwise.train.flags import Settings
from shardwise.train.parts import World
from shardwise.train.together import largest
from shardwise.train.watch import Watch


@dataclass
class Reaching:
    """The first rank, which has the log, decides; all ranks call each of these together. Without a target no run reaches it."""

    settings: Settings
    world: World
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
