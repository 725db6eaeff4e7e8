"""Operations that run as one kernel: norms, the gradients of gated activations, and the loss.

A norm takes the sums that it reads with it; the loss is one call where a rank has the whole vocabulary, and several
where it has a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.derive import ComputeStep
from shardwise.model import Contract, Map, Operation, Program, Role
from shardwise.run.engine.calls import TRAINS, CallBuilder, KernelCall
from shardwise.run.kernels.cross_entropy import VocabParallelCrossEntropy, cross_entropy
from shardwise.run.kernels.elementwise import gated_gradients
from shardwise.run.kernels.norms import NORMS, NormKernels
from shardwise.sharding import Axes


class FusedCall(NamedTuple):
    """A call, the operations that it stands for, and those of their results that it need not make (`dropped`)."""

    call: KernelCall
    operations: tuple[Operation, ...]
    dropped: frozenset[str] = frozenset()


NORM_SUMS = ("sum", "sum_square")
NORM_SUM_GRADIENTS = ("sum_to", "sum_square_dx")


def fuse_norms(builder: CallBuilder, phase: str, steps: Sequence[ComputeStep]) -> Iterator[FusedCall]:
    """Yield the norms of a phase whose sums no collective reduces."""
    maps = [step.operation for step in steps if isinstance(step.operation, Map)]
    for fused in (
        _fuse_backward_norms(builder, maps) if phase == "backward" else _fuse_forward_norms(builder, phase, maps)
    ):
        if builder.reduced_statistics.isdisjoint(_norm_statistics(fused)):
            yield fused


def _norm_statistics(fused: FusedCall) -> Iterator[str]:
    """Yield the sums that a norm, or its gradient, makes or reads, and their gradients."""
    for operation in fused.operations:
        is_norm = isinstance(operation, Map) and operation.function.startswith(tuple(NORMS))
        yield from operation.inputs if is_norm else (*operation.inputs, *operation.outputs)


def _norm_reading(program: Program, sums: str) -> Map:
    """Return the norm that reads some sums."""
    maps = (operation for operation in program.operations if isinstance(operation, Map))
    return next(norm for norm in maps if norm.function in NORMS and sums in norm.inputs[1:-1])


def _fuse_forward_norms(builder: CallBuilder, phase: str, maps: Sequence[Map]) -> Iterator[FusedCall]:
    """Yield each norm with the sums that it reads; a recompute phase may need only its result or only its sums."""
    program = builder.unit.forward.program
    sums = {operation.outputs[0]: operation for operation in maps if operation.function in NORM_SUMS}
    norms = [operation for operation in maps if operation.function in NORMS]
    for norm in {id(norm): norm for norm in (*(_norm_reading(program, name) for name in sums), *norms)}.values():
        x, *statistics, weight = norm.inputs
        fused_sums, results = [name for name in statistics if name in sums], [*norm.outputs] if norm in norms else []
        positions = [i for i, name in enumerate((*norm.outputs, *statistics)) if name in (*results, *fused_sums)]
        call = KernelCall(
            _norm_kernel(NORMS[norm.function], builder, positions), (x, weight), (*results, *fused_sums), phase
        )
        yield FusedCall(call, (*(sums[name] for name in fused_sums), *([norm] if results else [])))


def _norm_kernel(norm: NormKernels, builder: CallBuilder, positions: Sequence[int]) -> Any:
    """Return a kernel that computes a norm and returns its outputs at `positions`, in a tuple where there are several."""
    epsilon, offset = builder.numerics.norm_epsilon, builder.numerics.norm_offset

    def kernel(x: Tensor, weight: Tensor) -> Any:
        tensors = norm.forward(x, weight + offset if offset else weight, epsilon)
        selected = tuple(tensors[i] for i in positions)
        return selected if len(selected) > 1 else selected[0]

    return kernel


def _fuse_backward_norms(builder: CallBuilder, maps: Sequence[Map]) -> Iterator[FusedCall]:
    for norm in maps:
        function = norm.function.removesuffix("_dx")
        if function not in NORMS or norm.function == function:
            continue
        dy, *statistics, weight = norm.inputs
        gradient_maps = (m for m in maps if m.function.startswith(f"{function}_d"))
        norm_maps = [m for m in gradient_maps if m.inputs[0] == dy and statistics[0] in m.inputs]
        intermediates = {m.outputs[0] for m in norm_maps if not m.function.endswith(("_dx", "_dweight"))}
        sums = [m for m in maps if m.function in NORM_SUM_GRADIENTS and m.inputs[0] in intermediates]
        x = next(m.inputs[1] for m in norm_maps if m.function.endswith("_dsquares"))
        weight_gradients = [m.outputs[0] for m in norm_maps if m.function.endswith("_dweight")]
        kernel = _norm_gradient_kernel(NORMS[function], builder, needs_weight=bool(weight_gradients))
        call = KernelCall(kernel, (dy, x, *statistics, weight), (*norm.outputs, *weight_gradients), "backward")
        yield FusedCall(call, (*norm_maps, *sums), frozenset(m.outputs[0] for m in sums))


def _norm_gradient_kernel(norm: NormKernels, builder: CallBuilder, *, needs_weight: bool) -> Any:
    offset = builder.numerics.norm_offset

    def kernel(dy: Tensor, x: Tensor, *saved: Tensor) -> Any:
        *statistics, weight = saved
        scaled = weight + offset if offset else weight
        gradients = norm.backward(dy, x, *statistics, scaled, needs_weight=needs_weight)
        return gradients if needs_weight else gradients[0]

    return kernel


def fuse_gated_gradients(builder: CallBuilder, steps: Sequence[ComputeStep]) -> Iterator[FusedCall]:
    """Yield the pairs of gradients of gated activations, which read the same operands."""
    maps = {operation.outputs[0]: operation for step in steps if isinstance(operation := step.operation, Map)}
    ups = {(m.function.removesuffix("_dup"), m.inputs[0]): m for m in maps.values() if m.function.endswith("_dup")}
    for gradient in maps.values():
        kind = gradient.function.removesuffix("_dgate")
        up_gradient = ups.get((kind, gradient.inputs[0])) if kind != gradient.function else None
        if up_gradient is not None:
            outputs = (*gradient.outputs, *up_gradient.outputs)
            call = KernelCall(partial(gated_gradients, kind), gradient.inputs, outputs, "backward")
            yield FusedCall(call, (gradient, up_gradient))


LOSS_GRADIENT_MAPS = ("scale", "token_loss_dsum", "negate", "sum_exp_dx")


def fuse_loss(builder: CallBuilder, phase: str, steps: Sequence[ComputeStep]) -> Iterator[FusedCall]:
    """Yield the calls that stand for the loss, or its gradient, in a phase of the head."""
    logits = _logits_name(builder)
    if logits is None or phase == "recompute":
        return
    group = _loss_operations(builder, phase, steps, logits)
    axes = builder.rank.nontrivial_axes(builder.unit.forward.specs[logits].axes_of("V"))
    if not group:
        return
    if phase == "backward":
        yield _parallel_gradient(builder, group, logits, axes) if axes else _whole_vocabulary_gradient(group, logits)
    elif axes:
        yield from _parallel_loss(builder, group, logits, axes)
    else:
        yield _whole_vocabulary_loss(builder, group, logits)


def _loss_operations(builder: CallBuilder, phase: str, steps: Sequence[ComputeStep], logits: str) -> list[Operation]:
    """Return the operations from the logits to the loss, or from the loss to the gradient of the logits."""
    if phase == "forward":
        derived, group = {logits}, list[Operation]()
        for step in steps:
            if derived & set(step.operation.inputs):
                group.append(step.operation)
                derived |= set(step.operation.outputs)
        return group
    return [step.operation for step in steps if _is_loss_gradient(builder, step)]


def _is_loss_gradient(builder: CallBuilder, step: ComputeStep) -> bool:
    if getattr(step.operation, "function", "") in LOSS_GRADIENT_MAPS:
        return True
    return builder.unit.tensors[step.operation.outputs[0]].role is Role.LOGITS and not isinstance(
        step.operation, Contract
    )


def _whole_vocabulary_loss(builder: CallBuilder, group: list[Operation], logits: str) -> FusedCall:
    """Return the loss as one call; where a backward pass follows, it replaces the logits by their gradient."""
    targets = next(operation.inputs[1] for operation in group if operation.kind == "lookup")
    scale, cap = group[-1].inputs[1], builder.numerics.logit_cap

    def kernel(logits: Tensor, targets: Tensor, scale: Tensor, trains: bool) -> Tensor:
        return cross_entropy(logits, targets, scale, cap, replace=trains)

    return FusedCall(KernelCall(kernel, (logits, targets, scale, TRAINS), group[-1].outputs, "forward"), tuple(group))


def _whole_vocabulary_gradient(group: list[Operation], logits: str) -> FusedCall:
    """Return the gradient of the logits, which the forward pass wrote over them."""
    return FusedCall(KernelCall(lambda x: x, (logits,), group[-1].outputs, "backward", is_view=True), tuple(group))


def _local_vocabulary(builder: CallBuilder, axes: Axes) -> VocabParallelCrossEntropy:
    width, vocabulary = builder.sizes["V"] // builder.rank.mesh.size(axes), builder.architecture.vocab_size
    first = builder.rank.position(axes) * width
    return VocabParallelCrossEntropy(first, min(max(vocabulary - first, 0), width), builder.numerics.logit_cap)


def _by_function(group: Iterable[Operation]) -> dict[str, Any]:
    """Return the operations of a head's loss by function."""
    return {getattr(operation, "function", operation.kind): operation for operation in group}


def _parallel_loss(builder: CallBuilder, group: list[Operation], logits: str, axes: Axes) -> Iterator[FusedCall]:
    """Yield the kernels of a vocabulary-parallel loss; collectives reduce the statistics between them."""
    vocabulary, by_function = _local_vocabulary(builder, axes), _by_function(group)
    largest, total, target = (by_function[name] for name in ("maximum", "sum_exp", "lookup"))
    token, last = by_function["token_loss"], by_function["scaled_sum"]
    yield FusedCall(KernelCall(vocabulary.largest, largest.inputs, largest.outputs, "forward"), (largest,))
    yield FusedCall(KernelCall(vocabulary.local_sum_exp, total.inputs, total.outputs, "forward"), (total,))
    yield FusedCall(KernelCall(vocabulary.target_logit, target.inputs, target.outputs, "forward"), (target,))
    targets = builder.tensor_key(target.inputs[1], builder.unit.forward.specs[target.outputs[0]])
    reads = (*token.inputs, targets, last.inputs[1])
    yield FusedCall(KernelCall(vocabulary.loss, reads, last.outputs, "forward"), (token, last))


def _parallel_gradient(builder: CallBuilder, group: list[Operation], logits: str, axes: Axes) -> FusedCall:
    """Return the call that overwrites this rank's logits with their gradient."""
    by_function, forward = _by_function(group), _by_function(builder.unit.forward.program.operations)
    largest, total = forward["maximum"].outputs[0], forward["sum_exp"].outputs[0]
    targets, scale = forward["lookup"].inputs[1], by_function["scale"].inputs[1]
    reads = (logits, largest, total, targets, scale)
    return FusedCall(
        KernelCall(_local_vocabulary(builder, axes).gradient, reads, group[-1].outputs, "backward", is_view=True),
        tuple(group),
    )


def _logits_name(builder: CallBuilder) -> str | None:
    operations: Iterable[Operation] = builder.unit.forward.program.operations
    outputs = (operation.outputs[0] for operation in operations if isinstance(operation, Contract))
    return next((name for name in outputs if builder.unit.tensors[name].role is Role.LOGITS), None)


def find_fused_calls(builder: CallBuilder, phase: str, steps: Sequence[ComputeStep]) -> list[FusedCall]:
    """Return the calls that stand for several operations of a phase (forward, recompute or backward)."""
    return [
        *fuse_norms(builder, phase, steps),
        *fuse_gated_gradients(builder, steps),
        *fuse_loss(builder, phase, steps),
    ]
