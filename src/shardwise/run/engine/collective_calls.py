"""Collectives on activations as calls: one that starts a collective, and one that waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.derive.sharded_program import CollectiveStep
from shardwise.run.engine.call_builder import CallBuilder, KernelCall
from shardwise.run.engine.rank_coordinates import CollectiveHandle, CollectiveOps
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.instructions import LocalSlice, StartCollective, UnitCollective, WaitCollective

CollectiveInstruction = StartCollective | WaitCollective | LocalSlice
MOVING_PREFIX = "@moving"  # what is on its way, and where it arrives


class ArrivingTensor(NamedTuple):
    """A collective and the tensor that it writes."""

    pending: CollectiveHandle
    arriving: Tensor


def build_collective_calls(calls: CallBuilder, one: CollectiveInstruction, phase: str) -> list[KernelCall]:
    """The call of a start, a wait or a slice; none where nothing moves, and for weights, their gradients and control traffic,
    which are not the unit's."""
    if isinstance(one, LocalSlice):
        return _slice_calls(calls, one.step, phase)
    traffic = one.collective
    if not is_issued_here(calls, traffic):
        return []
    make = _start_call if isinstance(one, StartCollective) else _wait_call
    return [make(calls, traffic, phase)]


def is_issued_here(calls: CallBuilder, traffic: UnitCollective) -> bool:
    """Whether a collective is the unit's, and over several ranks."""
    return not (traffic.moves_weights or traffic.is_control) and bool(calls.rank.nontrivial_axes(traffic.axes))


def _start_call(calls: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    exchange, axes = calls.rank.exchange, calls.rank.nontrivial_axes(traffic.axes)
    assert exchange is not None, "a rank of several has an exchange"
    before, after, name = endpoints(calls, traffic)
    begin = START_KERNELS[traffic.kind](before, after, exchange, axes, calls)
    return KernelCall(begin, (calls.key(name, before),), (_arriving_key(calls, traffic),), phase, never_compiled=True)


def _wait_call(calls: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    before, after, name = endpoints(calls, traffic)
    lay = ARRIVAL_LAYOUTS.get(traffic.kind, _keep_layout)(before, after)

    def wait(on_way: ArrivingTensor, *_: Tensor) -> Tensor:
        on_way.pending.wait()
        return lay(on_way.arriving)

    # what is sent is read until it has been sent; a sum is made in a tensor of its own
    sent = () if traffic.kind is CollectiveKind.ALL_REDUCE else (calls.key(name, before),)
    return KernelCall(
        wait, (_arriving_key(calls, traffic), *sent), (calls.key(name, after),), phase, never_compiled=True
    )


def endpoints(calls: CallBuilder, traffic: UnitCollective) -> tuple[Spec, Spec, str]:
    """The shardings before and after a collective, and the tensor."""
    first, last = traffic.derived[0], traffic.derived[-1]
    return calls.rank.sharding(first.collective.before), calls.rank.sharding(last.collective.after), first.tensor.name


def _arriving_key(calls: CallBuilder, traffic: UnitCollective) -> str:
    _, after, name = endpoints(calls, traffic)
    return f"{MOVING_PREFIX} {calls.key(name, after)}"


def _slice_calls(calls: CallBuilder, step: CollectiveStep, phase: str) -> list[KernelCall]:
    """This rank's part of each dim that is split further."""
    before, after = calls.rank.sharding(step.collective.before), calls.rank.sharding(step.collective.after)
    if before == after or not step.tensor.dims:
        return []
    cuts = []
    for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)):
        if old != new:
            further = new[len(old) :]
            cuts.append((dim, calls.rank.mesh.size(further), calls.rank.position(further)))

    def kernel(x: Tensor) -> Tensor:
        for dim, parts, place in cuts:
            width = x.shape[dim] // parts
            x = x.narrow(dim, place * width, width)
        return x

    name = step.tensor.name
    return [KernelCall(kernel, (calls.key(name, before),), (calls.key(name, after),), phase, is_view=True)]


def _dim_losing_axes(before: Spec, after: Spec) -> int:
    """The dim whose axes a collective takes away."""
    return next(dim for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)) if len(old) > len(new))


def _all_gather(
    before: Spec, after: Spec, exchange: CollectiveOps, axes: Axes, calls: CallBuilder
) -> Callable[..., ArrivingTensor]:
    parts = calls.rank.mesh.size(axes)

    def start(x: Tensor) -> ArrivingTensor:
        own = x.contiguous()
        whole = own.new_empty((parts, *own.shape))
        return ArrivingTensor(exchange.all_gather(whole.view(-1), own.view(-1), axes), whole)

    return start


def _concatenate_parts(before: Spec, after: Spec) -> Callable[[Tensor], Tensor]:
    """Parts [n, ...] one after the other along their dim."""
    dim = _dim_losing_axes(before, after)
    return lambda arrived: arrived.movedim(0, dim).flatten(dim, dim + 1)


def _keep_layout(before: Spec, after: Spec) -> Callable[[Tensor], Tensor]:
    return lambda arrived: arrived


def _split_dim(x: Tensor, dim: int, parts: int) -> Tensor:
    """x cut along a dim: [n, ...]."""
    return torch.unflatten(x, dim, (parts, -1)).movedim(dim, 0).contiguous()


def _reduce_scatter(
    before: Spec, after: Spec, exchange: CollectiveOps, axes: Axes, calls: CallBuilder
) -> Callable[..., ArrivingTensor]:
    dim, parts = _dim_losing_axes(after, before), calls.rank.mesh.size(axes)

    def start(x: Tensor) -> ArrivingTensor:
        cut = _split_dim(x, dim, parts)
        part = torch.empty_like(cut[0])
        return ArrivingTensor(exchange.reduce_scatter(part.view(-1), cut.view(-1), axes), part)

    return start


def _all_reduce(
    before: Spec, after: Spec, exchange: CollectiveOps, axes: Axes, calls: CallBuilder
) -> Callable[..., ArrivingTensor]:
    def start(x: Tensor) -> ArrivingTensor:
        values = x.clone(memory_format=torch.contiguous_format)
        return ArrivingTensor(exchange.all_reduce(values, axes, before.reduction), values)

    return start


def _all_to_all(
    before: Spec, after: Spec, exchange: CollectiveOps, axes: Axes, calls: CallBuilder
) -> Callable[..., ArrivingTensor]:
    dim, parts = _dim_losing_axes(after, before), calls.rank.mesh.size(axes)

    def start(x: Tensor) -> ArrivingTensor:
        sent = _split_dim(x, dim, parts)
        received = torch.empty_like(sent)
        return ArrivingTensor(exchange.all_to_all(received.view(-1), sent.view(-1), axes), received)

    return start


CollectiveStarter = Callable[[Spec, Spec, CollectiveOps, Axes, CallBuilder], Callable[..., ArrivingTensor]]
START_KERNELS: Mapping[CollectiveKind, CollectiveStarter] = {
    CollectiveKind.ALL_GATHER: _all_gather, CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_REDUCE: _all_reduce, CollectiveKind.ALL_TO_ALL: _all_to_all,
}  # fmt: skip
# How what has arrived becomes the result; by others it is the result.
ARRIVAL_LAYOUTS: Mapping[CollectiveKind, Callable[[Spec, Spec], Callable[[Tensor], Tensor]]] = {
    CollectiveKind.ALL_GATHER: _concatenate_parts, CollectiveKind.ALL_TO_ALL: _concatenate_parts,
}  # fmt: skip
