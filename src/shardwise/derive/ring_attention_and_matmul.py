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

from shardwise.derive.sharded_program import Communicate, Compute, Step
from shardwise.layout.sharding_scheme import TP, Family
from shardwise.model.operations import Accumulate, Contract, Map, Scan, ScanGradient
from shardwise.model.operations.elementwise import FUNCTIONS
from shardwise.model.program import Role
from shardwise.sharding.collectives import Kind
from shardwise.sharding.spec import Axes, Spec

# What moves whole: weights and their gradients in flat arrays, rows of experts in as many as each rank has.
MOVED_WHOLE = (Role.WEIGHT, Role.WEIGHT_GRADIENT, Role.ROUTED)
Lying = tuple[str, Spec]  # a tensor in a sharding


class Pieces(NamedTuple):
    """A collective that goes in pieces, the products beside it and, where a sum is scattered, what adds theirs up."""

    moved: Communicate
    products: tuple[Compute, ...]
    sum: Compute | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of it, in order."""
        if _gathers(self.moved):
            return self.moved, *self.products
        return (*self.products, *([self.sum] if self.sum else []), self.moved)


def together(steps: Sequence[Step], family: Family) -> tuple[Step, ...]:
    """The steps of a phase, in an order in which the products beside a collective stand next to it."""
    around = [one for one in steps if _goes_around(one)] if family.async_tp else []
    for moved in sorted(around, key=_gathers):  # sums first, so that gradients of weights can stand behind them
        found = _gather_group(steps, moved) if _gathers(moved) else _makers(steps, moved)
        if found is not None:
            steps = _moved_to(steps, *found)
    return tuple(steps)


def in_pieces(steps: Sequence[Step], family: Family) -> Iterator[Pieces]:
    """The collectives of one phase that go in pieces, in order; `steps` are in the order of `together`."""
    return _standing(steps) if family.async_tp else iter(())


def _standing(steps: Sequence[Step]) -> Iterator[Pieces]:
    """Collectives with the products that stand next to them."""
    for place, moved in enumerate(steps):
        if not _goes_around(moved):
            continue
        if _gathers(moved):
            found = Pieces(moved, tuple(_run(steps[place + 1 :], moved)))
        else:
            total = _sum_before(steps[:place], moved)
            parts = set(_read(total) if total else [_ends(moved)[0]])
            found = Pieces(moved, tuple(_run_up_to(steps[: place - (total is not None)], parts)), total)
        if found.products:
            yield found


def _goes_around(step: Step) -> TypeGuard[Communicate]:
    """Whether a collective may be a ring of tensor parallelism."""
    if isinstance(step, Compute) or step.collective.axes != TP or step.tensor.role in MOVED_WHOLE:
        return False
    return step.collective.kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)


def _gathers(moved: Communicate) -> bool:
    return moved.collective.kind is Kind.ALL_GATHER


def _run(steps: Sequence[Step], moved: Communicate) -> Iterator[Compute]:
    """The products that follow one another and take what is gathered, none what another of them makes."""
    made: set[Lying] = set()
    for step in steps:
        if not _is_product(step) or _ends(moved)[1] not in _read(step) or not made.isdisjoint(_read(step)):
            return
        made |= set(_written(step))
        yield step


def _run_up_to(steps: Sequence[Step], parts: set[Lying]) -> list[Compute]:
    """The products at the end of some steps that make parts of a sum."""
    found: list[Compute] = []
    for step in reversed(steps):
        if not _is_product(step) or parts.isdisjoint(_written(step)):
            break
        found.insert(0, step)
    return found


def _gather_group(steps: Sequence[Step], moved: Communicate) -> tuple[list[Step], int] | None:
    """The steps to group, and the index to put them after: the gathering, and the products whose other operands are ready before
    anything reads their results. Gradients of weights come after sums of the same gradients, since engines free a weight with
    its gradient."""
    place, taken = _place(steps, moved), _ends(moved)[1]
    until = next((p for p in range(place + 1, len(steps)) if taken in _brought(steps[p])), len(steps))
    readers = [p for p in range(place + 1, until) if taken in _read(steps[p])]
    rings = [one for one in _standing(steps) if not _gathers(one.moved)]
    summed = {id(product) for ring in rings for product in ring.products}
    own = [p for p in readers if _is_product(steps[p]) and id(steps[p]) not in summed]
    while own:
        ready = {p: max([place, *_makers_of(steps, p)]) for p in own}
        behind = [_place(steps, ring.moved) for ring in rings if _share(ring, [steps[p] for p in own], taken)]
        for last in (max([*ready.values(), *behind]), max(ready.values())):
            if _may_wait(steps, own, readers, place, last):
                return _with_weights(steps, moved, own), last
        own.remove(max(own, key=ready.__getitem__))
    return None


def _share(ring: Pieces, products: Sequence[Step], taken: Lying) -> bool:
    """Whether the products of a ring take what others take beside what is gathered."""
    read = {lying for step in ring.products for lying in _read(step)}
    return any(lying in read for step in products for lying in _read(step) if lying != taken)


def _may_wait(steps: Sequence[Step], own: Sequence[int], readers: Sequence[int], place: int, last: int) -> bool:
    """Whether nothing reads what products make, or else what they take, from where it is gathered up to the last place."""
    early = any(_read_by(steps[p], steps[place + 1 : last + 1]) for p in own)
    return not early and all(p in own or p > last for p in readers)


def _with_weights(steps: Sequence[Step], moved: Communicate, own: Sequence[int]) -> list[Step]:
    """A gathering and its products, behind the weights that these take."""
    read = {name for p in own for name, _ in _read(steps[p])}
    between = steps[_place(steps, moved) + 1 : own[-1]]
    weights = [step for step in between if _brings_weight(step) and step.tensor.name in read]
    return [*weights, moved, *(steps[p] for p in own)]


def _makers(steps: Sequence[Step], moved: Communicate) -> tuple[list[Step], int] | None:
    """The same of a sum that is scattered: its products, which nothing else reads, their sum and, behind it, gradients of weights
    that take the same. Products that take what is gathered stand where that is."""
    place, summed = _place(steps, moved), _ends(moved)[0]
    total = next((one for one in steps[:place] if _is_sum(one) and summed in _written(one)), None)
    parts = set(_read(total) if total else [summed])
    if total and any(summed in _read(one) for one in steps if one is not moved):
        return None
    gathered = {_ends(one)[1] for one in steps if _goes_around(one) and _gathers(one)}
    products = [step for step in steps[:place] if _is_product(step) and gathered.isdisjoint(_read(step))]
    own = [
        step
        for step in products
        if not parts.isdisjoint(_written(step)) and not _read_by(step, steps, but=total or moved)
    ]
    if not own:
        return None
    read = {lying for step in own for lying in _read(step)}
    further = [one for one in products if not read.isdisjoint(_read(one)) and not _read_by(one, steps[: place + 1])]
    return [*own, *([total] if total else []), moved, *further], place


def _read_by(step: Step, steps: Iterable[Step], but: Step | None = None) -> bool:
    """Whether any of some steps takes what a step makes."""
    made = set(_written(step))
    return any(not made.isdisjoint(_read(one)) for one in steps if one is not but)


def _moved_to(steps: Sequence[Step], own: Sequence[Step], last: int) -> list[Step]:
    """Some steps next to each other, behind all others up to a place, and not within what stands together already."""
    moves = {id(step) for step in own}
    ahead = [step for step in steps[: last + 1] if id(step) not in moves]
    behind = [step for step in steps[last + 1 :] if id(step) not in moves]
    while ahead and behind and _together(ahead[-1], behind[0], [*ahead, *behind]):
        ahead.append(behind.pop(0))
    return [*ahead, *own, *behind]


def _together(one: Step, other: Step, steps: Sequence[Step]) -> bool:
    """Whether two steps are of one ring."""
    return any({id(one), id(other)} <= {id(step) for step in ring.steps} for ring in _standing(steps))


def _place(steps: Sequence[Step], moved: Step) -> int:
    return next(place for place, step in enumerate(steps) if step is moved)


def _makers_of(steps: Sequence[Step], place: int) -> Iterator[int]:
    """Where what a step reads is made or arrives, but for weights, which are brought ahead."""
    read = set(_read(steps[place]))
    for before in range(place):
        step = steps[before]
        if not _brings_weight(step) and not read.isdisjoint((*_written(step), *_brought(step))):
            yield before


def _sum_before(steps: Sequence[Step], moved: Communicate) -> Compute | None:
    """What adds up what is scattered, the last of the steps before it."""
    step = steps[-1] if steps else moved
    return step if _is_sum(step) and _ends(moved)[0] in _written(step) else None


def _is_product(step: Step) -> TypeGuard[Compute]:
    return isinstance(step, Compute) and isinstance(step.operation, Contract) and len(step.operation.inputs) == 2


def _is_sum(step: Step) -> TypeGuard[Compute]:
    """Whether a step adds up what lies alike."""
    if not isinstance(step, Compute):
        return False
    operation = step.operation
    adds = isinstance(operation, Map) and operation.function in FUNCTIONS and FUNCTIONS[operation.function].additive
    alike = all(spec == step.placed.outputs[0] for _, spec in _read(step))
    return (isinstance(operation, Accumulate) or adds) and alike


def _brings_weight(step: Step) -> TypeGuard[Communicate]:
    return isinstance(step, Communicate) and step.tensor.role is Role.WEIGHT


def _read(step: Step) -> list[Lying]:
    if isinstance(step, Communicate):
        return [_ends(step)[0]]
    return list(zip(step.operation.operands, step.placed.inputs, strict=False))


def _written(step: Step) -> list[Lying]:
    return list(zip(step.operation.outputs, step.placed.outputs, strict=True)) if isinstance(step, Compute) else []


def _brought(step: Step) -> list[Lying]:
    return [_ends(step)[1]] if isinstance(step, Communicate) else []


def _ends(moved: Communicate) -> tuple[Lying, Lying]:
    """What a collective moves, before and behind it."""
    return (moved.tensor.name, moved.collective.before), (moved.tensor.name, moved.collective.after)


RING: Axes = ("cp",)
SCANS = (Scan, ScanGradient)


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The collective at position `step`, which overlaps with the computations at the positions `beside`."""

    step: int
    beside: tuple[int, ...]


def overlapped(steps: Sequence[Step], family: Family) -> Iterator[Overlapped]:
    """The collectives of one phase that the family overlaps with computations, in order."""
    pieces = {id(one.moved): {id(product) for product in one.products} for one in in_pieces(steps, family)}
    for position, step in enumerate(steps):
        if not isinstance(step, Communicate):
            continue
        if family.ring and step.collective.axes == RING and step.tensor.role not in MOVED_WHOLE:
            beside = tuple(_beside(steps, position, step))
        else:
            beside = tuple(p for p, one in enumerate(steps) if id(one) in pieces.get(id(step), ()))
        if beside:
            yield Overlapped(position, beside)


def _beside(steps: Sequence[Step], position: int, moved: Communicate) -> Iterator[int]:
    """Attentions that take what is gathered, or that make what is scattered."""
    if moved.collective.kind is Kind.ALL_GATHER:
        yield from _readers_of_gather(steps, position, moved)
    if moved.collective.kind is Kind.REDUCE_SCATTER:
        for index, step in enumerate(steps[:position]):
            if (
                isinstance(step, Compute)
                and isinstance(step.operation, SCANS)
                and moved.tensor.name in step.operation.outputs
            ):
                yield index


def _readers_of_gather(steps: Sequence[Step], position: int, moved: Communicate) -> Iterator[int]:
    """Attentions that take what is gathered, until it is gathered again."""
    name, spec = moved.tensor.name, moved.collective.after
    for index, step in enumerate(steps[position + 1 :], start=position + 1):
        if isinstance(step, Communicate):
            if step.tensor.name == name and step.collective.after == spec:
                return
        elif isinstance(step.operation, SCANS):
            taken = zip(step.operation.operands, step.placed.inputs, strict=False)
            if (name, spec) in taken:
                yield index
