"""A priced product as plain data: what `shardwise matmul --json` and `shardwise reshard --json` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from shardwise.price import ProductReport, ProgramCost
from shardwise.price.product import Objective, StepCost, TensorFacts
from shardwise.sharding.notation import explain_sums

SCHEMA = "shardwise.matmul/1"
RESHARD_SCHEMA = "shardwise.reshard/1"


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


class XlaCollectivePayload(TypedDict):
    """A collective of XLA's program; `axes` is null for groups that are not a set of mesh axes."""

    op: str
    axes: list[str] | None
    bytes: float


class XlaPayload(TypedDict):
    """The program that XLA's partitioner made of the product."""

    backend: str
    version: str
    collectives: list[XlaCollectivePayload]
    bytes_per_device: float
    flops_per_device: float
    multiplications_per_device: float


class ProductPayload(CostPayload):
    """The cheapest program of a product, the others, and that of the four cases. The last keys are there where they were asked
    for: by --run (two) and by --verify."""

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
    max_relative_error: NotRequired[float]
    num_devices: NotRequired[int]
    verify: NotRequired[XlaPayload]


class MatmulPayload(ProductPayload):
    """What `shardwise matmul --json` prints."""

    schema: Literal["shardwise.matmul/1"]


class ReshardPayload(ProductPayload):
    """What `shardwise reshard --json` prints."""

    schema: Literal["shardwise.reshard/1"]


def product_payload(report: ProductReport, schema: str = SCHEMA) -> dict[str, Any]:
    """The text and sizes of a product, the placement of its tensors, and its programs with their costs."""
    made = report.expression
    return {
        "schema": schema,
        "expression": str(made.expression),
        "mesh": dict(made.mesh.axes),
        "sizes": dict(made.sizes),
        "dtype": made.dtype,
        "notes": list(explain_sums(made.expression)),
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
