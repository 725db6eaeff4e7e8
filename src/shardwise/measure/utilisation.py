"""Share of the peak that a measured run reached, and where the rest of its step goes by the prediction; behind `shardwise mfu`.

`read_measured_log` reads a run from its log, `compute_utilisation` returns its MFU and HFU, `break_down_step` explains its
step by the prediction of its layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from shardwise.hardware import CONSTANTS, LOCAL, LOCAL_NOTE, Cluster, with_calibration
from shardwise.layout import Layout, LayoutFacts
from shardwise.model import Architecture, Job, ModelFacts, model_flops_per_token
from shardwise.model.parameters_and_flops import layer_training_flops
from shardwise.price import Pricing, Problem, mfu_format
from shardwise.price.estimate import estimate
from shardwise.records.logs.training_log import (
    RULE,
    RunSteadyState,
    TrainingLog,
    measure_steady_state,
    read_training_log,
)
from shardwise.search import Plan, layout_of_plan
from shardwise.values import COMMUNICATION_TERMS, Flat, InputError, Payload, get_precision, printed

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
class StepBreakdown(Payload):
    """Parts of the time of a measured step, by the prediction of its layout.

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
    @printed
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
    # What is lost counts from the peak, not from the best that was measured.
    chip = replace(plan.cluster.chip, matmul_fraction=1.0, fp8_matmul_fraction=1.0, attention_fraction=1.0)
    cluster = replace(plan.cluster, chip=chip)
    for name, ideal in IDEAL_CONSTANTS.items():
        idealised, previous_s = replace(idealised, constants={**idealised.constants, **ideal}), remaining_s
        remaining_s = _compute_s(replace(plan, cluster=with_calibration(cluster, idealised)), reprice=True)
        yield name, previous_s - remaining_s
    yield REST_OF_KERNELS, remaining_s - at_peak_s


def _compute_s(plan: Plan, *, reprice: bool = False) -> float:
    predicted = estimate(plan.problem, plan.layout) if reprice else plan.estimate
    return sum(predicted.time[term] for term in COMPUTE_TERMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """Model, job and layout of a run, on the cluster that its prediction is made for.

    `batch_tokens` is None if the batch is unknown; `job` then has a batch of one sequence. `software` is the name of
    the stack, for a row of a run table; `unknown` are options of a launch that its release does not have.
    """

    model: Architecture
    cluster: Cluster
    job: Job
    layout: Layout | None
    batch_tokens: int | None
    software: str
    unknown: tuple[str, ...] = ()

    def with_batch(self, batch_tokens: int | None) -> RunSetup:
        """Return the setup with its batch in tokens; unchanged if this is None."""
        if batch_tokens is None:
            return self
        return replace(self, batch_tokens=batch_tokens, job=replace(self.job, global_batch_tokens=batch_tokens))


class MeasuredStep(NamedTuple):
    """Tokens/s of a device, seconds of a step (None if the batch is unknown), and the log that they come from."""

    tokens_per_s_per_device: float
    step_time_s: float | None
    log: TrainingLog | None = None
    steady: RunSteadyState | None = None
    paths: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRow:
    """The CSV file to which a run was appended, and the fields of the run for which its row has other values."""

    file: str
    lost_fields: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilisationReport:
    """A run, its measurements and utilisation, and a plan: with the breakdown that of its layout, else the best one.

    `row` is None if the run was not recorded as a row.

    >>> import shardwise as sw
    >>> report = sw.mfu(step_time="2.5s", model="llama-3-8b", cluster="h100:64", seq_len=8192, global_batch_tokens="1Mi")
    >>> round(report.utilisation.mfu, 3), report.breakdown, report.plan.layout.num_devices
    (0.341, None, 64)
    """

    setup: RunSetup
    measured: MeasuredStep
    utilisation: Utilisation
    plan: Plan | None = None
    breakdown: StepBreakdown | None = None
    row: RecordedRow | None = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons to doubt that the measurement is of the run as it is described."""
        return tuple(_doubts(self.utilisation, self.measured.steady))


# Frameworks count FLOPs by other formulas: with masked scores, recomputation or the embedding they differ by less.
MAX_COUNT_RATIO = 1.5


def _doubts(utilisation: Utilisation, steady: RunSteadyState | None) -> Iterator[str]:
    fix = "check the model, the devices, the batch and the sequence that were given"
    if utilisation.mfu > 1.0:
        yield f"an MFU of {utilisation.mfu:.0%} is above the peak of a device, which no run reaches: {fix}"
    if steady is None:
        return
    # Of two counts the MFU: a rate may be of operations in other formats too.
    flops_per_s = utilisation.flops_per_token * utilisation.tokens_per_s_per_device
    logged, counted = (steady.mfu, utilisation.mfu) if steady.mfu else ((steady.tflops or 0.0) * 1e12, flops_per_s)
    masked = utilisation.mfu_full / utilisation.mfu
    if logged and not counted / MAX_COUNT_RATIO <= logged <= counted * masked * MAX_COUNT_RATIO:
        yield f"the FLOPs here are {counted / logged:.2g} times those of the log's own count: {fix}"


def read_measured_log(paths: list[Path], setup: RunSetup) -> tuple[RunSetup, MeasuredStep]:
    """Read a run from the files of its log; the setup gets its batch from the log if it has none. Raises `InputError`
    as the log readers do."""
    log, num_devices = read_training_log(paths), setup.cluster.num_devices
    steady = measure_steady_state(log, num_devices, setup.job.seq_len, setup.batch_tokens)
    setup = setup.with_batch(setup.batch_tokens or steady.batch_tokens)
    step_time_s = setup.batch_tokens * steady.device_s_per_token / num_devices if setup.batch_tokens else None
    return setup, MeasuredStep(1.0 / steady.device_s_per_token, step_time_s, log, steady, tuple(paths))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord(Payload):
    """Report of a log: its framework, which of its lines count by which rule, and the first and the last step.
    `medium` is what it was read from, `by_clock` whether times are those between two entries."""

    format: str
    medium: str
    by_clock: bool
    steady: Annotated[RunSteadyState, Flat]
    rule: str
    torn_lines: int
    first_step: int
    last_step: int
    first_loss: float | None
    last_loss: float | None
    memory_bytes: float | None
    memory_kind: str | None

    @classmethod
    def of(cls, log: TrainingLog, steady: RunSteadyState) -> LogRecord:
        """Return the record of a log and its steady state."""
        first, last = log.first, log.steps[-1]
        return cls.from_attributes(
            log, log.format, format=log.format.name, steady=steady, rule=RULE, torn_lines=log.torn, first_step=first.step,
            last_step=last.step, first_loss=first.loss, last_loss=last.loss,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlanRecord(Payload):
    """The best plan, where no layout was given."""

    layout: LayoutFacts
    step_time_s: float
    interval90: tuple[float, float] | None
    mfu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRowRecord(Payload):
    """Fields of the run for which its recorded row has other values."""

    otherwise: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilisationRecord(Payload):
    """A measured run: what ran, its share of the peak, and where the rest of the step goes."""

    SCHEMA = "shardwise.mfu/2"
    model: ModelFacts
    cluster: str
    num_devices: int
    seq_len: int
    batch_tokens: int | None
    precision: str
    layout: LayoutFacts | None
    step_time_s: float | None
    utilisation: Utilisation
    log: LogRecord | None
    account: StepBreakdown | None
    plan: BestPlanRecord | None
    notes: Sequence[str]
    row: RecordedRowRecord | None

    @classmethod
    def of(cls, report: UtilisationReport) -> UtilisationRecord:
        """Return the record of a measured run."""
        setup, measured, plan = report.setup, report.measured, report.plan
        layout, log, steady = setup.layout, measured.log, measured.steady
        return cls.from_attributes(
            setup, setup.job, measured, report, model=ModelFacts.of(setup.model), cluster=setup.cluster.name,
            num_devices=setup.cluster.num_devices, account=report.breakdown,
            layout=LayoutFacts.of(layout, setup.model, setup.job, setup.cluster.topology) if layout else None,
            log=LogRecord.of(log, steady) if log and steady else None,
            plan=None if plan is None or report.breakdown
            else BestPlanRecord.from_attributes(plan.estimate, layout=layout_of_plan(plan)),
            notes=(*report.warnings, *(plan.estimate.notes if plan else ())),
            row=report.row and RecordedRowRecord(otherwise=report.row.lost_fields),
        )  # fmt: skip
