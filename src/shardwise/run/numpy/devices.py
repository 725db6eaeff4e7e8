"""Virtual devices in NumPy: shards are arrays, collectives move them, and the elements that move are counted.

An operation runs on one device after the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from shardwise.derive import CollectiveStep, ComputeStep, ProgramStep, pad_vocabulary
from shardwise.model import Accumulate, Contract, Lookup, Map, MatrixFunction, Operation, Program, Role, Route
from shardwise.model.operations import (
    CACHED_TOKEN_OPERATIONS,
    CONVOLUTION_OPERATIONS,
    Concatenate,
    ConcatenateGradient,
    RouteGradient,
    Scan,
    ScanGradient,
    Scatter,
    SelectBlocks,
    SelectKeys,
    SequenceRecurrence,
)
from shardwise.model.operations.recurrences import SEGMENT_AXES
from shardwise.run.numpy import kernels
from shardwise.run.numpy.cached_tokens import CachedTokensKernel
from shardwise.run.numpy.collectives import COLLECTIVES, Array, Shards, run_ring_attention
from shardwise.run.numpy.kernels import DEFAULT_ROUTER, Router
from shardwise.run.numpy.recurrences import ConvolutionKernel, RecurrenceKernel
from shardwise.sharding import Axes, Collective, CollectiveKind, Mesh, Spec, assign_letters, einsum_subscripts
from shardwise.sharding.shard_placement import permute_sends, permute_split_factors
from shardwise.step import (
    Instruction,
    Kernel,
    LocalSlice,
    RunRing,
    StartCollective,
    WaitCollective,
    unroll_rings,
)
from shardwise.step.instructions import FreeTensors, SingleInstruction
from shardwise.values import SymbolValues, lookup

MovedElements = Counter[tuple[CollectiveKind, Axes]]


class VirtualDevices:
    """The devices of a mesh and their shards: for each tensor and sharding, one array per device.

    `sizes` are those of dims with padding (`pad_vocabulary`), `true_sizes` those without. `moved` counts the elements
    that all devices together have received, by kind and axes of the collective. `scores` are those of a router's
    experts, by the name of its gates and the device, while the gates exist.
    """

    def __init__(self, mesh: Mesh, sizes: Mapping[str, int], *, router: Router = DEFAULT_ROUTER) -> None:
        self.router, self.mesh = router, mesh
        degrees = dict(mesh.axes)  # sizes of the dims of segments are degrees
        self.true_sizes: dict[Any, int] = SymbolValues({**degrees, **sizes})
        self.sizes: dict[Any, int] = SymbolValues({**degrees, **pad_vocabulary(sizes, mesh)})
        self.coordinates = list(mesh.coordinates())
        self.live_shards: dict[tuple[str, Spec], Shards] = {}
        self.constants: dict[str, tuple[tuple[str, ...], Array]] = {}
        self.moved: MovedElements = Counter()
        self.scores: dict[tuple[str, int], Array] = {}
        self.arriving: dict[int, dict[tuple[str, Spec], Shards]] = {}

    def scatter_array(self, name: str, spec: Spec, array: Array) -> None:
        """Distribute an array, padded with zeros; along partial axes the first device gets all of it, the others zeros."""
        padded = np.zeros([self.sizes[dim] for dim in spec.dims], array.dtype)
        padded[tuple(map(slice, array.shape))] = array
        shards = []
        for coordinate in self.coordinates:
            first = self.mesh.position(coordinate, spec.partial) == 0
            shards.append(self.local_part(padded, spec, coordinate) * (1 if first else 0))
        self.live_shards[name, spec] = shards

    def gather_array(self, name: str, spec: Spec) -> Array:
        """Return the full array of all devices' shards, without padding."""
        shards = self.live_shards[name, spec]
        array = np.zeros(tuple(self.sizes[dim] for dim in spec.dims), dtype=shards[0].dtype)
        copies = spec.replication(self.mesh)
        for coordinate, shard in zip(self.coordinates, shards, strict=True):
            array[self.window(spec, coordinate)] += shard / copies
        return array[tuple(slice(self.true_sizes[dim]) for dim in spec.dims)]

    def window(self, spec: Spec, coordinate: Mapping[str, int]) -> tuple[slice, ...]:
        """Return the slices of the full array that a device has."""
        window = []
        for dim, axes, local in zip(spec.dims, spec.axes, spec.local_shape(self.mesh, self.sizes), strict=True):
            start = self.mesh.position(coordinate, axes) * local
            assert self.sizes[dim] >= start + local
            window.append(slice(start, start + local))
        return tuple(window)

    def local_part(self, array: Array, spec: Spec, coordinate: Mapping[str, int]) -> Array:
        return np.array(array[self.window(spec, coordinate)])

    def shards(self, program: Program, name: str, spec: Spec) -> Shards:
        if program.tensors[name].role is Role.CONSTANT:
            _, array = self.constants[name]
            return [self.local_part(array, spec, coordinate) for coordinate in self.coordinates]
        return self.live_shards[name, spec]

    def run(self, program: Program, steps: tuple[ProgramStep, ...]) -> None:
        """Run derived steps: collectives move shards, operations compute on each device alone."""
        for step in steps:
            if isinstance(step, ComputeStep):
                self.compute(program, step)
            else:
                self.communicate(step.tensor.name, step.collective)

    def run_instructions(self, program: Program, instructions: Sequence[Instruction]) -> None:
        """Run an instruction list. A collective's result appears at its wait; a freed tensor is gone."""
        for instruction in instructions:
            if isinstance(instruction, RunRing) and instruction.ring.is_attention:
                self._run_attention_ring(program, instruction)
            else:
                for member in unroll_rings([instruction]):
                    self._run_instruction(program, member)

    def _run_attention_ring(self, program: Program, instruction: RunRing) -> None:
        ring_steps = {id(step) for step in instruction.ring.steps}
        for member in instruction.members:
            is_of_ring = not ring_steps.isdisjoint(map(id, member.steps))
            if is_of_ring and isinstance(member, Kernel):
                run_ring_attention(self, program, instruction.ring)
            elif is_of_ring and isinstance(member, StartCollective):
                self.arriving[id(member.collective)] = {}  # the ring brings it
            else:
                self._run_instruction(program, member)

    def _run_instruction(self, program: Program, instruction: SingleInstruction) -> None:
        match instruction:
            case Kernel():
                for step in instruction.steps:
                    self.compute(program, step)
            case LocalSlice():
                self.communicate(instruction.step.tensor.name, instruction.step.collective)
            case StartCollective():
                self.start(instruction.collective.derived, id(instruction.collective))
            case WaitCollective():
                self.live_shards |= self.arriving.pop(id(instruction.collective))
            case FreeTensors():
                for tensor in instruction.sharded_tensors:
                    self.free(*tensor)

    def free(self, name: str, spec: Spec) -> None:
        """Free a tensor in a sharding; with the last of a router's gates, the scores of their experts are freed too."""
        self.live_shards.pop((name, spec), None)
        if not any(name == live_name for live_name, _ in self.live_shards):
            for device in range(len(self.coordinates)):
                self.scores.pop((name, device), None)

    def start(self, steps: Iterable[CollectiveStep], key: int) -> None:
        """Move tensors; results are kept aside until the wait."""
        self.arriving[key] = {}
        for step in steps:
            if step.before in self.arriving[key]:  # the step before it of a collective of several
                self.live_shards[step.before] = self.arriving[key].pop(step.before)
            self.communicate(step.tensor.name, step.collective)
            self.arriving[key][step.after] = self.live_shards.pop(step.after)

    def compute(self, program: Program, step: ComputeStep) -> None:
        operation = step.operation
        operands = [self.shards(program, name, spec) for name, spec in step.reads]
        results: list[Shards] = [[] for _ in operation.outputs]
        kernel = DeviceKernel(self, step)
        for device in range(len(self.coordinates)):
            for result, array in zip(results, kernel(device, [o[device] for o in operands]), strict=True):
                result.append(array)
        for (name, spec), result in zip(step.writes, results, strict=True):
            self.live_shards[name, spec] = result
            if isinstance(operation, Contract) and program.tensors[name].role is Role.LOGITS:
                self._hide_padding(spec, result)

    def _hide_padding(self, logits: Spec, shards: Shards) -> None:
        """Set logits of padding to minus infinity: they have no part in the loss, and their gradient is zero."""
        for coordinate, shard in zip(self.coordinates, shards, strict=True):
            first = self.mesh.position(coordinate, logits.axes_of("V")) * shard.shape[-1]
            shard[..., max(self.true_sizes["V"] - first, 0) :] = -np.inf

    def communicate(self, name: str, collective: Collective) -> None:
        if collective.kind is CollectiveKind.SEND_RECV:
            return
        before = self.live_shards[name, collective.before]
        if collective.kind is CollectiveKind.PERMUTE:
            self.live_shards[name, collective.after] = self.permute(collective, before)
            return
        after: Shards = list(before)
        for group in self.groups(collective.axes):
            received = COLLECTIVES[collective.kind](self, collective, [before[device] for device in group])
            for device, array in zip(group, received, strict=True):
                after[device] = array
        self.live_shards[name, collective.after] = after

    def permute(self, collective: Collective, shards: Shards) -> Shards:
        """Send one part of each device's shard to one device."""
        ratios = permute_split_factors(collective, self.mesh)
        after: Shards = list(shards)
        for source, send in enumerate(permute_sends(collective, self.mesh)):
            sizes = [size // ratio for size, ratio in zip(shards[source].shape, ratios, strict=True)]
            part = tuple(slice(p * n, (p + 1) * n) for p, n in zip(send.part, sizes, strict=True))
            after[send.destination] = np.array(shards[source][part])
            self.count(collective, after[send.destination].size if send.destination != source else 0)
        return after

    def selected(self, operation: Scan | ScanGradient, arrays: Sequence[Array]) -> Array | None:
        """Return the positions of the keys that each query sees, from the last operand of sparse attention; None of others."""
        if not operation.is_sparse:
            return None
        block = operation.selected_block
        return kernels.expand_blocks(arrays[-1], self.sizes[block]) if block else arrays[-1]

    def groups(self, axes: Axes) -> list[list[int]]:
        """Return the device numbers of each group along `axes`, in the order of the axes."""
        members_of: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for device, coordinate in enumerate(self.coordinates):
            group_key = tuple(index for axis, index in coordinate.items() if axis not in axes)
            members_of.setdefault(group_key, []).append((self.mesh.position(coordinate, axes), device))
        return [[device for _, device in sorted(members)] for members in members_of.values()]

    def count(self, collective: Collective, num_elements: int) -> None:
        self.moved[collective.kind, collective.axes] += num_elements


DIMS = "EBTZjVFMSKGLOAHNXYIRUCQbJPrqehdWuD"  # the order in which the operands of a map are aligned


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
                gates, scores = self.devices.router.route(logits, self.devices.sizes[operation.num_chosen], *bias)
                self.devices.scores[operation.outputs[0], self.device] = scores
                return gates
            case SelectKeys():
                q, k, weights, queries, keys = arrays
                return kernels.select_keys(q, k, weights, queries, keys, self.devices.sizes[operation.num_selected])
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
        return np.array(np.einsum(self.subscripts, *arrays))

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
            return np.array(table[rows] * is_local[..., None])
        return np.where(is_local, np.take_along_axis(table, rows[..., None], axis=-1)[..., 0], 0.0)

    def scatter(self, operation: Scatter, dy: Array, index: Array) -> Array:
        spec = self.placed.outputs[0]
        shape = spec.local_shape(self.devices.mesh, self.devices.sizes)
        dim_index = spec.dims.index(operation.dim)
        rows, is_local = self.rows(spec, operation.dim, index, shape[dim_index])
        result = np.zeros(shape, dtype=dy.dtype)
        if dim_index == 0:
            np.add.at(result, rows.ravel(), (dy * is_local[..., None]).reshape(-1, dy.shape[-1]))
        else:
            np.put_along_axis(result, rows[..., None], (dy * is_local)[..., None], axis=-1)
        return result
