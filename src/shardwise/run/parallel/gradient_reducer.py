"""Reduction of gradients over the mesh: as soon as a group of them is ready, in one order on every rank, or later.

For the gradient noise scale (`batch_size`) the norm of the gradient of each micro-batch of each replica is taken as
soon as the backward pass has made it, before replicas are summed. Where ranks have parts of the same sequences'
gradient (`WeightSync.within`: context parallelism, experts, norms under sequence parallelism) these are summed first,
since squares of parts do not add up. All else is one sum of squares, to which each rank adds its part of the
parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.mixed_precision import DTYPES
from shardwise.run.parallel.flat_parameters import FlatParameterGroup
from shardwise.run.parallel.gradient_buffers import GradientBuffer
from shardwise.run.parallel.mesh_collectives import MeshCollectives
from shardwise.run.parallel.sharded_optimizer import sum_of_squares
from shardwise.sharding import Axes
from shardwise.step import MIRROR_RANKS, RankProgram
from shardwise.step.issued_collectives import partial_gradient_names

UnitPaths = tuple[str, ...]
WeightNames = Mapping[str, Mapping[str, str]]  # by unit path: the full parameter name of each trained weight it uses


@dataclass(frozen=True, slots=True)
class UnitGradientSink:
    """Destination of one unit's gradients (`run.engine.calls.GradientSink`)."""

    reducer: GradientReducer
    names: Mapping[str, str]

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
        name = self.names[weight]
        return self.reducer.group_of[name].target(name)

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        self.reducer.accept(self.names[weight], gradient)


class GradientReducer:
    """The gradients of all groups; `groups` are in the order in which they are ready, and are sent in this order on
    every rank.

    `names` are the weights whose gradients each unit gives. `reduction`: "after" the backward pass, or as soon as a
    group is ready. `each_pass`: reduce in every pass, not only in a step's last. `norms` takes the norm of each pass
    before anything is sent.
    """

    def __init__(
        self, groups: Sequence[FlatParameterGroup], names: WeightNames, exchange: MeshCollectives, norms: MicroBatchNorms, *,
        reduction: str, each_pass: bool,
    ) -> None:  # fmt: skip
        self.groups = [GradientBuffer(group, exchange) for group in groups]
        self.group_of = {name: buffer for buffer in self.groups for name in buffer.members}
        self.names, self.norms = names, norms
        self.after, self.each_pass = reduction == "after", each_pass
        self.pass_buffers: list[GradientBuffer] = []  # groups of which this pass gives gradients
        self.num_sent = 0

    def of_unit(self, path: str) -> UnitGradientSink:
        """Return the destination of the gradients of the unit at a path."""
        return UnitGradientSink(self, self.names[path])

    def accept(self, name: str, gradient: Tensor | None) -> None:
        """Take a parameter's gradient; None: it is at its target."""
        buffer = self.group_of[name]
        if buffer.accept(name, gradient):
            self._ready(buffer)

    def begin_step(self, passes: Counter[UnitPaths]) -> None:
        """Start a step; `passes` counts the passes of each set of unit paths."""
        num_passes: Counter[int] = Counter()
        for paths, times in passes.items():
            num_passes.update({id(buffer): times for buffer, _ in self._buffers_of_units(paths)})
        for buffer in self.groups:
            buffer.begin_step(num_passes[id(buffer)], measured=self.norms.measures)

    def begin_pass(self, paths: UnitPaths, micro_batch: int) -> None:
        """Start a pass of a micro-batch in which the units at these paths give their gradients."""
        buffers = self._buffers_of_units(paths)
        self.norms.micro_batch = micro_batch
        self.pass_buffers, self.num_sent = [buffer for buffer, _ in buffers], 0
        for buffer, uses in buffers:
            buffer.begin_pass(uses)

    def _buffers_of_units(self, paths: UnitPaths) -> list[tuple[GradientBuffer, Counter[str]]]:
        """Return the groups that units give gradients of, with the number of units that use each member."""
        uses = Counter(name for path in paths for name in self.names[path].values())
        buffers = [
            (buffer, Counter({name: uses[name] for name in buffer.members if name in uses})) for buffer in self.groups
        ]
        return [(buffer, group_uses) for buffer, group_uses in buffers if group_uses]

    def _ready(self, buffer: GradientBuffer) -> None:
        self.norms.accept(buffer)
        buffer.fold_separate_buffer()
        if buffer.flat.splits_weights:
            buffer.flat.release()
        if buffer.flat.scatters or not self.after:
            self._send_ready()

    def _send_ready(self) -> None:
        """Send the ready groups, in their order."""
        # Every rank issues its collectives in the order of `pass_buffers`, or they would deadlock: a group that is ready early
        # waits for those before it.
        while self.num_sent < len(self.pass_buffers) and not self.pass_buffers[self.num_sent].absent:
            buffer = self.pass_buffers[self.num_sent]
            if buffer.flat.scatters and self.num_sent:  # at most two unsharded gradient buffers exist at a time
                self.pass_buffers[self.num_sent - 1].receive()
            if buffer.flat.scatters or buffer.last or self.each_pass:
                buffer.send()
            self.num_sent += 1

    def end_pass(self) -> None:
        """Send the remaining groups.

        Scattered gradients are waited for, and so are those that a later pass sums again; a reduction that happens once
        per step overlaps with the passes that follow.
        """
        self._send_ready()
        for buffer in self.pass_buffers:
            if buffer.flat.scatters or not buffer.last:
                buffer.receive()
            buffer.end_pass()
        if self.each_pass:
            summed_again = [buffer for buffer in self.pass_buffers if not (buffer.last or buffer.flat.scatters)]
            _sum_shards(summed_again)
            for buffer in summed_again:
                buffer.keep_local_once()

    def end_step(self) -> None:
        """Complete all reductions: each rank has the full sum of its part, shared parameters included."""
        for buffer in self.groups:
            buffer.receive()
        _sum_shards(self.groups)
        for buffer in self.groups:
            buffer.sum_shared_copies()


def _sum_shards(buffers: Sequence[GradientBuffer]) -> None:
    """Sum scattered gradients over the axes that replicate them."""
    for buffer in buffers:
        buffer.reduce_shards()
    for buffer in buffers:
        buffer.receive_shards()


class MicroBatchNorms:
    """Adds up the squared norms of a step's micro-batches. Without `measures` it does nothing."""

    def __init__(self, instance: RankProgram, exchange: MeshCollectives) -> None:
        self.exchange, self.mesh = exchange, instance.mesh
        self.axes, self.replicas = instance.noise_axes, instance.scheme.replica_axes
        self.partial_names = partial_gradient_names(instance) if instance.policy.noise_scale else frozenset[str]()
        self.control = DTYPES[instance.control_dtype]
        self.measures, self.micro_batch = False, 0
        self._squares: list[Tensor] = []
        self._parts: dict[FlatParameterGroup, dict[int, Tensor]] = {}

    def begin_step(self, *, measures: bool) -> None:
        """Start a step, in which norms are taken or not."""
        self.measures = measures
        self._squares, self._parts = [], {}

    def accept(self, buffer: GradientBuffer) -> None:
        """Add a group's gradients of the micro-batch, or the part that one pass gives."""
        if not self.measures:
            return
        flat, partial_axes = buffer.flat, buffer.flat.sync.within(self.replicas)
        gradients = self._summed(flat, buffer.array, partial_axes) if partial_axes else buffer.array
        if self.partial_names.isdisjoint(buffer.members):
            self._square(flat, gradients)
            return
        parts = self._parts.setdefault(flat, {})
        earlier = parts.get(self.micro_batch)
        parts[self.micro_batch] = gradients.clone() if earlier is None else earlier.add_(gradients)

    def end_step(self) -> Tensor | None:
        """Return the sum over all micro-batches and replicas, equal on every rank; None without norms."""
        if not self.measures:
            return None
        for flat, parts in self._parts.items():
            for _, gradients in sorted(parts.items()):
                if flat.group.mirrored:
                    self._square(flat, self._summed(flat, gradients, MIRROR_RANKS), num_ends=2)
                else:
                    self._square(flat, gradients)
        total = torch.stack(self._squares).sum().to(self.control)
        self._squares, self._parts = [], {}
        return self.exchange.sum_and_wait(total, self.axes)

    def _summed(self, flat: FlatParameterGroup, gradients: Tensor, axes: Axes) -> Tensor:
        """Return the sum over ranks that have parts of the same gradient."""
        total = gradients.to(flat.formats.reduced, copy=True)
        self.exchange.all_reduce(total, axes, carries=flat.gradients_carried).wait()
        return total

    def _square(self, flat: FlatParameterGroup, gradients: Tensor, num_ends: int = 1) -> None:
        """Add the squares of a gradient that `num_ends` stages have alike."""
        for split, rows in flat.full_runs():
            self._squares.append(sum_of_squares(gradients[rows]) / (num_ends * self._copies(split)))

    def _copies(self, split: Collection[str]) -> int:
        """Return how many of the ranks that sum squares have the same gradient, of a parameter split over some axes."""
        excluded = {"pp", *self.replicas, *split}
        return self.mesh.size([axis for axis in self.axes if axis not in excluded])
