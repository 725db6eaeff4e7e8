"""Derived steps as calls of PyTorch kernels: one function for each kind of operation, those of routers and experts among
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.derive.sharded_program import ComputeStep
from shardwise.model.operations import (
    Accumulate,
    Concatenate,
    ConcatenateGradient,
    Contract,
    Lookup,
    Map,
    Operation,
    Route,
    RouteGradient,
    Scan,
    ScanGradient,
    Scatter,
)
from shardwise.run.engine.call_builder import (
    ANGLES,
    BALANCE_BIAS,
    MASK,
    PENALTY,
    ROUTER_STATISTICS,
    CallBuilder,
    KernelCall,
)
from shardwise.run.engine.expert_parallel import dispatch_dx
from shardwise.run.kernels import experts, norms
from shardwise.run.kernels.attention import Attention, sink_gradient
from shardwise.run.kernels.elementwise import FUNCTIONS, ElementwiseFunction
from shardwise.run.kernels.experts import ExpertRows
from shardwise.run.kernels.matmul import Einsum, OperandScales, as_matmul
from shardwise.run.kernels.rotary import rotate, rotate_back
from shardwise.sharding.spec import Spec


def build_call(calls: CallBuilder, step: ComputeStep, phase: str) -> KernelCall:
    """The call of one step."""
    call = CALL_BUILDERS[type(step.operation)](calls, step, step.operation)
    return calls.with_tensor_keys(replace(call, phase=phase), [step])


def _contract(calls: CallBuilder, step: ComputeStep, operation: Contract) -> KernelCall:
    (name,), reads = operation.outputs, operation.inputs
    if calls.is_routed(*reads):
        return expert_matmul_call(calls, step, operation)
    narrow = calls.quantized_matmul(step)
    if narrow is not None:
        return KernelCall(narrow, (*reads, *narrow.reads), (name,), into=narrow.into, never_compiled=True)
    dims = [spec.dims for spec in step.placed.inputs]
    result = step.placed.outputs[0].dims
    product = as_matmul(dims[0], dims[1], result, calls.local_sizes(step)) if len(dims) == 2 else None
    if product is None:
        return KernelCall(Einsum(dims, result), reads, (name,))
    return KernelCall(product, reads, (name,), into=product.into)


def _accumulate(calls: CallBuilder, step: ComputeStep, operation: Accumulate) -> KernelCall:
    reads, (name,) = operation.operands, operation.outputs
    if len(reads) == 1:
        return KernelCall(lambda x: x, reads, (name,), is_view=True)

    def kernel(first: Tensor, second: Tensor, *further: Tensor) -> Tensor:
        out = first + second
        for one in further:
            out.add_(one)
        return out

    return KernelCall(
        kernel, reads, (name,), over={place: partial(_add_in_place, place) for place in range(len(reads))}
    )


def _add_in_place(place: int, *terms: Tensor) -> Tensor:
    """The sum of all, over one of them."""
    out = terms[place]
    for one in (*terms[:place], *terms[place + 1 :]):
        out.add_(one)
    return out


def _map(calls: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    special = SPECIAL_MAPS.get(operation.function)
    if special is not None:
        return special(calls, step, operation)
    (name,), reads = operation.outputs, operation.inputs
    if calls.is_routed(*reads):
        rows = calls.rows(step.placed.inputs[0])
        if operation.function == "add_vector":
            return KernelCall(
                lambda x, vectors, routing: x + routing.repeat_per_row(vectors), (*reads, rows), (name,),
                over={0: lambda x, vectors, routing: x.add_(routing.repeat_per_row(vectors))},
            )  # fmt: skip
        if operation.function == "sum_to":
            return KernelCall(experts.sum_expert_rows, (*reads, rows), (name,))
    if operation.function == "sum_to" and "T" in step.placed.outputs[0].dims:
        return _alias_input(
            calls, step, operation
        )  # of positions, which documents have of their own: `_scatter` adds them up
    over = {}
    if operation.function in ("add", "add_vector") and len(reads) == 2:
        full = [place for place, spec in enumerate(step.placed.inputs) if spec.dims == step.placed.outputs[0].dims]
        over = {place: partial(_add_in_place, place) for place in full}
    return KernelCall(_elementwise_kernel(calls, step, operation), reads, (name,), over=over)


def _elementwise_kernel(calls: CallBuilder, step: ComputeStep, operation: Map) -> Callable[..., Tensor]:
    """A function of aligned operands, summed over the dims that its result lacks, in the result's format."""
    function, out = _elementwise_function(calls, operation), step.placed.outputs[0].dims
    dims = [spec.dims for spec in step.placed.inputs]
    union = max((*dims, out), key=len)
    views = [_alignment_view(one, union) for one in dims]
    summed = tuple(place for place, dim in enumerate(union) if dim not in out)
    dtype = calls.dtype_of(operation.outputs[0])
    plain = all(view is None for view in views) and not summed

    def kernel(*operands: Tensor) -> Tensor:
        result = function(*(x if view is None else view(x) for view, x in zip(views, operands, strict=True)))
        result = result.sum(dim=summed) if summed else result
        return result if result.dtype == dtype else result.to(dtype)

    def direct(*operands: Tensor) -> Tensor:
        result = function(*operands)
        return result if result.dtype == dtype else result.to(dtype)

    return direct if plain else kernel


def _elementwise_function(calls: CallBuilder, operation: Map) -> ElementwiseFunction:
    """What an elementwise operation does with aligned operands."""
    if operation.function not in norms.NORM_STEPS:
        return FUNCTIONS[operation.function]
    width, numerics = math.prod(calls.sizes[dim] for dim in operation.over), calls.numerics
    return norms.norm_step(operation.function, width, numerics.norm_epsilon, numerics.norm_offset)


def _alignment_view(dims: tuple[str, ...], union: tuple[str, ...]) -> Callable[[Tensor], Tensor] | None:
    """An operand's view with a dim of 1 for each that it lacks; None where it broadcasts as it is."""
    if union[len(union) - len(dims) :] == dims:
        return None
    order = [dims.index(dim) for dim in union if dim in dims]
    lacking = [place for place, dim in enumerate(union) if dim not in dims]

    def view(x: Tensor) -> Tensor:
        x = x.permute(order)
        for place in lacking:
            x = x.unsqueeze(place)
        return x

    return view


def _join(calls: CallBuilder, step: ComputeStep, operation: Concatenate) -> KernelCall:
    out, dims = step.placed.outputs[0].dims, [spec.dims for spec in step.placed.inputs]
    place = next(i for i, dim in enumerate(out) if all(dim not in one for one in dims))
    own = [tuple(part if i == place else dim for i, dim in enumerate(out)) for part in operation.parts]
    views = [_alignment_view(one, whole) for one, whole in zip(dims, own, strict=True)]
    fullest = max(range(len(dims)), key=lambda one: len(dims[one]))

    def kernel(*operands: Tensor) -> Tensor:
        whole = operands[fullest].shape
        aligned = [x if view is None else view(x) for view, x in zip(views, operands, strict=True)]
        return torch.cat([x.expand(*whole[:place], x.shape[place], *whole[place + 1 :]) for x in aligned], dim=place)

    return KernelCall(kernel, operation.inputs, operation.outputs)


def _part(calls: CallBuilder, step: ComputeStep, operation: ConcatenateGradient) -> KernelCall:
    spec, like = step.placed.inputs[0].dims, step.placed.outputs[0].dims
    sizes = [calls.sizes[dim] for dim in operation.parts]
    place, width = spec.index(operation.joined), sizes[operation.position]
    start = sum(sizes[: operation.position])
    dims = [operation.parts[operation.position] if dim == operation.joined else dim for dim in spec]
    summed = tuple(i for i, dim in enumerate(dims) if dim not in like)

    def kernel(dy: Tensor) -> Tensor:
        taken = dy.narrow(place, start, width)
        return taken.sum(dim=summed) if summed else taken

    return KernelCall(kernel, operation.operands, operation.outputs, is_view=not summed)


def _lookup(calls: CallBuilder, step: ComputeStep, operation: Lookup) -> KernelCall:
    scale = calls.numerics.embedding_scale if operation.dim == "V" else 1.0
    own = _local_row_lookup(calls, step.placed.inputs[0], operation.dim)

    def kernel(table: Tensor, index: Tensor) -> Tensor:
        found, has = own(index)
        rows = F.embedding(found, table)
        rows = rows if has is None else rows.mul_(has[..., None])
        return rows if scale == 1.0 else rows * scale

    return KernelCall(kernel, operation.inputs, operation.outputs)


LocalRowLookup = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def _local_row_lookup(calls: CallBuilder, table: Spec, dim: str) -> LocalRowLookup:
    """Row numbers within this rank's part of a table, and which of them it has; None: all."""
    parts = calls.rank.mesh.size(table.axes_of(dim))
    if parts == 1:
        return lambda index: (index, None)
    size = calls.sizes[dim] // parts
    first = calls.rank.position(table.axes_of(dim)) * size

    def own(index: Tensor) -> tuple[Tensor, Tensor]:
        found = index - first
        has = (found >= 0) & (found < size)
        return found.mul_(has), has

    return own


def _scatter(calls: CallBuilder, step: ComputeStep, operation: Scatter) -> KernelCall:
    """Rows added up at their indices; positions of documents have gradients of every sequence, others one of them all."""
    scale = calls.numerics.embedding_scale if operation.dim == "V" else 1.0
    sizes = calls.local_sizes(step)
    shape = [sizes[dim] for dim in step.placed.outputs[0].dims]
    own = _local_row_lookup(calls, step.placed.outputs[0], operation.dim)

    def into(target: Tensor, dy: Tensor, index: Tensor, *, add: bool) -> Tensor:
        if not add:
            target.zero_()
        wanted, has = own(index.expand(dy.shape[:-1]).reshape(-1))
        rows = dy.reshape(-1, dy.shape[-1]).to(target.dtype)
        rows = rows if has is None else rows * has[:, None]
        return target.index_add_(0, wanted, rows, alpha=scale)

    def kernel(dy: Tensor, index: Tensor) -> Tensor:
        return into(dy.new_empty(shape), dy, index, add=False)

    return KernelCall(kernel, operation.operands, operation.outputs, into=into)


def _scan(calls: CallBuilder, step: ComputeStep, operation: Scan) -> KernelCall:
    attention = Attention.of(calls.numerics, calls.sizes["H"])
    q, k, v, _, _, *sinks = operation.inputs
    return KernelCall(attention.forward, (q, k, v, _mask_key(calls, step), *sinks), operation.outputs)


def _mask_key(calls: CallBuilder, step: ComputeStep) -> str:
    """What queries see, by the parts of the sequence that queries and keys are."""
    queries, keys = step.placed.inputs[3:5]
    return calls.cut(MASK, queries.axes_of("T"), keys.axes_of("T"))


def _scan_gradient(calls: CallBuilder, step: ComputeStep, operation: ScanGradient) -> KernelCall:
    attention = Attention.of(calls.numerics, calls.sizes["H"])
    q, k, v, _, _, out, lse, dy = operation.inputs
    program = calls.unit.forward.program
    sinks = next(one.inputs[5:] for one in program.operations if isinstance(one, Scan) and out in one.outputs)
    return KernelCall(attention.backward, (q, k, v, _mask_key(calls, step), out, lse, dy, *sinks), operation.outputs)


def _rotary(function: Callable[..., Tensor], calls: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    return KernelCall(
        function, (operation.inputs[0], calls.cut(ANGLES, step.placed.inputs[1].axes_of("T"))), operation.outputs
    )


def _alias_input(calls: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    return KernelCall(lambda x: x, operation.inputs[:1], operation.outputs, is_view=True)


def _sink_share(calls: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    return KernelCall(sink_gradient, operation.inputs, operation.outputs)


CallMaker = Callable[[CallBuilder, ComputeStep, Any], KernelCall]


def router_call(kernel: Callable[..., Tensor], calls: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    """A function of tokens and of what their router did."""
    reads = operation.inputs if calls.gates in operation.inputs else (*operation.inputs, calls.gates)
    return KernelCall(kernel, reads, operation.outputs)


SPECIAL_MAPS: Mapping[str, CallMaker] = {
    "rotary": partial(_rotary, rotate),
    "rotary_back": partial(_rotary, rotate_back),
    "handover": _alias_input,
    "dispatch": partial(router_call, experts.dispatch),
    "dispatch_dx": partial(router_call, dispatch_dx),
    "combine": partial(router_call, experts.combine),
    "combine_dgates": partial(router_call, experts.combine_dgates),
    "combine_dx": partial(router_call, experts.combine_dx),
    "sink_share": _sink_share,
}


def route_call(calls: CallBuilder, step: ComputeStep, operation: Route) -> KernelCall:
    num_chosen, numerics, factor = calls.sizes[operation.num_chosen], calls.numerics, calls.rank.capacity_factor

    def kernel(logits: Tensor, balance_bias: Tensor) -> tuple[experts.Routing, Tensor]:
        normalised, gating = numerics.normalised_gates, numerics.gating
        routing = experts.route_tokens(
            logits, num_chosen, balance_bias, normalised=normalised, gating=gating, capacity_factor=factor
        )
        return routing, torch.stack((routing.wanted.to(routing.scores.dtype), routing.shares.sum(dim=0)))

    return KernelCall(kernel, (*operation.inputs, BALANCE_BIAS), (*operation.outputs, ROUTER_STATISTICS))


def route_gradient_call(calls: CallBuilder, step: ComputeStep, operation: RouteGradient) -> KernelCall:
    dtype = calls.dtype

    def kernel(dgates: Tensor, routing: experts.Routing, penalty: Tensor | None) -> Tensor:
        return experts.route_gradient(dgates, routing, penalty, dtype)

    return KernelCall(kernel, (*operation.inputs, PENALTY), operation.outputs)


CALL_BUILDERS: Mapping[type[Operation], CallMaker] = {
    Contract: _contract, Accumulate: _accumulate, Map: _map, Concatenate: _join, ConcatenateGradient: _part, Lookup:
    _lookup, Scatter: _scatter,
    Route: route_call, RouteGradient: route_gradient_call, Scan: _scan, ScanGradient: _scan_gradient,
}  # fmt: skip


def expert_matmul_call(calls: CallBuilder, step: ComputeStep, operation: Contract) -> KernelCall:
    """Of the rows of experts: by their matrices, or with other rows to the gradient of these."""
    (name,), (left, right), narrow = operation.outputs, operation.inputs, calls.quantized_matmul(step)
    dims, result = [spec.dims for spec in step.placed.inputs], step.placed.outputs[0].dims
    if calls.is_routed(left) and calls.is_routed(right):
        reads = (left, right) if dims[0][-1] == result[1] else (right, left)
        rows = calls.rows(step.placed.inputs[0])
        shape = [calls.local_sizes(step)[dim] for dim in result]
        of_gradient = narrow and narrow.of(("rows", "M"), ("rows", "D"), ("M", "D"), turned=reads[0] != left)

        def gradient(one: Tensor, other: Tensor, routing: ExpertRows, *scales: OperandScales) -> Tensor:
            product = of_gradient and of_gradient.at(*scales)
            return experts.expert_gradient(one, other, routing, one.new_empty(shape), add=False, product=product)

        def into(
            target: Tensor, one: Tensor, other: Tensor, routing: ExpertRows, *scales: OperandScales, add: bool
        ) -> None:
            product = of_gradient and of_gradient.at(*scales)
            experts.expert_gradient(one, other, routing, target, add=add, product=product)

        return KernelCall(
            gradient,
            (*reads, rows, *(narrow.reads if narrow else ())),
            (name,),
            into=into,
            never_compiled=narrow is not None,
        )
    rows, weight = (left, right) if calls.is_routed(left) else (right, left)
    matrix = dims[0] if weight == left else dims[1]
    turned = matrix[-1] != result[-1]
    of_rows = calls.rows(step.placed.outputs[0])
    of_expert = narrow and narrow.of(("rows", "D"), ("D", "M"), ("rows", "M"), turned=rows != left)

    def kernel(rows: Tensor, weight: Tensor, routing: ExpertRows, *scales: OperandScales) -> Tensor:
        product = of_expert and of_expert.at(*scales)
        return experts.expert_matmul(rows, weight.transpose(1, 2) if turned else weight, routing, product=product)

    return KernelCall(
        kernel, (rows, weight, of_rows, *(narrow.reads if narrow else ())), (name,), never_compiled=narrow is not None
    )
