"""Detect anomalous steps: losses or gradient norms that are not finite, or that spike. Needs no PyTorch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import mean, stdev

from shardwise.run.recipe import (
    LOSS_SPIKE,
    MIN_SPIKE_STEPS,
    NON_FINITE,
    NORM_SPIKE,
    SPIKE_DEVIATIONS,
    SPIKE_WINDOW,
    AnomalyAction,
)


@dataclass(frozen=True, slots=True)
class StepAnomaly:
    """An anomaly of a step: what is wrong, under which policy, and the action that follows. `where`: rank, unit and
    tensor of its origin, if known."""

    step: int
    policy: str
    action: AnomalyAction
    text: str
    where: str = ""

    def __str__(self) -> str:
        return f"step {self.step}: found {self.text}{'; ' if self.where else ''}{self.where}"

    def at_location(self, location: str) -> StepAnomaly:
        """Return the anomaly with its location."""
        return replace(self, where=location)


class AnomalyDetector:
    """Compares the loss and gradient norm of each step with those of the steps before; the same on all ranks.

    `actions`: the action of each policy. The last `window` steps without anomaly are remembered, and a value more than
    `deviations` standard deviations above their mean is a spike.

    >>> detector = AnomalyDetector({"non_finite": "stop", "loss_spike": "skip", "norm_spike": "ignore"}, window=4, deviations=6.0)
    >>> for loss in (3.0, 2.9, 3.1, 3.0):
    ...     detector.record(loss, 1.0)
    >>> print(detector.check(5, 9.0, 1.0))
    step 5: found a loss of 9; the mean of the 4 steps before is 3, their standard deviation 0.0816, and 6 of these are allowed
    >>> print(detector.check(5, 3.1, float("nan")))
    step 5: found a norm of all gradients of nan; finite ones are required
    """

    def __init__(
        self, actions: Mapping[str, AnomalyAction], *, window: int = SPIKE_WINDOW, deviations: float = SPIKE_DEVIATIONS
    ) -> None:
        self.actions, self.deviations = actions, deviations
        self.least = min(max(window // 2, MIN_SPIKE_STEPS), window)
        self._values: dict[str, deque[float]] = {LOSS_SPIKE: deque(maxlen=window), NORM_SPIKE: deque(maxlen=window)}

    @property
    def is_active(self) -> bool:
        """True if any policy needs the steps before."""
        return any(self.actions[name] != "ignore" for name in self._values)

    def check(self, step: int, loss: float, norm: float) -> StepAnomaly | None:
        """Return the anomaly of a step, counted from 1, or None."""
        measurements = {LOSS_SPIKE: ("a loss", loss), NORM_SPIKE: ("a norm of all gradients", norm)}
        non_finite = [f"{label} of {value}" for label, value in measurements.values() if not math.isfinite(value)]
        if non_finite:
            text = f"{' and '.join(non_finite)}; finite ones are required"
            return StepAnomaly(step, NON_FINITE, self.actions[NON_FINITE], text)
        for name, (label, value) in measurements.items():
            if self.actions[name] != "ignore" and (limits := self._above(name, value)):
                return StepAnomaly(step, name, self.actions[name], f"{label} of {value:.4g}; {limits}")
        return None

    def limits(self) -> tuple[float, float]:
        """Return the largest loss and gradient norm of the next step that are no anomaly; infinite where any finite one is
        allowed."""
        loss, norm = (math.inf if self.actions[name] == "ignore" else self._limit(name) for name in self._values)
        return loss, norm

    def _limit(self, name: str) -> float:
        recent = self._values[name]
        return math.inf if len(recent) < self.least else mean(recent) + self.deviations * stdev(recent)

    def _above(self, name: str, value: float) -> str:
        if value <= self._limit(name):
            return ""
        recent = self._values[name]
        average, deviation = mean(recent), stdev(recent)
        return (
            f"the mean of the {len(recent)} steps before is {average:.4g}, their standard deviation {deviation:.3g}, and "
            f"{self.deviations:g} of these are allowed"
        )

    def record(self, loss: float, norm: float) -> None:
        """Remember a step without anomaly."""
        self._values[LOSS_SPIKE].append(loss)
        self._values[NORM_SPIKE].append(norm)

    def restore(self, steps: Iterable[tuple[float, float]]) -> None:
        """Remember the loss and norm of steps without anomaly, in order."""
        for loss, norm in steps:
            self.record(loss, norm)
