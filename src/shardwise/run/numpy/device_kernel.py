"""One operation on one virtual device after the other, by the kernels in NumPy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shardwise.derive import ComputeStep
from shardwise.model import Accumulate, Contract, Lookup, Map, MatrixFunction, Operation, Route
from shardwise.model.alternating_streams import LAUREL_RANK
from shardwise.model.operations import (
    CACHED_TOKEN_OPERATIONS,
    COMPRESSION_OPERATIONS,
    CONVOLUTION_OPERATIONS,
    SHARED_KEY_OPERATIONS,
    WINDOWS,
    Concatenate,
    ConcatenateGradient,
    DropIndex,
    DropIndexGradient,
    HashedRoute,
    RouteGradient,
    Scan,
    ScanGradient,
    Scatter,
    SelectBlocks,
    SelectKeys,
    SequenceRecurrence,
    StreamWeights,
    StreamWeightsGradient,
    TakeIndex,
    TakeIndexGradient,
)
from shardwise.model.operations.recurrences import SEGMENT_AXES
from shardwise.run.numpy import kernels
from shardwise.run.numpy.cached_tokens import CachedTokensKernel
from shardwise.run.numpy.collectives import Array
from shardwise.run.numpy.compressed_keys import CompressionKernel
from shardwise.run.numpy.recurrences import ConvolutionKernel, RecurrenceKernel
from shardwise.run.numpy.residual_streams import stream_weights_kernel
from shardwise.sharding import Axes, Spec, assign_letters, einsum_subscripts
from shardwise.values import lookup

if TYPE_CHECKING:
    from shardwise.run.numpy.devices import VirtualDevices

DIMS = (
    *"EBT",
    WINDOWS,
    *"ZjtVFMSfgalximKGLOAHNXYIRUCQbJPrqeohdWuzp",
    LAUREL_RANK,
    "D",
)  # the order in which the operands of a map are aligned

MIN_PLANNED_ELEMENTS = 2**16  # of the larger operand of a contraction; below, planning takes longer than the product


class DeviceKernel:
    """One operation, run on each device in turn; what is the same on all devices is computed once."""

    def __init__(self, devices: VirtualDevices, step: ComputeStep) -> None:
        self.devices, self.device = devices, 0
        self.operation: Operation = step.operation
        self.placed = step.placed

    def __call__(self, device: int, arrays: list[Array]) -> tuple[Array, ...]:
        self.device = device
        match self.operation:
            case Scan(is_sparse=is_sparse):
                q, k, v, queries, keys, *sinks = arrays[: len(arrays) - is_sparse]
                part = kernels.attention(q, k, v, queries, keys, self.devices.selected(self.operation, arrays))
                return kernels.add_sinks(part, *sinks) if sinks else part
            case ScanGradient():
                operands = kernels.AttentionOperands(*arrays[:5])._replace(
                    selected=self.devices.selected(self.operation, arrays)
                )
                return kernels.attention_gradient(operands, *arrays[5:8])
            case operation if isinstance(operation, CACHED_TOKEN_OPERATIONS):
                return self.cached_kernel(arrays)
            case SequenceRecurrence() as operation:
                return RecurrenceKernel(operation, self.placed.inputs, self.placed.outputs, self.segment)(arrays)
            case operation if isinstance(operation, (*COMPRESSION_OPERATIONS, *SHARED_KEY_OPERATIONS)):
                return CompressionKernel(operation, self.devices.sizes["m"], self.segment)(arrays)
            case StreamWeights() | StreamWeightsGradient():
                return stream_weights_kernel(self.operation, arrays, self.devices.sizes["f"])
            case operation if isinstance(operation, CONVOLUTION_OPERATIONS):
                return ConvolutionKernel(operation, self.devices.sizes["w"], self.segment)(arrays)
            case operation:
                return (self._single_result(operation, arrays),)

    def _single_result(self, operation: Operation, arrays: list[Array]) -> Array:
        match operation:
            case Contract():
                return self.contract(*arrays)
            case Accumulate():
                return np.array(np.add.reduce(np.stack(arrays)))
            case Map():
                return self.map(operation, arrays)
            case Concatenate():
                return self.join(operation, arrays)
            case ConcatenateGradient():
                return self.part(operation, *arrays)
            case TakeIndex():
                return np.array(np.take(arrays[0], operation.index, self.placed.inputs[0].dims.index(operation.dim)))
            case TakeIndexGradient():
                return self.put_index(operation, *arrays)
            case DropIndex():
                return np.delete(arrays[0], operation.index, self.placed.inputs[0].dims.index(operation.dim))
            case DropIndexGradient():
                return np.insert(arrays[0], operation.index, 0.0, self.placed.outputs[0].dims.index(operation.dim))
            case Lookup():
                return self.lookup(operation, *arrays)
            case Scatter():
                return self.scatter(operation, *arrays)
            case RouteGradient():
                dgates, gates = arrays
                return self.devices.router.gradient(
                    dgates, gates, self.devices.scores[operation.inputs[1], self.device]
                )
            case Route():
                logits, *bias = arrays
                if isinstance(operation, HashedRoute):
                    is_chosen = (bias[0][..., None] == np.arange(logits.shape[-1])).any(axis=-2)
                    bias = [np.where(is_chosen, np.inf, 0.0)]
                gates, scores = self.devices.router.route(logits, self.devices.sizes[operation.num_chosen], *bias)
                self.devices.scores[operation.outputs[0], self.device] = scores
                return gates
            case SelectKeys():
                q, k, weights, queries, keys = arrays
                num_selected, window = (
                    self.devices.sizes.get(d, 0) for d in (operation.num_selected, operation.window)
                )
                return kernels.select_keys(q, k, weights, queries, keys, num_selected, window)
            case SelectBlocks():
                q, k, queries, keys = arrays
                num_selected, block = (self.devices.sizes[dim] for dim in (operation.num_selected, operation.block))
                return kernels.select_blocks(q, k, queries, keys, num_selected, block)
            case MatrixFunction():
                return self.of_matrix(operation, arrays)
        raise TypeError(f"no kernel for {operation}")

    def cached_kernel(self, arrays: list[Array]) -> tuple[Array, ...]:
        """Run an operation of inference on cached tokens."""
        kernel = CachedTokensKernel(self.operation, self.placed, self.devices.sizes)
        tokens = self.placed.inputs[0].axes_of("T")
        return kernel(arrays, self.devices.mesh.position(self.coordinate, tokens), self.devices.mesh)

    @property
    def coordinate(self) -> Mapping[str, int]:
        return self.devices.coordinates[self.device]

    @property
    def segment(self) -> int | None:
        """Number of the segment of the sequence that the device has; None where the sequence is in one part."""
        is_split = self.devices.mesh.size(SEGMENT_AXES) > 1
        return self.devices.mesh.position(self.coordinate, SEGMENT_AXES) if is_split else None

    @cached_property
    def subscripts(self) -> str:
        operands, result = [spec.dims for spec in self.placed.inputs], self.placed.outputs[0].dims
        return einsum_subscripts(operands, result, assign_letters(dim for dims in operands for dim in dims))

    @cached_property
    def dims(self) -> list[str]:
        """Dims of the operands and of the result, in one order."""
        all_dims = {dim for spec in (*self.placed.outputs, *self.placed.inputs) for dim in spec.dims}
        return sorted(all_dims, key=DIMS.index)

    @cached_property
    def alignment(self) -> list[tuple[list[int], list[int]]]:
        """Order of the dims of each operand, and indices of the dims that it lacks."""
        return [
            (
                [spec.dims.index(dim) for dim in self.dims if dim in spec.dims],
                [i for i, dim in enumerate(self.dims) if dim not in spec.dims],
            )
            for spec in self.placed.inputs
        ]

    @cached_property
    def local(self) -> dict[str, int]:
        """Sizes of the result's dims on a device."""
        out = self.placed.outputs[0]
        return dict(zip(out.dims, out.local_shape(self.devices.mesh, self.devices.sizes), strict=True))

    @cached_property
    def width(self) -> int:
        """Number of elements that a reduction of the whole tensor covers."""
        return math.prod(self.devices.true_sizes[dim] for dim in getattr(self.operation, "over", ()))

    @cached_property
    def cuts(self) -> list[tuple[int, Axes]]:
        """Indices and axes of dims whose sums are cut along a flat array (`derive.sharded_program`)."""
        out, mesh = self.placed.outputs[0], self.devices.mesh
        cuts = []
        for position, dim in enumerate(dim for dim in self.dims if dim in out.dims):
            axes = next((spec.axes_of(dim) for spec in self.placed.inputs if dim in spec.dims), ())
            cut = tuple(axis for axis in axes if axis in out.partial)
            cuts += [(position, cut)] if mesh.size(cut) > 1 else []
        return cuts

    def contract(self, *arrays: Array) -> Array:
        # A plan of the contraction makes it a BLAS product, at a cost that only large operands are worth.
        is_planned = max(array.size for array in arrays) > MIN_PLANNED_ELEMENTS
        return np.array(np.einsum(self.subscripts, *arrays, optimize=is_planned))

    def of_matrix(self, operation: MatrixFunction, arrays: list[Array]) -> Array:
        """Apply a function to each matrix of a stack [..., rows, columns], whose sides may be several dims.

        Squares [..., rows, rows] of its sides have one dim each.
        """
        front, out = len(operation.stack), self.placed.outputs[0]
        matrices = [
            array.reshape(*array.shape[:front], *self.matrix_sides(operation, array.shape[front:])) for array in arrays
        ]
        output: Array = kernels.get_map(operation.function)(*matrices, width=1)
        return output.reshape(out.local_shape(self.devices.mesh, self.devices.sizes))

    @staticmethod
    def matrix_sides(operation: MatrixFunction, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Return the numbers of rows and columns of a matrix with these dim sizes."""
        if len(sizes) == 1:
            return math.isqrt(sizes[0]), math.isqrt(sizes[0])
        rows = len(operation.rows)
        return math.prod(sizes[:rows]), math.prod(sizes[rows:])

    def map(self, operation: Map, arrays: list[Array]) -> Array:
        out = self.placed.outputs[0]
        aligned = [
            np.expand_dims(np.transpose(array, order), missing)
            for array, (order, missing) in zip(arrays, self.alignment, strict=True)
        ]
        if operation.function == "add":
            result = sum(aligned[1:], aligned[0])
        else:
            result = kernels.get_map(operation.function)(*aligned, width=self.width)
        summed = tuple(i for i, dim in enumerate(self.dims) if dim not in out.dims)
        if summed:
            reduce = lookup({"sum": np.add, "max": np.maximum}, operation.reduction, "reduction").reduce
            result = reduce(result, axis=summed)
        result_dims = [dim for dim in self.dims if dim in out.dims]
        result = np.broadcast_to(self.pad_cut_sums(result), [self.local[dim] for dim in result_dims])
        return np.array(np.transpose(result, [result_dims.index(dim) for dim in out.dims]))

    def pad_cut_sums(self, result: Array) -> Array:
        """Return this device's contribution to sums that are cut over all devices, with zeros for the other parts."""
        for position, cut in self.cuts:
            size, index = result.shape[position], self.devices.mesh.position(self.coordinate, cut)
            padding = index * size, (self.devices.mesh.size(cut) - index - 1) * size
            result = np.pad(result, [padding if i == position else (0, 0) for i in range(result.ndim)])
        return result

    def join(self, operation: Concatenate, arrays: list[Array]) -> Array:
        """Repeat each operand along the result's dims that it lacks, then concatenate them."""
        out, local = self.placed.outputs[0], self.local
        (joined,) = (i for i, d in enumerate(out.dims) if all(d not in spec.dims for spec in self.placed.inputs))
        repeated = []
        for spec, part_dim, array in zip(self.placed.inputs, operation.parts, arrays, strict=True):
            dims = [part_dim if i == joined else d for i, d in enumerate(out.dims)]
            shape = [array.shape[spec.dims.index(d)] if d in spec.dims else 1 for d in dims]
            order = [spec.dims.index(d) for d in dims if d in spec.dims]
            full_shape = [shape[i] if i == joined else local[d] for i, d in enumerate(out.dims)]
            repeated.append(np.broadcast_to(np.transpose(array, order).reshape(shape), full_shape))
        return np.concatenate(repeated, axis=joined)

    def part(self, operation: ConcatenateGradient, dy: Array) -> Array:
        spec, like = self.placed.inputs[0], self.placed.outputs[0]
        sizes = [self.devices.sizes[dim] for dim in operation.parts]
        start = sum(sizes[: operation.position])
        joined = spec.dims.index(operation.joined)
        part_dim = operation.parts[operation.position]
        part = dy[(slice(None),) * joined + (slice(start, start + sizes[operation.position]),)]
        dims = [part_dim if d == operation.joined else d for d in spec.dims]
        summed = part.sum(axis=tuple(i for i, d in enumerate(dims) if d not in like.dims))
        result_dims = [d for d in dims if d in like.dims]
        return np.array(np.transpose(summed, [result_dims.index(d) for d in like.dims]))

    def put_index(self, operation: TakeIndexGradient, dy: Array) -> Array:
        out = self.placed.outputs[0]
        result = np.zeros(out.local_shape(self.devices.mesh, self.devices.sizes), dtype=dy.dtype)
        result[(slice(None),) * out.dims.index(operation.dim) + (operation.index,)] = dy
        return result

    def rows(self, table: Spec, dim: str, index: Array, size: int) -> tuple[Array, Array]:
        """Return row numbers within this device's part of the table, and which of them it has."""
        local = index - self.devices.mesh.position(self.coordinate, table.axes_of(dim)) * size
        is_local = (local >= 0) & (local < size)
        return np.where(is_local, local, 0), is_local

    def lookup(self, operation: Lookup, table: Array, index: Array) -> Array:
        spec = self.placed.inputs[0]
        dim_index = spec.dims.index(operation.dim)
        rows, is_local = self.rows(spec, operation.dim, index, table.shape[dim_index])
        if dim_index == 0:
            return np.array(table[rows] * is_local.reshape(*is_local.shape, *(1,) * (table.ndim - 1)))
        return np.where(is_local, np.take_along_axis(table, rows[..., None], axis=-1)[..., 0], 0.0)

    def scatter(self, operation: Scatter, dy: Array, index: Array) -> Array:
        spec = self.placed.outputs[0]
        shape = spec.local_shape(self.devices.mesh, self.devices.sizes)
        dim_index = spec.dims.index(operation.dim)
        rows, is_local = self.rows(spec, operation.dim, index, shape[dim_index])
        result = np.zeros(shape, dtype=dy.dtype)
        if dim_index == 0:
            is_local = is_local.reshape(*is_local.shape, *(1,) * (len(shape) - 1))
            np.add.at(result, rows.ravel(), (dy * is_local).reshape(-1, *shape[1:]))
        else:
            np.put_along_axis(result, rows[..., None], (dy * is_local)[..., None], axis=-1)
        return result
