"""Workloads: the requests that a served model answers, and the latencies that its users accept."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.values import raise_problems

MAX_TOKENS = 10**9  # of one request: far above any context
MAX_REQUESTS = 1e9  # at once, or in a second: far above any cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests of `isl` input and `osl` output tokens (means), in a steady state.

    Either `concurrency` requests are in the system at any time, each followed by the next, or requests arrive at `rate_per_s`
    on average and at random (a Poisson process). Both are of the whole cluster, over all replicas. `cached_tokens` of each
    input are in the cache already (a shared prefix). The shortest outputs lack `length_spread` of the longest: 0 where all are
    alike, so that requests at a concurrency stay together; 0.2 as benchmarks draw them (InferenceX). A run at a concurrency has
    `waves` requests for each that is in the system, of which the first start at once.

    Raises `InputError` with every value that no workload has.

    >>> Workload(isl=8192, osl=1024, concurrency=64).total_tokens
    9216
    """

    isl: int
    osl: int
    concurrency: float | None = None
    rate_per_s: float | None = None
    cached_tokens: int = 0
    length_spread: float = 0.2
    waves: float = 10.0

    def __post_init__(self) -> None:
        problems = [
            f"workload: {name} is {value!r}; a whole number of 1 to {MAX_TOKENS} is required"
            for name in ("isl", "osl")
            if isinstance(value := getattr(self, name), bool)
            or not isinstance(value, int)
            or not 1 <= value <= MAX_TOKENS
        ]
        problems += [
            f"workload: {name} is {value!r}; a positive number of at most {MAX_REQUESTS:,.0f} is required"
            for name in ("concurrency", "rate_per_s")
            if (value := getattr(self, name)) is not None and not 0 < value <= MAX_REQUESTS
        ]
        if (self.concurrency is None) == (self.rate_per_s is None):
            count = "both" if self.concurrency is not None else "neither"
            problems.append(f"workload: found {count} of concurrency and rate_per_s; one of the two is required")
        if not problems and not 0 <= self.cached_tokens < self.isl:
            problems.append(
                f"workload: cached_tokens is {self.cached_tokens!r}; 0 to isl - 1 = {self.isl - 1} is required: the last "
                "input token is computed, since it gives the first output token"
            )
        if not 0 <= self.length_spread <= 1:
            problems.append(f"workload: length_spread is {self.length_spread!r}; 0 to 1 is required")
        if not (math.isfinite(self.waves) and self.waves >= 1):
            problems.append(f"workload: waves is {self.waves!r}; a number of at least 1 is required")
        raise_problems(problems)

    @property
    def total_tokens(self) -> int:
        """Tokens of a request at its end."""
        return self.isl + self.osl

    @property
    def mean_context(self) -> float:
        """Mean tokens that a request has in the cache while it decodes."""
        return self.isl + self.osl / 2

    @property
    def new_input_tokens(self) -> int:
        """Input tokens that are computed."""
        return self.isl - self.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyLimits:
    """Latencies that users accept, in seconds: time to first token, and time per output token after it. None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def __post_init__(self) -> None:
        raise_problems(
            [
                f"limits: {name} is {value!r}; a positive number of seconds is required"
                for name in ("ttft_s", "tpot_s")
                if (value := getattr(self, name)) is not None and not (value > 0 and math.isfinite(value))
            ]
        )
