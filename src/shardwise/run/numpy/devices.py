"""Virtual devices in NumPy: shards are arrays, collectives move them, and the elements that move are counted.

An operation runs on one device after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.derive import CollectiveStep, ComputeStep, ProgramStep, pad_vocabulary
from shardwise.model import Contract, Program, Role
from shardwise.model.operations import Scan, ScanGradient
from shardwise.run.numpy import kernels
from shardwise.run.numpy.collectives import COLLECTIVES, Array, Shards, run_ring_attention
from shardwise.run.numpy.device_kernel import DeviceKernel
from shardwise.run.numpy.kernels import DEFAULT_ROUTER, Router
from shardwise.sharding import Axes, Collective, CollectiveKind, Mesh, Spec
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
from shardwise.values import SymbolValues

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
