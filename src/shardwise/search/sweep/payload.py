"""A sweep as plain data: the payload that `plan --sweep --json` prints, and the rows of a CSV file."""

from __future__ import annotations

import csv
import io
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.layout.legality import degrees_of, num_micro_batches
from shardwise.layout.payload import LayoutPayload
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.planning.payload import layout_of_plan
from shardwise.planning.plan import Plan
from shardwise.search.sweep.points import Point, Swept, knee, parts
from shardwise.terms import MEMORY_TERMS, TIME_TERMS

SCHEMA = "shardwise.sweep/2"
OF_ESTIMATE = (
    "step_time_s", "tokens_per_s_per_device", "mfu", "hfu", "bound", "memory_bytes", "memory_capacity_bytes",
)  # fmt: skip
OF_RUN = ("days", "chip_hours", "usd")


class SweptName(TypedDict):
    """A swept name, and its values."""

    name: str
    values: list[Any]


class PointPayload(TypedDict):
    """A point: its values, and its plan's figures. Where it has no plan, `problem` says why and they are null."""

    at: dict[str, Any]
    model: ModelPayload
    cluster: str
    num_devices: int
    global_batch_tokens: int
    seq_len: int
    problem: str | None
    layout: LayoutPayload | None
    num_micro_batches: int | None
    step_time_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    hfu: float | None
    bound: str | None
    memory_bytes: float | None
    memory_capacity_bytes: float | None
    interval90: tuple[float, float] | None
    tokens_per_s: float | None
    usd_per_step: float | None
    usd_per_token: float | None
    days: float | None
    chip_hours: float | None
    usd: float | None
    parts: dict[str, float] | None
    time: dict[str, float] | None
    memory: dict[str, float] | None


class KneePayload(TypedDict):
    """The knee of one series: the first point with another bound than those before it; null where there is none."""

    series: dict[str, Any]
    at: dict[str, Any] | None
    reason: str | None


class SweepPayload(TypedDict):
    """Plans of a job over swept values; `complete` is false where the sweep was stopped before its last point."""

    schema: Literal["shardwise.sweep/2"]
    sweeps: list[SweptName]
    complete: bool
    points: list[PointPayload]
    knees: list[KneePayload]


def sweep_payload(swept: Swept) -> dict[str, Any]:
    """The versioned payload; `complete` is false where it was stopped before its last point."""
    return {
        "schema": SCHEMA,
        "sweeps": [{"name": sweep.name, "values": list(sweep.values)} for sweep in swept.sweeps],
        "complete": len(swept.points) == swept.num_points,
        "points": [point_payload(point) for point in swept.points],
        "knees": [
            {
                "series": dict(at),
                "at": dict(found.point.at) if found else None,
                "reason": found.reason if found else None,
            }
            for at, found in ((at, knee(points)) for at, points in swept.series())
        ]
        if swept.along.ordered
        else [],
    }


def point_payload(point: Point) -> dict[str, Any]:
    """A point: its values, and its plan's figures, each of them None where there is no plan."""
    case, found = point.case, point.plan
    return {
        "at": dict(point.at), "model": model_payload(case.model), "cluster": case.cluster.name,
        "num_devices": case.cluster.num_devices,
        "global_batch_tokens": case.job.global_batch_tokens, "seq_len": case.job.seq_len,
        "problem": str(point.error) if point.error else None, "layout": layout_of_plan(found) if found else None,
        "num_micro_batches": micro_batches(found) if found else None,
        **{name: getattr(found.estimate, name) if found else None for name in OF_ESTIMATE},
        "interval90": list(found.estimate.interval90) if found and found.estimate.interval90 else None,
        "tokens_per_s": case.job.global_batch_tokens / found.estimate.step_time_s if found else None,
        "usd_per_step": point.usd_per_step, "usd_per_token": point.usd_per_token,
        **{name: getattr(found.run, name) if found and found.run else None for name in OF_RUN},
        "parts": parts(found.estimate) if found else None,
        "time": dict(found.estimate.time) if found else None, "memory": dict(found.estimate.memory) if found else None,
    }  # fmt: skip


def micro_batches(plan: Plan) -> int:
    """Micro-batches of the fullest replica in a step: the steps of gradient accumulation."""
    return int(num_micro_batches(plan.job, degrees_of(plan.layout)))


def sweep_csv(swept: Swept) -> str:
    """A row for each point: the values of the sweeps, then the figures; seconds and bytes of each term last."""
    out = io.StringIO()
    rows = [_flat(point) for point in swept.points]
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _flat(point: Point) -> dict[str, Any]:
    """The payload of a point without lists and tables in it."""
    found = point_payload(point)
    low, high = found.pop("interval90") or (None, None)
    time, memory, at = found.pop("time") or {}, found.pop("memory") or {}, found.pop("at")
    del found["parts"]
    found["model"], found["layout"] = found["model"]["name"], found["layout"] and found["layout"]["text"]
    row = {
        **{f"sweep.{name}": value for name, value in at.items()},
        **found,
        "interval90_low_s": low,
        "interval90_high_s": high,
    }
    row |= {f"time_s.{term}": time.get(term) for term in TIME_TERMS}
    return row | {f"memory_bytes.{term}": memory.get(term) for term in MEMORY_TERMS}
