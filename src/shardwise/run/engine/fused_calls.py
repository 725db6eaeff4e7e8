"""The steps of a phase of a unit as calls, those that run as one kernel together: norms and the loss.

A norm comes with the sums that it reads; the loss over the vocabulary is one call where a rank has all words, several
where it has a part of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.derive.sharded_program import ComputeStep
from shardwise.model.operations import Accumulate, Contract, Map, Operation
from shardwise.model.program import Program, Role
from shardwise.run.engine.call_builder import TRAINS, CallBuilder, KernelCall
from shardwise.run.engine.collective_calls import CollectiveInstruction, build_collective_calls
from shardwise.run.engine.expert_parallel import expert_row_call, moves_expert_rows
from shardwise.run.engine.kernel_calls import build_call
from shardwise.run.engine.ring_calls import RingStep, build_ring_call, ring_outputs
from shardwise.run.kernels.cross_entropy import VocabParallelCrossEntropy, cross_entropy
from shardwise.run.kernels.norms import NORMS, NormKernels
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import LocalSlice


class FusedCall(NamedTuple):
    """A call, the operations that it stands for, and what of their results it has no need to make."""

    call: KernelCall
    operations: tuple[Operation, ...]
    dropped: frozenset[str] = frozenset()


class PhaseSteps(NamedTuple):
    """What is done in a phase, in order."""

    name: str
    parts: Sequence[ComputeStep | CollectiveInstruction | RingStep]

    @property
    def steps(self) -> list[ComputeStep]:
        """Its computations."""
        return [part for part in self.parts if isinstance(part, ComputeStep)]

    @property
    def maps(self) -> Iterator[Map]:
        return (step.operation for step in self.steps if isinstance(step.operation, Map))

    def steps_of(self, operations: Iterable[Operation]) -> list[ComputeStep]:
        """The steps of some operations."""
        wanted = {id(operation) for operation in operations}
        return [step for step in self.steps if id(step.operation) in wanted]


NORM_SUMS = ("sum", "sum_square")
NORM_SUM_GRADIENTS = ("sum_to", "sum_square_dx")


def fuse_norms(calls: CallBuilder, phase: PhaseSteps) -> Iterator[FusedCall]:
    """All norms of a phase whose sums stay where they are made."""
    moved = calls.reduced_statistics()
    for one in _fuse_backward_norms(calls, phase) if phase.name == "backward" else _fuse_forward_norms(calls, phase):
        if moved.isdisjoint(_norm_statistics(one)):
            yield one


def _norm_statistics(one: FusedCall) -> Iterator[str]:
    """The sums that a norm, or its gradient, makes or reads, and their gradients."""
    for operation in one.operations:
        of_norm = isinstance(operation, Map) and operation.function.startswith(tuple(NORMS))
        yield from operation.inputs if of_norm else (*operation.inputs, *operation.outputs)


def _norm_reading(program: Program, sums: str) -> Map:
    """The norm that reads some sums."""
    norms = (one for one in program.operations if isinstance(one, Map) and one.function in NORMS)
    return next(one for one in norms if sums in one.inputs[1:-1])


def _fuse_forward_norms(calls: CallBuilder, phase: PhaseSteps) -> Iterator[FusedCall]:
    """Each norm with the sums that it reads; where these or its result alone are made again, they are made with it."""
    program, maps = calls.unit.forward.program, list(phase.maps)
    sums = {one.outputs[0]: one for one in maps if one.function in NORM_SUMS}
    norms = [one for one in maps if one.function in NORMS]
    for one in {id(norm): norm for norm in (*(_norm_reading(program, name) for name in sums), *norms)}.values():
        x, *kept, weight = one.inputs
        made, results = [name for name in kept if name in sums], [*one.outputs] if one in norms else []
        places = [place for place, name in enumerate((*one.outputs, *kept)) if name in (*results, *made)]
        call = KernelCall(_norm_kernel(NORMS[one.function], calls, places), (x, weight), (*results, *made), phase.name)
        yield FusedCall(call, (*(sums[name] for name in made), *([one] if results else [])))


def _norm_kernel(norm: NormKernels, calls: CallBuilder, places: Sequence[int]) -> Any:
    """Of the result and the sums those at some places, in a tuple where there are several."""
    epsilon, offset = calls.numerics.norm_epsilon, calls.numerics.norm_offset

    def kernel(x: Tensor, weight: Tensor) -> Any:
        every = norm.forward(x, weight + offset if offset else weight, epsilon)
        found = tuple(every[place] for place in places)
        return found if len(found) > 1 else found[0]

    return kernel


def _fuse_backward_norms(calls: CallBuilder, phase: PhaseSteps) -> Iterator[FusedCall]:
    maps = list(phase.maps)
    for one in maps:
        function = one.function.removesuffix("_dx")
        if function not in NORMS or one.function == function:
            continue
        dy, *kept, weight = one.inputs
        of_norm = [
            m for m in maps if m.function.startswith(f"{function}_d") and m.inputs[0] == dy and kept[0] in m.inputs
        ]
        through = {m.outputs[0] for m in of_norm if not m.function.endswith(("_dx", "_dweight"))}
        sums = [m for m in maps if m.function in NORM_SUM_GRADIENTS and m.inputs[0] in through]
        x = next(m.inputs[1] for m in of_norm if m.function.endswith("_dsquares"))
        to_weight = [m.outputs[0] for m in of_norm if m.function.endswith("_dweight")]
        kernel = _norm_gradient_kernel(NORMS[function], calls, needs_weight=bool(to_weight))
        call = KernelCall(kernel, (dy, x, *kept, weight), (*one.outputs, *to_weight), phase.name)
        yield FusedCall(call, (*of_norm, *sums), frozenset(m.outputs[0] for m in sums))


def _norm_gradient_kernel(norm: NormKernels, calls: CallBuilder, *, needs_weight: bool) -> Any:
    offset = calls.numerics.norm_offset

    def kernel(dy: Tensor, x: Tensor, *others: Tensor) -> Any:
        *kept, weight = others
        scaled = weight + offset if offset else weight
        found = norm.backward(dy, x, *kept, scaled, needs_weight=needs_weight)
        return found if needs_weight else found[0]

    return kernel


LOSS_GRADIENT_MAPS = ("scale", "token_loss_dsum", "negate", "sum_exp_dx")


def fuse_loss(calls: CallBuilder, phase: PhaseSteps) -> Iterator[FusedCall]:
    """Those of a head's phase."""
    logits = _logits_name(calls)
    if logits is None or phase.name == "recompute":
        return
    group = _loss_operations(calls, phase, logits)
    axes = calls.rank.nontrivial_axes(calls.unit.forward.specs[logits].axes_of("V"))
    if not group:
        return
    if phase.name == "forward":
        yield from (
            _parallel_loss(calls, group, logits, axes) if axes else [_whole_vocabulary_loss(calls, group, logits)]
        )
    else:
        yield _parallel_gradient(calls, group, logits, axes) if axes else _whole_vocabulary_gradient(group, logits)


def _loss_operations(calls: CallBuilder, phase: PhaseSteps, logits: str) -> list[Operation]:
    """What is made of the logits, or the gradient that is made of the loss's."""
    if phase.name == "forward":
        behind, group = {logits}, list[Operation]()
        for step in phase.steps:
            if behind & set(step.operation.inputs):
                group.append(step.operation)
                behind |= set(step.operation.outputs)
        return group
    return [step.operation for step in phase.steps if _is_loss_gradient(calls, step)]


def _is_loss_gradient(calls: CallBuilder, step: ComputeStep) -> bool:
    if getattr(step.operation, "function", "") in LOSS_GRADIENT_MAPS:
        return True
    return calls.unit.tensors[step.operation.outputs[0]].role is Role.LOGITS and not isinstance(
        step.operation, Contract
    )


def _whole_vocabulary_loss(calls: CallBuilder, group: list[Operation], logits: str) -> FusedCall:
    """All in one; with a backward pass to come, logits become their gradient."""
    targets = next(one.inputs[1] for one in group if one.kind == "lookup")
    scale, cap = group[-1].inputs[1], calls.numerics.logit_cap

    def kernel(logits: Tensor, targets: Tensor, scale: Tensor, trains: bool) -> Tensor:
        return cross_entropy(logits, targets, scale, cap, replace=trains)

    return FusedCall(KernelCall(kernel, (logits, targets, scale, TRAINS), group[-1].outputs, "forward"), tuple(group))


def _whole_vocabulary_gradient(group: list[Operation], logits: str) -> FusedCall:
    """The gradient of the logits, which the forward pass has written over them."""
    return FusedCall(KernelCall(lambda x: x, (logits,), group[-1].outputs, "backward", is_view=True), tuple(group))


def _local_vocabulary(calls: CallBuilder, axes: Axes) -> VocabParallelCrossEntropy:
    width, vocabulary = calls.sizes["V"] // calls.rank.mesh.size(axes), calls.architecture.vocab_size
    first = calls.rank.position(axes) * width
    return VocabParallelCrossEntropy(first, min(max(vocabulary - first, 0), width), calls.numerics.logit_cap)


def _by_function(group: Iterable[Operation]) -> dict[str, Any]:
    """The operations of a head's loss by what they do."""
    return {getattr(one, "function", one.kind): one for one in group}


def _parallel_loss(calls: CallBuilder, group: list[Operation], logits: str, axes: Axes) -> Iterator[FusedCall]:
    """Steps between which statistics are made whole."""
    own, named = _local_vocabulary(calls, axes), _by_function(group)
    largest, total, target = (named[name] for name in ("maximum", "sum_exp", "lookup"))
    token, last = named["token_loss"], named["scaled_sum"]
    yield FusedCall(KernelCall(own.largest, largest.inputs, largest.outputs, "forward"), (largest,))
    yield FusedCall(KernelCall(own.sum_exp, total.inputs, total.outputs, "forward"), (total,))
    yield FusedCall(KernelCall(own.target_logit, target.inputs, target.outputs, "forward"), (target,))
    targets = calls.key(target.inputs[1], calls.unit.forward.specs[target.outputs[0]])
    reads = (*token.inputs, targets, last.inputs[1])
    yield FusedCall(KernelCall(own.loss, reads, last.outputs, "forward"), (token, last))


def _parallel_gradient(calls: CallBuilder, group: list[Operation], logits: str, axes: Axes) -> FusedCall:
    """The gradient of this rank's logits, over them."""
    named, forward = _by_function(group), _by_function(calls.unit.forward.program.operations)
    largest, total = forward["maximum"].outputs[0], forward["sum_exp"].outputs[0]
    targets, scale = forward["lookup"].inputs[1], named["scale"].inputs[1]
    reads = (logits, largest, total, targets, scale)
    return FusedCall(
        KernelCall(_local_vocabulary(calls, axes).gradient, reads, group[-1].outputs, "backward", is_view=True),
        tuple(group),
    )


def _logits_name(calls: CallBuilder) -> str | None:
    operations: Iterable[Operation] = calls.unit.forward.program.operations
    made = (one.outputs[0] for one in operations if isinstance(one, Contract))
    return next((name for name in made if calls.unit.tensors[name].role is Role.LOGITS), None)


def find_fused_groups(calls: CallBuilder, phase: PhaseSteps) -> list[FusedCall]:
    """All groups of a phase that have a kernel of their own."""
    return [*fuse_norms(calls, phase), *fuse_loss(calls, phase)]


def build_phase_calls(calls: CallBuilder, phase: PhaseSteps) -> Iterator[KernelCall]:
    """A phase's calls in order, each group where the last of its steps stands."""
    groups = find_fused_groups(calls, phase)
    dropped = frozenset(name for group in groups for name in group.dropped)
    group_of = {id(operation): group for group in groups for operation in group.operations}
    left = {id(group): len(group.operations) for group in groups}
    within = {name for group in groups for one in group.operations for name in one.outputs} - {
        name for group in groups for name in group.call.writes
    }  # what no call makes
    for step in phase.parts:
        if isinstance(step, RingStep):
            yield replace(build_ring_call(calls, step, phase.name), results=ring_outputs(step))
            continue
        if not isinstance(step, ComputeStep):
            unmade = isinstance(step, LocalSlice) and step.step.tensor.name in within
            moves = None if isinstance(step, LocalSlice) else step.collective
            if moves_expert_rows(step, calls):
                yield replace(expert_row_call(calls, step, phase.name), traffic=moves)
            elif not unmade:
                yield from (replace(call, traffic=moves) for call in build_collective_calls(calls, step, phase.name))
            continue
        group = group_of.get(id(step.operation))
        if group is None:
            made = build_call(calls, _drop_summed_terms(step, dropped), phase.name)
            yield replace(made, results=step.operation.outputs)
            continue
        left[id(group)] -= 1
        if not left[id(group)]:
            made = calls.with_tensor_keys(group.call, phase.steps_of(group.operations))
            yield replace(made, results=tuple(name for one in group.operations for name in one.outputs))


def _drop_summed_terms(step: ComputeStep, dropped: frozenset[str]) -> ComputeStep:
    """A sum of gradients without those that are parts of others."""
    operation = step.operation
    if not isinstance(operation, Accumulate) or dropped.isdisjoint(operation.inputs):
        return step
    kept = tuple(name for name in operation.inputs if name not in dropped)
    return ComputeStep(Accumulate(kept, operation.outputs), step.placed)
