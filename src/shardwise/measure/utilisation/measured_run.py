"""A measured run: what ran, its measurements, its utilisation, and its comparison with a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from typing_extensions import TypedDict

from shardwise.hardware.cluster import Cluster
from shardwise.layout.layout import Layout
from shardwise.layout.payload import LayoutPayload, layout_payload
from shardwise.measure.utilisation.step_breakdown import StepBreakdown, Utilisation, breakdown_payload
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.records.logs.steady_state import RULE, SteadyState, measure_steady_state
from shardwise.records.logs.training_log import TrainingLog, read_training_log
from shardwise.search.plan import Plan
from shardwise.search.plan_file import layout_of_plan
from shardwise.values.payload_fields import MergedFields

MFU_SCHEMA = "shardwise.mfu/2"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSetup:
    """A run: the cluster as it is predicted on. `batch_tokens` is None where it is unknown, and the job's is then one sequence.

    `software` names what ran it, for a row; `unknown` are options of a launch that its release does not have.
    """

    model: Architecture
    cluster: Cluster
    job: Job
    layout: Layout | None
    batch_tokens: int | None
    software: str
    unknown: tuple[str, ...] = ()

    def with_batch(self, batch_tokens: int | None) -> RunSetup:
        """The run with its batch, once this is known."""
        if batch_tokens is None:
            return self
        return replace(self, batch_tokens=batch_tokens, job=replace(self.job, global_batch_tokens=batch_tokens))


class MeasuredStep(NamedTuple):
    """The measurements: tokens/s of a device, seconds of a step where its batch is known, and the log they came from, if any."""

    tokens_per_s_per_device: float
    step_time_s: float | None
    log: TrainingLog | None = None
    steady: SteadyState | None = None
    paths: tuple[Path, ...] = ()


class UtilisationReport(NamedTuple):
    """What ran, its measurements and utilisation, and a plan: of its layout with the account, or the best one."""

    ran: RunSetup
    measured: MeasuredStep
    used: Utilisation
    plan: Plan | None
    account: StepBreakdown | None


def read_measured_log(paths: list[Path], ran: RunSetup) -> tuple[RunSetup, MeasuredStep]:
    """A run as its log records it, whose batch is then known where the log has it. Raises `InputError` as the readers do."""
    log, devices = read_training_log(paths), ran.cluster.num_devices
    found = measure_steady_state(log, devices, ran.job.seq_len, ran.batch_tokens)
    ran = ran.with_batch(ran.batch_tokens or found.batch_tokens)
    seconds = ran.batch_tokens * found.device_s_per_token / devices if ran.batch_tokens else None
    return ran, MeasuredStep(1.0 / found.device_s_per_token, seconds, log, found, tuple(paths))


class LogPayload(TypedDict):
    """What a log reports: its framework, which of its lines count by which rule, and the first and the last step.

    `medium` is what it was read from, `by_clock` whether times are those between two entries.
    """

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


def mfu_payload(found: UtilisationReport, row: Sequence[str] | None = None) -> dict[str, Any]:
    """What `shardwise mfu --json` prints. `row`: fields of the run for which its recorded row has other values."""
    ran, measured = found.ran, found.measured
    return {
        "schema": MFU_SCHEMA, "model": model_payload(ran.model), "cluster": ran.cluster.name,
        "num_devices": ran.cluster.num_devices,
        "seq_len": ran.job.seq_len, "batch_tokens": ran.batch_tokens, "precision": ran.job.precision,
        "layout": _layout_payload(ran), "step_time_s": measured.step_time_s,
        "utilisation": asdict(found.used), "log": _log_payload(measured),
        "account": breakdown_payload(found.account) if found.account else None,
        "plan": None if found.plan is None or found.account else {
            "layout": layout_of_plan(found.plan), "step_time_s": found.plan.estimate.step_time_s,
            "interval90": found.plan.estimate.interval90, "mfu": found.plan.estimate.mfu,
        },
        "notes": list(found.plan.estimate.notes) if found.plan else [], "row": None if row is None else {"otherwise": list(row)},
    }  # fmt: skip


def _layout_payload(ran: RunSetup) -> dict[str, Any] | None:
    return layout_payload(ran.layout, ran.model, ran.job, ran.cluster.topology) if ran.layout else None


def _log_payload(measured: MeasuredStep) -> dict[str, Any] | None:
    log, found = measured.log, measured.steady
    if log is None or found is None:
        return None
    return {
        "format": log.format.name, "medium": log.medium, "by_clock": log.by_clock, **asdict(found), "rule": RULE,
        "torn_lines": log.torn, "first_step": log.first.step, "last_step": log.steps[-1].step,
        "first_loss": log.first.loss, "last_loss": log.steps[-1].loss,
        "memory_bytes": log.memory_bytes, "memory_kind": log.format.memory_kind,
    }  # fmt: skip
