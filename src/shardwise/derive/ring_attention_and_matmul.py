"""Collectives that run block by block beside the computations that need them: ring attention and asynchronous tensor
parallelism.

The derivation decides which bytes move; this decides beside which computations. With a ring over `cp` each device attends to
one block of keys and values while the next arrives; in the backward pass the gradients of the blocks travel with them.

With asynchronous tensor parallelism the products of one operand run beside its collective, as a ring that an engine runs in
one call. The blocks of a gathered tensor travel around, and each product takes the block that has arrived while the next one
comes; of a scattered sum the blocks travel, and the products of each rank add their part of the block that leaves next. So
all products of a ring run where the ring does: their operands are ready before it, and their results are read after it.

Sources: Liu et al. 2023 (Ring Attention); S1, "ring attention"; Wang et al. 2023 (Overlap communication with dependent
computation via decomposition).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ProgramStep
from shardwise.layout.sharding_scheme import TP_AXES, ShardingScheme
from shardwise.model.operations import Accumulate, Contract, Map, Scan, ScanGradient
from shardwise.model.operations.elementwise import FUNCTIONS
from shardwise.model.program import Role
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes, Spec

# What moves whole: weights and their gradients in flat arrays, rows of experts in as many as each rank has.
ROLES_MOVED_UNSPLIT = (Role.WEIGHT, Role.WEIGHT_GRADIENT, Role.ROUTED)
TensorAndSpec = tuple[str, Spec]  # a tensor in a sharding


class Ring(NamedTuple):
    """A collective that goes in pieces, the products beside it and, where a sum is scattered, what adds theirs up."""

    collective_step: CollectiveStep
    products: tuple[ComputeStep, ...]
    sum: ComputeStep | None = None

    @property
    def steps(self) -> tuple[ProgramStep, ...]:
        """All of it, in order."""
        if _is_gather(self.collective_step):
            return self.collective_step, *self.products
        return (*self.products, *([self.sum] if self.sum else []), self.collective_step)


def group_rings(steps: Sequence[ProgramStep], family: ShardingScheme) -> tuple[ProgramStep, ...]:
    """The steps of a phase, in an order in which the products beside a collective stand next to it."""
    around = [one for one in steps if _may_be_ring(one)] if family.async_tp else []
    for moved in sorted(around, key=_is_gather):  # sums first, so that gradients of weights can stand behind them
        found = _gather_group(steps, moved) if _is_gather(moved) else _scatter_group(steps, moved)
        if found is not None:
            steps = _group_steps(steps, *found)
    return tuple(steps)


def find_rings(steps: Sequence[ProgramStep], family: ShardingScheme) -> Iterator[Ring]:
    """The collectives of one phase that go in pieces, in order; `steps` are in the order of `group_rings`."""
    return _adjacent_rings(steps) if family.async_tp else iter(())


def _adjacent_rings(steps: Sequence[ProgramStep]) -> Iterator[Ring]:
    """Collectives with the products that stand next to them."""
    for place, moved in enumerate(steps):
        if not _may_be_ring(moved):
            continue
        if _is_gather(moved):
            found = Ring(moved, tuple(_products_after_gather(steps[place + 1 :], moved)))
        else:
            total = _sum_before_scatter(steps[:place], moved)
            parts = set(_tensors_read(total) if total else [_before_and_after(moved)[0]])
            found = Ring(moved, tuple(_products_before_scatter(steps[: place - (total is not None)], parts)), total)
        if found.products:
            yield found


def _may_be_ring(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    """Whether a collective may be a ring of tensor parallelism."""
    if isinstance(step, ComputeStep) or step.collective.axes != TP_AXES or step.tensor.role in ROLES_MOVED_UNSPLIT:
        return False
    return step.collective.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def _is_gather(moved: CollectiveStep) -> bool:
    return moved.collective.kind is CollectiveKind.ALL_GATHER


def _products_after_gather(steps: Sequence[ProgramStep], moved: CollectiveStep) -> Iterator[ComputeStep]:
    """The products that follow one another and take what is gathered, none what another of them makes."""
    made: set[TensorAndSpec] = set()
    for step in steps:
        if (
            not _is_product(step)
            or _before_and_after(moved)[1] not in _tensors_read(step)
            or not made.isdisjoint(_tensors_read(step))
        ):
            return
        made |= set(_tensors_computed(step))
        yield step


def _products_before_scatter(steps: Sequence[ProgramStep], parts: set[TensorAndSpec]) -> list[ComputeStep]:
    """The products at the end of some steps that make parts of a sum."""
    found: list[ComputeStep] = []
    for step in reversed(steps):
        if not _is_product(step) or parts.isdisjoint(_tensors_computed(step)):
            break
        found.insert(0, step)
    return found


def _gather_group(steps: Sequence[ProgramStep], moved: CollectiveStep) -> tuple[list[ProgramStep], int] | None:
    """The steps to group, and the index to put them after: the gathering, and the products whose other operands are ready before
    anything reads their results. Gradients of weights come after sums of the same gradients, since engines free a weight with
    its gradient."""
    place, taken = _index_of(steps, moved), _before_and_after(moved)[1]
    until = next((p for p in range(place + 1, len(steps)) if taken in _tensors_received(steps[p])), len(steps))
    readers = [p for p in range(place + 1, until) if taken in _tensors_read(steps[p])]
    rings = [one for one in _adjacent_rings(steps) if not _is_gather(one.collective_step)]
    summed = {id(product) for ring in rings for product in ring.products}
    own = [p for p in readers if _is_product(steps[p]) and id(steps[p]) not in summed]
    while own:
        ready = {p: max([place, *_producers(steps, p)]) for p in own}
        behind = [
            _index_of(steps, ring.collective_step)
            for ring in rings
            if _shares_operands(ring, [steps[p] for p in own], taken)
        ]
        for last in (max([*ready.values(), *behind]), max(ready.values())):
            if _can_delay(steps, own, readers, place, last):
                return _weights_and_gather(steps, moved, own), last
        own.remove(max(own, key=ready.__getitem__))
    return None


def _shares_operands(ring: Ring, products: Sequence[ProgramStep], taken: TensorAndSpec) -> bool:
    """Whether the products of a ring take what others take beside what is gathered."""
    read = {lying for step in ring.products for lying in _tensors_read(step)}
    return any(lying in read for step in products for lying in _tensors_read(step) if lying != taken)


def _can_delay(steps: Sequence[ProgramStep], own: Sequence[int], readers: Sequence[int], place: int, last: int) -> bool:
    """Whether nothing reads what products make, or else what they take, from where it is gathered up to the last place."""
    early = any(_is_read_by(steps[p], steps[place + 1 : last + 1]) for p in own)
    return not early and all(p in own or p > last for p in readers)


def _weights_and_gather(steps: Sequence[ProgramStep], moved: CollectiveStep, own: Sequence[int]) -> list[ProgramStep]:
    """A gathering and its products, behind the weights that these take."""
    read = {name for p in own for name, _ in _tensors_read(steps[p])}
    between = steps[_index_of(steps, moved) + 1 : own[-1]]
    weights = [step for step in between if _brings_weight(step) and step.tensor.name in read]
    return [*weights, moved, *(steps[p] for p in own)]


def _scatter_group(steps: Sequence[ProgramStep], moved: CollectiveStep) -> tuple[list[ProgramStep], int] | None:
    """The same of a sum that is scattered: its products, which nothing else reads, their sum and, behind it, gradients of weights
    that take the same. Products that take what is gathered stand where that is."""
    place, summed = _index_of(steps, moved), _before_and_after(moved)[0]
    total = next((one for one in steps[:place] if _is_sum(one) and summed in _tensors_computed(one)), None)
    parts = set(_tensors_read(total) if total else [summed])
    if total and any(summed in _tensors_read(one) for one in steps if one is not moved):
        return None
    gathered = {_before_and_after(one)[1] for one in steps if _may_be_ring(one) and _is_gather(one)}
    products = [step for step in steps[:place] if _is_product(step) and gathered.isdisjoint(_tensors_read(step))]
    own = [
        step
        for step in products
        if not parts.isdisjoint(_tensors_computed(step)) and not _is_read_by(step, steps, but=total or moved)
    ]
    if not own:
        return None
    read = {lying for step in own for lying in _tensors_read(step)}
    further = [
        one for one in products if not read.isdisjoint(_tensors_read(one)) and not _is_read_by(one, steps[: place + 1])
    ]
    return [*own, *([total] if total else []), moved, *further], place


def _is_read_by(step: ProgramStep, steps: Iterable[ProgramStep], but: ProgramStep | None = None) -> bool:
    """Whether any of some steps takes what a step makes."""
    made = set(_tensors_computed(step))
    return any(not made.isdisjoint(_tensors_read(one)) for one in steps if one is not but)


def _group_steps(steps: Sequence[ProgramStep], own: Sequence[ProgramStep], last: int) -> list[ProgramStep]:
    """Some steps next to each other, behind all others up to a place, and not within what stands together already."""
    moves = {id(step) for step in own}
    ahead = [step for step in steps[: last + 1] if id(step) not in moves]
    behind = [step for step in steps[last + 1 :] if id(step) not in moves]
    while ahead and behind and _are_in_one_ring(ahead[-1], behind[0], [*ahead, *behind]):
        ahead.append(behind.pop(0))
    return [*ahead, *own, *behind]


def _are_in_one_ring(one: ProgramStep, other: ProgramStep, steps: Sequence[ProgramStep]) -> bool:
    """Whether two steps are of one ring."""
    return any({id(one), id(other)} <= {id(step) for step in ring.steps} for ring in _adjacent_rings(steps))


def _index_of(steps: Sequence[ProgramStep], moved: ProgramStep) -> int:
    return next(place for place, step in enumerate(steps) if step is moved)


def _producers(steps: Sequence[ProgramStep], place: int) -> Iterator[int]:
    """Where what a step reads is made or arrives, but for weights, which are brought ahead."""
    read = set(_tensors_read(steps[place]))
    for before in range(place):
        step = steps[before]
        if not _brings_weight(step) and not read.isdisjoint((*_tensors_computed(step), *_tensors_received(step))):
            yield before


def _sum_before_scatter(steps: Sequence[ProgramStep], moved: CollectiveStep) -> ComputeStep | None:
    """What adds up what is scattered, the last of the steps before it."""
    step = steps[-1] if steps else moved
    return step if _is_sum(step) and _before_and_after(moved)[0] in _tensors_computed(step) else None


def _is_product(step: ProgramStep) -> TypeGuard[ComputeStep]:
    return isinstance(step, ComputeStep) and isinstance(step.operation, Contract) and len(step.operation.inputs) == 2


def _is_sum(step: ProgramStep) -> TypeGuard[ComputeStep]:
    """Whether a step adds up what lies alike."""
    if not isinstance(step, ComputeStep):
        return False
    operation = step.operation
    adds = isinstance(operation, Map) and operation.function in FUNCTIONS and FUNCTIONS[operation.function].additive
    alike = all(spec == step.placed.outputs[0] for _, spec in _tensors_read(step))
    return (isinstance(operation, Accumulate) or adds) and alike


def _brings_weight(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    return isinstance(step, CollectiveStep) and step.tensor.role is Role.WEIGHT


def _tensors_read(step: ProgramStep) -> list[TensorAndSpec]:
    if isinstance(step, CollectiveStep):
        return [_before_and_after(step)[0]]
    return list(zip(step.operation.operands, step.placed.inputs, strict=False))


def _tensors_computed(step: ProgramStep) -> list[TensorAndSpec]:
    return list(zip(step.operation.outputs, step.placed.outputs, strict=True)) if isinstance(step, ComputeStep) else []


def _tensors_received(step: ProgramStep) -> list[TensorAndSpec]:
    return [_before_and_after(step)[1]] if isinstance(step, CollectiveStep) else []


def _before_and_after(moved: CollectiveStep) -> tuple[TensorAndSpec, TensorAndSpec]:
    """What a collective moves, before and behind it."""
    return (moved.tensor.name, moved.collective.before), (moved.tensor.name, moved.collective.after)


RING_AXES: Axes = ("cp",)
ATTENTIONS = (Scan, ScanGradient)


@dataclass(frozen=True, slots=True)
class OverlappedCollective:
    """The collective at index `collective_index`, which overlaps with the computations at `compute_indices`."""

    collective_index: int
    compute_indices: tuple[int, ...]


def find_overlapped_collectives(steps: Sequence[ProgramStep], family: ShardingScheme) -> Iterator[OverlappedCollective]:
    """The collectives of one phase that the family overlaps with computations, in order."""
    pieces = {id(one.collective_step): {id(product) for product in one.products} for one in find_rings(steps, family)}
    for position, step in enumerate(steps):
        if not isinstance(step, CollectiveStep):
            continue
        if family.is_ring and step.collective.axes == RING_AXES and step.tensor.role not in ROLES_MOVED_UNSPLIT:
            beside = tuple(_overlapping_attentions(steps, position, step))
        else:
            beside = tuple(p for p, one in enumerate(steps) if id(one) in pieces.get(id(step), ()))
        if beside:
            yield OverlappedCollective(position, beside)


def _overlapping_attentions(steps: Sequence[ProgramStep], position: int, moved: CollectiveStep) -> Iterator[int]:
    """Attentions that take what is gathered, or that make what is scattered."""
    if moved.collective.kind is CollectiveKind.ALL_GATHER:
        yield from _readers_of_gather(steps, position, moved)
    if moved.collective.kind is CollectiveKind.REDUCE_SCATTER:
        for index, step in enumerate(steps[:position]):
            if (
                isinstance(step, ComputeStep)
                and isinstance(step.operation, ATTENTIONS)
                and moved.tensor.name in step.operation.outputs
            ):
                yield index


def _readers_of_gather(steps: Sequence[ProgramStep], position: int, moved: CollectiveStep) -> Iterator[int]:
    """Attentions that take what is gathered, until it is gathered again."""
    name, spec = moved.tensor.name, moved.collective.after
    for index, step in enumerate(steps[position + 1 :], start=position + 1):
        if isinstance(step, CollectiveStep):
            if step.tensor.name == name and step.collective.after == spec:
                return
        elif isinstance(step.operation, ATTENTIONS):
            taken = zip(step.operation.operands, step.placed.inputs, strict=False)
            if (name, spec) in taken:
                yield index
