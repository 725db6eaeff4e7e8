"""Steps of a router and of the rows of experts as calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.derive.walk import Compute
from shardwise.engine.torch import experts
from shardwise.engine.torch.calls import BALANCE_BIAS, PENALTY, ROUTED, Call, Calls
from shardwise.engine.torch.narrow import Scales
from shardwise.engine.torch.rows import Rows
from shardwise.model.operations import Contract, Map, Route, RouteGradient


def expert_contract(calls: Calls, step: Compute, operation: Contract) -> Call:
    """Of the rows of experts: by their matrices, or with other rows to the gradient of these."""
    (name,), (left, right), narrow = operation.outputs, operation.inputs, calls.narrow_product(step)
    dims, result = [spec.dims for spec in step.placed.inputs], step.placed.outputs[0].dims
    if calls.is_routed(left) and calls.is_routed(right):
        reads = (left, right) if dims[0][-1] == result[1] else (right, left)
        rows = calls.rows(step.placed.inputs[0])
        shape = [calls.local_sizes(step)[dim] for dim in result]
        of_gradient = narrow and narrow.of(("rows", "M"), ("rows", "D"), ("M", "D"), turned=reads[0] != left)

        def gradient(one: Tensor, other: Tensor, routing: Rows, *scales: Scales) -> Tensor:
            product = of_gradient and of_gradient.at(*scales)
            return experts.expert_gradient(one, other, routing, one.new_empty(shape), add=False, product=product)

        def into(target: Tensor, one: Tensor, other: Tensor, routing: Rows, *scales: Scales, add: bool) -> None:
            product = of_gradient and of_gradient.at(*scales)
            experts.expert_gradient(one, other, routing, target, add=add, product=product)

        return Call(
            gradient, (*reads, rows, *(narrow.reads if narrow else ())), (name,), into=into, alone=narrow is not None
        )
    rows, weight = (left, right) if calls.is_routed(left) else (right, left)
    matrix = dims[0] if weight == left else dims[1]
    turned = matrix[-1] != result[-1]
    of_rows = calls.rows(step.placed.outputs[0])
    of_expert = narrow and narrow.of(("rows", "D"), ("D", "M"), ("rows", "M"), turned=rows != left)

    def kernel(rows: Tensor, weight: Tensor, routing: Rows, *scales: Scales) -> Tensor:
        product = of_expert and of_expert.at(*scales)
        return experts.expert_product(rows, weight.transpose(1, 2) if turned else weight, routing, product=product)

    return Call(kernel, (rows, weight, of_rows, *(narrow.reads if narrow else ())), (name,), alone=narrow is not None)


def route(calls: Calls, step: Compute, operation: Route) -> Call:
    num_chosen, numerics, factor = calls.sizes[operation.num_chosen], calls.numerics, calls.rank.capacity_factor

    def kernel(logits: Tensor, balance_bias: Tensor) -> tuple[experts.Routing, Tensor]:
        normalised, gating = numerics.normalised_gates, numerics.gating
        routing = experts.route(
            logits, num_chosen, balance_bias, normalised=normalised, gating=gating, capacity_factor=factor
        )
        return routing, torch.stack((routing.wanted.to(routing.scores.dtype), routing.shares.sum(dim=0)))

    return Call(kernel, (*operation.inputs, BALANCE_BIAS), (*operation.outputs, ROUTED))


def route_gradient(calls: Calls, step: Compute, operation: RouteGradient) -> Call:
    dtype = calls.dtype

    def kernel(dgates: Tensor, routing: experts.Routing, penalty: Tensor | None) -> Tensor:
        return experts.route_gradient(dgates, routing, penalty, dtype)

    return Call(kernel, (*operation.inputs, PENALTY), operation.outputs)


def of_rows(kernel: Callable[..., Tensor], calls: Calls, step: Compute, operation: Map) -> Call:
    """A function of tokens and of what their router did."""
    reads = operation.inputs if calls.gates in operation.inputs else (*operation.inputs, calls.gates)
    return Call(kernel, reads, operation.outputs)
