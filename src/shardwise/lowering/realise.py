"""From derived collectives to those that an engine issues.

Engines fuse: one AllGather brings all weights of a unit (an FSDP unit), one ReduceScatter or AllReduce takes all its
gradients. Bytes per kind, axes, phase and scope are conserved. Weights that the recomputed slice and the backward pass
both need are gathered once, before both. A scalar (the loss) is reduced once per step, not per micro-batch. A collective
that is `pipelined` with computations runs in as many pieces as its group has devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardwise.derive.derivation import Unit
from shardwise.derive.pipeline import pipelined
from shardwise.derive.products import taken_by_products
from shardwise.derive.walk import Communicate, Compute, Step
from shardwise.model.program import Role, density
from shardwise.sharding.collective import Kind
from shardwise.sharding.spec import Axes
from shardwise.symbolic import ZERO, Polynomial

WEIGHT_ROLES = (Role.WEIGHT, Role.WEIGHT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Realised:
    """One collective of an engine. `payload` are elements (see `Collective.payload_elements`; of routed
    tokens those that are there), `tensors` what it carries, `beside` the results of the computations that it is pipelined
    with. `for_products`: nothing but products with a block's weights take what it brings."""

    unit: str
    phase: str
    kind: Kind
    axes: Axes
    role: Role
    payload: Polynomial
    tensors: tuple[str, ...]
    beside: tuple[str, ...] = ()
    for_products: bool = False

    @property
    def scope(self) -> str:
        """How often it runs: once per optimizer step, or per micro-batch."""
        return "step" if self.phase == "update" else "micro_batch"

    @property
    def carries_weights(self) -> bool:
        return self.role in WEIGHT_ROLES

    @property
    def group(self) -> str:
        """The parallel axis that it is charged to; scalars are control traffic."""
        return axis_group(self.axes) if self.carries_weights or self.scope != "step" else "control"


def axis_group(axes: Axes) -> str:
    """The parallel axis that traffic over these atomic axes belongs to."""
    for name in ("dp", "fsdp", "cp", "pp", "ep"):
        if name in axes:
            return name
    return "tp"


def realise(unit: Unit) -> tuple[Realised, ...]:
    """All collectives of one unit, slices left out, weights and gradients fused."""
    found: list[Realised] = []
    phases, tensors = unit.phases(), unit.tensors
    for phase, steps in phases.items():
        beside = {one.step: _results(steps, one.beside) for one in pipelined(steps, unit.family)}
        found += [
            replace(
                _plain(unit.name, phase, s, beside.get(position, ())),
                for_products=taken_by_products(phases, tensors, phase, position),
            )
            for position, s in enumerate(steps)
            if isinstance(s, Communicate) and s.collective.kind is not Kind.SLICE
        ]
    return tuple(_joined(_fuse(found)))


def _results(steps: tuple[Step, ...], positions: tuple[int, ...]) -> tuple[str, ...]:
    """The first result of each of some computations: their names among the kernels."""
    return tuple(step.operation.outputs[0] for p in positions if isinstance(step := steps[p], Compute))


def _plain(unit: str, phase: str, step: Communicate, beside: tuple[str, ...]) -> Realised:
    collective, role = step.collective, step.tensor.role
    if phase == "recompute" and role in WEIGHT_ROLES:
        phase = "backward"
    if not step.tensor.dims:
        phase = "update"  # control traffic: the loss is a sum, so it is reduced once per step
    return Realised(
        unit,
        phase,
        collective.kind,
        collective.axes,
        role,
        collective.payload_elements * density(role),
        (step.tensor.name,),
        beside,
    )


def _fuse(collectives: Iterable[Realised]) -> list[Realised]:
    fused: dict[tuple[object, ...], list[Realised]] = {}
    for index, one in enumerate(collectives):
        key = (one.phase, one.kind, one.axes, one.role) if one.carries_weights else (index,)
        fused.setdefault(key, []).append(one)
    return [_merge(group) for group in fused.values()]


def _joined(collectives: Iterable[Realised]) -> Iterator[Realised]:
    """AllToAlls of one tensor over one axis after the other as one over both: a dispatcher sends each row once."""
    waiting: Realised | None = None
    for one in collectives:
        both = (waiting, one) if waiting else ()
        if both and all(part.kind is Kind.ALL_TO_ALL for part in both) and waiting.tensors == one.tensors:  # type: ignore[union-attr]
            waiting = replace(one, axes=(*waiting.axes, *one.axes))  # type: ignore[union-attr]
            continue
        if waiting:
            yield waiting
        waiting = one
    if waiting:
        yield waiting


def _merge(group: list[Realised]) -> Realised:
    first = group[0]
    payload = sum((one.payload for one in group), start=ZERO)
    tensors = tuple(name for one in group for name in one.tensors)
    return replace(first, payload=payload, tensors=tensors)
