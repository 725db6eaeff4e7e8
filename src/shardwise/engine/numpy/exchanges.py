"""What each collective does with the shards of one group of virtual devices, and what each device receives by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import chosen
from shardwise.sharding.collective import Collective, Kind

if TYPE_CHECKING:
    from shardwise.engine.numpy.virtual import VirtualDevices

Array = NDArray[Any]
Shards = list[Array]


def _changed_dim(collective: Collective) -> int:
    """Position of the dim whose axes the collective changes (for an all-to-all: the dim that is gathered)."""
    pairs = list(zip(collective.before.axes, collective.after.axes, strict=True))
    return next(i for i, (old, new) in enumerate(pairs) if len(old) > len(new)) if any(
        len(old) > len(new) for old, new in pairs
    ) else next(i for i, (old, new) in enumerate(pairs) if old != new)  # fmt: skip


def _all_gather(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    whole = np.concatenate(shards, axis=_changed_dim(collective))
    for shard in shards:
        devices.count(collective, whole.size - shard.size)
    return [whole] * len(shards)


def _reduce(collective: Collective, shards: Shards) -> Array:
    combine = chosen({"sum": np.add, "max": np.maximum}, collective.before.reduction, "reduction")
    return np.array(combine.reduce(np.stack(shards)))


def _reduce_scatter(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    parts = np.split(_reduce(collective, shards), len(shards), axis=_changed_dim(collective))
    for part in parts:
        devices.count(collective, part.size * (len(shards) - 1))
    return [np.array(part) for part in parts]


def _all_reduce(devices: VirtualDevices, collective: Collective, shards: Shards) -> Shards:
    """A ring: reduce-scatter of the flattened array in as even chunks as it allows, then all-gather of the chunks."""
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
    target = next(
        i
        for i, (old, new) in enumerate(zip(collective.before.axes, collective.after.axes, strict=True))
        if len(new) > len(old)
    )
    cut = [np.split(shard, len(shards), axis=target) for shard in shards]
    for shard in shards:
        devices.count(collective, shard.size - shard.size // len(shards))
    return [np.concatenate([parts[i] for parts in cut], axis=source) for i in range(len(shards))]


COLLECTIVES: Mapping[Kind, Callable[[VirtualDevices, Collective, Shards], Shards]] = {
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.SLICE: _slice,
}
