"""Fusion of a unit's derived computations into the kernels that an engine launches.

Neighbouring elementwise operations run as one kernel, as torch.compile and XLA fuse them: it reads what comes from
outside and writes what is read elsewhere. Products, attention and lookups are kernels of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.derive import ComputeStep, ProgramStep, ShardedUnit
from shardwise.derive.low_precision_products import is_block_product
from shardwise.model import Contract, MatrixFunction, Role, Tensor, density
from shardwise.model.operations import (
    CACHED_ATTENTION_OPERATIONS,
    RECURRENCE_OPERATIONS,
    SHARED_KEY_OPERATIONS,
    CachedRecurrence,
    Scan,
    ScanGradient,
    Selection,
)
from shardwise.model.operations.base import ONCE
from shardwise.sharding import Spec
from shardwise.step.instructions import Kernel, KernelShape
from shardwise.values import ZERO, LocalDim, Polynomial, multiply_symbols, sum_polynomials
from shardwise.values.symbolic import FewestElements

# Operations with matrix products, whose FLOPs are counted.
COUNTED_OPERATIONS = (
    Contract, MatrixFunction, Scan, ScanGradient, Selection, *SHARED_KEY_OPERATIONS, *RECURRENCE_OPERATIONS,
    *CACHED_ATTENTION_OPERATIONS, CachedRecurrence,
)  # fmt: skip
MergePredicate = Callable[[ComputeStep, ComputeStep], bool]
PlacedSteps = list[tuple[int, ComputeStep]]  # computations that run as one kernel, with their positions
BATCH_DIMS = ("B", "T")  # tokens: any number of rows, whose last tile is the only one that is not full


class FusionScope(NamedTuple):
    """All that fusion reads of a unit beside its steps: its tensors, the identities of the operations that read each, and the
    names of those that outlive the pass."""

    tensors: Mapping[str, Tensor]
    readers: Mapping[str, Set[int]]
    live_out: Set[str]


def list_kernels(unit: ShardedUnit) -> tuple[Kernel, ...]:
    """Return all kernels of a unit, in execution order."""
    return tuple(kernel for placed in fuse_kernels(unit).values() for _, kernel in placed)


def fuse_kernels(unit: ShardedUnit) -> dict[str, tuple[tuple[int, Kernel], ...]]:
    """Return the kernels of each phase, each with the position of its last derived step."""
    scope = _scope(unit)
    return {phase: fuse_steps(phase, steps, scope) for phase, steps in unit.phases().items()}


def fuse_steps(
    phase: str, steps: Iterable[ProgramStep], scope: FusionScope, merges: MergePredicate | None = None
) -> tuple[tuple[int, Kernel], ...]:
    """Return the kernels of one phase's steps, each with the position of its last step. Neighbouring products are one kernel
    where `merges` says so of each pair of them."""
    groups = _fusion_groups(steps)
    if merges:
        groups = _merge_products(groups, merges)
    return tuple((group[-1][0], _fuse_group(phase, [step for _, step in group], scope)) for group in groups)


def _merge_products(groups: Iterable[PlacedSteps], merges: MergePredicate) -> list[PlacedSteps]:
    merged: list[PlacedSteps] = []
    for group in groups:
        if merged and merges(merged[-1][-1][1], group[0][1]):
            merged[-1] = [*merged[-1], *group]
        else:
            merged.append(group)
    return merged


def unfused_kernels(unit: ShardedUnit, phase: str) -> tuple[Kernel, ...]:
    """Return each computation of a phase as a kernel of its own, in order: its cost without fusion."""
    scope = _scope(unit)
    computed = (step for step in unit.phases()[phase] if isinstance(step, ComputeStep))
    return tuple(_fuse_group(phase, [step], scope) for step in computed)


def _scope(unit: ShardedUnit) -> FusionScope:
    live_out = {
        *unit.saved,
        *unit.forward.program.outputs,
        *unit.backward.program.outputs,
        *unit.update.program.outputs,
    }
    return FusionScope(unit.tensors, readers_of(step for steps in unit.phases().values() for step in steps), live_out)


def readers_of(steps: Iterable[ProgramStep]) -> dict[str, set[int]]:
    """Return the identities of the operations that read each tensor."""
    readers: dict[str, set[int]] = {}
    for step in steps:
        if isinstance(step, ComputeStep):
            for name, _ in step.reads:
                readers.setdefault(name, set()).add(id(step.operation))
    return readers


def _fusion_groups(steps: Iterable[ProgramStep]) -> list[PlacedSteps]:
    """Group neighbouring elementwise computations, with their positions; a collective on activations ends a group."""
    groups: list[PlacedSteps] = []
    extends_group = False
    for position, step in enumerate(steps):
        if not isinstance(step, ComputeStep):
            # weights are prefetched and gradients leave in the background: neither is in the way
            extends_group = extends_group and step.tensor.role in (Role.WEIGHT, Role.WEIGHT_GRADIENT)
            continue
        fusible = step.operation.kind == "map" and step.operation.num_parts(step.placed) is ONCE
        if extends_group and fusible:
            groups[-1].append((position, step))
        else:
            groups.append([(position, step)])
        extends_group = fusible
    return groups


def _fuse_group(phase: str, group: list[ComputeStep], scope: FusionScope) -> Kernel:
    members = {id(step.operation) for step in group}
    results = (name for step in group for name in step.operation.outputs)
    visible = (name for name in results if name in scope.live_out or scope.readers.get(name, set()) - members)
    names = dict.fromkeys(name for step in group for name in (*step.operation.inputs, *step.operation.outputs))
    kernel = _fuse_steps_once(phase, tuple(group), frozenset(visible), tuple(map(scope.tensors.__getitem__, names)))
    return replace(kernel, steps=tuple(group))


# Most kernels recur in many schemes of a search. They are made without their steps, whose identities tell phases apart.
@lru_cache(maxsize=2**14)
def _fuse_steps_once(
    phase: str, group: tuple[ComputeStep, ...], visible: frozenset[str], tensors: tuple[Tensor, ...]
) -> Kernel:
    """Return the kernel of neighbouring steps on these tensors; results that are not `visible` stay inside it."""
    scope = FusionScope({tensor.name: tensor for tensor in tensors}, {}, visible)
    inside = {name for step in group for name in step.operation.outputs}
    sizes: dict[str, Polynomial] = {}
    for step in group:
        for (name, _), elements in zip(step.reads, step.operation.read_elements(step.placed), strict=False):
            if name not in inside:
                sizes[name] = elements
        for (name, _), elements in zip(step.writes, step.operation.written_elements(step.placed), strict=True):
            if name in visible or len(group) == 1:
                sizes[name] = elements
    outputs = tuple(name for step in group for name in step.operation.outputs)
    first = group[0].operation
    num_parts = first.num_parts(group[0].placed)
    product_operands = {name: sizes[name] for name in first.inputs} if is_block_product(first, scope.tensors) else {}
    reads = tuple(dict.fromkeys(name for step in group for name, _ in step.reads if name not in inside))
    makes_gradients = first.kind == "contract" and scope.tensors[outputs[0]].role is Role.WEIGHT_GRADIENT
    return Kernel(
        phase, first.kind, first.inputs, reads, outputs, _matmul_flops(scope, group), _by_role(scope, sizes, num_parts),
        _by_role(scope, product_operands), makes_gradients, _group_shape(scope, group), (),
    )  # fmt: skip


def _group_shape(scope: FusionScope, group: Sequence[ComputeStep]) -> KernelShape:
    """Return the shape of a kernel; the weights of merged products are one matrix with the columns of all."""
    shape = _kernel_shape(scope, group[0])
    if group[0].operation.kind != "contract" or len(group) == 1:
        return shape
    columns = [_kernel_shape(scope, step).extents[-1] for step in group]
    return replace(shape, extents=(*shape.extents[:-1], sum_polynomials(columns)))


def _kernel_shape(scope: FusionScope, step: ComputeStep) -> KernelShape:
    operation, placed = step.operation, step.placed
    if isinstance(operation, CACHED_ATTENTION_OPERATIONS):
        return KernelShape(
            scores=multiply_symbols(operation.score_symbols(placed)),
            width=multiply_symbols(_locals(placed.inputs[0], placed.inputs[0].dims[-1:])),
        )
    if isinstance(operation, (Scan, ScanGradient)):
        q, k = placed.inputs[:2]
        scores = [*_locals(q, q.dims[:-1]), *_locals(k, [operation.sequence])]
        return KernelShape(scores=multiply_symbols(scores), width=multiply_symbols(_locals(q, q.dims[-1:])))
    if isinstance(operation, SHARED_KEY_OPERATIONS):
        q, *keys = placed.inputs[: 2 + operation.compressed]
        rows = _locals(q, q.dims[:-1])
        num_scores = sum_polynomials(multiply_symbols([*rows, *_locals(spec, spec.dims[1:2])]) for spec in keys)
        return KernelShape(scores=num_scores, width=multiply_symbols(_locals(q, q.dims[-1:])))
    if isinstance(operation, MatrixFunction):
        contraction = multiply_symbols([FewestElements(operation.rows, operation.columns)])
        scratch = operation.workspace_elements(placed)
        return KernelShape(contraction, scratch_elements=scratch, owned_matrices_only=not operation.is_state)
    return _product_shape(scope, step) if operation.kind == "contract" else KernelShape()


def _product_shape(scope: FusionScope, step: ComputeStep) -> KernelShape:
    """Return the shape of a product. An expert's group has the expected number of routed rows."""
    (left, right), out = step.placed.inputs, step.placed.outputs[0]
    contracted = [d for d in left.dims if d in right.dims and d not in out.dims]
    free_dims = ([d for d in spec.dims if d not in opposite.dims] for spec, opposite in ((left, right), (right, left)))
    groups = [(left, contracted), *zip((left, right), free_dims, strict=True)]
    without_batch = ((spec, dims) for spec, dims in groups if dims and not set(dims) & set(BATCH_DIMS))
    extents = tuple(multiply_symbols(_locals(spec, dims)) for spec, dims in without_batch)
    contraction = multiply_symbols(_locals(left, contracted)) if contracted else ZERO
    named = zip(step.operation.inputs, (left, right), strict=True)
    routed = next((spec for name, spec in named if scope.tensors[name].role is Role.ROUTED), None)
    if routed is None:
        return KernelShape(contraction, extents)
    row_dims = [d for d in routed.dims[:-1] if d != "E"]
    group_rows = multiply_symbols(_locals(routed, row_dims)) * density(Role.ROUTED)
    return KernelShape(group_rows if set(row_dims) & set(contracted) else contraction, extents, group_rows)


def _locals(spec: Spec, dims: Iterable[str]) -> list[LocalDim]:
    return [LocalDim(d, spec.axes_of(d)) for d in dims]


def _matmul_flops(scope: FusionScope, group: Iterable[ComputeStep]) -> Polynomial:
    """Return the FLOPs of products and attention; of routed tokens only the expected rows count."""
    total = ZERO
    for step in group:
        if isinstance(step.operation, COUNTED_OPERATIONS):
            routed = Role.ROUTED in {scope.tensors[name].role for name, _ in step.reads}
            total = total + step.operation.flops(step.placed) * density(Role.ROUTED if routed else Role.ACTIVATION)
    return total


def _by_role(
    scope: FusionScope, sizes: Mapping[str, Polynomial], num_parts: Polynomial = ONCE
) -> dict[Role, Polynomial]:
    elements: dict[Role, Polynomial] = {}
    for name, size in sizes.items():
        if size:  # nothing is read of tensors whose rows are picked out
            role = scope.tensors[name].role
            elements[role] = elements.get(role, ZERO) + size * density(role)
    return elements if num_parts is ONCE else {role: number * num_parts for role, number in elements.items()}
