"""Collectives on activations as calls: one starts a collective, another waits for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.derive import CollectiveStep
from shardwise.run.engine.calls import CallBuilder, KernelCall
from shardwise.run.engine.rank_coordinates import CollectiveHandle
from shardwise.sharding import Axes, CollectiveKind, Spec
from shardwise.step import LocalSlice, StartCollective, UnitCollective, WaitCollective

CollectiveInstruction = StartCollective | WaitCollective | LocalSlice
MOVING_PREFIX = "@moving"  # begins the slot names of `ArrivingTensor`s


class ArrivingTensor(NamedTuple):
    """A started collective and the tensor that it writes."""

    pending: CollectiveHandle
    arriving: Tensor


def build_collective_calls(builder: CallBuilder, instruction: CollectiveInstruction, phase: str) -> list[KernelCall]:
    """Return the calls of a start, a wait or a slice.

    None for a group of one rank, none for what a ring brings, and none for weights, their gradients and control traffic,
    which the unit does not issue.
    """
    if isinstance(instruction, LocalSlice):
        return _slice_calls(builder, instruction.step, phase)
    traffic = instruction.collective
    if traffic.chunked_with or not is_issued_here(builder, traffic):
        return []
    build = _start_call if isinstance(instruction, StartCollective) else _wait_call
    return [build(builder, traffic, phase)]


def is_issued_here(builder: CallBuilder, traffic: UnitCollective) -> bool:
    """Return whether the unit issues a collective, over more than one rank."""
    return not (traffic.moves_weights or traffic.is_control) and bool(builder.rank.nontrivial_axes(traffic.axes))


def _start_call(builder: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    axes = builder.rank.nontrivial_axes(traffic.axes)
    before, after, name = endpoints(builder, traffic)
    start = START_KERNELS[traffic.kind](before, after, axes, builder)
    return KernelCall(start, (builder.tensor_key(name, before),), (_arriving_key(builder, traffic),), phase)


def _wait_call(builder: CallBuilder, traffic: UnitCollective, phase: str) -> KernelCall:
    before, after, name = endpoints(builder, traffic)
    dim = _dim_losing_axes(before, after) if traffic.kind in CONCATENATING_KINDS else None

    def wait(transfer: ArrivingTensor, *_: Tensor) -> Tensor:
        transfer.pending.wait()
        return transfer.arriving if dim is None else transfer.arriving.movedim(0, dim).flatten(dim, dim + 1)

    # The wait reads what is sent, so that its slot is freed only after it; an AllReduce works on a copy.
    sent = () if traffic.kind is CollectiveKind.ALL_REDUCE else (builder.tensor_key(name, before),)
    return KernelCall(wait, (_arriving_key(builder, traffic), *sent), (builder.tensor_key(name, after),), phase)


def endpoints(builder: CallBuilder, traffic: UnitCollective) -> tuple[Spec, Spec, str]:
    """Return the shardings before and after a collective, and the name of the tensor."""
    first, last = traffic.derived[0], traffic.derived[-1]
    return (
        builder.rank.sharding(first.collective.before),
        builder.rank.sharding(last.collective.after),
        first.tensor.name,
    )


def _arriving_key(builder: CallBuilder, traffic: UnitCollective) -> str:
    _, after, name = endpoints(builder, traffic)
    return f"{MOVING_PREFIX} {builder.tensor_key(name, after)}"


def _slice_calls(builder: CallBuilder, step: CollectiveStep, phase: str) -> list[KernelCall]:
    """Return the call that takes this rank's part of each dim that is split further."""
    before, after = builder.rank.sharding(step.collective.before), builder.rank.sharding(step.collective.after)
    if before == after or not step.tensor.dims:
        return []
    cuts = []
    for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)):
        if old != new:
            added_axes = new[len(old) :]
            cuts.append((dim, builder.rank.mesh.size(added_axes), builder.rank.position(added_axes)))

    def kernel(x: Tensor) -> Tensor:
        for dim, parts, position in cuts:
            width = x.shape[dim] // parts
            x = x.narrow(dim, position * width, width)
        return x

    name = step.tensor.name
    return [
        KernelCall(kernel, (builder.tensor_key(name, before),), (builder.tensor_key(name, after),), phase, is_view=True)
    ]


def _dim_losing_axes(before: Spec, after: Spec) -> int:
    """Return the index of the dim whose axes a collective takes away."""
    return next(dim for dim, (old, new) in enumerate(zip(before.axes, after.axes, strict=True)) if len(old) > len(new))


def _all_gather(before: Spec, after: Spec, axes: Axes, builder: CallBuilder) -> Callable[..., ArrivingTensor]:
    collectives, parts = builder.rank.collectives, builder.rank.mesh.size(axes)

    def start(x: Tensor) -> ArrivingTensor:
        part = x.contiguous()
        gathered = part.new_empty((parts, *part.shape))
        return ArrivingTensor(collectives.all_gather(gathered.view(-1), part.view(-1), axes), gathered)

    return start


def _split_dim(x: Tensor, dim: int, parts: int) -> Tensor:
    """Split x along a dim into [n, ...]."""
    return torch.unflatten(x, dim, (parts, -1)).movedim(dim, 0).contiguous()


def _reduce_scatter(before: Spec, after: Spec, axes: Axes, builder: CallBuilder) -> Callable[..., ArrivingTensor]:
    dim, parts, collectives = _dim_losing_axes(after, before), builder.rank.mesh.size(axes), builder.rank.collectives

    def start(x: Tensor) -> ArrivingTensor:
        cut = _split_dim(x, dim, parts)
        part = torch.empty_like(cut[0])
        return ArrivingTensor(collectives.reduce_scatter(part.view(-1), cut.view(-1), axes), part)

    return start


def _all_reduce(before: Spec, after: Spec, axes: Axes, builder: CallBuilder) -> Callable[..., ArrivingTensor]:
    collectives = builder.rank.collectives

    def start(x: Tensor) -> ArrivingTensor:
        values = x.clone(memory_format=torch.contiguous_format)
        return ArrivingTensor(collectives.all_reduce(values, axes, before.reduction), values)

    return start


def _all_to_all(before: Spec, after: Spec, axes: Axes, builder: CallBuilder) -> Callable[..., ArrivingTensor]:
    dim, parts, collectives = _dim_losing_axes(after, before), builder.rank.mesh.size(axes), builder.rank.collectives

    def start(x: Tensor) -> ArrivingTensor:
        sent = _split_dim(x, dim, parts)
        received = torch.empty_like(sent)
        return ArrivingTensor(collectives.all_to_all(received.view(-1), sent.view(-1), axes), received)

    return start


CollectiveStarter = Callable[[Spec, Spec, Axes, CallBuilder], Callable[..., ArrivingTensor]]
START_KERNELS: Mapping[CollectiveKind, CollectiveStarter] = {
    CollectiveKind.ALL_GATHER: _all_gather, CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_REDUCE: _all_reduce, CollectiveKind.ALL_TO_ALL: _all_to_all,
}  # fmt: skip
CONCATENATING_KINDS = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)  # what arrives is parts [n, ...] of a dim
