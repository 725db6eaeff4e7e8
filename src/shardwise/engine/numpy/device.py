"""One operation on the arrays of one virtual device after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shardwise.derive.walk import Compute
from shardwise.engine.numpy import kernels
from shardwise.errors import chosen
from shardwise.model.operations import (
    Accumulate,
    Contract,
    Join,
    Lookup,
    Map,
    OfMatrix,
    Operation,
    Part,
    Route,
    RouteGradient,
    Scan,
    ScanGradient,
    Scatter,
)
from shardwise.sharding.meaning import einsum_subscripts, letters_of
from shardwise.sharding.spec import Axes, Spec

if TYPE_CHECKING:
    from shardwise.engine.numpy.virtual import VirtualDevices

Array = NDArray[Any]


DIMS = "EBTVFMSKGHIRUCQJPrD"  # the order in which the operands of a map are aligned


class DeviceKernel:
    """One operation, on each device in turn: what is the same on all of them is found once."""

    def __init__(self, devices: VirtualDevices, step: Compute) -> None:
        self.devices, self.device = devices, 0
        self.operation: Operation = step.operation
        self.placed = step.placed

    def __call__(self, device: int, arrays: list[Array]) -> tuple[Array, ...]:
        self.device, operation = device, self.operation
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
            scores = self.devices.scores[operation.inputs[1], self.device]
            dgates, gates = arrays
            return (self.devices.router.gradient(dgates, gates, scores),)
        if isinstance(operation, Route):
            gates, scores = self.devices.router.route(arrays[0], self.devices.sizes[operation.num_chosen])
            self.devices.scores[operation.outputs[0], self.device] = scores
            return (gates,)
        if isinstance(operation, Scan):
            part = kernels.attention(*arrays[:5])
            return kernels.with_sinks(part, *arrays[5:]) if arrays[5:] else part
        if isinstance(operation, OfMatrix):
            return (self.of_matrix(operation, arrays),)
        if isinstance(operation, ScanGradient):
            return kernels.attention_gradient(*arrays)
        raise TypeError(f"no kernel for {operation}")

    @property
    def coordinate(self) -> Mapping[str, int]:
        return self.devices.coordinates[self.device]

    @cached_property
    def subscripts(self) -> str:
        operands, result = [spec.dims for spec in self.placed.inputs], self.placed.outputs[0].dims
        return einsum_subscripts(operands, result, letters_of(dim for dims in operands for dim in dims))

    @cached_property
    def dims(self) -> list[str]:
        """Those of the operands and of the result, in one order."""
        every = {dim for spec in (*self.placed.outputs, *self.placed.inputs) for dim in spec.dims}
        return sorted(every, key=DIMS.index)

    @cached_property
    def alignment(self) -> list[tuple[list[int], list[int]]]:
        """For each operand the order of its dims, and the places of the dims that it lacks."""
        return [
            (
                [spec.dims.index(dim) for dim in self.dims if dim in spec.dims],
                [place for place, dim in enumerate(self.dims) if dim not in spec.dims],
            )
            for spec in self.placed.inputs
        ]

    @cached_property
    def local(self) -> dict[str, int]:
        """The result's sizes on a device."""
        out = self.placed.outputs[0]
        return dict(zip(out.dims, out.local_shape(self.devices.mesh, self.devices.sizes), strict=True))

    @cached_property
    def width(self) -> int:
        """Elements that a reduction of the whole tensor goes over."""
        return math.prod(self.devices.true_sizes[dim] for dim in getattr(self.operation, "over", ()))

    @cached_property
    def cuts(self) -> list[tuple[int, Axes]]:
        """Places of dims whose sums over all devices are cut along a flat array (`derive.walk`), and over which axes."""
        out, mesh = self.placed.outputs[0], self.devices.mesh
        found = []
        for place, dim in enumerate(dim for dim in self.dims if dim in out.dims):
            axes = next((spec.axes_of(dim) for spec in self.placed.inputs if dim in spec.dims), ())
            cut = tuple(axis for axis in axes if axis in out.partial)
            found += [(place, cut)] if mesh.size(cut) > 1 else []
        return found

    def contract(self, *arrays: Array) -> Array:
        return np.array(np.einsum(self.subscripts, *arrays))

    def of_matrix(self, operation: OfMatrix, arrays: list[Array]) -> Array:
        """Of each matrix of a stack [..., rows, columns], whose dims may be several, and of squares [..., rows, rows] of its
        sides, each of which is one dim."""
        front, out = len(operation.stack), self.placed.outputs[0]
        taken = [array.reshape(*array.shape[:front], *self.sides(operation, array.shape[front:])) for array in arrays]
        found: Array = kernels.map_named(operation.function)(*taken, width=1)
        return found.reshape(out.local_shape(self.devices.mesh, self.devices.sizes))

    @staticmethod
    def sides(operation: OfMatrix, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Those of a matrix with these sizes of its dims."""
        if len(sizes) == 1:
            return math.isqrt(sizes[0]), math.isqrt(sizes[0])
        rows = len(operation.rows)
        return math.prod(sizes[:rows]), math.prod(sizes[rows:])

    def map(self, operation: Map, arrays: list[Array]) -> Array:
        out = self.placed.outputs[0]
        aligned = [
            np.expand_dims(np.transpose(array, order), lacking)
            for array, (order, lacking) in zip(arrays, self.alignment, strict=True)
        ]
        if operation.function == "add":
            result = sum(aligned[1:], aligned[0])
        else:
            result = kernels.map_named(operation.function)(*aligned, width=self.width)
        summed = tuple(place for place, dim in enumerate(self.dims) if dim not in out.dims)
        if summed:
            reduce = chosen({"sum": np.add, "max": np.maximum}, operation.reduction, "reduction").reduce
            result = reduce(result, axis=summed)
        kept = [dim for dim in self.dims if dim in out.dims]
        result = np.broadcast_to(self.summands(result), [self.local[dim] for dim in kept])
        return np.array(np.transpose(result, [kept.index(dim) for dim in out.dims]))

    def summands(self, result: Array) -> Array:
        """Of sums over all devices that are cut what this device adds: nothing to those that it has no part of."""
        for place, cut in self.cuts:
            size, number = result.shape[place], self.devices.mesh.position(self.coordinate, cut)
            front = number * size, (self.devices.mesh.size(cut) - number - 1) * size
            result = np.pad(result, [front if other == place else (0, 0) for other in range(result.ndim)])
        return result

    def join(self, operation: Join, arrays: list[Array]) -> Array:
        """Repeat each operand along the result's dims that it lacks, then put them one after the other."""
        out, local = self.placed.outputs[0], self.local
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
        return np.where(mine, np.take_along_axis(table, rows[..., None], axis=-1)[..., 0], 0.0)

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
