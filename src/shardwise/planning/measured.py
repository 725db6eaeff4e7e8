"""A run that was measured: what ran, what was measured of it, what that is, and what it is beside a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.cluster.cluster import Cluster
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.measurement.logs.read import TrainingLog, read_training_log
from shardwise.measurement.logs.steady import RULE, Steady, steady
from shardwise.model.architecture import Architecture
from shardwise.planning.account import Account, Utilisation, account_payload
from shardwise.planning.plan import Plan

SCHEMA = "shardwise.mfu/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A run: the cluster as it is predicted on. `batch_tokens` is None where nobody said it, and the job's is then one sequence.

    `software` names what ran it, for a row; `unknown` are options of a launch that its release does not have.
    """

    model: Architecture
    cluster: Cluster
    job: Job
    layout: Layout | None
    batch_tokens: int | None
    software: str
    unknown: tuple[str, ...] = ()

    def of_batch(self, batch_tokens: int | None) -> Ran:
        """The run with its batch, once that is known."""
        if batch_tokens is None:
            return self
        return replace(self, batch_tokens=batch_tokens, job=replace(self.job, global_batch_tokens=batch_tokens))


class Measured(NamedTuple):
    """What was measured: tokens/s of a device, seconds of a step where its batch is known, and the log where it is from one."""

    tokens_per_s_per_device: float
    step_time_s: float | None
    log: TrainingLog | None = None
    steady: Steady | None = None
    paths: tuple[Path, ...] = ()


class MeasuredRun(NamedTuple):
    """What ran, what was measured of it, what that is, and a plan: of its layout with the account, or the one to take."""

    ran: Ran
    measured: Measured
    used: Utilisation
    plan: Plan | None
    account: Account | None


def of_log(paths: list[Path], ran: Ran) -> tuple[Ran, Measured]:
    """What a log says of a run, whose batch is then known where the log has it. Raises `InputError` as the readers do."""
    log, devices = read_training_log(paths), ran.cluster.num_devices
    found = steady(log, devices, ran.job.seq_len, ran.batch_tokens)
    ran = ran.of_batch(ran.batch_tokens or found.batch_tokens)
    seconds = ran.batch_tokens * found.device_s_per_token / devices if ran.batch_tokens else None
    return ran, Measured(1.0 / found.device_s_per_token, seconds, log, found, tuple(paths))


def mfu_payload(found: MeasuredRun, row: Sequence[str] | None = None) -> dict[str, Any]:
    """What `shardwise mfu --json` prints. `row`: what of the run the row that was made of it says otherwise."""
    ran, measured = found.ran, found.measured
    return {
        "schema": SCHEMA, "model": ran.model.name, "cluster": ran.cluster.name, "num_devices": ran.cluster.num_devices,
        "seq_len": ran.job.seq_len, "batch_tokens": ran.batch_tokens, "precision": ran.job.precision,
        "layout": None if ran.layout is None else str(ran.layout), "step_time_s": measured.step_time_s,
        "utilisation": asdict(found.used), "log": _log_payload(measured),
        "account": account_payload(found.account) if found.account else None,
        "plan": None if found.plan is None or found.account else {
            "layout": str(found.plan.layout), "step_time_s": found.plan.estimate.step_time_s,
            "interval90": found.plan.estimate.interval90, "mfu": found.plan.estimate.mfu,
        },
        "notes": list(found.plan.estimate.notes) if found.plan else [], "row": None if row is None else {"otherwise": list(row)},
    }  # fmt: skip


def _log_payload(measured: Measured) -> dict[str, Any] | None:
    log, found = measured.log, measured.steady
    if log is None or found is None:
        return None
    return {
        "format": log.format.name, "medium": log.medium, "by_clock": log.by_clock, **asdict(found), "rule": RULE,
        "torn_lines": log.torn, "first_step": log.first.step, "last_step": log.steps[-1].step,
        "first_loss": log.first.loss, "last_loss": log.steps[-1].loss,
        "memory_bytes": log.memory_bytes, "memory_kind": log.format.memory_kind,
    }  # fmt: skip
