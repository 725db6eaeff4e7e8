"""Operations that run as one kernel: norms, the gradients of gated activations, and the loss.

A norm takes the sums that it reads with it, and the sum of two tensors whose norm it is, as in a residual stream; its
gradient takes the sum with the stream's gradient. The loss is one call where a rank has the whole vocabulary, and several
where it has a part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from shardwise.derive import CollectiveStep, ComputeStep
from shardwise.derive.producer_casts import GATED_GRADIENTS
from shardwise.model import Accumulate, Contract, Map, Operation, Program, Role
from shardwise.run.engine.calls import TRAINS, CallBuilder, KernelCall, form_key
from shardwise.run.kernels.activation_casts import OutputCast
from shardwise.run.kernels.cross_entropy import VocabParallelCrossEntropy, cross_entropy
from shardwise.run.kernels.elementwise import gated_forms, gated_gradient_forms
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
    fuse = _fuse_backward_norms if phase == "backward" else _fuse_forward_norms
    for fused in fuse(builder, phase, steps):
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


def _fuse_forward_norms(builder: CallBuilder, phase: str, steps: Sequence[ComputeStep]) -> Iterator[FusedCall]:
    """Yield each norm with the sums that it reads; a recompute phase may need only its result or only its sums."""
    program, maps = builder.unit.forward.program, _maps(steps)
    sums = {operation.outputs[0]: operation for operation in maps if operation.function in NORM_SUMS}
    norms = [operation for operation in maps if operation.function in NORMS]
    for norm in {id(norm): norm for norm in (*(_norm_reading(program, name) for name in sums), *norms)}.values():
        x, *statistics, weight = norm.inputs
        fused_sums, results = [name for name in statistics if name in sums], [*norm.outputs] if norm in norms else []
        operations = (*(sums[name] for name in fused_sums), *([norm] if results else []))
        cast = builder.output_cast(phase, norm.outputs[0]) if results else None
        output = NormOutput(NORMS[norm.function], cast, bool(results), tuple(name in sums for name in statistics))
        total = _sum_before(builder, phase, steps, x, operations)
        writes = (*(key for name in results for key in result_keys(name, cast)), *fused_sums)
        if total is None:
            kernel = _norm_kernel(output, builder)
            yield FusedCall(KernelCall(kernel, (x, weight), writes, phase), operations)
        else:
            kernels = [_sum_norm_kernel(output, builder, i) for i in (None, 0, 1)]
            call = KernelCall(
                kernels[0], (*total.inputs, weight), (x, *writes), phase, over=dict(enumerate(kernels[1:]))
            )
            yield FusedCall(call, (total, *operations))


def _maps(steps: Sequence[ComputeStep]) -> list[Map]:
    return [step.operation for step in steps if isinstance(step.operation, Map)]


def _sum_before(
    builder: CallBuilder, phase: str, steps: Sequence[ComputeStep], x: str, norm: Sequence[Operation]
) -> Map | None:
    """Return the sum of two tensors that is x, where the operations of a norm follow it and nothing else takes x before
    they have run; None: there is no such sum."""
    total = next((step for step in steps if x in step.operation.outputs), None)
    if total is None or not isinstance(total.operation, Map) or total.operation.function != "add":
        return None
    last, derived = norm[-1], builder.unit.phases()[phase]
    if any(isinstance(step, CollectiveStep) and step.tensor.name == x for step in derived):
        return None
    computed = [step for step in derived if isinstance(step, ComputeStep)]
    first_index, last_index = (
        next(i for i, step in enumerate(computed) if step.operation is operation)
        for operation in (total.operation, last)
    )
    between = [step.operation for step in computed[first_index + 1 : last_index]]
    if any(x in operation.inputs and operation not in norm for operation in between):
        return None
    return total.operation if _adds_where_they_are(builder, total, total.operation.inputs) else None


def _adds_where_they_are(builder: CallBuilder, step: ComputeStep, terms: Sequence[str]) -> bool:
    """Return whether a step adds two tensors of tokens that have the dims and the sharding of the sum."""
    specs = dict(zip(step.operation.inputs, step.placed.inputs, strict=False))
    out = builder.rank.sharding(step.placed.outputs[0])
    is_local = all(builder.rank.sharding(specs[name]) == out for name in terms)
    return len(terms) == 2 and is_local and not builder.is_routed(*terms)


class NormOutput(NamedTuple):
    """Results of a norm that a call writes: its result, in the forms of a `cast` if any, and some of its statistics."""

    norm: NormKernels
    cast: OutputCast | None
    has_result: bool
    has_statistics: tuple[bool, ...]

    def select(self, forms: Sequence[Any], statistics: Sequence[Tensor]) -> tuple[Any, ...]:
        """Return the results that are written."""
        selected = (tensor for tensor, is_read in zip(statistics, self.has_statistics, strict=True) if is_read)
        return (*(forms if self.has_result else ()), *selected)


def result_keys(name: str, cast: OutputCast | None) -> tuple[str, ...]:
    """Return the slots of a result: one for each form in which it is written."""
    return (name,) if cast is None else tuple(form_key(name, form) for form in cast.forms)


def _norm_kernel(output: NormOutput, builder: CallBuilder) -> Any:
    """Return a kernel that computes a norm and returns its results, in a tuple where there are several."""
    epsilon, offset = builder.numerics.norm_epsilon, builder.numerics.norm_offset

    def kernel(x: Tensor, weight: Tensor) -> Any:
        forms, statistics = output.norm.forward(x, weight + offset if offset else weight, epsilon, output.cast)
        selected = output.select(forms, statistics)
        return selected if len(selected) > 1 else selected[0]

    return kernel


def _sum_norm_kernel(output: NormOutput, builder: CallBuilder, overwritten: int | None) -> Any:
    """Return a kernel that computes a sum and its norm, and returns the sum and the norm's results; the sum is written over
    one of its terms, if any is `overwritten`."""
    epsilon, offset = builder.numerics.norm_epsilon, builder.numerics.norm_offset

    def kernel(*operands: Tensor) -> tuple[Any, ...]:
        first, second, weight = operands
        into = None if overwritten is None else operands[overwritten]
        scale = weight + offset if offset else weight
        total, forms, statistics = output.norm.forward_of_sum((first, second), scale, epsilon, output.cast, into)
        return total, *output.select(forms, statistics)

    return kernel


def _fuse_backward_norms(builder: CallBuilder, phase: str, steps: Sequence[ComputeStep]) -> Iterator[FusedCall]:
    """Yield each norm's gradients, with the sum of its input's gradient and one other term."""
    maps = _maps(steps)
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
        kernel = partial(_norm_gradients, NORMS[function], builder.numerics.norm_offset, bool(weight_gradients))
        reads, dropped = (dy, x, *statistics, weight), frozenset(m.outputs[0] for m in sums)
        stream = _stream_gradient(builder, steps, norm.outputs[0], dropped)
        if stream is None:
            call = KernelCall(partial(kernel, None, False), reads, (*norm.outputs, *weight_gradients), phase)
            yield FusedCall(call, (*norm_maps, *sums), dropped)
        else:
            term, total = stream
            call = KernelCall(
                partial(kernel, len(reads), False), (*reads, term), (*total.outputs, *weight_gradients), phase,
                over={len(reads): partial(kernel, len(reads), True)},
            )  # fmt: skip
            yield FusedCall(call, (*norm_maps, *sums, total))


def _stream_gradient(
    builder: CallBuilder, steps: Sequence[ComputeStep], dx: str, dropped: Set[str]
) -> tuple[str, Accumulate] | None:
    """Return the only term of a sum of gradients beside a norm's dx and those `dropped` into it, and the sum; None: the sum
    has more terms, or a collective moves dx before."""
    collectives = (step for step in builder.unit.phases()["backward"] if isinstance(step, CollectiveStep))
    if any(step.tensor.name == dx for step in collectives):
        return None
    for step in steps:
        operation = step.operation
        if isinstance(operation, Accumulate) and dx in operation.operands:
            stream = [name for name in operation.operands if name != dx and name not in dropped]
            is_only = len(stream) == 1 and dropped <= set(operation.operands)
            return (stream[0], operation) if is_only and _adds_where_they_are(builder, step, [dx, *stream]) else None
    return None


def _norm_gradients(
    norm: NormKernels, offset: float, needs_weight: bool, term: int | None, overwrites: bool, *operands: Tensor
) -> Any:
    """Return the gradients of a norm; the operand at `term` is added to that of its input, which may overwrite it."""
    dtotal, operands = (None, operands) if term is None else (operands[term], operands[:term])
    dy, x, *statistics, weight = operands
    gradients = norm.backward(
        dy, x, *statistics, weight + offset if offset else weight, needs_weight=needs_weight, dtotal=dtotal,
        into=dtotal if overwrites else None,
    )  # fmt: skip
    return gradients if needs_weight else gradients[0]


def fuse_gated_gradients(builder: CallBuilder, steps: Sequence[ComputeStep]) -> Iterator[FusedCall]:
    """Yield the pairs of gradients of gated activations, which read the same operands."""
    maps = {operation.outputs[0]: operation for step in steps if isinstance(operation := step.operation, Map)}
    ups = {(m.function.removesuffix("_dup"), m.inputs[0]): m for m in maps.values() if m.function.endswith("_dup")}
    for gradient in maps.values():
        kind = gradient.function.removesuffix("_dgate")
        up_gradient = ups.get((kind, gradient.inputs[0])) if kind != gradient.function else None
        if up_gradient is not None:
            outputs = (*gradient.outputs, *up_gradient.outputs)
            gate_cast, up_cast = (builder.output_cast("backward", name) for name in outputs)
            kernel = partial(gated_gradient_forms, kind, (gate_cast, up_cast))
            writes = (*result_keys(outputs[0], gate_cast), *result_keys(outputs[1], up_cast))
            yield FusedCall(KernelCall(kernel, gradient.inputs, writes, "backward"), (gradient, up_gradient))


def fuse_gated_casts(builder: CallBuilder, phase: str, steps: Sequence[ComputeStep]) -> Iterator[FusedCall]:
    """Yield the gated activations of a phase that write what products read."""
    for operation in _maps(steps):
        cast = builder.output_cast(phase, operation.outputs[0])
        if cast is None or operation.function in NORMS or operation.function.endswith(GATED_GRADIENTS):
            continue
        keys, kernel = result_keys(operation.outputs[0], cast), partial(gated_forms, operation.function, cast)
        single = (lambda *operands, kernel=kernel: kernel(*operands)[0]) if len(keys) == 1 else kernel
        yield FusedCall(KernelCall(single, operation.inputs, keys, phase), (operation,))


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
        *fuse_gated_casts(builder, phase, steps),
        *fuse_gated_gradients(builder, steps),
        *fuse_loss(builder, phase, steps),
    ]
