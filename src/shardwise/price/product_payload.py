"""JSON of a priced product: its tensors, and its programs with their costs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from typing_extensions import TypedDict

from shardwise.price.product import Objective, ProductReport, ProgramCost, StepCost, TensorFacts
from shardwise.sharding.notation import explain_sums


class Seconds(TypedDict):
    """Seconds of the products and of the communication, and the bounds of the total."""

    math: float
    comms: float
    lower: float
    upper: float


class CostPayload(TypedDict):
    """A program with its cost; `time_s` is null where no chip was named."""

    program: list[StepCost]
    bytes_per_device: float
    flops_per_device: float
    time_s: Seconds | None
    result: str


class OtherPayload(CostPayload):
    """Another program, and how it compares."""

    reason: str


class ProductPayload(CostPayload):
    """The cheapest program of a product, the others, and that of the four cases."""

    expression: str
    mesh: dict[str, int]
    sizes: dict[str, int]
    dtype: str
    notes: list[str]
    tensors: list[TensorFacts]
    objective: Objective
    alternatives: list[OtherPayload]
    by_cases: CostPayload
    backward: CostPayload | None


def product_payload(report: ProductReport, schema: str) -> dict[str, Any]:
    """Return the text and sizes of a product, the placement of its tensors, and its programs with their costs."""
    product = report.expression
    return {
        "schema": schema,
        "expression": str(product.expression),
        "mesh": dict(product.mesh.axes),
        "sizes": dict(product.sizes),
        "dtype": product.dtype,
        "notes": list(explain_sums(product.expression)),
        "tensors": [asdict(tensor) for tensor in report.tensors],
        "objective": report.objective,
        **_cost_payload(report.best),
        "alternatives": [{**_cost_payload(cost), "reason": reason} for cost, reason in report.alternatives],
        "by_cases": _cost_payload(report.by_cases),
        "backward": _cost_payload(report.backward) if report.backward else None,
    }


def _cost_payload(cost: ProgramCost) -> dict[str, Any]:
    times = {"math": cost.math_s, "comms": cost.comms_s, "lower": cost.lower_s, "upper": cost.upper_s}
    return {
        "program": [asdict(step) for step in cost.program],
        "bytes_per_device": cost.bytes_per_device,
        "flops_per_device": cost.flops_per_device,
        "time_s": times if cost.math_s is not None else None,
        "result": cost.result,
    }
