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


def group_rings(steps: Sequence[ProgramStep], scheme: ShardingScheme) -> tuple[ProgramStep, ...]:
    """The steps of a phase, in an order in which the products beside a collective stand next to it."""
    ring_collectives = [step for step in steps if _may_be_ring(step)] if scheme.async_tp else []
    for collective_step in sorted(
        ring_collectives, key=_is_gather
    ):  # sums first, so that gradients of weights can stand behind them
        group = (
            _gather_group(steps, collective_step)
            if _is_gather(collective_step)
            else _scatter_group(steps, collective_step)
        )
        if group is not None:
            steps = _group_steps(steps, *group)
    return tuple(steps)


def find_rings(steps: Sequence[ProgramStep], scheme: ShardingScheme) -> Iterator[Ring]:
    """The collectives of one phase that go in pieces, in order; `steps` are in the order of `group_rings`."""
    return _adjacent_rings(steps) if scheme.async_tp else iter(())


def _adjacent_rings(steps: Sequence[ProgramStep]) -> Iterator[Ring]:
    """Collectives with the products that stand next to them."""
    for index, step in enumerate(steps):
        if not _may_be_ring(step):
            continue
        if _is_gather(step):
            ring = Ring(step, tuple(_products_after_gather(steps[index + 1 :], step)))
        else:
            sum_step = _sum_before_scatter(steps[:index], step)
            summed_tensors = set(_tensors_read(sum_step) if sum_step else [_before_and_after(step)[0]])
            ring = Ring(
                step, tuple(_products_before_scatter(steps[: index - (sum_step is not None)], summed_tensors)), sum_step
            )
        if ring.products:
            yield ring


def _may_be_ring(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    """Whether a collective may be a ring of tensor parallelism."""
    if isinstance(step, ComputeStep) or step.collective.axes != TP_AXES or step.tensor.role in ROLES_MOVED_UNSPLIT:
        return False
    return step.collective.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def _is_gather(step: CollectiveStep) -> bool:
    return step.collective.kind is CollectiveKind.ALL_GATHER


def _products_after_gather(steps: Sequence[ProgramStep], collective_step: CollectiveStep) -> Iterator[ComputeStep]:
    """The products that follow one another and take what is gathered, none what another of them makes."""
    computed: set[TensorAndSpec] = set()
    for step in steps:
        if (
            not _is_product(step)
            or _before_and_after(collective_step)[1] not in _tensors_read(step)
            or not computed.isdisjoint(_tensors_read(step))
        ):
            return
        computed |= set(_tensors_computed(step))
        yield step


def _products_before_scatter(steps: Sequence[ProgramStep], summed_tensors: set[TensorAndSpec]) -> list[ComputeStep]:
    """The products at the end of some steps that make parts of a sum."""
    products: list[ComputeStep] = []
    for step in reversed(steps):
        if not _is_product(step) or summed_tensors.isdisjoint(_tensors_computed(step)):
            break
        products.insert(0, step)
    return products


def _gather_group(
    steps: Sequence[ProgramStep], collective_step: CollectiveStep
) -> tuple[list[ProgramStep], int] | None:
    """The steps to group, and the index to put them after: the gathering, and the products whose other operands are ready before
    anything reads their results. Gradients of weights come after sums of the same gradients, since engines free a weight with
    its gradient."""
    gather_index, gathered = _index_of(steps, collective_step), _before_and_after(collective_step)[1]
    end = next(
        (index for index in range(gather_index + 1, len(steps)) if gathered in _tensors_received(steps[index])),
        len(steps),
    )
    reader_indices = [index for index in range(gather_index + 1, end) if gathered in _tensors_read(steps[index])]
    rings = [ring for ring in _adjacent_rings(steps) if not _is_gather(ring.collective_step)]
    ids_in_scatters = {id(product) for ring in rings for product in ring.products}
    product_indices = [
        index for index in reader_indices if _is_product(steps[index]) and id(steps[index]) not in ids_in_scatters
    ]
    while product_indices:
        ready_index = {index: max([gather_index, *_producers(steps, index)]) for index in product_indices}
        scatter_indices = [
            _index_of(steps, ring.collective_step)
            for ring in rings
            if _shares_operands(ring, [steps[index] for index in product_indices], gathered)
        ]
        for last in (max([*ready_index.values(), *scatter_indices]), max(ready_index.values())):
            if _can_delay(steps, product_indices, reader_indices, gather_index, last):
                return _weights_and_gather(steps, collective_step, product_indices), last
        product_indices.remove(max(product_indices, key=ready_index.__getitem__))
    return None


def _shares_operands(ring: Ring, products: Sequence[ProgramStep], gathered: TensorAndSpec) -> bool:
    """Whether the products of a ring take what others take beside what is gathered."""
    operands = {tensor for step in ring.products for tensor in _tensors_read(step)}
    return any(tensor in operands for step in products for tensor in _tensors_read(step) if tensor != gathered)


def _can_delay(
    steps: Sequence[ProgramStep],
    product_indices: Sequence[int],
    reader_indices: Sequence[int],
    gather_index: int,
    last: int,
) -> bool:
    """Whether nothing reads what products make, or else what they take, from where it is gathered up to the last place."""
    is_read_early = any(_is_read_by(steps[index], steps[gather_index + 1 : last + 1]) for index in product_indices)
    return not is_read_early and all(index in product_indices or index > last for index in reader_indices)


def _weights_and_gather(
    steps: Sequence[ProgramStep], collective_step: CollectiveStep, product_indices: Sequence[int]
) -> list[ProgramStep]:
    """A gathering and its products, behind the weights that these take."""
    names_read = {name for index in product_indices for name, _ in _tensors_read(steps[index])}
    between = steps[_index_of(steps, collective_step) + 1 : product_indices[-1]]
    weights = [step for step in between if _brings_weight(step) and step.tensor.name in names_read]
    return [*weights, collective_step, *(steps[index] for index in product_indices)]


def _scatter_group(
    steps: Sequence[ProgramStep], collective_step: CollectiveStep
) -> tuple[list[ProgramStep], int] | None:
    """The same of a sum that is scattered: its products, which nothing else reads, their sum and, behind it, gradients of weights
    that take the same. Products that take what is gathered stand where that is."""
    scatter_index, scattered = _index_of(steps, collective_step), _before_and_after(collective_step)[0]
    sum_step = next(
        (step for step in steps[:scatter_index] if _is_sum(step) and scattered in _tensors_computed(step)), None
    )
    summed_tensors = set(_tensors_read(sum_step) if sum_step else [scattered])
    if sum_step and any(scattered in _tensors_read(step) for step in steps if step is not collective_step):
        return None
    gathered = {_before_and_after(step)[1] for step in steps if _may_be_ring(step) and _is_gather(step)}
    products = [
        step for step in steps[:scatter_index] if _is_product(step) and gathered.isdisjoint(_tensors_read(step))
    ]
    ring_products = [
        step
        for step in products
        if not summed_tensors.isdisjoint(_tensors_computed(step))
        and not _is_read_by(step, steps, ignored=sum_step or collective_step)
    ]
    if not ring_products:
        return None
    operands = {tensor for step in ring_products for tensor in _tensors_read(step)}
    following_products = [
        step
        for step in products
        if not operands.isdisjoint(_tensors_read(step)) and not _is_read_by(step, steps[: scatter_index + 1])
    ]
    return [*ring_products, *([sum_step] if sum_step else []), collective_step, *following_products], scatter_index


def _is_read_by(step: ProgramStep, steps: Iterable[ProgramStep], ignored: ProgramStep | None = None) -> bool:
    """Whether any of some steps takes what a step makes."""
    computed = set(_tensors_computed(step))
    return any(not computed.isdisjoint(_tensors_read(reader)) for reader in steps if reader is not ignored)


def _group_steps(steps: Sequence[ProgramStep], group: Sequence[ProgramStep], last: int) -> list[ProgramStep]:
    """Some steps next to each other, behind all others up to a place, and not within what stands together already."""
    group_ids = {id(step) for step in group}
    leading = [step for step in steps[: last + 1] if id(step) not in group_ids]
    trailing = [step for step in steps[last + 1 :] if id(step) not in group_ids]
    while leading and trailing and _are_in_one_ring(leading[-1], trailing[0], [*leading, *trailing]):
        leading.append(trailing.pop(0))
    return [*leading, *group, *trailing]


def _are_in_one_ring(first: ProgramStep, second: ProgramStep, steps: Sequence[ProgramStep]) -> bool:
    """Whether two steps are of one ring."""
    return any({id(first), id(second)} <= {id(step) for step in ring.steps} for ring in _adjacent_rings(steps))


def _index_of(steps: Sequence[ProgramStep], target: ProgramStep) -> int:
    return next(index for index, step in enumerate(steps) if step is target)


def _producers(steps: Sequence[ProgramStep], index: int) -> Iterator[int]:
    """Where what a step reads is made or arrives, but for weights, which are brought ahead."""
    operands = set(_tensors_read(steps[index]))
    for earlier in range(index):
        step = steps[earlier]
        if not _brings_weight(step) and not operands.isdisjoint((*_tensors_computed(step), *_tensors_received(step))):
            yield earlier


def _sum_before_scatter(steps: Sequence[ProgramStep], collective_step: CollectiveStep) -> ComputeStep | None:
    """What adds up what is scattered, the last of the steps before it."""
    step = steps[-1] if steps else collective_step
    return step if _is_sum(step) and _before_and_after(collective_step)[0] in _tensors_computed(step) else None


def _is_product(step: ProgramStep) -> TypeGuard[ComputeStep]:
    return isinstance(step, ComputeStep) and isinstance(step.operation, Contract) and len(step.operation.inputs) == 2


def _is_sum(step: ProgramStep) -> TypeGuard[ComputeStep]:
    """Whether a step adds up what lies alike."""
    if not isinstance(step, ComputeStep):
        return False
    operation = step.operation
    adds = isinstance(operation, Map) and operation.function in FUNCTIONS and FUNCTIONS[operation.function].additive
    has_one_spec = all(spec == step.placed.outputs[0] for _, spec in _tensors_read(step))
    return (isinstance(operation, Accumulate) or adds) and has_one_spec


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


def _before_and_after(step: CollectiveStep) -> tuple[TensorAndSpec, TensorAndSpec]:
    """What a collective moves, before and behind it."""
    return (step.tensor.name, step.collective.before), (step.tensor.name, step.collective.after)


RING_AXES: Axes = ("cp",)
ATTENTIONS = (Scan, ScanGradient)


@dataclass(frozen=True, slots=True)
class OverlappedCollective:
    """The collective at index `collective_index`, which overlaps with the computations at `compute_indices`."""

    collective_index: int
    compute_indices: tuple[int, ...]


def find_overlapped_collectives(steps: Sequence[ProgramStep], scheme: ShardingScheme) -> Iterator[OverlappedCollective]:
    """The collectives of one phase that the family overlaps with computations, in order."""
    product_ids = {
        id(ring.collective_step): {id(product) for product in ring.products} for ring in find_rings(steps, scheme)
    }
    for position, step in enumerate(steps):
        if not isinstance(step, CollectiveStep):
            continue
        if scheme.is_ring and step.collective.axes == RING_AXES and step.tensor.role not in ROLES_MOVED_UNSPLIT:
            compute_indices = tuple(_overlapping_attentions(steps, position, step))
        else:
            compute_indices = tuple(
                index for index, candidate in enumerate(steps) if id(candidate) in product_ids.get(id(step), ())
            )
        if compute_indices:
            yield OverlappedCollective(position, compute_indices)


def _overlapping_attentions(
    steps: Sequence[ProgramStep], position: int, collective_step: CollectiveStep
) -> Iterator[int]:
    """Attentions that take what is gathered, or that make what is scattered."""
    if collective_step.collective.kind is CollectiveKind.ALL_GATHER:
        yield from _readers_of_gather(steps, position, collective_step)
    if collective_step.collective.kind is CollectiveKind.REDUCE_SCATTER:
        for index, step in enumerate(steps[:position]):
            if (
                isinstance(step, ComputeStep)
                and isinstance(step.operation, ATTENTIONS)
                and collective_step.tensor.name in step.operation.outputs
            ):
                yield index


def _readers_of_gather(steps: Sequence[ProgramStep], position: int, collective_step: CollectiveStep) -> Iterator[int]:
    """Attentions that take what is gathered, until it is gathered again."""
    name, spec = collective_step.tensor.name, collective_step.collective.after
    for index, step in enumerate(steps[position + 1 :], start=position + 1):
        if isinstance(step, CollectiveStep):
            if step.tensor.name == name and step.collective.after == spec:
                return
        elif isinstance(step.operation, ATTENTIONS):
            operands = zip(step.operation.operands, step.placed.inputs, strict=False)
            if (name, spec) in operands:
                yield index
