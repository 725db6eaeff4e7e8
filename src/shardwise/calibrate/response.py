"""What was measured as a function of the constants: a training step, or a micro-benchmark."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.calibrate.published_runs.case import Case
from shardwise.cluster.calibration import CONSTANTS, scaled
from shardwise.cluster.stacks import Stack
from shardwise.cost.pricing import Pricing
from shardwise.cost.rates import rates_at
from shardwise.symbolic import Value

Array = NDArray[np.float64]
Constants = Mapping[str, Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Seconds that were measured, `weight` of them, on a chip under a stack; `seconds` prices the same at any constants."""

    chip: str
    stack: Stack
    seconds: Callable[[Constants], Value]
    measured_s: float
    weight: float = 1.0

    @property
    def names(self) -> tuple[tuple[str, str], ...]:
        """Whose each constant is, and its name."""
        return tuple((self.owner(name), name) for name in CONSTANTS)

    def owner(self, name: str) -> str:
        """The chip or the stack that a constant belongs to."""
        return f"chip {self.chip}" if CONSTANTS[name].owner == "chip" else f"stack {self.stack.name}"

    def prior(self, name: str) -> float:
        """Where a constant is expected before anything is measured."""
        return CONSTANTS[name].prior if CONSTANTS[name].owner == "chip" else self.stack.prior(name)


def step_seconds(case: Case) -> Callable[[Constants], Value]:
    """The step time of a run. What does not depend on the constants is worked out once."""
    pricing = Pricing(case.architecture, case.cluster, case.job, case.layout)
    software, chip = case.software, case.cluster.chip

    def seconds(constants: Constants) -> Value:
        rates = rates_at(
            chip, constants, clock=software.clock, fused_attention=software.fused_attention,
            synchronises=software.synchronises, stack=software.stack,
        )  # fmt: skip
        links = scaled(case.cluster.topology, constants["link_fraction"], constants["network_fraction"])
        return pricing.at(rates, links).slowest_s()

    return seconds


def run_observation(case: Case, measured_s: float, weight: float = 1.0) -> Observation:
    """A training run."""
    return Observation(
        chip=case.cluster.chip.name, stack=case.software.stack, seconds=step_seconds(case), measured_s=measured_s,
        weight=weight,
    )  # fmt: skip
