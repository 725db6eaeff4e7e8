"""Estimate of a serving configuration: latencies and throughput with intervals, memory, and what a pass's time is made of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardwise.serve.serving_layout import ServingLayout
from shardwise.serve.serving_problem import ServingProblem
from shardwise.serve.workload import LatencyLimits

ServingVerdict = Literal["fits", "does not fit", "not known"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A predicted quantity and the ends of its 90% prediction interval; the ends are None where nothing was measured that an
    interval could rest on."""

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has two ends or none")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingMemory:
    """Bytes of the fullest device, by the engine's own rule, and what its cache holds.

    `usable_bytes` is what the engine's rule lets it use of `capacity_bytes`; weights, activations of the largest pass and
    `runtime_bytes` (context, captured graphs, communication buffers) come off it, and the rest is `cache_bytes`.
    `cache_tokens` are those of one copy of attention; `largest_batch` is how many requests of the workload they hold, and
    `lacking_bytes` what is missing for one. The verdict is "not known" where the error of the parts decides.
    """

    capacity_bytes: float
    usable_bytes: float
    weight_bytes: float
    activation_bytes: float
    runtime_bytes: float
    cache_bytes: float
    cache_bytes_per_token: float
    cache_tokens: int
    largest_batch: int
    lacking_bytes: float
    verdict: ServingVerdict
    rule: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingEstimate:
    """Estimate of one layout under a workload, in a steady state.

    `ttft_s` is the mean time to the first token with queueing, `tpot_s` the mean time of each token after it.
    `tokens_per_s_per_device` counts output tokens over all devices of the layout, and `requests_per_s` is of all replicas.
    `concurrency` is the number of requests in the system: that of the workload, or what its rate leads to. `running` of them
    decode at once in one copy of attention. `decode_terms` and `prefill_terms` are seconds of a decode pass and of one request's
    prefill by term, and add up to `decode_pass_s` and `prefill_s`; `bound` is the largest term of the pass that users wait for
    most. `max_rate_per_s` is what the replicas can serve at all. `watts_per_device` is a device's mean power (`device_power`),
    `joules_per_output_token` that of all devices over their tokens; both are None where the chip's rated power is not known.
    `is_measured` is False where nothing that was published measured this engine on this chip: the numbers are then a roofline at
    constants of others, and `notes` say so.
    """

    problem: ServingProblem
    layout: ServingLayout
    ttft_s: Prediction
    tpot_s: Prediction
    tokens_per_s_per_device: Prediction
    requests_per_s: float
    max_rate_per_s: float
    concurrency: float
    running: float
    decode_pass_s: float
    prefill_s: float
    decode_terms: Mapping[str, float]
    prefill_terms: Mapping[str, float]
    bound: str
    memory: ServingMemory
    usd_per_million_output_tokens: Prediction | None
    watts_per_device: Prediction | None
    joules_per_output_token: Prediction | None
    is_measured: bool
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> ServingVerdict:
        """True if a request fits in memory."""
        return self.memory.verdict

    @property
    def request_s(self) -> float:
        """Mean seconds of a request from its arrival to its last token."""
        return self.ttft_s.value + self.tpot_s.value * (self.problem.workload.osl - 1)

    def meets(self, limits: LatencyLimits) -> bool:
        """Return True if both latencies are within the limits."""
        return self.ttft_s.value <= (limits.ttft_s or math.inf) and self.tpot_s.value <= (limits.tpot_s or math.inf)
