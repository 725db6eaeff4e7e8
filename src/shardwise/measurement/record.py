"""What is measured of one step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.errors import require
from shardwise.terms import TIME_TERMS

# The terms of an estimate, and what a step spends that no estimate has: waiting for its data, and the rest.
MEASURED_TERMS = (*TIME_TERMS, "data", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, counted from 1: `step` is the number of steps done with it.

    `loss` is the mean over the `num_targets` of the global batch, in nats; `grad_norm` that of all gradients together, before it
    is clipped. `num_tokens` are those of the global batch. `seconds` by name of `MEASURED_TERMS`, of `step_time_s` wall-clock
    seconds. `auxiliary_loss` and `expert_imbalance` (rows of the fullest expert over the mean, of the first process's
    stages) are of a model with experts, `dropped_share` (of that process's rows those that no expert took) of one whose experts
    have a capacity,
    `prediction_loss` is of one with multi-token prediction: the mean over its modules, without its weight. No other loss has part
    in `loss`. A run in fp16 has the `loss_scale` of the step that follows, and how many steps were left out so far
    (`num_skipped`), for their gradients were not finite.

    A step that measured the noise scale has what it follows from: the mean squared norm of the gradients of parts of the batch,
    of `small_tokens` each, and that of the whole batch of `big_tokens`, both of the loss per token and before they are clipped.
    Raises `InputError` for another term and for a time that no step takes.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_targets: int
    step_time_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    auxiliary_loss: float | None = None
    expert_imbalance: float | None = None
    dropped_share: float | None = None
    prediction_loss: float | None = None
    loss_scale: float | None = None
    num_skipped: int | None = None
    small_norm_squared: float | None = None
    big_norm_squared: float | None = None
    small_tokens: float | None = None
    big_tokens: float | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.seconds if name not in MEASURED_TERMS]
        problems = [f"seconds of {name!r}; one of {', '.join(MEASURED_TERMS)}" for name in unknown]
        if self.step < 1:
            problems.append(f"step {self.step}; at least 1")
        if not 0 < self.step_time_s < math.inf:
            problems.append(f"step_time_s {self.step_time_s}; a time above 0")
        require([f"step record: found {problem} is required" for problem in problems])
