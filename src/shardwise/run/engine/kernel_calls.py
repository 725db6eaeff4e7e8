"""One kernel call for each kind of operation, routers and experts included."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.derive import ComputeStep
from shardwise.model import Accumulate, Contract, Lookup, Map, Operation, Route
from shardwise.model.operations import Concatenate, ConcatenateGradient, RouteGradient, Scan, ScanGradient, Scatter
from shardwise.run.engine.calls import ANGLES, BALANCE_BIAS, MASK, PENALTY, ROUTER_STATISTICS, CallBuilder, KernelCall
from shardwise.run.engine.expert_parallel import dispatch_dx
from shardwise.run.kernels import experts, norms
from shardwise.run.kernels.attention import Attention, sink_gradient
from shardwise.run.kernels.elementwise import FUNCTIONS, ElementwiseFunction
from shardwise.run.kernels.experts import ExpertRows
from shardwise.run.kernels.matmul import Einsum, OperandScales, as_matmul
from shardwise.run.kernels.positions_and_masks import rotate, rotate_back
from shardwise.sharding import Spec


def build_call(builder: CallBuilder, step: ComputeStep, phase: str) -> KernelCall:
    """Return the call of one step."""
    call = CALL_BUILDERS[type(step.operation)](builder, step, step.operation)
    return builder.with_tensor_keys(builder.with_forms(replace(call, phase=phase), step, phase), [step])


def _contract(builder: CallBuilder, step: ComputeStep, operation: Contract) -> KernelCall:
    (name,), reads = operation.outputs, operation.inputs
    if builder.is_routed(*reads):
        return expert_matmul_call(builder, step, operation)
    quantized = builder.quantized_matmul(step)
    if quantized is not None:
        splits = ((read, quantized.split(spec.dims)) for read, spec in zip(reads, step.placed.inputs, strict=True))
        casts = {read: (0, split) for read, split in splits if split is not None and builder.is_weight(read)}
        return KernelCall(quantized, (*reads, *quantized.reads), (name,), into=quantized.into, casts=casts)
    dims = [spec.dims for spec in step.placed.inputs]
    result = step.placed.outputs[0].dims
    product = as_matmul(dims[0], dims[1], result, builder.local_sizes(step)) if len(dims) == 2 else None
    if product is None:
        return KernelCall(Einsum(dims, result), reads, (name,))
    return KernelCall(product, reads, (name,), into=product.into)


def _accumulate(builder: CallBuilder, step: ComputeStep, operation: Accumulate) -> KernelCall:
    reads, (name,) = operation.operands, operation.outputs
    if len(reads) == 1:
        return KernelCall(lambda x: x, reads, (name,), is_view=True)

    def kernel(first: Tensor, second: Tensor, *terms: Tensor) -> Tensor:
        out = first + second
        for term in terms:
            out.add_(term)
        return out

    return KernelCall(kernel, reads, (name,), over={i: partial(_add_in_place, i) for i in range(len(reads))})


def _add_in_place(position: int, *terms: Tensor) -> Tensor:
    """Add all terms into the one at `position`."""
    out = terms[position]
    for term in (*terms[:position], *terms[position + 1 :]):
        out.add_(term)
    return out


def _map(builder: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    special = SPECIAL_MAPS.get(operation.function)
    if special is not None:
        return special(builder, step, operation)
    (name,), reads = operation.outputs, operation.inputs
    if builder.is_routed(*reads):
        rows = builder.rows(step.placed.inputs[0])
        if operation.function == "add_vector":
            return KernelCall(
                lambda x, vectors, routing: x + routing.repeat_per_row(vectors), (*reads, rows), (name,),
                over={0: lambda x, vectors, routing: x.add_(routing.repeat_per_row(vectors))},
            )  # fmt: skip
        if operation.function == "sum_to":
            return KernelCall(experts.sum_expert_rows, (*reads, rows), (name,))
    if operation.function == "sum_to" and "T" in step.placed.outputs[0].dims:
        # Gradients of position embeddings, where documents have positions of their own: `_scatter` adds them up.
        return _alias_input(builder, step, operation)
    over = {}
    if operation.function in ("add", "add_vector") and len(reads) == 2:
        full = [i for i, spec in enumerate(step.placed.inputs) if spec.dims == step.placed.outputs[0].dims]
        over = {i: partial(_add_in_place, i) for i in full}
    return KernelCall(_elementwise_kernel(builder, step, operation), reads, (name,), over=over)


def _elementwise_kernel(builder: CallBuilder, step: ComputeStep, operation: Map) -> Callable[..., Tensor]:
    """Return a function of aligned operands, summed over the dims that its result lacks, in the result's dtype."""
    function, out = _elementwise_function(builder, operation), step.placed.outputs[0].dims
    dims = [spec.dims for spec in step.placed.inputs]
    union = max((*dims, out), key=len)
    views = [_alignment_view(operand_dims, union) for operand_dims in dims]
    summed = tuple(i for i, dim in enumerate(union) if dim not in out)
    dtype = builder.dtype_of(operation.outputs[0])
    plain = all(view is None for view in views) and not summed

    def kernel(*operands: Tensor) -> Tensor:
        result = function(*(x if view is None else view(x) for view, x in zip(views, operands, strict=True)))
        result = result.sum(dim=summed) if summed else result
        return result if result.dtype == dtype else result.to(dtype)

    def direct(*operands: Tensor) -> Tensor:
        result = function(*operands)
        return result if result.dtype == dtype else result.to(dtype)

    return direct if plain else kernel


def _elementwise_function(builder: CallBuilder, operation: Map) -> ElementwiseFunction:
    """Return the function of aligned operands that an elementwise operation computes."""
    if operation.function not in norms.NORM_STEPS:
        return FUNCTIONS[operation.function]
    width, numerics = math.prod(builder.sizes[dim] for dim in operation.over), builder.numerics
    return norms.norm_step(operation.function, width, numerics.norm_epsilon, numerics.norm_offset)


def _alignment_view(dims: tuple[str, ...], union: tuple[str, ...]) -> Callable[[Tensor], Tensor] | None:
    """Return a view of an operand with a dim of size 1 for each dim that it lacks; None where it broadcasts as it is."""
    if union[len(union) - len(dims) :] == dims:
        return None
    order = [dims.index(dim) for dim in union if dim in dims]
    missing = [i for i, dim in enumerate(union) if dim not in dims]

    def view(x: Tensor) -> Tensor:
        x = x.permute(order)
        for i in missing:
            x = x.unsqueeze(i)
        return x

    return view


def _join(builder: CallBuilder, step: ComputeStep, operation: Concatenate) -> KernelCall:
    out, dims = step.placed.outputs[0].dims, [spec.dims for spec in step.placed.inputs]
    dim_index = next(i for i, dim in enumerate(out) if all(dim not in operand_dims for operand_dims in dims))
    aligned_dims = [tuple(part if i == dim_index else dim for i, dim in enumerate(out)) for part in operation.parts]
    views = [
        _alignment_view(operand_dims, full_dims) for operand_dims, full_dims in zip(dims, aligned_dims, strict=True)
    ]
    fullest = max(range(len(dims)), key=lambda operand: len(dims[operand]))

    def kernel(*operands: Tensor) -> Tensor:
        shape = operands[fullest].shape
        aligned = [x if view is None else view(x) for view, x in zip(views, operands, strict=True)]
        return torch.cat(
            [x.expand(*shape[:dim_index], x.shape[dim_index], *shape[dim_index + 1 :]) for x in aligned], dim=dim_index
        )

    return KernelCall(kernel, operation.inputs, operation.outputs)


def _part(builder: CallBuilder, step: ComputeStep, operation: ConcatenateGradient) -> KernelCall:
    spec, like = step.placed.inputs[0].dims, step.placed.outputs[0].dims
    sizes = [builder.sizes[dim] for dim in operation.parts]
    dim_index, width = spec.index(operation.joined), sizes[operation.position]
    start = sum(sizes[: operation.position])
    dims = [operation.parts[operation.position] if dim == operation.joined else dim for dim in spec]
    summed = tuple(i for i, dim in enumerate(dims) if dim not in like)

    def kernel(dy: Tensor) -> Tensor:
        part = dy.narrow(dim_index, start, width)
        return part.sum(dim=summed) if summed else part

    return KernelCall(kernel, operation.operands, operation.outputs, is_view=not summed)


def _lookup(builder: CallBuilder, step: ComputeStep, operation: Lookup) -> KernelCall:
    scale = builder.numerics.embedding_scale if operation.dim == "V" else 1.0
    look_up = _local_row_lookup(builder, step.placed.inputs[0], operation.dim)

    def kernel(table: Tensor, index: Tensor) -> Tensor:
        local_index, is_local = look_up(index)
        rows = F.embedding(local_index, table)
        rows = rows if is_local is None else rows.mul_(is_local[..., None])
        return rows if scale == 1.0 else rows * scale

    return KernelCall(kernel, operation.inputs, operation.outputs)


LocalRowLookup = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def _local_row_lookup(builder: CallBuilder, table: Spec, dim: str) -> LocalRowLookup:
    """Return a function from row numbers to those within this rank's part of a table, and which rows it has; None: all."""
    parts = builder.rank.mesh.size(table.axes_of(dim))
    if parts == 1:
        return lambda index: (index, None)
    size = builder.sizes[dim] // parts
    first = builder.rank.position(table.axes_of(dim)) * size

    def look_up(index: Tensor) -> tuple[Tensor, Tensor]:
        local_index = index - first
        is_local = (local_index >= 0) & (local_index < size)
        return local_index.mul_(is_local), is_local

    return look_up


def _scatter(builder: CallBuilder, step: ComputeStep, operation: Scatter) -> KernelCall:
    """Add rows up at their indices; of positions, those of documents differ between sequences."""
    scale = builder.numerics.embedding_scale if operation.dim == "V" else 1.0
    sizes = builder.local_sizes(step)
    shape = [sizes[dim] for dim in step.placed.outputs[0].dims]
    look_up = _local_row_lookup(builder, step.placed.outputs[0], operation.dim)

    def into(target: Tensor, dy: Tensor, index: Tensor, *, add: bool) -> Tensor:
        if not add:
            target.zero_()
        local_index, is_local = look_up(index.expand(dy.shape[:-1]).reshape(-1))
        rows = dy.reshape(-1, dy.shape[-1]).to(target.dtype)
        rows = rows if is_local is None else rows * is_local[:, None]
        return target.index_add_(0, local_index, rows, alpha=scale)

    def kernel(dy: Tensor, index: Tensor) -> Tensor:
        return into(dy.new_empty(shape), dy, index, add=False)

    return KernelCall(kernel, operation.operands, operation.outputs, into=into)


def _scan(builder: CallBuilder, step: ComputeStep, operation: Scan) -> KernelCall:
    attention = Attention.of(builder.numerics, builder.sizes["H"])
    q, k, v, _, _, *sinks = operation.inputs
    return KernelCall(attention.forward, (q, k, v, _mask_key(builder, step), *sinks), operation.outputs)


def _mask_key(builder: CallBuilder, step: ComputeStep) -> str:
    """Return the key of the attention mask of this rank's queries and keys."""
    queries, keys = step.placed.inputs[3:5]
    return builder.batch_part(MASK, queries.axes_of("T"), keys.axes_of("T"))


def _scan_gradient(builder: CallBuilder, step: ComputeStep, operation: ScanGradient) -> KernelCall:
    attention = Attention.of(builder.numerics, builder.sizes["H"])
    q, k, v, _, _, out, lse, dy = operation.inputs
    program = builder.unit.forward.program
    sinks = next(scan.sinks for scan in program.operations if isinstance(scan, Scan) and out in scan.outputs)
    return KernelCall(attention.backward, (q, k, v, _mask_key(builder, step), out, lse, dy, *sinks), operation.outputs)


def _rotary(function: Callable[..., Tensor], builder: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    return KernelCall(
        function,
        (operation.inputs[0], builder.batch_part(ANGLES, step.placed.inputs[1].axes_of("T"))),
        operation.outputs,
    )


def _alias_input(builder: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    return KernelCall(lambda x: x, operation.inputs[:1], operation.outputs, is_view=True)


CallMaker = Callable[[CallBuilder, ComputeStep, Any], KernelCall]


def router_call(kernel: Callable[..., Tensor], builder: CallBuilder, step: ComputeStep, operation: Map) -> KernelCall:
    """Return the call of a function of tokens and of their router's choice."""
    reads = operation.inputs if builder.gates in operation.inputs else (*operation.inputs, builder.gates)
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
    "sink_share": lambda builder, step, operation: KernelCall(sink_gradient, operation.inputs, operation.outputs),
}


def route_call(builder: CallBuilder, step: ComputeStep, operation: Route) -> KernelCall:
    """Return the call of a router: its choice, and per expert the rows asked for and the sum of probabilities."""
    num_chosen, numerics, factor = builder.sizes[operation.num_chosen], builder.numerics, builder.rank.capacity_factor

    def kernel(logits: Tensor, balance_bias: Tensor) -> tuple[experts.TokenRouting, Tensor]:
        normalised, gating = numerics.normalised_gates, numerics.gating
        routing = experts.route_tokens(
            logits, num_chosen, balance_bias, normalised=normalised, gating=gating, capacity_factor=factor
        )
        return routing, torch.stack((routing.requested.to(routing.scores.dtype), routing.shares.sum(dim=0)))

    return KernelCall(kernel, (*operation.inputs, BALANCE_BIAS), (*operation.outputs, ROUTER_STATISTICS))


def route_gradient_call(builder: CallBuilder, step: ComputeStep, operation: RouteGradient) -> KernelCall:
    """Return the call of the gradient of a router's logits."""
    dtype = builder.dtype

    def kernel(dgates: Tensor, routing: experts.TokenRouting, penalty: Tensor | None) -> Tensor:
        return experts.route_gradient(dgates, routing, penalty, dtype)

    return KernelCall(kernel, (*operation.inputs, PENALTY), operation.outputs)


CALL_BUILDERS: Mapping[type[Operation], CallMaker] = {
    Contract: _contract, Accumulate: _accumulate, Map: _map, Concatenate: _join, ConcatenateGradient: _part, Lookup:
    _lookup, Scatter: _scatter,
    Route: route_call, RouteGradient: route_gradient_call, Scan: _scan, ScanGradient: _scan_gradient,
}  # fmt: skip


def expert_matmul_call(builder: CallBuilder, step: ComputeStep, operation: Contract) -> KernelCall:
    """Return the call of a grouped product: rows by experts' matrices, or the gradient of the matrices."""
    (name,), (left, right), quantized = operation.outputs, operation.inputs, builder.quantized_matmul(step)
    dims, result = [spec.dims for spec in step.placed.inputs], step.placed.outputs[0].dims
    scale_inputs = quantized.reads if quantized else ()
    if builder.is_routed(left) and builder.is_routed(right):
        reads: tuple[str, ...] = (left, right) if dims[0][-1] == result[1] else (right, left)
        routing_key = builder.rows(step.placed.inputs[0])
        shape = [builder.local_sizes(step)[dim] for dim in result]
        gradient_matmul = quantized and quantized.of(
            ("rows", "M"), ("rows", "D"), ("M", "D"), is_transposed=reads[0] != left
        )

        def into(
            target: Tensor, left: Tensor, right: Tensor, routing: ExpertRows, *scales: OperandScales, add: bool
        ) -> Tensor:
            product = gradient_matmul and gradient_matmul.at(*scales)
            return experts.expert_gradient(left, right, routing, target, add=add, product=product)

        def gradient(left: Tensor, *operands: Any) -> Tensor:
            return into(left.new_empty(shape), left, *operands, add=False)

        reads = (*reads, routing_key, *scale_inputs)
        return KernelCall(gradient, reads, (name,), into=into)
    rows, weight = (left, right) if builder.is_routed(left) else (right, left)
    matrix = dims[0] if weight == left else dims[1]
    is_transposed = matrix[-1] != result[-1]
    routing_key = builder.rows(step.placed.outputs[0])
    row_matmul = quantized and quantized.of(("rows", "D"), ("D", "M"), ("rows", "M"), is_transposed=rows != left)

    def kernel(rows: Tensor, weight: Tensor, routing: ExpertRows, *scales: OperandScales) -> Tensor:
        weight = weight.transpose(1, 2) if is_transposed else weight
        return experts.expert_matmul(rows, weight, routing, product=row_matmul and row_matmul.at(*scales))

    reads = (rows, weight, routing_key, *scale_inputs)
    return KernelCall(kernel, reads, (name,), casts={weight: (1, 1)} if quantized else {})
