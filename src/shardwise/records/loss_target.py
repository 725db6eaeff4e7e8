"""When a run reaches a loss: the steps to it, from the losses of single steps, which are noisy."""

from __future__ import annotations

import math
from collections.abc import Iterable

SMOOTHED_PART = 3  # the last third of the steps is what a smoothed loss is made of
FEWEST_STEPS = 8  # steps, for a line through them


class StepsToLoss:
    """The steps after which the smoothed training loss of a run is at most `target` nats.

    The smoothed loss after s steps is the value at s of the straight line in log steps (least squares) through the losses of the
    last third of them: their mean would lag behind. Steps are interpolated between the last smoothed loss above the target and
    the first one that is not. It is the training loss, of samples that are new as long as the run does not pass over its data
    again; the loss of a step is that before its update. Losses that are not finite are left out.

    >>> target = StepsToLoss(3.0)
    >>> for step in range(1, 200):
    ...     if target.add_loss(6.0 - 0.75 * math.log(step)):
    ...         break
    >>> step, abs(target.steps / math.exp(4) - 1) < 1e-3
    (55, True)
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.steps: float | None = None
        self._smoothed = math.inf
        self._sums = [(0, 0.0, 0.0, 0.0, 0.0)]  # up to each step: 1, x, x², y and x·y of its log step x and loss y

    @property
    def smoothed(self) -> float | None:
        """The smoothed loss after the steps so far; None where they are too few."""
        return self._smoothed if self._smoothed < math.inf else None

    def add_loss(self, loss: float) -> bool:
        """The loss of the next step. Whether the target is reached."""
        x = math.log(len(self._sums))
        terms = (1, x, x * x, loss, x * loss) if math.isfinite(loss) else (0, 0.0, 0.0, 0.0, 0.0)
        self._sums.append(tuple(a + b for a, b in zip(self._sums[-1], terms, strict=True)))  # type: ignore[arg-type]
        before, self._smoothed = self._smoothed, self._line(x)
        if self.steps is None and self._smoothed <= self.target:
            done = len(self._sums) - 1
            part = (before - self.target) / (before - self._smoothed) if before < math.inf else 1.0
            self.steps = done - 1 + part
        return self.steps is not None

    def _line(self, at: float) -> float:
        """The smoothed loss at a log step; infinite where there are too few steps for one."""
        done = len(self._sums) - 1
        first = self._sums[done - max(done // SMOOTHED_PART, min(FEWEST_STEPS, done))]
        count, x, xx, y, xy = (b - a for a, b in zip(first, self._sums[-1], strict=True))
        if count < FEWEST_STEPS:
            return math.inf
        slope = (count * xy - x * y) / (count * xx - x * x)
        return (y + slope * (count * at - x)) / count


def steps_to_loss(losses: Iterable[float], target: float) -> float | None:
    """The steps of a run with these losses to a smoothed loss of `target` nats; None where it is not reached.

    >>> steps_to_loss([6.0 - 0.5 * math.log(step) for step in range(1, 10)], 3.0) is None
    True
    """
    found = StepsToLoss(target)
    return found.steps if any(found.add_loss(loss) for loss in losses) else None
