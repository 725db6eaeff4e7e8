"""Utilisation of a measured step, and where the rest of its time goes according to the prediction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from shardwise.hardware import CONSTANTS, LOCAL, LOCAL_NOTE, with_calibration
from shardwise.layout import Layout
from shardwise.model import Architecture, model_flops_per_token
from shardwise.model.parameters_and_flops import layer_training_flops
from shardwise.price import Pricing, Problem, mfu_format
from shardwise.price.estimate import estimate
from shardwise.search import Plan
from shardwise.values import COMMUNICATION_TERMS, InputError, get_precision

COMPUTE_TERMS = ("forward", "backward", "recompute")
# What keeps kernels from the peak, each with the constants that say so at their ideal: taken away one after the other, the time
# that each of them takes away is its own. GEMM efficiency is what products lose below the peak.
_ATTENTION = CONSTANTS["attention_fraction"].high  # of the peak; the stack's factor then makes it whole
IDEAL_CONSTANTS: Mapping[str, Mapping[str, float]] = {
    "GEMM efficiency": {
        "matmul_fraction": 1.0, "fp8_matmul_fraction": 1.0, "grouped_fraction": 1.0,
        "matmul_ramp": CONSTANTS["matmul_ramp"].low,
    },
    "attention kernel efficiency": {"attention_fraction": _ATTENTION, "attention": _ATTENTION},
    "gaps between kernels": {"launch_s": CONSTANTS["launch_s"].low},
}  # fmt: skip
REST_OF_KERNELS = "elementwise kernels, waiting for the host, uneven stages"
IntervalVerdict = Literal["inside", "faster", "slower"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Utilisation:
    """Shares of the devices' peak (0 to 1) at a rate of tokens.

    `flops_per_token` are the model's, forward and backward without recomputation, with causal attention counted as half:
    `mfu`; `mfu_full` counts the full square of the scores, as PaLM and torchtitan do. `hfu` adds recomputed FLOPs, for a given
    layout. `peak_flops_per_s` is one device's, dense, in `peak_format`.
    """

    tokens_per_s_per_device: float
    flops_per_token: float
    flops_per_token_full: float
    peak_format: str
    peak_flops_per_s: float
    mfu: float
    mfu_full: float
    hfu: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A part of the measured step: predicted seconds, and their share of the measured step."""

    name: str
    seconds: float
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBreakdown:
    """Where the time of a measured step goes, by the prediction of its layout.

    `parts` add up to `measured_s`; the last is the unexplained remainder. `predicted_s` is a bound where `interval90` is None;
    `verdict` says on which side of the interval the measurement is.
    """

    measured_s: float
    predicted_s: float
    interval90: tuple[float, float] | None
    bound_s: float | None
    verdict: IntervalVerdict
    parts: tuple[StepPart, ...]

    @property
    def unexplained_s(self) -> float:
        return self.measured_s - self.predicted_s


def compute_utilisation(problem: Problem, tokens_per_s_per_device: float, layout: Layout | None = None) -> Utilisation:
    """Return MFU and, with a layout, HFU at a rate in tokens/s per device. Raises `InputError` for a host, which has no
    published peak, and `MissingValueError` for a chip without a sourced one."""
    if problem.cluster.chip.name == LOCAL:
        raise InputError(
            f"mfu: {LOCAL_NOTE}, and no machine's peak; a cluster of your own is required (bench machine --out)"
        )
    peak_format = mfu_format(problem.job)
    peak, flops = (
        problem.cluster.chip.peak(peak_format),
        model_flops_per_token(problem.architecture, problem.job.attended_tokens),
    )
    flops_full = flops + _masked_flops(problem.architecture, problem.job.attended_tokens)
    mfu = flops * tokens_per_s_per_device / peak
    return Utilisation(
        tokens_per_s_per_device=tokens_per_s_per_device, flops_per_token=flops, flops_per_token_full=flops_full,
        peak_format=peak_format, peak_flops_per_s=peak, mfu=mfu, mfu_full=mfu * flops_full / flops,
        hfu=None if layout is None else mfu * Pricing(problem, layout).hardware_ratio(),
    )  # fmt: skip


def _masked_flops(architecture: Architecture, seq_len: int) -> float:
    """Return the FLOPs per token for masked scores, which MFU with full attention counts."""
    full, attended = (layer_training_flops(architecture, seq_len, causal=causal)[1] for causal in (False, True))
    return architecture.num_layers * (full - attended) / seq_len


def break_down_step(plan: Plan, measured_s: float, utilisation: Utilisation) -> StepBreakdown:
    """Return the parts of a measured step by the prediction of its plan; `utilisation` has the layout's HFU."""
    predicted = plan.estimate
    model_s = utilisation.mfu * measured_s
    recomputed_s = ((utilisation.hfu or utilisation.mfu) - utilisation.mfu) * measured_s
    seconds_by_part = {
        "model FLOPs at the peak": model_s, "FLOPs that are run again, at the peak": recomputed_s,
        **dict(_kernel_losses(plan, model_s + recomputed_s)),
        **{_term_text(term): seconds for term, seconds in predicted.time.items() if term not in COMPUTE_TERMS},
    }  # fmt: skip
    nonzero_parts = [(name, seconds) for name, seconds in seconds_by_part.items() if abs(seconds) > measured_s * 1e-9]
    nonzero_parts.append(("not explained by the prediction", measured_s - predicted.step_time_s))
    return StepBreakdown(
        measured_s=measured_s, predicted_s=predicted.step_time_s, interval90=predicted.interval90, bound_s=plan.bound_s,
        verdict=_judge_interval(measured_s, predicted.interval90 or (predicted.step_time_s, predicted.step_time_s)),
        parts=tuple(StepPart(name=name, seconds=seconds, share=seconds / measured_s) for name, seconds in nonzero_parts),
    )  # fmt: skip


def _judge_interval(measured_s: float, interval: tuple[float, float]) -> IntervalVerdict:
    if measured_s < interval[0]:
        return "faster"
    return "slower" if measured_s > interval[1] else "inside"


def _term_text(term: str) -> str:
    texts = {
        "bubble": "pipeline bubble", "host": "transfers from and to the host",
        "control": "sums of the loss and the norm", "optimizer": "the optimizer's update",
    }  # fmt: skip
    return f"exposed communication over {term}" if term in COMMUNICATION_TERMS else texts.get(term, term)


def _kernel_losses(plan: Plan, at_peak_s: float) -> Iterator[tuple[str, float]]:
    """Yield the time of kernels beyond their FLOPs at the peak, by cause; the causes add up to the total. A single loss
    if the cluster has no calibration, or if products run in another format than the peak's."""
    compute_s, calibration = _compute_s(plan), plan.cluster.calibration
    if calibration is None or get_precision(plan.job.precision).matmul_format != mfu_format(plan.job):
        yield "kernels, beyond their FLOPs at the peak", compute_s - at_peak_s
        return
    idealised, remaining_s = replace(calibration, clock=max(calibration.clock, 1.0)), compute_s
    for name, ideal in IDEAL_CONSTANTS.items():
        idealised, previous_s = replace(idealised, constants={**idealised.constants, **ideal}), remaining_s
        remaining_s = _compute_s(replace(plan, cluster=with_calibration(plan.cluster, idealised)), reprice=True)
        yield name, previous_s - remaining_s
    yield REST_OF_KERNELS, remaining_s - at_peak_s


def _compute_s(plan: Plan, *, reprice: bool = False) -> float:
    predicted = estimate(plan.problem, plan.layout) if reprice else plan.estimate
    return sum(predicted.time[term] for term in COMPUTE_TERMS)


def breakdown_payload(breakdown: StepBreakdown) -> dict[str, Any]:
    """Return a breakdown as JSON."""
    return {**asdict(breakdown), "unexplained_s": breakdown.unexplained_s}
