"""Fusion of a unit's derived computations into the kernels that an engine launches.

Neighbouring elementwise operations run as one kernel, as torch.compile and XLA fuse them: it reads what comes from
outside and writes what is read elsewhere. Products, attention and lookups are kernels of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.derive import ComputeStep, ProgramStep, ShardedUnit
from shardwise.derive.low_precision_products import is_block_product
from shardwise.model import Contract, Lookup, MatrixFunction, Role, density
from shardwise.model.operations import RECURRENCE_OPERATIONS, SELECT_OPERATIONS, Scan, ScanGradient
from shardwise.model.operations.base import ONCE
from shardwise.sharding import Spec
from shardwise.step.instructions import Kernel, KernelShape
from shardwise.values import ZERO, LocalDim, Polynomial, multiply_symbols
from shardwise.values.symbolic import FewestElements

BATCH_DIMS = ("B", "T")  # tokens: any number of rows, whose last tile is the only one that is not full


def list_kernels(unit: ShardedUnit) -> tuple[Kernel, ...]:
    """Return all kernels of a unit, in execution order."""
    return tuple(kernel for placed in fuse_kernels(unit).values() for _, kernel in placed)


def fuse_kernels(unit: ShardedUnit) -> dict[str, tuple[tuple[int, Kernel], ...]]:
    """Return the kernels of each phase, each with the position of its last derived step."""
    readers, live_out = _readers(unit), _live_out_names(unit)
    return {
        phase: tuple(
            (group[-1][0], _fuse_group(unit, phase, [step for _, step in group], readers, live_out))
            for group in _fusion_groups(steps)
        )
        for phase, steps in unit.phases().items()
    }


def unfused_kernels(unit: ShardedUnit, phase: str) -> tuple[Kernel, ...]:
    """Return each computation of a phase as a kernel of its own, in order: its cost without fusion."""
    readers, live_out = _readers(unit), _live_out_names(unit)
    computed = (step for step in unit.phases()[phase] if isinstance(step, ComputeStep))
    return tuple(_fuse_group(unit, phase, [step], readers, live_out) for step in computed)


def _live_out_names(unit: ShardedUnit) -> set[str]:
    """Return the names of the tensors that outlive a pass of the unit."""
    return {*unit.saved, *unit.forward.program.outputs, *unit.backward.program.outputs, *unit.update.program.outputs}


def _readers(unit: ShardedUnit) -> dict[str, set[int]]:
    """Return the identities of the operations that read each tensor."""
    readers: dict[str, set[int]] = {}
    for steps in unit.phases().values():
        for step in steps:
            if isinstance(step, ComputeStep):
                for name, _ in step.reads:
                    readers.setdefault(name, set()).add(id(step.operation))
    return readers


def _fusion_groups(steps: Iterable[ProgramStep]) -> list[list[tuple[int, ComputeStep]]]:
    """Group neighbouring elementwise computations, with their positions; a collective on activations ends a group."""
    groups: list[list[tuple[int, ComputeStep]]] = []
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


def _fuse_group(
    unit: ShardedUnit, phase: str, group: list[ComputeStep], readers: Mapping[str, set[int]], live_out: set[str]
) -> Kernel:
    members = {id(step.operation) for step in group}
    inside = {name for step in group for name in step.operation.outputs}
    visible = {name for name in inside if name in live_out or readers.get(name, set()) - members}
    specs: dict[str, Spec] = {}
    for step in group:
        for name, spec in step.reads:
            if name not in inside and not (isinstance(step.operation, Lookup) and name == step.operation.inputs[0]):
                specs[name] = spec
        for name, spec in step.writes:
            if name in visible or len(group) == 1:
                specs[name] = spec
    outputs = tuple(name for step in group for name in step.operation.outputs)
    first = group[0].operation
    num_parts = first.num_parts(group[0].placed)
    product_operands = {name: specs[name] for name in first.inputs} if is_block_product(first, unit.tensors) else {}
    reads = tuple(dict.fromkeys(name for step in group for name, _ in step.reads if name not in inside))
    makes_gradients = first.kind == "contract" and unit.tensors[outputs[0]].role is Role.WEIGHT_GRADIENT
    return Kernel(
        phase, first.kind, first.inputs, reads, outputs, _matmul_flops(unit, group), _by_role(unit, specs, num_parts),
        _by_role(unit, product_operands), makes_gradients, _kernel_shape(unit, group[0]), tuple(group),
    )  # fmt: skip


def _kernel_shape(unit: ShardedUnit, step: ComputeStep) -> KernelShape:
    operation, placed = step.operation, step.placed
    if isinstance(operation, (Scan, ScanGradient)):
        q, k = placed.inputs[:2]
        scores = [*_locals(q, q.dims[:-1]), *_locals(k, [operation.sequence])]
        return KernelShape(scores=multiply_symbols(scores), width=multiply_symbols(_locals(q, q.dims[-1:])))
    if isinstance(operation, MatrixFunction):
        contraction = multiply_symbols([FewestElements(operation.rows, operation.columns)])
        scratch = operation.workspace_elements(placed)
        return KernelShape(contraction, scratch_elements=scratch, owned_matrices_only=not operation.is_state)
    return _product_shape(unit, step) if operation.kind == "contract" else KernelShape()


def _product_shape(unit: ShardedUnit, step: ComputeStep) -> KernelShape:
    """Return the shape of a product. An expert's group has the expected number of routed rows."""
    (left, right), out = step.placed.inputs, step.placed.outputs[0]
    contracted = [d for d in left.dims if d in right.dims and d not in out.dims]
    free_dims = ([d for d in spec.dims if d not in opposite.dims] for spec, opposite in ((left, right), (right, left)))
    groups = [(left, contracted), *zip((left, right), free_dims, strict=True)]
    without_batch = ((spec, dims) for spec, dims in groups if dims and not set(dims) & set(BATCH_DIMS))
    extents = tuple(multiply_symbols(_locals(spec, dims)) for spec, dims in without_batch)
    contraction = multiply_symbols(_locals(left, contracted)) if contracted else ZERO
    named = zip(step.operation.inputs, (left, right), strict=True)
    routed = next((spec for name, spec in named if unit.tensors[name].role is Role.ROUTED), None)
    if routed is None:
        return KernelShape(contraction, extents)
    row_dims = [d for d in routed.dims[:-1] if d != "E"]
    group_rows = multiply_symbols(_locals(routed, row_dims)) * density(Role.ROUTED)
    return KernelShape(group_rows if set(row_dims) & set(contracted) else contraction, extents, group_rows)


def _locals(spec: Spec, dims: Iterable[str]) -> list[LocalDim]:
    return [LocalDim(d, spec.axes_of(d)) for d in dims]


def _matmul_flops(unit: ShardedUnit, group: list[ComputeStep]) -> Polynomial:
    """Return the FLOPs of products and attention; of routed tokens only the expected rows count."""
    total = ZERO
    for step in group:
        if isinstance(
            step.operation, (Contract, MatrixFunction, Scan, ScanGradient, *SELECT_OPERATIONS, *RECURRENCE_OPERATIONS)
        ):
            routed = Role.ROUTED in {unit.tensors[name].role for name, _ in step.reads}
            total = total + step.operation.flops(step.placed) * density(Role.ROUTED if routed else Role.ACTIVATION)
    return total


def _by_role(unit: ShardedUnit, specs: Mapping[str, Spec], num_parts: Polynomial = ONCE) -> dict[Role, Polynomial]:
    elements: dict[Role, Polynomial] = {}
    for name, spec in specs.items():
        role = unit.tensors[name].role
        elements[role] = elements.get(role, ZERO) + spec.local_elements() * density(role)
    return elements if num_parts is ONCE else {role: number * num_parts for role, number in elements.items()}
