"""A priced product as plain data: what `shardwise matmul --json` and `shardwise reshard --json` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.cost.product import ProductReport, ProgramCost
from shardwise.sharding.meaning import notes

SCHEMA = "shardwise.matmul/1"
RESHARD_SCHEMA = "shardwise.reshard/1"


def product_payload(report: ProductReport, schema: str = SCHEMA) -> dict[str, Any]:
    """The text and sizes of a product, where its tensors lie, and its programs with what each costs."""
    made = report.made
    return {
        "schema": schema,
        "expression": str(made.expression),
        "mesh": dict(made.mesh.axes),
        "sizes": dict(made.sizes),
        "dtype": made.dtype,
        "notes": list(notes(made.expression)),
        "tensors": [asdict(tensor) for tensor in report.tensors],
        "objective": report.objective,
        **_cost(report.best),
        "alternatives": [{**_cost(cost), "reason": reason} for cost, reason in report.alternatives],
        "by_cases": _cost(report.by_cases),
        "backward": _cost(report.backward) if report.backward else None,
    }


def _cost(cost: ProgramCost) -> dict[str, Any]:
    times = {"math": cost.math_s, "comms": cost.comms_s, "lower": cost.lower_s, "upper": cost.upper_s}
    return {
        "program": [asdict(step) for step in cost.program],
        "bytes_per_device": cost.bytes_per_device,
        "flops_per_device": cost.flops_per_device,
        "time_s": times if cost.math_s is not None else None,
        "result": cost.result,
    }
