"""Virtual devices in NumPy: each device's shards are arrays, each collective moves them, and what moves is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from shardwise.derive.overlapped import RING
from shardwise.derive.shardings import padded
from shardwise.derive.walk import Communicate, Compute, Step
from shardwise.engine.numpy.device import DeviceKernel
from shardwise.engine.numpy.exchanges import COLLECTIVES, Array, Shards
from shardwise.engine.numpy.ring import run_ring
from shardwise.engine.numpy.routing import ROUTER, Router
from shardwise.layout.family import Family
from shardwise.lowering.instruction import Free, Instruction, Launch, Slice, Start, Wait
from shardwise.model.operations import Contract
from shardwise.model.program import Program, Role
from shardwise.sharding.collective import Collective, Kind
from shardwise.sharding.exchange import part_ratios, sends
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec
from shardwise.symbolic import Values

Moved = Counter[tuple[Kind, Axes]]


class VirtualDevices:
    """The devices of a mesh and what they hold: for each tensor and sharding, one array a device.

    `sizes` are those of the dims as they hold them (`padded`), `true_sizes` those of whole arrays. `moved` counts the elements
    that all devices together have received, by kind and axes of the collective. `scores` are those of a router's experts, by the
    name of its gates and the device, as long as there are gates.
    """

    def __init__(
        self, mesh: Mesh, sizes: Mapping[str, int], family: Family | None = None, *, router: Router = ROUTER
    ) -> None:
        self.family, self.router = family, router
        self.mesh = mesh
        self.true_sizes: dict[Any, int] = Values({**sizes})
        self.sizes: dict[Any, int] = Values({**padded(sizes, mesh)})
        self.coordinates = list(mesh.coordinates())
        self.held: dict[tuple[str, Spec], Shards] = {}
        self.constants: dict[str, tuple[tuple[str, ...], Array]] = {}
        self.moved: Moved = Counter()
        self.scores: dict[tuple[str, int], Array] = {}
        self.arriving: dict[int, dict[tuple[str, Spec], Shards]] = {}

    def put(self, name: str, spec: Spec, whole: Array) -> None:
        """Distribute an array, padded with zeros; along partial axes the first device gets all of it and the others nothing."""
        held = np.zeros([self.sizes[dim] for dim in spec.dims], whole.dtype)
        held[tuple(map(slice, whole.shape))] = whole
        shards = []
        for coordinate in self.coordinates:
            first = self.mesh.position(coordinate, spec.partial) == 0
            shards.append(self.cut(held, spec, coordinate) * (1 if first else 0))
        self.held[name, spec] = shards

    def get(self, name: str, spec: Spec) -> Array:
        """Put the array together from all devices' shards, without what pads it."""
        shards = self.held[name, spec]
        whole = np.zeros(tuple(self.sizes[dim] for dim in spec.dims), dtype=shards[0].dtype)
        copies = spec.replication(self.mesh)
        for coordinate, shard in zip(self.coordinates, shards, strict=True):
            whole[self.window(spec, coordinate)] += shard / copies
        return whole[tuple(slice(self.true_sizes[dim]) for dim in spec.dims)]

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
        """Run derived steps: collectives move shards, operations compute on each device alone."""
        for step in steps:
            if isinstance(step, Compute):
                self.compute(program, step)
            else:
                self.communicate(step.tensor.name, step.collective)

    def follow(self, program: Program, instructions: Sequence[Instruction]) -> None:
        """Do what a list says. What a collective brings is there when it has been waited for, what is freed is there no more.

        Where the family has a ring, attention runs around it in place of the collectives that it runs beside.
        """
        around = self.rings(instructions)
        in_pieces = {id(step) for moved in around.values() for step in moved}
        for one in instructions:
            match one:
                case Launch():
                    for step in one.kernel.steps:
                        moved = around.get(step.operation.outputs[0])
                        run_ring(self, program, step, moved) if moved else self.compute(program, step)
                case Slice():
                    self.communicate(one.step.tensor.name, one.step.collective)
                case Start():
                    self.start([step for step in one.traffic.derived if id(step) not in in_pieces], id(one.traffic))
                case Wait():
                    self.held |= self.arriving.pop(id(one.traffic))
                case Free():
                    for held in one.held:
                        self.free(*held)

    def free(self, name: str, spec: Spec) -> None:
        """Free a tensor in a sharding; with the last of a router's gates, the scores of their experts are freed too."""
        self.held.pop((name, spec), None)
        if not any(name == other for other, _ in self.held):
            for device in range(len(self.coordinates)):
                self.scores.pop((name, device), None)

    def rings(self, instructions: Iterable[Instruction]) -> dict[str, list[Communicate]]:
        """By its first result each attention that runs in a ring, with the collectives that it takes the place of."""
        found: dict[str, list[Communicate]] = {}
        if self.family and self.family.ring:
            for one in instructions:
                if isinstance(one, Start) and one.traffic.axes == RING:
                    for result in one.traffic.beside:
                        found.setdefault(result, []).extend(one.traffic.derived)
        return found

    def start(self, steps: Iterable[Communicate], key: int) -> None:
        """Move tensors; what arrives is put aside until it is waited for."""
        self.arriving[key] = {}
        for step in steps:
            for held in [each for each in self.arriving[key] if each == (step.tensor.name, step.collective.before)]:
                self.held[held] = self.arriving[key].pop(held)
            self.communicate(step.tensor.name, step.collective)
            held = step.tensor.name, step.collective.after
            self.arriving[key][held] = self.held.pop(held)

    def compute(self, program: Program, step: Compute) -> None:
        operation, placed = step.operation, step.placed
        read = list(zip(operation.operands, placed.inputs, strict=False))
        operands = [self.shards(program, name, spec) for name, spec in read]
        results: list[Shards] = [[] for _ in operation.outputs]
        kernel = DeviceKernel(self, step)
        for device in range(len(self.coordinates)):
            for result, array in zip(results, kernel(device, [o[device] for o in operands]), strict=True):
                result.append(array)
        for name, spec, result in zip(operation.outputs, placed.outputs, results, strict=True):
            self.held[name, spec] = result
            if isinstance(operation, Contract) and program.tensors[name].role is Role.LOGITS:
                self._hide_padding(spec, result)

    def _hide_padding(self, logits: Spec, shards: Shards) -> None:
        """What is no word has no part in the loss, and its gradient is zero."""
        for coordinate, shard in zip(self.coordinates, shards, strict=True):
            first = self.mesh.position(coordinate, logits.axes_of("V")) * shard.shape[-1]
            shard[..., max(self.true_sizes["V"] - first, 0) :] = -np.inf

    def communicate(self, name: str, collective: Collective) -> None:
        if collective.kind is Kind.SEND_RECV:
            return
        before = self.held[name, collective.before]
        if collective.kind is Kind.PERMUTE:
            self.held[name, collective.after] = self.permute(collective, before)
            return
        after: Shards = list(before)
        for group in self.groups(collective.axes):
            moved = COLLECTIVES[collective.kind](self, collective, [before[device] for device in group])
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
