"""A measured run: its setup, its measurements, its utilisation, and its comparison with a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from typing_extensions import TypedDict

from shardwise.hardware import Cluster
from shardwise.layout import Layout, LayoutPayload, layout_payload
from shardwise.measure.utilisation.step_breakdown import StepBreakdown, Utilisation, breakdown_payload
from shardwise.model import Architecture, Job, ModelPayload, model_payload
from shardwise.records.logs.steady_state import RULE, SteadyState, measure_steady_state
from shardwise.records.logs.training_log import TrainingLog, read_training_log
from shardwise.search import Plan, layout_of_plan
from shardwise.values import MergedFields

MFU_SCHEMA = "shardwise.mfu/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """What was run, on the cluster that its prediction is made for.

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
    steady: SteadyState | None = None
    paths: tuple[Path, ...] = ()


class UtilisationReport(NamedTuple):
    """A run, its measurements and utilisation, and a plan: with the breakdown that of its layout, else the best one."""

    ran: RunSetup
    measured: MeasuredStep
    used: Utilisation
    plan: Plan | None
    account: StepBreakdown | None


def read_measured_log(paths: list[Path], setup: RunSetup) -> tuple[RunSetup, MeasuredStep]:
    """Read a run from the files of its log; the setup gets its batch from the log if it has none. Raises `InputError`
    as the log readers do."""
    log, num_devices = read_training_log(paths), setup.cluster.num_devices
    steady = measure_steady_state(log, num_devices, setup.job.seq_len, setup.batch_tokens)
    setup = setup.with_batch(setup.batch_tokens or steady.batch_tokens)
    step_time_s = setup.batch_tokens * steady.device_s_per_token / num_devices if setup.batch_tokens else None
    return setup, MeasuredStep(1.0 / steady.device_s_per_token, step_time_s, log, steady, tuple(paths))


class LogPayload(TypedDict):
    """What a log reports: its framework, which of its lines count by which rule, and the first and the last step.
    `medium` is what it was read from, `by_clock` whether times are those between two entries."""

    format: str
    medium: str
    by_clock: bool
    rule: str
    torn_lines: int
    first_step: int
    last_step: int
    first_loss: float | None
    last_loss: float | None
    memory_bytes: float | None
    memory_kind: str | None


class Unexplained(TypedDict):
    """The rest of the measured step, which no part of the prediction explains."""

    unexplained_s: float


class PlannedPayload(TypedDict):
    """The best plan, where no layout was given."""

    layout: LayoutPayload
    step_time_s: float
    interval90: tuple[float, float] | None
    mfu: float


class RowPayload(TypedDict):
    """Fields of the run for which its recorded row has other values."""

    otherwise: list[str]


class MfuPayload(TypedDict):
    """A measured run: what ran, its share of the peak, and where the rest of the step goes."""

    schema: Literal["shardwise.mfu/2"]
    model: ModelPayload
    cluster: str
    num_devices: int
    seq_len: int
    batch_tokens: int | None
    precision: str
    layout: LayoutPayload | None
    step_time_s: float | None
    utilisation: Utilisation
    log: Annotated[dict[str, Any], MergedFields(SteadyState, LogPayload)] | None
    account: Annotated[dict[str, Any], MergedFields(StepBreakdown, Unexplained)] | None
    plan: PlannedPayload | None
    notes: list[str]
    row: RowPayload | None


def mfu_payload(report: UtilisationReport, lost_fields: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the JSON of `shardwise mfu --json`. `lost_fields` are the fields of the run for which its recorded row has
    other values; None if no row was recorded."""
    setup, measured = report.ran, report.measured
    return {
        "schema": MFU_SCHEMA, "model": model_payload(setup.model), "cluster": setup.cluster.name,
        "num_devices": setup.cluster.num_devices,
        "seq_len": setup.job.seq_len, "batch_tokens": setup.batch_tokens, "precision": setup.job.precision,
        "layout": _layout_payload(setup), "step_time_s": measured.step_time_s,
        "utilisation": asdict(report.used), "log": _log_payload(measured),
        "account": breakdown_payload(report.account) if report.account else None,
        "plan": None if report.plan is None or report.account else {
            "layout": layout_of_plan(report.plan), "step_time_s": report.plan.estimate.step_time_s,
            "interval90": report.plan.estimate.interval90, "mfu": report.plan.estimate.mfu,
        },
        "notes": list(report.plan.estimate.notes) if report.plan else [],
        "row": None if lost_fields is None else {"otherwise": list(lost_fields)},
    }  # fmt: skip


def _layout_payload(setup: RunSetup) -> dict[str, Any] | None:
    return layout_payload(setup.layout, setup.model, setup.job, setup.cluster.topology) if setup.layout else None


def _log_payload(measured: MeasuredStep) -> dict[str, Any] | None:
    log, steady = measured.log, measured.steady
    if log is None or steady is None:
        return None
    return {
        "format": log.format.name, "medium": log.medium, "by_clock": log.by_clock, **asdict(steady), "rule": RULE,
        "torn_lines": log.torn, "first_step": log.first.step, "last_step": log.steps[-1].step,
        "first_loss": log.first.loss, "last_loss": log.steps[-1].loss,
        "memory_bytes": log.memory_bytes, "memory_kind": log.format.memory_kind,
    }  # fmt: skip
