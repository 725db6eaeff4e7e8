"""Estimate of a deployment of two pools: latencies and throughput with intervals, and what each pool does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.serve.pooled_layout import PooledLayout
from shardwise.serve.serving_estimate import Prediction, ServingMemory, ServingVerdict
from shardwise.serve.serving_problem import ServingProblem
from shardwise.serve.workload import LatencyLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFigures:
    """Figures of one pool: the requests per second that it serves at most, the share of that in use, the seconds of one of its
    passes by term (they add up to `pass_s`), the memory of its fullest device, and a device's mean power."""

    max_rate_per_s: float
    busy_share: float
    pass_s: float
    terms: Mapping[str, float]
    memory: ServingMemory
    watts_per_device: Prediction | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledEstimate:
    """Estimate of two pools under a workload, in a steady state.

    `ttft_terms` are seconds until the first token by term, the largest first, and add up to `ttft_s`; the first token is the
    user's when the decode pool has the cache. `tpot_s` is that of the decode pool, whose passes have no inputs.
    `tokens_per_s_per_device` counts output tokens over the devices of both. `bound` is the pool that is full first, and
    `prefill_devices_per_decode_device` the ratio of devices at which both are full at once. `transfer_bytes` of cache are moved
    for a request. `running` requests decode at once in one copy of attention. `joules_per_output_token` are of both pools.
    """

    problem: ServingProblem
    layout: PooledLayout
    ttft_s: Prediction
    tpot_s: Prediction
    tokens_per_s_per_device: Prediction
    requests_per_s: float
    max_rate_per_s: float
    concurrency: float
    running: float
    ttft_terms: Mapping[str, float]
    transfer_bytes: float
    prefill: PoolFigures
    decode: PoolFigures
    bound: str
    prefill_devices_per_decode_device: float
    usd_per_million_output_tokens: Prediction | None
    joules_per_output_token: Prediction | None
    is_measured: bool
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> ServingVerdict:
        """True if a request fits in the memory of both pools."""
        verdicts = {self.prefill.memory.verdict, self.decode.memory.verdict}
        ranked: tuple[ServingVerdict, ...] = ("does not fit", "not known", "fits")
        return next(verdict for verdict in ranked if verdict in verdicts)

    @property
    def request_s(self) -> float:
        """Mean seconds of a request from its arrival to its last token."""
        return self.ttft_s.value + self.tpot_s.value * (self.problem.workload.osl - 1)

    def meets(self, limits: LatencyLimits) -> bool:
        """Return True if both latencies are within the limits."""
        return self.ttft_s.value <= (limits.ttft_s or math.inf) and self.tpot_s.value <= (limits.tpot_s or math.inf)
