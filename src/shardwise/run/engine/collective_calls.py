"""Collectives on activations as calls: one that starts a collective, and one that waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.derive.sharded_program import Communicate
from shardwise.run.engine.call_builder import Call, Calls
from shardwise.run.engine.rank_coordinates import Exchange, Pending
from shardwise.sharding.collectives import Kind
from shardwise.sharding.spec import Axes, Spec
from shardwise.step.instructions import Slice, Start, Traffic, Wait

Moving = Start | Wait | Slice
MOVING = "@moving"  # what is on its way, and where it arrives


class OnWay(NamedTuple):
    """A collective and the tensor that it writes."""

    pending: Pending
    arriving: Tensor


def moving_calls(calls: Calls, one: Moving, phase: str) -> list[Call]:
    """The call of a start, a wait or a slice; none where nothing moves, and for weights, their gradients and control traffic,
    which are not the unit's."""
    if isinstance(one, Slice):
        return _slice(calls, one.step, phase)
    traffic = one.traffic
    if not is_issued(calls, traffic):
        return []
    make = _start if isinstance(one, Start) else _wait
    return [make(calls, traffic, phase)]


def is_issued(calls: Calls, traffic: Traffic) -> bool:
    """Whether a collective is the unit's, and over several ranks."""
    return not (traffic.carries_weights or traffic.is_control) and bool(calls.rank.several(traffic.axes))


def _start(calls: Calls, traffic: Traffic, phase: str) -> Call:
    exchange, axes = calls.rank.exchange, calls.rank.several(traffic.axes)
    assert exchange is not None, "a rank of several has an exchange"
    before, after, name = ends_of(calls, traffic)
    begin = STARTS[traffic.kind](before, after, exchange, axes, calls)
    return Call(begin, (calls.key(name, before),), (_on_way(calls, traffic),), phase, alone=True)


def _wait(calls: Calls, traffic: Traffic, phase: str) -> Call:
    before, after, name = ends_of(calls, traffic)
    lay = WAITS.get(traffic.kind, _as_it_is)(before, after)

    def wait(on_way: OnWay, *_: Tensor) -> Tensor:
        on_way.pending.wait()
        return lay(on_way.arriving)

    # what is sent is read until it has been sent; a sum is made in a tensor of its own
    sent = () if traffic.kind is Kind.ALL_REDUCE else (calls.key(name, before),)
    return Call(wait, (_on_way(calls, traffic), *sent), (calls.key(name, after),), phase, alone=True)


def ends_of(calls: Calls, traffic: Traffic) -> tuple[Spec, Spec, str]:
    """The shardings before and after a collective, and the tensor."""
    first, last = traffic.derived[0], traffic.derived[-1]
    return calls.rank.sharding(first.collective.before), calls.rank.sharding(last.collective.after), first.tensor.name


def _on_way(calls: Calls, traffic: Traffic) -> str:
    _, after, name = ends_of(calls, traffic)
    return f"{MOVING} {calls.key(name, after)}"


def _slice(calls: Calls, step: Communicate, phase: str) -> list[Call]:
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
    return [Call(kernel, (calls.key(name, before),), (calls.key(name, after),), phase, is_view=True)]


def _losing(before: Spec, after: Spec) -> int:
    """The dim whose axes a collective takes away."""
    return next(dim for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)) if len(old) > len(new))


def _all_gather(before: Spec, after: Spec, exchange: Exchange, axes: Axes, calls: Calls) -> Callable[..., OnWay]:
    parts = calls.rank.mesh.size(axes)

    def start(x: Tensor) -> OnWay:
        own = x.contiguous()
        whole = own.new_empty((parts, *own.shape))
        return OnWay(exchange.all_gather(whole.view(-1), own.view(-1), axes), whole)

    return start


def _gathered(before: Spec, after: Spec) -> Callable[[Tensor], Tensor]:
    """Parts [n, ...] one after the other along their dim."""
    dim = _losing(before, after)
    return lambda arrived: arrived.movedim(0, dim).flatten(dim, dim + 1)


def _as_it_is(before: Spec, after: Spec) -> Callable[[Tensor], Tensor]:
    return lambda arrived: arrived


def _in_parts(x: Tensor, dim: int, parts: int) -> Tensor:
    """x cut along a dim: [n, ...]."""
    return torch.unflatten(x, dim, (parts, -1)).movedim(dim, 0).contiguous()


def _reduce_scatter(before: Spec, after: Spec, exchange: Exchange, axes: Axes, calls: Calls) -> Callable[..., OnWay]:
    dim, parts = _losing(after, before), calls.rank.mesh.size(axes)

    def start(x: Tensor) -> OnWay:
        cut = _in_parts(x, dim, parts)
        part = torch.empty_like(cut[0])
        return OnWay(exchange.reduce_scatter(part.view(-1), cut.view(-1), axes), part)

    return start


def _all_reduce(before: Spec, after: Spec, exchange: Exchange, axes: Axes, calls: Calls) -> Callable[..., OnWay]:
    def start(x: Tensor) -> OnWay:
        values = x.clone(memory_format=torch.contiguous_format)
        return OnWay(exchange.all_reduce(values, axes, before.reduction), values)

    return start


def _all_to_all(before: Spec, after: Spec, exchange: Exchange, axes: Axes, calls: Calls) -> Callable[..., OnWay]:
    dim, parts = _losing(after, before), calls.rank.mesh.size(axes)

    def start(x: Tensor) -> OnWay:
        sent = _in_parts(x, dim, parts)
        received = torch.empty_like(sent)
        return OnWay(exchange.all_to_all(received.view(-1), sent.view(-1), axes), received)

    return start


Starter = Callable[[Spec, Spec, Exchange, Axes, Calls], Callable[..., OnWay]]
STARTS: Mapping[Kind, Starter] = {
    Kind.ALL_GATHER: _all_gather, Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_REDUCE: _all_reduce, Kind.ALL_TO_ALL: _all_to_all,
}  # fmt: skip
# How what has arrived becomes the result; by others it is the result.
WAITS: Mapping[Kind, Callable[[Spec, Spec], Callable[[Tensor], Tensor]]] = {
    Kind.ALL_GATHER: _gathered, Kind.ALL_TO_ALL: _gathered,
}  # fmt: skip
