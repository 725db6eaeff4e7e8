"""Collectives that run block by block while computations use the blocks: ring attention and asynchronous tensor parallelism.

The derivation decides which bytes move; this module decides which computations overlap with them. With a ring over `cp` each
device attends to one block of keys and values while the next arrives; in the backward pass the gradients of the blocks travel
with them.

With asynchronous tensor parallelism a collective and the products that read or make its tensor are one ring, which an engine
runs in one call. Around a gather, the blocks travel and each product takes the block that has arrived. Before a scatter,
partial sums travel and each rank adds its products' part of the block that leaves next. All products of a ring run when the
ring does: their operands must be ready before it, and their results are read after it. So `group_rings` reorders the steps,
and a ring is then a collective with the products adjacent to it.

Sources: Liu et al. 2023 (Ring Attention); S1, "ring attention"; Wang et al. 2023 (Overlap communication with dependent
computation via decomposition).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeGuard

from shardwise.derive.sharded_program import (
    CollectiveStep,
    ComputeStep,
    ProgramNode,
    ProgramStep,
    Ring,
    ShardedTensor,
)
from shardwise.layout import TP_AXES, ShardingScheme
from shardwise.model import Accumulate, Contract, Map, Role
from shardwise.model.operations import ATTENTION_OPERATIONS
from shardwise.model.operations.elementwise_functions import FUNCTIONS
from shardwise.sharding import Axes, CollectiveKind

RING_AXES: Axes = ("cp",)  # of ring attention
# Tensors that no ring cuts into blocks: weights and their gradients move as flat arrays, routed rows in uneven numbers.
ROLES_MOVED_UNSPLIT = (Role.WEIGHT, Role.WEIGHT_GRADIENT, Role.ROUTED)


def group_rings(
    steps: Sequence[ProgramStep], scheme: ShardingScheme, other_steps: Sequence[ProgramStep] = ()
) -> tuple[ProgramNode, ...]:
    """Return the nodes of a phase: its steps, reordered so that the steps of each ring are adjacent, with rings as one node.

    `other_steps` are those of the other phases of the pass, which may read what a ring gathers.
    """
    rings: list[Ring] = []
    if scheme.async_tp:
        steps = _with_adjacent_rings(steps)
        rings += (_keep_gathered(ring, [*steps, *other_steps]) for ring in _adjacent_rings(steps))
    if scheme.is_ring:
        rings += _attention_rings(steps)
    ring_of = {id(step): ring for ring in rings for step in ring.steps}
    nodes: list[ProgramNode] = []
    for step in steps:
        ring = ring_of.get(id(step))
        if ring is None:
            nodes.append(step)
        elif step is ring.computes[0]:
            nodes.append(ring)
    return tuple(nodes)


def _attention_rings(steps: Sequence[ProgramStep]) -> Iterator[Ring]:
    """Yield the attentions, each with the collectives over `cp` beside it that bring keys and values, or take gradients away."""
    for index, step in enumerate(steps):
        if not isinstance(step, ComputeStep) or not isinstance(step.operation, ATTENTION_OPERATIONS):
            continue
        before = [*_leading_collectives(reversed(steps[:index]))][::-1]
        after = _leading_collectives(steps[index + 1 :])
        gathers = tuple(moved for moved in before if _travels_over_cp(moved) and moved.after in step.reads)
        scatters = tuple(moved for moved in after if _travels_over_cp(moved) and moved.before in step.writes)
        if gathers or scatters:
            yield Ring(RING_AXES, gathers, (step,), scatters)


def _with_adjacent_rings(steps: Sequence[ProgramStep]) -> Sequence[ProgramStep]:
    """Return the steps with the products of each ring of tensor parallelism adjacent to its collective."""
    collectives = [step for step in steps if _may_be_ring(step)]
    # Scatters first, so that gradients of weights can come after them. Later groups may not split an earlier ring.
    for collective in sorted(collectives, key=_is_gather):
        group = _gather_group(steps, collective) if _is_gather(collective) else _scatter_group(steps, collective)
        if group is not None:
            steps = _group_steps(steps, *group)
    return steps


def _keep_gathered(ring: Ring, steps: Iterable[ProgramStep]) -> Ring:
    """Return a ring that keeps what it gathers where others of `steps` read it."""
    gathered, ring_steps = {step.after for step in ring.gathers}, {id(step) for step in ring.steps}
    is_read = any(id(step) not in ring_steps and not gathered.isdisjoint(step.reads) for step in steps)
    return replace(ring, keeps_gathered=True) if is_read else ring


def _adjacent_rings(steps: Sequence[ProgramStep]) -> Iterator[Ring]:
    """Yield the collectives of tensor parallelism that have products adjacent to them, with these."""
    for index, step in enumerate(steps):
        if not _may_be_ring(step):
            continue
        if _is_gather(step):
            ring = Ring(TP_AXES, (step,), tuple(_products_after_gather(steps[index + 1 :], step)))
        else:
            total = _sum_before_scatter(steps[:index], step)
            summands = set(total.reads if total else [step.before])
            products = _products_before_scatter(steps[: index - (total is not None)], summands)
            ring = Ring(TP_AXES, (), tuple(products), (step,), total)
        if ring.computes:
            yield ring


def _may_be_ring(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    """Return whether a step is a gather or scatter over all of tensor parallelism that can be cut into blocks."""
    if isinstance(step, ComputeStep) or step.collective.axes != TP_AXES or step.tensor.role in ROLES_MOVED_UNSPLIT:
        return False
    return step.collective.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)


def _leading_collectives(steps: Iterable[ProgramStep]) -> Iterator[CollectiveStep]:
    """Yield the steps up to the first computation."""
    for step in steps:
        if isinstance(step, ComputeStep):
            return
        yield step


def _travels_over_cp(step: CollectiveStep) -> bool:
    """Return whether a collective moves an activation, or its gradient, over the axis of ring attention."""
    return step.collective.axes == RING_AXES and step.tensor.role not in ROLES_MOVED_UNSPLIT


def _is_gather(step: CollectiveStep) -> bool:
    return step.collective.kind is CollectiveKind.ALL_GATHER


def _products_after_gather(steps: Sequence[ProgramStep], gather: CollectiveStep) -> Iterator[ComputeStep]:
    """Yield the products at the start of `steps` that read the gathered tensor and no result of one another."""
    computed: set[ShardedTensor] = set()
    for step in steps:
        if not _is_product(step) or gather.after not in step.reads or not computed.isdisjoint(step.reads):
            return
        computed |= set(step.writes)
        yield step


def _products_before_scatter(steps: Sequence[ProgramStep], summands: set[ShardedTensor]) -> list[ComputeStep]:
    """Return the products at the end of `steps` whose results are summed."""
    products: list[ComputeStep] = []
    for step in reversed(steps):
        if not _is_product(step) or summands.isdisjoint(step.writes):
            break
        products.insert(0, step)
    return products


def _gather_group(steps: Sequence[ProgramStep], gather: CollectiveStep) -> tuple[list[ProgramStep], int] | None:
    """Return a gather with its products and the index to put them after; None if no product can be delayed to it.

    A product joins if its other operands are ready before anything reads its result. Gradients of weights come after scatters
    that read the same operands, since engines free a weight with its gradient.
    """
    start, gathered = _index_of(steps, gather), gather.after
    end = next((i for i in range(start + 1, len(steps)) if _arrives(steps[i], gathered)), len(steps))
    readers = [i for i in range(start + 1, end) if gathered in steps[i].reads]
    rings = [ring for ring in _adjacent_rings(steps) if not ring.gathers]
    scattered = {id(product) for ring in rings for product in ring.computes}
    products = [i for i in readers if _is_product(steps[i]) and id(steps[i]) not in scattered]
    while products:
        ready_index = {i: max([start, *_producers(steps, i)]) for i in products}
        scatters = [
            _index_of(steps, ring.collectives[0])
            for ring in rings
            if _shares_operands(ring, [steps[i] for i in products], gathered)
        ]
        for last in (max([*ready_index.values(), *scatters]), max(ready_index.values())):
            if _can_delay(steps, products, readers, start, last):
                return _weights_and_gather(steps, gather, products), last
        products.remove(max(products, key=ready_index.__getitem__))
    return None


def _shares_operands(ring: Ring, products: Sequence[ProgramStep], gathered: ShardedTensor) -> bool:
    """Return whether a ring's products and these share an operand other than the gathered tensor."""
    operands = {tensor for step in ring.computes for tensor in step.reads}
    return any(tensor in operands for step in products for tensor in step.reads if tensor != gathered)


def _can_delay(
    steps: Sequence[ProgramStep], products: Sequence[int], readers: Sequence[int], start: int, last: int
) -> bool:
    """Return whether the products can be delayed to index `last` without delaying a reader of their results or of the gather."""
    is_read_early = any(_is_read_by(steps[i], steps[start + 1 : last + 1]) for i in products)
    return not is_read_early and all(i in products or i > last for i in readers)


def _weights_and_gather(
    steps: Sequence[ProgramStep], gather: CollectiveStep, products: Sequence[int]
) -> list[ProgramStep]:
    """Return a gather and its products, preceded by the collectives that bring the weights of these products."""
    names_read = {name for i in products for name, _ in steps[i].reads}
    between = steps[_index_of(steps, gather) + 1 : products[-1]]
    weights = [step for step in between if _brings_weight(step) and step.tensor.name in names_read]
    return [*weights, gather, *(steps[i] for i in products)]


def _scatter_group(steps: Sequence[ProgramStep], scatter: CollectiveStep) -> tuple[list[ProgramStep], int] | None:
    """Return a scatter with its products, their sum and the index to put them after; None if nothing can be grouped.

    Nothing else may read the products' results. Behind the scatter come gradients of weights that read the same operands.
    Products that read a gathered tensor belong to the gather.
    """
    end, scattered = _index_of(steps, scatter), scatter.before
    total = next((step for step in steps[:end] if _is_sum(step) and scattered in step.writes), None)
    summands = set(total.reads if total else [scattered])
    if total and any(scattered in step.reads for step in steps if step is not scatter):
        return None
    gathered = {step.after for step in steps if _may_be_ring(step) and _is_gather(step)}
    products = [step for step in steps[:end] if _is_product(step) and gathered.isdisjoint(step.reads)]
    ring_products = [
        step
        for step in products
        if not summands.isdisjoint(step.writes) and not _is_read_by(step, steps, ignored=total or scatter)
    ]
    if not ring_products:
        return None
    operands = {tensor for step in ring_products for tensor in step.reads}
    following_products = [
        step for step in products if not operands.isdisjoint(step.reads) and not _is_read_by(step, steps[: end + 1])
    ]
    return [*ring_products, *([total] if total else []), scatter, *following_products], end


def _is_read_by(step: ProgramStep, steps: Iterable[ProgramStep], ignored: ProgramStep | None = None) -> bool:
    """Return whether any of `steps` reads a result of `step`."""
    computed = set(step.writes)
    return any(not computed.isdisjoint(reader.reads) for reader in steps if reader is not ignored)


def _group_steps(steps: Sequence[ProgramStep], group: Sequence[ProgramStep], last: int) -> list[ProgramStep]:
    """Move the steps of `group` together, after all others up to index `last`, without splitting another ring."""
    group_ids = {id(step) for step in group}
    leading = [step for step in steps[: last + 1] if id(step) not in group_ids]
    trailing = [step for step in steps[last + 1 :] if id(step) not in group_ids]
    while leading and trailing and _share_ring(leading[-1], trailing[0], [*leading, *trailing]):
        leading.append(trailing.pop(0))
    return [*leading, *group, *trailing]


def _share_ring(first: ProgramStep, second: ProgramStep, steps: Sequence[ProgramStep]) -> bool:
    return any({id(first), id(second)} <= {id(step) for step in ring.steps} for ring in _adjacent_rings(steps))


def _index_of(steps: Sequence[ProgramStep], target: ProgramStep) -> int:
    return next(index for index, step in enumerate(steps) if step is target)


def _producers(steps: Sequence[ProgramStep], index: int) -> Iterator[int]:
    """Yield the indices at which a step's operands are computed or arrive; weights, which are gathered ahead, do not count."""
    operands = set(steps[index].reads)
    for earlier in range(index):
        step = steps[earlier]
        if not _brings_weight(step) and not operands.isdisjoint(step.writes):
            yield earlier


def _sum_before_scatter(steps: Sequence[ProgramStep], scatter: CollectiveStep) -> ComputeStep | None:
    """Return the last of `steps` if it adds up the scattered tensor."""
    step = steps[-1] if steps else scatter
    return step if _is_sum(step) and scatter.before in step.writes else None


def _is_product(step: ProgramStep) -> TypeGuard[ComputeStep]:
    return isinstance(step, ComputeStep) and isinstance(step.operation, Contract) and len(step.operation.inputs) == 2


def _is_sum(step: ProgramStep) -> TypeGuard[ComputeStep]:
    """Return whether a step adds tensors of one spec."""
    if not isinstance(step, ComputeStep):
        return False
    operation = step.operation
    adds = isinstance(operation, Map) and operation.function in FUNCTIONS and FUNCTIONS[operation.function].additive
    specs_match = all(spec == step.placed.outputs[0] for _, spec in step.reads)
    return (isinstance(operation, Accumulate) or adds) and specs_match


def _arrives(step: ProgramStep, tensor: ShardedTensor) -> bool:
    return isinstance(step, CollectiveStep) and step.after == tensor


def _brings_weight(step: ProgramStep) -> TypeGuard[CollectiveStep]:
    return isinstance(step, CollectiveStep) and step.tensor.role is Role.WEIGHT
