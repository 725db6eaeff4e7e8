"""Cost of a sharded product (the cheapest program, runners-up, the book's derivation, forward and backward), and its JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from shardwise.derive import CollectiveStep, ComputeStep, ShardedExpression, ShardedProgram
from shardwise.derive.sharded_einsum import derive_by_cases, expression_program, solve_expression, strategy_program
from shardwise.derive.sharded_program import ShardingTargets, shard_program
from shardwise.hardware import collective_s
from shardwise.hardware.mesh_links import MeshOnChips
from shardwise.model.backward import transpose_program
from shardwise.sharding import Axes, Collective, CollectiveKind, Spec
from shardwise.sharding.collectives import received_elements
from shardwise.sharding.matmul_search.cheapest_paths import CostVector, PriceCollective
from shardwise.sharding.matmul_search.cheapest_strategies import PriceProduct
from shardwise.sharding.notation import explain_sums
from shardwise.values import Flat, InputError, Payload, SymbolValues, bytes_per_element, constant, lookup

Objective = Literal["time", "bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """One step: bytes that one device receives, FLOPs, seconds (None: no chip).

    `op` is a collective's kind or, of what each device does alone, `local_product`, `local_sum` (of one operand, over dims
    that nothing else has), `local_transpose` (dims in another order) or `local_broadcast` (the gradient of a sum).
    """

    op: str
    operand: str
    axes: tuple[str, ...]
    dim: str | None
    before: str
    after: str
    bytes_per_device: float
    flops: float
    time_s: float | None
    reason: str = ""

    @property
    def is_local(self) -> bool:
        """True if the device computes, and receives nothing."""
        return self.op.startswith("local_")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramCost:
    """A program's steps and totals. `lower` is the time if compute and communication overlap fully, `upper` if not at all."""

    program: tuple[StepCost, ...]
    bytes_per_device: float
    flops_per_device: float
    math_s: float | None
    comms_s: float | None
    result: str

    @property
    def lower_s(self) -> float | None:
        return None if self.math_s is None or self.comms_s is None else max(self.math_s, self.comms_s)

    @property
    def upper_s(self) -> float | None:
        return None if self.math_s is None or self.comms_s is None else self.math_s + self.comms_s


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """Placement of a tensor: shape and bytes of a shard, how often each shard is held, bytes over all devices, and the seconds
    in which a device reads its shard from memory (None: no chip)."""

    name: str
    sharding: str
    local_shape: tuple[int, ...]
    bytes_per_device: float
    copies: int
    total_bytes: float
    load_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductReport:
    """The cheapest program as steps to run and as costs, other programs with the reason each lost, and the book's way."""

    expression: ShardedExpression
    tensors: tuple[TensorFacts, ...]
    objective: Objective
    steps: ShardedProgram
    best: ProgramCost
    alternatives: tuple[tuple[ProgramCost, str], ...]
    by_cases: ProgramCost
    backward: ProgramCost | None


def _minimizes_time(objective: str) -> bool:
    """Return True if seconds are minimised before bytes."""
    return lookup({"time": True, "bytes": False}, objective, "objective")


def price_product(
    expression: ShardedExpression, chips: MeshOnChips | None, *, objective: Objective = "time", free: Sequence[str] = (),
    with_backward: bool = False,
) -> ProductReport:  # fmt: skip
    """Solve and price a sharded product. Without a chip there are no times, and the objective is bytes.

    The cost of a program is the sum of its steps: seconds of compute at the chip's peak and of each collective on its
    links, or bytes that a device receives, then FLOPs. Raises `ShardingError` when there is no program, `InputError` for another
    objective.
    """
    objective = objective if chips is not None else "bytes"
    solution = solve_expression(
        expression, lambda product: _ProductPricer(product, _chips_for(chips, product)).prices(objective), free=free
    )
    strategies = solution.strategies
    starts = tuple(strategies[0].starts[name] for name in expression.names)
    expression = replace(solution.expression, operands=starts)
    pricer = _ProductPricer(expression, _chips_for(chips, expression))
    best = strategy_program(expression, strategies[0])
    best_cost = pricer.program(best, strategies[0].result)
    runners_up = [
        pricer.program(strategy_program(expression, strategy), strategy.result) for strategy in strategies[1:]
    ]
    cases = derive_by_cases(expression)
    return ProductReport(
        expression=expression, tensors=pricer.tensors(strategies[0].result), objective=objective, steps=best, best=best_cost,
        alternatives=tuple((runner_up, _compare_costs(runner_up, best_cost)) for runner_up in runners_up),
        by_cases=pricer.program(cases, cases.specs[expression.result_name]),
        backward=pricer.backward() if with_backward else None,
    )  # fmt: skip


def _chips_for(chips: MeshOnChips | None, expression: ShardedExpression) -> MeshOnChips | None:
    """Return the chips with links for the axes of the product's mesh, which may be cut."""
    return chips.cut(expression.mesh) if chips is not None else None


def _compare_costs(runner_up: ProgramCost, best: ProgramCost) -> str:
    """Describe what the other program does more of."""
    parts = []
    if runner_up.flops_per_device > best.flops_per_device * (1 + 1e-9):
        parts.append(
            f"repeats work: {runner_up.flops_per_device / best.flops_per_device:.3g}x the FLOPs on each device"
        )
    if runner_up.bytes_per_device > best.bytes_per_device * (1 + 1e-9):
        ratio = runner_up.bytes_per_device / best.bytes_per_device if best.bytes_per_device else float("inf")
        parts.append(
            f"moves {ratio:.3g}x the bytes" if best.bytes_per_device else "moves bytes where none have to move"
        )
    if (
        not parts
        and runner_up.upper_s is not None
        and best.upper_s is not None
        and runner_up.upper_s > best.upper_s * (1 + 1e-9)
    ):
        parts.append(f"takes {runner_up.upper_s / best.upper_s:.3g}x the time on these links")
    same = "costs the same" if len(runner_up.program) <= len(best.program) else "costs the same, in more steps"
    return "; ".join(parts) or same


class _ProductPricer:
    def __init__(self, expression: ShardedExpression, chips: MeshOnChips | None) -> None:
        self.expression, self.on = expression, chips
        self.width = bytes_per_element(expression.dtype)
        self.values = SymbolValues({**expression.sizes, **dict(expression.mesh.axes)})
        self.cache: dict[tuple[CollectiveKind, Axes, float], tuple[float, float]] = {}

    def collective(self, kind: CollectiveKind, axes: Axes, payload: float) -> tuple[float, float]:
        """Return the bytes received by one device, and the seconds (0 without a chip)."""
        key = (kind, axes, payload)
        if key not in self.cache:
            moved = received_elements(kind, axes, constant(payload)).evaluate(self.values) * self.width
            self.cache[key] = moved, self.seconds(kind, axes, payload * self.width)
        return self.cache[key]

    def seconds(self, kind: CollectiveKind, axes: Axes, payload_bytes: float) -> float:
        if self.on is None:
            return 0.0
        return float(collective_s(kind, axes, payload_bytes, self.on.links))

    def tensors(self, result: Spec) -> tuple[TensorFacts, ...]:
        """Return the placement of operands and result at the start and at the end."""
        expression = self.expression
        named = [*zip(expression.names, expression.operands, strict=True), (expression.result_name, result)]
        return tuple(self.tensor_facts(name, spec) for name, spec in named)

    def tensor_facts(self, name: str, spec: Spec) -> TensorFacts:
        shape = spec.local_shape(self.expression.mesh, self.expression.sizes)
        shard_bytes = math.prod(shape) * self.width
        return TensorFacts(
            name=name, sharding=str(spec), local_shape=shape, bytes_per_device=shard_bytes,
            copies=spec.replication(self.expression.mesh), total_bytes=shard_bytes * self.expression.mesh.num_devices,
            load_s=shard_bytes / self.on.chip.memory_bytes_per_s if self.on else None,
        )  # fmt: skip

    def math_s(self, flops: float) -> float:
        return flops / self.on.chip.peak(self.expression.dtype) if flops and self.on is not None else 0.0

    def prices(self, objective: Objective) -> tuple[PriceCollective, PriceProduct]:
        """Return the prices that the search adds up."""
        return self.objective_of(objective), self.product_of(objective)

    def objective_of(self, objective: Objective) -> PriceCollective:
        time_first = _minimizes_time(objective)

        def price(kind: CollectiveKind, axes: Axes, payload: float) -> CostVector:
            moved, seconds = self.collective(kind, axes, payload)
            count = 0.0 if kind is CollectiveKind.SLICE else 1.0
            return (seconds, moved, 0.0, count) if time_first else (moved, 0.0, seconds, count)

        return price

    def product_of(self, objective: Objective) -> PriceProduct:
        time_first = _minimizes_time(objective)

        def price(flops: float) -> CostVector:
            return (self.math_s(flops), 0.0, flops, 0.0) if time_first else (0.0, flops, 0.0, 0.0)

        return price

    def program(self, program: ShardedProgram, result: Spec) -> ProgramCost:
        """Return the cost of every step of a program."""
        steps = tuple(self.step(step) for step in program.steps)
        timed = self.on is not None
        return ProgramCost(
            program=steps, bytes_per_device=sum(s.bytes_per_device for s in steps),
            flops_per_device=sum(s.flops for s in steps),
            math_s=sum(s.time_s or 0.0 for s in steps if s.is_local) if timed else None,
            comms_s=sum(s.time_s or 0.0 for s in steps if not s.is_local) if timed else None,
            result=f"{self.expression.result_name}{result}",
        )  # fmt: skip

    def step(self, step: CollectiveStep | ComputeStep) -> StepCost:
        if isinstance(step, CollectiveStep):
            collective = step.collective
            payload = float(collective.payload_elements.evaluate(self.values))
            moved, seconds = self.collective(collective.kind, collective.axes, payload)
            return StepCost(
                op=str(collective.kind), operand=step.tensor.name, axes=collective.axes, dim=_changed_dim(collective),
                before=str(collective.before), after=str(collective.after), bytes_per_device=moved, flops=0.0,
                time_s=seconds if self.on else None, reason=step.reason,
            )  # fmt: skip
        flops = float(step.operation.flops(step.placed).evaluate(self.values))
        return StepCost(
            op=_local_operation(step), operand=" * ".join(step.operation.operands), axes=(), dim=None,
            before=" * ".join(str(spec) for spec in step.placed.inputs), after=str(step.placed.outputs[0]),
            bytes_per_device=0.0, flops=flops, time_s=self.math_s(flops) if self.on else None,
        )  # fmt: skip

    def backward(self) -> ProgramCost:
        """Return the cost of the gradients of all operands, each brought to its operand's sharding, by the four cases."""
        expression = self.expression
        if len(expression.names) < 2:
            raise InputError("--backward: one operand has no product to transpose; give a product")
        forward = derive_by_cases(expression)
        program = expression_program(expression)
        transposed = transpose_program(program, outputs=[expression.result_name], inputs=expression.names)
        rest = dict(zip(expression.names, expression.operands, strict=True))
        final = {transposed.gradients[name]: rest[name].with_partial(()) for name in expression.names}
        saved = {n: forward.specs[n] for n in transposed.program.inputs if n in forward.specs} | rest
        saved[f"d.{expression.result_name}"] = forward.specs[expression.result_name]
        sharded = shard_program(transposed.program, saved, ShardingTargets(final=final, primal=forward.specs))
        return self.program(sharded, forward.specs[expression.result_name])


def _local_operation(step: ComputeStep) -> str:
    """Return the name of a device's local computation (see `StepCost`)."""
    if len(step.placed.inputs) > 1:
        return "local_product"
    before, after = len(step.placed.inputs[0].dims), len(step.placed.outputs[0].dims)
    return "local_sum" if before > after else "local_broadcast" if before < after else "local_transpose"


def _changed_dim(collective: Collective) -> str | None:
    """Return the dim whose sharding changes, if any."""
    pairs = zip(collective.before.dims, collective.before.axes, collective.after.axes, strict=True)
    return next((dim for dim, old, new in pairs if old != new), None)


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
