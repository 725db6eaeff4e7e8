"""Virtual devices in NumPy: each device's shards are arrays, each collective moves them, and what moves is counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.execute import kernels
from shardwise.execute.ring import rings_of, run_ring
from shardwise.layout.derive import Communicate, Compute, Step
from shardwise.layout.shardings import Family
from shardwise.model.operations import (
    Accumulate,
    Contract,
    Join,
    Lookup,
    Map,
    Operation,
    Part,
    Route,
    RouteGradient,
    Scan,
    ScanGradient,
    Scatter,
)
from shardwise.model.program import Program, Role
from shardwise.sharding.collective import Collective, Kind
from shardwise.sharding.exchange import part_ratios, sends
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec

Array = NDArray[Any]
Shards = list[Array]
Moved = Counter[tuple[Kind, Axes]]


class VirtualDevices:
    """The devices of a mesh and what they hold: for each tensor and sharding, one array a device.

    `moved` counts the elements that all devices together have received, by kind and axes of the collective.
    """

    def __init__(self, mesh: Mesh, sizes: Mapping[str, int], family: Family | None = None) -> None:
        self.family = family
        self.mesh = mesh
        self.sizes = sizes
        self.coordinates = list(mesh.coordinates())
        self.held: dict[tuple[str, Spec], Shards] = {}
        self.constants: dict[str, tuple[tuple[str, ...], Array]] = {}
        self.moved: Moved = Counter()

    def put(self, name: str, spec: Spec, whole: Array) -> None:
        """Distribute an array; along partial axes the first device gets all of it and the others nothing."""
        shards = []
        for coordinate in self.coordinates:
            first = self.mesh.position(coordinate, spec.partial) == 0
            shards.append(self.cut(whole, spec, coordinate) * (1 if first else 0))
        self.held[name, spec] = shards

    def get(self, name: str, spec: Spec) -> Array:
        """Put the array together from all devices' shards."""
        shards = self.held[name, spec]
        whole = np.zeros(tuple(self.sizes[dim] for dim in spec.dims), dtype=shards[0].dtype)
        copies = spec.replication(self.mesh)
        for coordinate, shard in zip(self.coordinates, shards, strict=True):
            whole[self.window(spec, coordinate)] += shard / copies
        return whole

    def window(self, spec: Spec, coordinate: Mapping[str, int]) -> tuple[slice, ...]:
        """The part of the whole array that a device holds."""
        window = []
        for dim, axes, local in zip(spec.dims, spec.axes, spec.local_shape(self.mesh, self.sizes), strict=True):
            start = self.mesh.position(coordinate, axes) * local
            assert self.sizes[dim] >= start + local
            window.append(slice(start, start + local))
        return tuple(window)

    def cut(self, whole: Array, spec: Spec, coordinate: Mapping[str, int]) -> Array:
        return np.array(whole[self.window(spec, coordinate)])

    def shards(self, program: Program, name: str, spec: Spec) -> Shards:
        if program.tensors[name].role is Role.CONSTANT:
            _, whole = self.constants[name]
            return [self.cut(whole, spec, coordinate) for coordinate in self.coordinates]
        return self.held[name, spec]

    def run(self, program: Program, steps: tuple[Step, ...]) -> None:
        """Run derived steps: collectives move shards, operations compute on each device alone.

        Where the family has a ring, attention runs around it in place of the collectives that it is pipelined with.
        """
        rings = rings_of(steps, self.family) if self.family else {}
        in_pieces = {position for around in rings.values() for position in around}
        for position, step in enumerate(steps):
            if position in rings:
                assert isinstance(step, Compute)
                moved = [steps[one] for one in rings[position]]
                run_ring(self, program, step, [one for one in moved if isinstance(one, Communicate)])
            elif isinstance(step, Compute):
                self.compute(program, step)
            elif position not in in_pieces:
                self.communicate(step.tensor.name, step.collective)

    def compute(self, program: Program, step: Compute) -> None:
        operation, placed = step.operation, step.placed
        read = list(zip(operation.operands, placed.inputs, strict=False))
        operands = [self.shards(program, name, spec) for name, spec in read]
        results: list[Shards] = [[] for _ in operation.outputs]
        for device, coordinate in enumerate(self.coordinates):
            kernel = _Kernel(self, step, coordinate)
            for result, array in zip(results, kernel([o[device] for o in operands]), strict=True):
                result.append(array)
        for name, spec, result in zip(operation.outputs, placed.outputs, results, strict=True):
            self.held[name, spec] = result

    def communicate(self, name: str, collective: Collective) -> None:
        if collective.kind is Kind.SEND_RECV:
            return
        before = self.held[name, collective.before]
        if collective.kind is Kind.PERMUTE:
            self.held[name, collective.after] = self.permute(collective, before)
            return
        after: Shards = list(before)
        for group in self.groups(collective.axes):
            moved = _COLLECTIVES[collective.kind](self, collective, [before[device] for device in group])
            for device, array in zip(group, moved, strict=True):
                after[device] = array
        self.held[name, collective.after] = after

    def permute(self, collective: Collective, shards: Shards) -> Shards:
        """Each device hands one part of its shard to one device."""
        ratios = part_ratios(collective, self.mesh)
        after: Shards = list(shards)
        for source, send in enumerate(sends(collective, self.mesh)):
            sizes = [size // ratio for size, ratio in zip(shards[source].shape, ratios, strict=True)]
            part = tuple(slice(p * n, (p + 1) * n) for p, n in zip(send.part, sizes, strict=True))
            after[send.destination] = np.array(shards[source][part])
            self.count(collective, after[send.destination].size if send.destination != source else 0)
        return after

    def groups(self, axes: Axes) -> list[list[int]]:
        """Device numbers of each group along `axes`, in the order of the axes."""
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for device, coordinate in enumerate(self.coordinates):
            others = tuple(index for axis, index in coordinate.items() if axis not in axes)
            found.setdefault(others, []).append((self.mesh.position(coordinate, axes), device))
        return [[device for _, device in sorted(members)] for members in found.values()]

    def count(self, collective: Collective, elements: int) -> None:
        self.moved[collective.kind, collective.axes] += elements


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
    combine = np.maximum if collective.before.reduction == "max" else np.add
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


_COLLECTIVES: Mapping[Kind, Callable[[VirtualDevices, Collective, Shards], Shards]] = {
    Kind.ALL_GATHER: _all_gather,
    Kind.REDUCE_SCATTER: _reduce_scatter,
    Kind.ALL_REDUCE: _all_reduce,
    Kind.ALL_TO_ALL: _all_to_all,
    Kind.SLICE: _slice,
}


class _Kernel:
    """One operation on one device."""

    def __init__(self, devices: VirtualDevices, step: Compute, coordinate: Mapping[str, int]) -> None:
        self.devices = devices
        self.operation: Operation = step.operation
        self.placed = step.placed
        self.coordinate = coordinate

    def __call__(self, arrays: list[Array]) -> tuple[Array, ...]:
        operation = self.operation
        if isinstance(operation, Contract):
            return (self.contract(*arrays),)
        if isinstance(operation, Accumulate):
            return (np.add.reduce(np.stack(arrays)),)
        if isinstance(operation, Map):
            return (self.map(operation, arrays),)
        if isinstance(operation, Join):
            return (self.join(operation, arrays),)
        if isinstance(operation, Part):
            return (self.part(operation, *arrays),)
        if isinstance(operation, Lookup):
            return (self.lookup(operation, *arrays),)
        if isinstance(operation, Scatter):
            return (self.scatter(operation, *arrays),)
        if isinstance(operation, RouteGradient):
            return (kernels.route_gradient(*arrays),)
        if isinstance(operation, Route):
            return (kernels.route(arrays[0], self.devices.sizes[operation.num_chosen]),)
        if isinstance(operation, Scan):
            part = kernels.attention(*arrays[:5])
            return kernels.with_sinks(part, *arrays[5:]) if arrays[5:] else part
        if isinstance(operation, ScanGradient):
            return kernels.attention_gradient(*arrays)
        raise TypeError(f"no kernel for {operation}")

    def contract(self, left: Array, right: Array) -> Array:
        specs = (*self.placed.inputs, self.placed.outputs[0])
        names = sorted({dim for spec in specs for dim in spec.dims})
        letters = {dim: chr(ord("a") + i) for i, dim in enumerate(names)}
        a, b, c = ("".join(letters[dim] for dim in spec.dims) for spec in specs)
        return np.array(np.einsum(f"{a},{b}->{c}", left, right))

    def map(self, operation: Map, arrays: list[Array]) -> Array:
        out = self.placed.outputs[0]
        union = list(dict.fromkeys([*out.dims, *(d for s in self.placed.inputs for d in s.dims)]))
        union.sort(key="EBTVFMSKGHIRUCQJPD".index)
        aligned = []
        for spec, array in zip(self.placed.inputs, arrays, strict=True):
            order = [d for d in union if d in spec.dims]
            moved = np.transpose(array, [spec.dims.index(d) for d in order])
            aligned.append(moved.reshape([moved.shape[order.index(d)] if d in order else 1 for d in union]))
        function = operation.function
        result = (
            sum(aligned[1:], aligned[0])
            if function == "add"
            else kernels.MAPS[function](*aligned, width=math.prod(self.devices.sizes[d] for d in operation.over))
        )
        summed = tuple(i for i, d in enumerate(union) if d not in out.dims)
        if summed:
            result = result.max(axis=summed) if operation.reduction == "max" else result.sum(axis=summed)
        kept = [d for d in union if d in out.dims]
        local = dict(zip(out.dims, out.local_shape(self.devices.mesh, self.devices.sizes), strict=True))
        result = np.broadcast_to(result, [local[d] for d in kept])
        return np.array(np.transpose(result, [kept.index(d) for d in out.dims]))

    def join(self, operation: Join, arrays: list[Array]) -> Array:
        """Repeat each operand along the result's dims that it lacks, then put them one after the other."""
        out = self.placed.outputs[0]
        local = dict(zip(out.dims, out.local_shape(self.devices.mesh, self.devices.sizes), strict=True))
        (joined,) = (i for i, d in enumerate(out.dims) if all(d not in spec.dims for spec in self.placed.inputs))
        repeated = []
        for spec, own, array in zip(self.placed.inputs, operation.parts, arrays, strict=True):
            dims = [own if i == joined else d for i, d in enumerate(out.dims)]
            shape = [array.shape[spec.dims.index(d)] if d in spec.dims else 1 for d in dims]
            order = [spec.dims.index(d) for d in dims if d in spec.dims]
            whole = [shape[i] if i == joined else local[d] for i, d in enumerate(out.dims)]
            repeated.append(np.broadcast_to(np.transpose(array, order).reshape(shape), whole))
        return np.concatenate(repeated, axis=joined)

    def part(self, operation: Part, dy: Array) -> Array:
        spec, like = self.placed.inputs[0], self.placed.outputs[0]
        sizes = [self.devices.sizes[dim] for dim in operation.parts]
        start = sum(sizes[: operation.position])
        joined = spec.dims.index(operation.joined)
        own = operation.parts[operation.position]
        taken = dy[(slice(None),) * joined + (slice(start, start + sizes[operation.position]),)]
        dims = [own if d == operation.joined else d for d in spec.dims]
        summed = taken.sum(axis=tuple(i for i, d in enumerate(dims) if d not in like.dims))
        kept = [d for d in dims if d in like.dims]
        return np.array(np.transpose(summed, [kept.index(d) for d in like.dims]))

    def rows(self, table: Spec, dim: str, index: Array, size: int) -> tuple[Array, Array]:
        """Row numbers within this device's part of the table, and which of them it has."""
        local = index - self.devices.mesh.position(self.coordinate, table.axes_of(dim)) * size
        mine = (local >= 0) & (local < size)
        return np.where(mine, local, 0), mine

    def lookup(self, operation: Lookup, table: Array, index: Array) -> Array:
        spec = self.placed.inputs[0]
        where = spec.dims.index(operation.dim)
        rows, mine = self.rows(spec, operation.dim, index, table.shape[where])
        if where == 0:
            return np.array(table[rows] * mine[..., None])
        return np.array(np.take_along_axis(table, rows[..., None], axis=-1)[..., 0] * mine)

    def scatter(self, operation: Scatter, dy: Array, index: Array) -> Array:
        spec = self.placed.outputs[0]
        shape = spec.local_shape(self.devices.mesh, self.devices.sizes)
        where = spec.dims.index(operation.dim)
        rows, mine = self.rows(spec, operation.dim, index, shape[where])
        result = np.zeros(shape, dtype=dy.dtype)
        if where == 0:
            np.add.at(result, rows.ravel(), (dy * mine[..., None]).reshape(-1, dy.shape[-1]))
        else:
            np.put_along_axis(result, rows[..., None], (dy * mine)[..., None], axis=-1)
        return result
