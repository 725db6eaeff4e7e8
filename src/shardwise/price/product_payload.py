"""JSON of a priced product: its tensors, and its programs with their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from shardwise.price.product import Objective, ProductReport, ProgramCost, StepCost, TensorFacts
from shardwise.sharding.notation import explain_sums
from shardwise.values import Flat, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSecondsRecord(Payload):
    """Seconds of the products and of the communication, and the bounds of the total."""

    math: float
    comms: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCostRecord(Payload):
    """A program with its cost; `time_s` is null where no chip was named."""

    program: Sequence[StepCost]
    bytes_per_device: float
    flops_per_device: float
    time_s: ProgramSecondsRecord | None
    result: str

    @classmethod
    def of(cls, cost: ProgramCost) -> ProgramCostRecord:
        """Return the record of a program."""
        seconds = ProgramSecondsRecord.from_attributes(
            math=cost.math_s, comms=cost.comms_s, lower=cost.lower_s, upper=cost.upper_s
        )
        return cls.from_attributes(cost, time_s=None if cost.math_s is None else seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherProgramRecord(Payload):
    """Another program, and how it compares."""

    cost: Annotated[ProgramCostRecord, Flat]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRecord(Payload):
    """The cheapest program of a product, the others, and that of the four cases."""

    expression: str
    mesh: Mapping[str, int]
    sizes: Mapping[str, int]
    dtype: str
    notes: Sequence[str]
    tensors: Sequence[TensorFacts]
    objective: Objective
    best: Annotated[ProgramCostRecord, Flat]
    alternatives: Sequence[OtherProgramRecord]
    by_cases: ProgramCostRecord
    backward: ProgramCostRecord | None

    @classmethod
    def of(cls, report: ProductReport) -> ProductRecord:
        """Return the record of a product."""
        product = report.expression
        return cls.from_attributes(
            report, product, expression=str(product.expression), mesh=dict(product.mesh.axes),
            notes=list(explain_sums(product.expression)), best=ProgramCostRecord.of(report.best),
            alternatives=[
                OtherProgramRecord(cost=ProgramCostRecord.of(cost), reason=reason) for cost, reason in report.alternatives
            ],
            by_cases=ProgramCostRecord.of(report.by_cases),
            backward=ProgramCostRecord.of(report.backward) if report.backward else None,
        )  # fmt: skip
