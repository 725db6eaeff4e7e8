"""Steps after which a run reaches a loss, from the noisy losses of single steps."""

from __future__ import annotations

import math
from collections.abc import Iterable

SMOOTHED_PART = 3  # a smoothed loss uses the last third of the steps
FEWEST_STEPS = 8  # steps that a line is fitted to


class StepsToLoss:
    """Tracker of the number of steps after which the smoothed training loss of a run is at most `target` nats.

    The smoothed loss after s steps is the value at s of the straight line in log steps (least squares) through the losses of
    the last third of them: their mean would lag behind. Steps are interpolated between the last smoothed loss above the
    target and the first one that is not. It is the training loss, of new samples as long as the run does not repeat its data;
    the loss of a step is that before its update. Losses that are not finite are left out.

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
        """Smoothed loss after the steps so far; None if they are too few."""
        return self._smoothed if self._smoothed < math.inf else None

    def add_loss(self, loss: float) -> bool:
        """Add the loss of the next step; return True once the target is reached."""
        x = math.log(len(self._sums))
        terms = (1, x, x * x, loss, x * loss) if math.isfinite(loss) else (0, 0.0, 0.0, 0.0, 0.0)
        self._sums.append(tuple(a + b for a, b in zip(self._sums[-1], terms, strict=True)))  # type: ignore[arg-type]
        previous, self._smoothed = self._smoothed, self._line(x)
        if self.steps is None and self._smoothed <= self.target:
            num_steps = len(self._sums) - 1
            fraction = (previous - self.target) / (previous - self._smoothed) if previous < math.inf else 1.0
            self.steps = num_steps - 1 + fraction
        return self.steps is not None

    def _line(self, log_step: float) -> float:
        """Return the smoothed loss at a log step; infinite if the steps are too few for a line."""
        num_steps = len(self._sums) - 1
        first = self._sums[num_steps - max(num_steps // SMOOTHED_PART, min(FEWEST_STEPS, num_steps))]
        # Differences of prefix sums are the sums over the window. A line in log steps, as a mean would lag behind.
        count, x, xx, y, xy = (b - a for a, b in zip(first, self._sums[-1], strict=True))
        if count < FEWEST_STEPS:
            return math.inf
        slope = (count * xy - x * y) / (count * xx - x * x)
        return (y + slope * (count * log_step - x)) / count


def steps_to_loss(losses: Iterable[float], target: float) -> float | None:
    """Return the steps of a run with these losses to a smoothed loss of `target` nats, or None if it is not reached.

    >>> steps_to_loss([6.0 - 0.5 * math.log(step) for step in range(1, 10)], 3.0) is None
    True
    """
    tracker = StepsToLoss(target)
    return tracker.steps if any(tracker.add_loss(loss) for loss in losses) else None
