"""Shard a program: find every operation's shardings and every collective from the resting shardings of the inputs.

The same function serves forward, recompute, backward and update programs; nothing about transformers is known here. A tensor
has a resting spec, in which it stays between operations; available specs, to which earlier steps have brought it; and, if it
is a weight, a use spec, in which operations must take it. `reshard` brings it from one to another, once for each spec that is
needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from shardwise.model import Accumulate, Operation, Program, Role, Tensor
from shardwise.model.operations import ATTENTION_OPERATIONS, Carry, OperationSharding
from shardwise.sharding import Axes, Collective, CollectiveKind, Spec, reshard


class ShardedTensor(NamedTuple):
    """A tensor by name, in one of the specs that a device has it in."""

    name: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """One collective on one tensor. `reason` says why the tensor moves; it is printed beside the collective."""

    tensor: Tensor
    collective: Collective
    reason: str = ""

    @property
    def before(self) -> ShardedTensor:
        return ShardedTensor(self.tensor.name, self.collective.before)

    @property
    def after(self) -> ShardedTensor:
        return ShardedTensor(self.tensor.name, self.collective.after)

    @property
    def reads(self) -> tuple[ShardedTensor, ...]:
        return (self.before,)

    @property
    def writes(self) -> tuple[ShardedTensor, ...]:
        return (self.after,)


@dataclass(frozen=True, slots=True)
class ComputeStep:
    """One operation on each device's shards, with the shardings of its operands and results.

    `reads` are the operands whose values are read, without inputs that give only a shape or a sharding.
    """

    operation: Operation
    placed: OperationSharding
    reads: tuple[ShardedTensor, ...] = field(init=False, compare=False, repr=False)
    writes: tuple[ShardedTensor, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:  # once, since grouping, lowering and liveness read them again and again
        reads = zip(self.operation.operands, self.placed.inputs, strict=False)
        writes = zip(self.operation.outputs, self.placed.outputs, strict=True)
        object.__setattr__(self, "reads", tuple(ShardedTensor(name, spec) for name, spec in reads))
        object.__setattr__(self, "writes", tuple(ShardedTensor(name, spec) for name, spec in writes))


ProgramStep = CollectiveStep | ComputeStep


@dataclass(frozen=True, slots=True)
class Ring:
    """Computations that run block by block while blocks travel around the ranks of `axes`.

    Over `cp` it is ring attention: `gathers` bring keys and values, `scatters` take their gradients away. Over tensor
    parallelism `computes` are products, which read one gathered tensor or whose results one scatter takes; `sum` adds these
    results, and further terms, before the scatter (None where it takes a product's result as it is). `keeps_gathered`: other
    steps of the pass read the gathered tensor too, so its blocks are assembled.
    """

    axes: Axes
    gathers: tuple[CollectiveStep, ...]
    computes: tuple[ComputeStep, ...]
    scatters: tuple[CollectiveStep, ...] = ()
    sum: ComputeStep | None = None
    keeps_gathered: bool = False

    @property
    def collectives(self) -> tuple[CollectiveStep, ...]:
        return (*self.gathers, *self.scatters)

    @property
    def steps(self) -> tuple[ProgramStep, ...]:
        """The steps in the order in which they run without a ring."""
        return (*self.gathers, *self.computes, *([self.sum] if self.sum else []), *self.scatters)

    @property
    def first_results(self) -> tuple[str, ...]:
        """The first result of each computation, which names its kernel."""
        return tuple(step.operation.outputs[0] for step in self.computes)

    @property
    def is_attention(self) -> bool:
        return isinstance(self.computes[0].operation, ATTENTION_OPERATIONS)

    @property
    def block(self) -> ShardedTensor:
        """The travelling tensor in the spec in which a rank has one block of it."""
        return self.gathers[0].before if self.gathers else self.scatters[0].after

    @property
    def dim(self) -> str:
        """Dim along which the blocks lie."""
        collective = self.collectives[0].collective
        before, after = collective.before, collective.after
        return next(dim for dim in before.dims if before.axes_of(dim) != after.axes_of(dim))

    @property
    def terms(self) -> tuple[ShardedTensor, ...]:
        """Terms of the sum beside the products' results."""
        results = {tensor for step in self.computes for tensor in step.writes}
        return tuple(tensor for tensor in self.sum.reads if tensor not in results) if self.sum else ()

    @property
    def reads(self) -> tuple[ShardedTensor, ...]:
        """Tensors that it reads, each once; of a gathered tensor the rank's own block."""
        gathered = {step.after for step in self.gathers}
        operands = [tensor for step in self.computes for tensor in step.reads if tensor not in gathered]
        return tuple(dict.fromkeys([*(step.before for step in self.gathers), *operands, *self.terms]))

    @property
    def writes(self) -> tuple[ShardedTensor, ...]:
        """Tensors that it makes; of a scattered tensor the rank's own block."""
        inner = {*(step.before for step in self.scatters), *(self.sum.reads if self.sum else ())}
        results = [tensor for step in self.computes for tensor in step.writes if tensor not in inner]
        gathered = [step.after for step in self.gathers] if self.keeps_gathered else []
        return (*results, *gathered, *(step.after for step in self.scatters))


ProgramNode = ProgramStep | Ring
FinalSpec = Spec | Callable[[Spec], Spec]  # a spec, or a function of the one in which the result is computed


def steps_of_nodes(nodes: Iterable[ProgramNode]) -> tuple[ProgramStep, ...]:
    """Return the steps of a program's nodes, those of rings one by one."""
    return tuple(step for node in nodes for step in (node.steps if isinstance(node, Ring) else (node,)))


@dataclass(frozen=True, slots=True)
class ShardedProgram:
    """The nodes of a program in execution order (steps, and rings of several), and the spec in which each tensor stays."""

    program: Program
    nodes: tuple[ProgramNode, ...]
    specs: Mapping[str, Spec]

    @property
    def steps(self) -> tuple[ProgramStep, ...]:
        """The steps of the program; of a ring each of its steps."""
        return steps_of_nodes(self.nodes)

    @property
    def communication(self) -> tuple[CollectiveStep, ...]:
        return tuple(step for step in self.steps if isinstance(step, CollectiveStep))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingTargets:
    """The specs that `shard_program` brings tensors to, by name.

    `use`: in which operations must take a tensor (weights). `immediate`: of results as soon as they are computed (the residual
    stream). `at_first_read`: of inputs when they are first read (gradients from which an update makes the state). `final`: of
    results at the end. `primal`: of the forward tensors, which their gradients share. `flat_reductions` has results of
    reductions over tensors that ZeRO cuts as flat arrays, with the axes of the cut: each device has a part of every sum.
    After an operation of the kinds `free_after_use`, activations that were moved for it are freed, so that a later reader
    moves them again: ring attention keeps no blocks, and the backward pass gathers them once more.
    """

    use: Mapping[str, Spec] = field(default_factory=dict)
    immediate: Mapping[str, FinalSpec] = field(default_factory=dict)
    at_first_read: Mapping[str, Spec] = field(default_factory=dict)
    final: Mapping[str, FinalSpec] = field(default_factory=dict)
    primal: Mapping[str, Spec] = field(default_factory=dict)
    flat_reductions: Mapping[str, Axes] = field(default_factory=dict)
    free_after_use: tuple[type[Operation], ...] = ()


def shard_program(
    program: Program, resting: Mapping[str, Spec], targets: ShardingTargets, *,
    operations: Sequence[Operation] | None = None, already_available: Mapping[str, Spec] | None = None,
) -> ShardedProgram:  # fmt: skip
    """Derive the shardings of `operations` (default: all of the program's) and the collectives between them.

    `resting` are the specs of the inputs, `already_available` further specs in which they are available at the start: a
    weight or an activation that the forward pass gathered and did not release. Raises `ShardingError` when an operation
    cannot be placed.
    """
    sharder = _ProgramSharder(
        program=program, targets=targets, resting=dict(resting),
        available={name: {spec} for name, spec in resting.items()},
        dims={name: tensor.dims for name, tensor in program.tensors.items()},
    )  # fmt: skip
    for name, spec in (already_available or {}).items():
        sharder.available[name].add(spec)
    for operation in program.operations if operations is None else operations:
        sharder.add_operation(operation)
    for name, final_spec in targets.final.items():
        sharder.rest_result(name, final_spec)
    return ShardedProgram(sharder.program, tuple(sharder.steps), dict(sharder.resting))


# The schemes of a search give most operations of a unit operands in the same few specs: each rule is applied once to each.
@lru_cache(maxsize=2**15)
def _place_operation(
    operation: Operation, specs: tuple[Spec, ...], result_dims: tuple[tuple[str, ...], ...], fixed: tuple[bool, ...],
    goal: Spec | None,
) -> OperationSharding:  # fmt: skip
    """Apply an operation's sharding rule; `fixed` says for each operand whether it may not move."""
    dims = dict(zip(operation.inputs, (spec.dims for spec in specs), strict=True))
    dims |= zip(operation.outputs, result_dims, strict=True)
    is_fixed = dict(zip(operation.inputs, fixed, strict=True))
    return operation.propagate_sharding(specs, dims, is_fixed.__getitem__, goal)


@dataclass(slots=True, kw_only=True)
class _ProgramSharder:
    """The state of `shard_program` after the steps so far."""

    program: Program
    targets: ShardingTargets
    resting: dict[str, Spec]
    available: dict[str, set[Spec]]
    dims: dict[str, tuple[str, ...]]
    steps: list[ProgramStep] = field(default_factory=list)

    def add_operation(self, operation: Operation) -> None:
        if isinstance(operation, Accumulate):
            operation = self.add_aligned_gradients(operation)
        for name in operation.operands:
            if name in self.targets.at_first_read:
                self.reshard_to(name, self.targets.at_first_read[name], "updated where the state rests")
                self.resting[name] = self.targets.at_first_read[name]
        specs = [self.current_spec(name) for name in operation.inputs]
        placed = self.place(operation, specs, self.target_spec(operation))
        if operation.outputs[0] in self.targets.flat_reductions:
            placed = replace(placed, outputs=(self.flat_reduction_spec(operation, placed),))
        reasons = placed.reasons or ("",) * len(placed.inputs)
        step = ComputeStep(operation, placed)
        for (name, spec), reason in zip(step.reads, reasons, strict=False):
            self.reshard_to(name, spec, reason)
        if isinstance(operation, Carry):
            self.add_carry(operation, placed)
        else:
            self.steps.append(step)
        if isinstance(operation, self.targets.free_after_use):
            for name, _ in step.reads:
                if self.program.tensors[name].role is not Role.WEIGHT:
                    self.available[name] &= {self.resting[name]}
        for name, spec in step.writes:
            self.resting[name] = spec
            self.available[name] = {spec}
            self.rest_gradient(name, spec)
            if name in self.targets.immediate:
                self.rest_result(name, self.targets.immediate[name])

    def place(self, operation: Operation, specs: Sequence[Spec], goal: Spec | None = None) -> OperationSharding:
        """Return the shardings of an operation whose operands come in `specs`."""
        fixed = tuple(name in self.targets.use for name in operation.inputs)
        result_dims = tuple(self.dims[name] for name in operation.outputs)
        return _place_operation(operation, tuple(specs), result_dims, fixed, goal)

    def flat_reduction_spec(self, operation: Operation, placed: OperationSharding) -> Spec:
        """Return the spec of a reduction over flat shards: partial over the axes that cut the array."""
        (name,), (spec,) = operation.outputs, placed.outputs
        cut = tuple(
            axis
            for axis in self.targets.flat_reductions[name]
            if any(axis in operand.sharded_axes for operand in placed.inputs)
        )
        return spec.gather_axes(cut).with_partial((*cut, *(axis for axis in spec.partial if axis not in cut)))

    def target_spec(self, operation: Operation) -> Spec | None:
        """Return the spec that a complete gradient is wanted in: its tensor's, where that is used."""
        primal = self.program.tensors[operation.outputs[0]].gradient_of
        if not primal:
            return None
        return self.targets.use.get(primal) or self.resting.get(primal) or self.targets.primal.get(primal)

    def current_spec(self, name: str) -> Spec:
        """Return an operand's spec: its use spec, its resting spec, or (shape only) the forward tensor's."""
        return self.targets.use.get(name) or self.resting.get(name) or self.targets.primal[name]

    def rest_gradient(self, name: str, output_spec: Spec) -> None:
        """Bring a gradient to rest as its tensor does: scatter a partial sum over the axes that split the tensor.

        Over other axes it stays partial, so that what is computed from it is reduced once, where it has to be; and it stays
        split over axes that do not split the tensor.
        """
        tensor = self.program.tensors[name]
        tensor_spec = self.targets.primal.get(tensor.gradient_of)
        if tensor_spec is None or tensor.role is Role.WEIGHT_GRADIENT:
            return
        tensor_spec = tensor_spec.with_partial(())
        for dim in tensor_spec.dims:
            extra_axes = tuple(axis for axis in output_spec.axes_of(dim) if axis not in tensor_spec.sharded_axes)
            tensor_spec = tensor_spec.with_axes(dim, tensor_spec.axes_of(dim) + extra_axes)
        spec = tensor_spec.with_partial(axis for axis in output_spec.partial if axis not in tensor_spec.sharded_axes)
        self.reshard_to(name, spec, "a gradient rests as its tensor does")
        self.resting[name] = spec

    def add_carry(self, operation: Carry, placed: OperationSharding) -> None:
        tensor = self.program.tensors[operation.inputs[0]]
        self.steps.append(
            CollectiveStep(
                tensor, Collective(CollectiveKind.SEND_RECV, (operation.axis,), placed.inputs[0], placed.outputs[0])
            )
        )

    def reshard_to(self, name: str, spec: Spec, reason: str) -> None:
        """Make a tensor available in `spec`. A partial sum that is resolved stays resolved."""
        tensor = self.program.tensors[name]
        if spec in self.available[name]:
            return
        start = self.resting[name]
        # A weight comes to its use spec first and further from there: engines gather it once for all its readers.
        if tensor.role is Role.WEIGHT and self.targets.use.get(name, spec) != spec:
            start = self.targets.use[name]
            self.reshard_to(name, start, reason)
        if tensor.role is not Role.CONSTANT:
            for collective in reshard(start, spec):
                if collective.after not in self.available[name]:
                    self.steps.append(CollectiveStep(tensor, collective, reason))
                self.available[name].add(collective.after)
            if self.resting[name].partial and not spec.partial:
                self.resting[name] = spec
        self.available[name].add(spec)

    def rest_result(self, name: str, final_spec: FinalSpec) -> None:
        """Bring a result to the sharding in which it stays."""
        spec = final_spec if isinstance(final_spec, Spec) else final_spec(self.resting[name])
        self.reshard_to(name, spec, "resting sharding of the result")
        self.resting[name] = spec

    def add_aligned_gradients(self, operation: Accumulate) -> Accumulate:
        """Add gradients of equal specs before any of them moves, so that one collective serves them all."""
        *gradients, primal = operation.inputs
        names_by_spec: dict[Spec, list[str]] = {}  # in order of appearance, which fixes the order of the sums
        for name in gradients:
            names_by_spec.setdefault(self.resting[name], []).append(name)
        if len(names_by_spec) == 1:
            return operation
        names = []
        for i, (spec, members) in enumerate(names_by_spec.items()):
            names.append(members[0] if len(members) == 1 else self.add_partial_sum(operation, i, spec, members, primal))
        return Accumulate((*names, primal), operation.outputs)

    def add_partial_sum(self, operation: Accumulate, index: int, spec: Spec, members: list[str], primal: str) -> str:
        name = f"{operation.outputs[0]}+{index}"
        self.program = Program(
            {**self.program.tensors, name: Tensor(name, self.dims[members[0]], self.program.tensors[members[0]].role)},
            self.program.operations, self.program.inputs, self.program.outputs,
        )  # fmt: skip
        self.dims[name] = spec.dims
        partial_sum = Accumulate((*members, primal), (name,))
        self.steps.append(
            ComputeStep(partial_sum, self.place(partial_sum, [*(spec for _ in members), self.current_spec(primal)]))
        )
        self.resting[name] = spec
        self.available[name] = {spec}
        return name
