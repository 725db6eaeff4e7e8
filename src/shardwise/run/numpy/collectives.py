"""Collectives among the shards of virtual devices, with the number of elements that each device receives; ring
attention.

In ring attention keys and values travel around, and so do their gradients: each device merges attention over one block
of keys after the other. In the backward pass the gradients of a block travel with it and end at the device that stores
the block. The traffic is that of the AllGathers and ReduceScatters that the ring replaces, counted as permutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.derive import RING_AXES, Ring
from shardwise.model import Program
from shardwise.model.operations import Operation, Scan, ScanGradient
from shardwise.run.numpy import kernels
from shardwise.sharding import Collective, CollectiveKind, Spec
from shardwise.values import lookup

if TYPE_CHECKING:
    from shardwise.run.numpy.devices import VirtualDevices


Array = NDArray[Any]
Shards = list[Array]


def _changed_dim(collective: Collective) -> int:
    """Return the index of the dim whose axes the collective changes (for an AllToAll: the dim that is gathered)."""
    pairs = list(zip(collective.before.axes, collective.after.axes, strict=True))
    gathered = [i for i, (old, new) in enumerate(pairs) if len(old) > len(new)]
    return gathered[0] if gathered else next(i for i, (old, new) in enumerate(pairs) if old != new)


def _all_gather(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    gathered = np.concatenate(shards, axis=_changed_dim(collective))
    for shard in shards:
        devices.count(collective, gathered.size - shard.size)
    return [gathered] * len(shards)


def _reduce(collective: Collective, shards: Shards) -> Array:
    combine = lookup({"sum": np.add, "max": np.maximum}, collective.before.reduction, "reduction")
    return np.array(combine.reduce(np.stack(shards)))


def _reduce_scatter(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    parts = np.split(_reduce(collective, shards), len(shards), axis=_changed_dim(collective))
    for part in parts:
        devices.count(collective, part.size * (len(shards) - 1))
    return [np.array(part) for part in parts]


def _all_reduce(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    """Reduce as a ring does: ReduceScatter of the flattened array in even chunks, then AllGather of them."""
    total = _reduce(collective, shards)
    chunks = np.array_split(total.ravel(), len(shards))
    for chunk in chunks:
        devices.count(collective, chunk.size * (len(shards) - 1) + (total.size - chunk.size))
    return [total] * len(shards)


def _slice(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    dim = _changed_dim(collective)
    return [np.array(np.split(shard, len(shards), axis=dim)[i]) for i, shard in enumerate(shards)]


def _all_to_all(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    source = _changed_dim(collective)
    axes = zip(collective.before.axes, collective.after.axes, strict=True)
    target = next(i for i, (old, new) in enumerate(axes) if len(new) > len(old))
    cut = [np.split(shard, len(shards), axis=target) for shard in shards]
    for shard in shards:
        devices.count(collective, shard.size - shard.size // len(shards))
    return [np.concatenate([parts[i] for parts in cut], axis=source) for i in range(len(shards))]


COLLECTIVES: Mapping[CollectiveKind, Callable[[VirtualDevices, Collective, Shards], Shards]] = {
    CollectiveKind.ALL_GATHER: _all_gather,
    CollectiveKind.REDUCE_SCATTER: _reduce_scatter,
    CollectiveKind.ALL_REDUCE: _all_reduce,
    CollectiveKind.ALL_TO_ALL: _all_to_all,
    CollectiveKind.SLICE: _slice,
}


def run_ring_attention(devices: VirtualDevices, program: Program, ring: Ring) -> None:
    """Run one attention, or its gradient, in place of its collectives."""
    (step,) = ring.computes
    operands = _ring_operands(devices, program, ring)
    attend = _ring_gradient if isinstance(step.operation, ScanGradient) else _ring_forward
    results: list[list[Array]] = [[np.empty(0)] * len(devices.coordinates) for _ in step.operation.outputs]
    positions = {name: i for i, name in enumerate((*step.operation.operands[:3], *step.operation.outputs))}
    for group in devices.groups(ring.axes):
        shards = [
            _with_selected(devices, step.operation, [operand[device] for operand in operands]) for device in group
        ]
        for device, arrays in zip(group, attend(shards), strict=True):
            for result, array in zip(results, arrays, strict=True):
                result[device] = array
        for collective_step in ring.collectives:
            array = [*operands[:3], *results][positions[collective_step.tensor.name]][group[0]]
            devices.moved[CollectiveKind.PERMUTE, ring.axes] += array.size * len(group) * (len(group) - 1)
    scattered = {scatter.before: scatter.after for scatter in ring.scatters}
    for tensor, result in zip(step.writes, results, strict=True):
        devices.live_shards[scattered.get(tensor, tensor)] = result


def _with_selected(devices: VirtualDevices, operation: Operation, operands: list[Array]) -> tuple[Any, ...]:
    """Return operands of attention with the positions of selected keys as the last one, or None."""
    assert isinstance(operation, Scan | ScanGradient)
    return (*operands[: len(operands) - operation.is_sparse], devices.selected(operation, operands))


def _ring_operands(devices: VirtualDevices, program: Program, ring: Ring) -> list[list[Array]]:
    """Return the operands before anything moves: keys, values and the keys' positions in blocks."""
    (step,) = ring.computes
    before = {gather.after: gather.before for gather in ring.gathers}
    shards = [devices.shards(program, *before.get(tensor, tensor)) for tensor in step.reads]
    key_positions, spec = step.reads[4]
    shards[4] = devices.shards(program, key_positions, Spec.of(spec.dims, dict.fromkeys(spec.dims, RING_AXES)))
    return shards


def _ring_forward(shards: Sequence[tuple[Any, ...]]) -> list[tuple[Array, ...]]:
    """Return (output, log-sum-exp) of each device, from its (q, k, v, positions, positions of the keys, sinks if any, and the
    positions of selected keys or None)."""
    count = len(shards)
    results = []
    for index, (q, _, _, queries, _, *sinks, selected) in enumerate(shards):
        blocks = [shards[(index - turn) % count] for turn in range(count)]
        merged = None
        for _, k, v, _, keys, *_ in blocks:
            part = kernels.attention(q, k, v, queries, keys, selected)
            merged = part if merged is None else kernels.merge_attention(merged, part)
        assert merged is not None
        results.append(kernels.add_sinks(merged, *sinks) if sinks else merged)
    return list(results)


def _ring_gradient(shards: Sequence[tuple[Any, ...]]) -> list[tuple[Array, ...]]:
    """Return (dq, dk, dv) of each device, from its operands of a gradient; dk and dv are of the block that it stores."""
    dq = [np.zeros_like(operands[0]) for operands in shards]
    dk = [np.zeros_like(operands[1]) for operands in shards]
    dv = [np.zeros_like(operands[2]) for operands in shards]
    for turn in range(1, len(shards) + 1):  # a block starts at the next device and comes home on the last turn
        for index, (q, _, _, queries, _, out, lse, dy, selected) in enumerate(shards):
            block = (index - turn) % len(shards)
            _, k, v, _, keys = shards[block][:5]
            parts = kernels.attention_gradient(
                kernels.AttentionOperands(q, k, v, queries, keys, selected), out, lse, dy
            )
            dq[index] = dq[index] + parts[0]
            dk[block] = dk[block] + parts[1]
            dv[block] = dv[block] + parts[2]
    return list(zip(dq, dk, dv, strict=True))
