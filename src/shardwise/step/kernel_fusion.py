"""The computations of a derived unit as the kernels that an engine launches.

Neighbouring elementwise operations run as one kernel (torch.compile and XLA fuse them): it reads what comes from outside
and writes what is read elsewhere. Products, attention and lookups are kernels of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.derive.low_precision_products import is_block_product
from shardwise.derive.sharded_program import ComputeStep, ProgramStep
from shardwise.derive.sharded_unit import ShardedUnit
from shardwise.model.operations import Contract, Lookup, MatrixFunction, Scan, ScanGradient
from shardwise.model.program import Role, density
from shardwise.sharding.spec import Spec
from shardwise.step.instructions import Kernel, KernelShape
from shardwise.values.symbolic import ZERO, FewestElements, LocalDim, Polynomial, multiply_symbols

BATCH_DIMS = ("B", "T")  # tokens: any number of rows, whose last tile is the only one that is not full


def list_kernels(unit: ShardedUnit) -> tuple[Kernel, ...]:
    """All kernels of one unit, in order."""
    return tuple(kernel for placed in fuse_kernels(unit).values() for _, kernel in placed)


def fuse_kernels(unit: ShardedUnit) -> dict[str, tuple[tuple[int, Kernel], ...]]:
    """All kernels of one unit by phase, in order, each with the place of its last computation among the steps."""
    readers, leaving = _readers(unit), _live_out_names(unit)
    return {
        phase: tuple(
            (run[-1][0], _fuse_group(unit, phase, [step for _, step in run], readers, leaving))
            for run in _fusion_groups(steps)
        )
        for phase, steps in unit.phases().items()
    }


def unfused_kernels(unit: ShardedUnit, phase: str) -> tuple[Kernel, ...]:
    """Each computation of a phase as a kernel of its own, in order: what each takes where its neighbours are left out."""
    readers, leaving = _readers(unit), _live_out_names(unit)
    return tuple(
        _fuse_group(unit, phase, [step], readers, leaving)
        for step in unit.phases()[phase]
        if isinstance(step, ComputeStep)
    )


def _live_out_names(unit: ShardedUnit) -> set[str]:
    """The tensors that are there when a pass of the unit has ended."""
    return {*unit.saved, *unit.forward.program.outputs, *unit.backward.program.outputs, *unit.update.program.outputs}


def _readers(unit: ShardedUnit) -> dict[str, set[int]]:
    """For each tensor, the operations of the unit that read it."""
    readers: dict[str, set[int]] = {}
    for steps in unit.phases().values():
        for step in steps:
            if isinstance(step, ComputeStep):
                for name in step.operation.operands:
                    readers.setdefault(name, set()).add(id(step.operation))
    return readers


def _fusion_groups(steps: Iterable[ProgramStep]) -> list[list[tuple[int, ComputeStep]]]:
    """Computations in order with their places, neighbouring elementwise ones together; a collective on activations ends a run."""
    runs: list[list[tuple[int, ComputeStep]]] = []
    joined = False
    for place, step in enumerate(steps):
        if not isinstance(step, ComputeStep):
            # weights are prefetched and gradients leave in the background: neither is in the way
            joined = joined and step.tensor.role in (Role.WEIGHT, Role.WEIGHT_GRADIENT)
            continue
        fusible = step.operation.kind == "map"
        if joined and fusible:
            runs[-1].append((place, step))
        else:
            runs.append([(place, step)])
        joined = fusible
    return runs


def _fuse_group(
    unit: ShardedUnit, phase: str, run: list[ComputeStep], readers: Mapping[str, set[int]], leaving: set[str]
) -> Kernel:
    members = {id(step.operation) for step in run}
    inside = {name for step in run for name in step.operation.outputs}
    kept = {name for name in inside if name in leaving or readers.get(name, set()) - members}
    touched: dict[str, Spec] = {}
    for step in run:
        for name, spec in zip(step.operation.operands, step.placed.inputs, strict=False):
            if name not in inside and not (isinstance(step.operation, Lookup) and name == step.operation.inputs[0]):
                touched[name] = spec
        for name, spec in zip(step.operation.outputs, step.placed.outputs, strict=True):
            if name in kept or len(run) == 1:
                touched[name] = spec
    outputs = tuple(name for step in run for name in step.operation.outputs)
    first = run[0].operation
    taken = {name: touched[name] for name in first.inputs} if is_block_product(first, unit.tensors) else {}
    reads = tuple(dict.fromkeys(name for step in run for name in step.operation.operands if name not in inside))
    makes_gradients = first.kind == "contract" and unit.tensors[outputs[0]].role is Role.WEIGHT_GRADIENT
    return Kernel(
        phase, first.kind, first.inputs, reads, outputs, _matmul_flops(unit, run), _by_role(unit, touched),
        _by_role(unit, taken), makes_gradients, _kernel_shape(unit, run[0]), tuple(run),
    )  # fmt: skip


def _kernel_shape(unit: ShardedUnit, step: ComputeStep) -> KernelShape:
    operation, placed = step.operation, step.placed
    if isinstance(operation, (Scan, ScanGradient)):
        q, k = placed.inputs[:2]
        scores = [*_locals(q, q.dims[:-1]), *_locals(k, [operation.sequence])]
        return KernelShape(scores=multiply_symbols(scores), width=multiply_symbols(_locals(q, q.dims[-1:])))
    if isinstance(operation, MatrixFunction):
        least, passing = (
            multiply_symbols([FewestElements(operation.rows, operation.columns)]),
            operation.workspace_elements(placed),
        )
        return KernelShape(least, scratch_elements=passing, owned_matrices_only=not operation.is_state)
    return _product_shape(unit, step) if operation.kind == "contract" else KernelShape()


def _product_shape(unit: ShardedUnit, step: ComputeStep) -> KernelShape:
    """Of routed tokens a group has the rows that are there; they are summed over where a weight's gradient is made."""
    (left, right), out = step.placed.inputs, step.placed.outputs[0]
    sums = [d for d in left.dims if d in right.dims and d not in out.dims]
    own = ([d for d in spec.dims if d not in other.dims] for spec, other in ((left, right), (right, left)))
    groups = [(left, sums), *zip((left, right), own, strict=True)]
    sides = tuple(
        multiply_symbols(_locals(spec, dims)) for spec, dims in groups if dims and not set(dims) & set(BATCH_DIMS)
    )
    summed = multiply_symbols(_locals(left, sums)) if sums else ZERO
    routed = [
        (name, spec)
        for name, spec in zip(step.operation.inputs, (left, right), strict=True)
        if unit.tensors[name].role is Role.ROUTED
    ]
    if not routed:
        return KernelShape(summed, sides)
    spec = routed[0][1]
    rows = [d for d in spec.dims[:-1] if d != "E"]
    there = multiply_symbols(_locals(spec, rows)) * density(Role.ROUTED)
    return KernelShape(there if set(rows) & set(sums) else summed, sides, there)


def _locals(spec: Spec, dims: Iterable[str]) -> list[LocalDim]:
    return [LocalDim(d, spec.axes_of(d)) for d in dims]


def _matmul_flops(unit: ShardedUnit, run: list[ComputeStep]) -> Polynomial:
    """Of routed tokens only the rows that are there are multiplied."""
    total = ZERO
    for step in run:
        if isinstance(step.operation, (Contract, MatrixFunction, Scan, ScanGradient)):
            routed = Role.ROUTED in {unit.tensors[name].role for name in step.operation.operands}
            total = total + step.operation.flops(step.placed) * density(Role.ROUTED if routed else Role.ACTIVATION)
    return total


def _by_role(unit: ShardedUnit, touched: Mapping[str, Spec]) -> dict[Role, Polynomial]:
    elements: dict[Role, Polynomial] = {}
    for name, spec in touched.items():
        role = unit.tensors[name].role
        elements[role] = elements.get(role, ZERO) + spec.local_elements() * density(role)
    return elements
