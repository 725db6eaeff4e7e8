"""A serving problem: a model, a cluster, a workload, and the engine that serves it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.hardware import Cluster
from shardwise.model import Architecture
from shardwise.serve.formats import ServingFormats
from shardwise.serve.serving_calibration import ServingCalibration
from shardwise.serve.workload import LatencyLimits, Workload
from shardwise.values import raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """Limits that an engine is started with; None: the engine's default.

    `max_num_seqs` requests run at once in each copy of attention, `max_batched_tokens` tokens in one pass of it.
    `memory_fraction` is the engine's own fraction (of total, free or static memory: `engines`). `chunked_prefill`: inputs are
    cut into chunks that share passes with decoding requests. `mtp_tokens` are drafted by multi-token prediction in each pass, of
    which the share `acceptance` is accepted, one after the other. `admission_passes` lie between two admissions of requests:
    SGLang's `scheduler_recv_interval`, TensorRT-LLM's `batch_wait_timeout_iters` or, with attention_dp, `timeout_iters` of its
    balance.
    """

    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    memory_fraction: float | None = None
    chunked_prefill: bool = True
    mtp_tokens: int = 0
    acceptance: float = 0.0
    admission_passes: int = 1

    def __post_init__(self) -> None:
        problems = [
            f"limits: {name} is {value!r}; a whole number of at least 1 is required"
            for name in ("max_num_seqs", "max_batched_tokens")
            if (value := getattr(self, name)) is not None and not value >= 1
        ]
        if self.memory_fraction is not None and not 0 < self.memory_fraction <= 1:
            problems.append(
                f"limits: memory_fraction is {self.memory_fraction!r}; more than 0 and at most 1 is required"
            )
        if self.admission_passes < 1:
            problems.append(
                f"limits: admission_passes is {self.admission_passes!r}; a whole number of at least 1 is required"
            )
        if not 0 <= self.acceptance <= 1:
            problems.append(f"limits: acceptance is {self.acceptance!r}; 0 to 1 is required")
        if self.mtp_tokens < 0:
            problems.append(f"limits: mtp_tokens is {self.mtp_tokens!r}; a whole number of at least 0 is required")
        raise_problems(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingProblem:
    """A model that is served on a cluster under a workload; `engine` names one of `engines`, `release` one of its releases
    (None: the newest with constants). `calibration` has what was measured on this cluster beside what is published."""

    architecture: Architecture
    cluster: Cluster
    workload: Workload
    engine: str = "vllm"
    release: str | None = None
    formats: ServingFormats = field(default_factory=ServingFormats)
    batch_limits: BatchLimits = field(default_factory=BatchLimits)
    latency_limits: LatencyLimits = field(default_factory=LatencyLimits)
    calibration: ServingCalibration | None = None
