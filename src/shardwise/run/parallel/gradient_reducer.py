"""When gradients are summed over the mesh: as soon as a group of them is ready, in one order on every rank, or later.

For the gradient noise scale (`batch.noise`) the norm of the gradient of each micro-batch of each replica is taken, as
the backward pass has just made it, before replicas are added up. Where ranks have parts of the same sequences'
gradient (`Sync.within`: context parallelism, experts, norms under sequence parallelism) these are summed first, since
squares of parts do not add up; all else is one sum of squares, to which each rank adds its own part of the parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.run.mixed_precision import DTYPES
from shardwise.run.parallel.collectives import MeshCollectives
from shardwise.run.parallel.flat_parameters import FlatParameterGroup
from shardwise.run.parallel.gradient_buffers import GradientBuffer
from shardwise.run.parallel.sharded_optimizer import sum_of_squares
from shardwise.sharding.spec import Axes
from shardwise.step.instructions import MIRROR_RANKS
from shardwise.step.issued_collectives import partial_gradient_names
from shardwise.step.rank_program import RankProgram

UnitPaths = tuple[str, ...]
WeightNames = Mapping[
    str, Mapping[str, str]
]  # by unit's path, of each trained weight that it uses the parameter's full name


@dataclass(frozen=True, slots=True)
class UnitGradientSink:
    """Where one unit's gradients go (`engine.torch.calls.Gradients`)."""

    reducer: GradientReducer
    names: Mapping[str, str]

    def target(self, weight: str) -> tuple[Tensor | None, bool]:
        name = self.names[weight]
        return self.reducer.group_of[name].target(name)

    def deliver(self, weight: str, gradient: Tensor | None) -> None:
        self.reducer.accept(self.names[weight], gradient)


class GradientReducer:
    """The gradients of all groups. `groups` in the order in which they are ready; they are sent in this order on every process.

    `names` are those of the weights whose gradients each unit gives. `reduction`: "after" the backward pass, or as soon as a
    group is ready. `each_pass`: not only in a step's last. `norms` takes those of each pass, before anything is sent.
    """

    def __init__(
        self, groups: Sequence[FlatParameterGroup], names: WeightNames, exchange: MeshCollectives, norms: MicroBatchNorms, *,
        reduction: str, each_pass: bool,
    ) -> None:  # fmt: skip
        self.groups = [GradientBuffer(group, exchange) for group in groups]
        self.group_of = {name: one for one in self.groups for name in one.members}
        self.names, self.norms = names, norms
        self.after, self.each_pass = reduction == "after", each_pass
        self.passing: list[GradientBuffer] = []  # those that this pass gives gradients of
        self.num_sent = 0

    def of_unit(self, path: str) -> UnitGradientSink:
        """Where the gradients of the unit at a path go."""
        return UnitGradientSink(self, self.names[path])

    def accept(self, name: str, gradient: Tensor | None) -> None:
        """A parameter's gradient is ready; None: at its target."""
        one = self.group_of[name]
        if one.accept(name, gradient):
            self._ready(one)

    def begin_step(self, passes: Counter[UnitPaths]) -> None:
        """`passes`: how often each of some sets of units gives gradients in the step, by their paths."""
        found: Counter[int] = Counter()
        for paths, times in passes.items():
            found.update({id(one): times for one, _ in self._buffers_of_units(paths)})
        for one in self.groups:
            one.begin_step(found[id(one)], measured=self.norms.measures)

    def begin_pass(self, paths: UnitPaths, micro_batch: int) -> None:
        """The units at these paths are going to give their gradients of a micro-batch."""
        given = self._buffers_of_units(paths)
        self.norms.micro_batch = micro_batch
        self.passing, self.num_sent = [one for one, _ in given], 0
        for one, uses in given:
            one.begin_pass(uses)

    def _buffers_of_units(self, paths: UnitPaths) -> list[tuple[GradientBuffer, Counter[str]]]:
        """The groups that units give gradients of, and how many units give that of each member."""
        uses = Counter(name for path in paths for name in self.names[path].values())
        found = [(one, Counter({name: uses[name] for name in one.members if name in uses})) for one in self.groups]
        return [(one, of_group) for one, of_group in found if of_group]

    def _ready(self, one: GradientBuffer) -> None:
        self.norms.accept(one)
        one.fold_separate_buffer()
        if one.flat.splits_weights:
            one.flat.release()
        if one.flat.scatters or not self.after:
            self._send_ready()

    def _sends(self, one: GradientBuffer) -> bool:
        return one.flat.scatters or one.last or self.each_pass

    def _send_ready(self) -> None:
        """Send the groups that are ready, in their order; of scattered ones the one before has arrived by then."""
        while self.num_sent < len(self.passing) and not self.passing[self.num_sent].absent:
            one = self.passing[self.num_sent]
            if one.flat.scatters and self.num_sent:
                self.passing[self.num_sent - 1].receive()
            if self._sends(one):
                one.send()
            self.num_sent += 1

    def end_pass(self) -> None:
        """Send what is left. What is scattered is waited for, and what is summed again in a later pass; what is reduced once per
        step is on its way beside the passes that follow."""
        self._send_ready()
        for one in self.passing:
            if one.flat.scatters or not one.last:
                one.receive()
            one.end_pass()
        if self.each_pass:
            again = [one for one in self.passing if not (one.last or one.flat.scatters)]
            _sum_shards(again)
            for one in again:
                one.keep_local_once()

    def end_step(self) -> None:
        """Each process has the whole sum of its part; of parameters of which another stage has a copy, that of both."""
        for one in self.groups:
            one.receive()
        _sum_shards(self.groups)
        for one in self.groups:
            one.sum_shared_copies()


def _sum_shards(groups: Sequence[GradientBuffer]) -> None:
    """Over the axes that replicate what was scattered."""
    for one in groups:
        one.reduce_shards()
    for one in groups:
        one.receive_shards()


class MicroBatchNorms:
    """Adds up the squared norms of a step's micro-batches. Without `measures` it does nothing."""

    def __init__(self, instance: RankProgram, exchange: MeshCollectives) -> None:
        self.exchange, self.mesh = exchange, instance.mesh
        self.axes, self.replicas = instance.noise_axes, instance.family.replica_axes
        self.divided = partial_gradient_names(instance) if instance.policy.noise_scale else frozenset[str]()
        self.control = DTYPES[instance.control_dtype]
        self.measures, self.micro_batch = False, 0
        self._squares: list[Tensor] = []
        self._parts: dict[FlatParameterGroup, dict[int, Tensor]] = {}

    def begin_step(self, *, measures: bool) -> None:
        """A step begins in which norms are taken, or not."""
        self.measures = measures
        self._squares, self._parts = [], {}

    def accept(self, one: GradientBuffer) -> None:
        """A group's gradients of the micro-batch are there, or the part of them that one pass gives."""
        if not self.measures:
            return
        flat, within = one.flat, one.flat.sync.within(self.replicas)
        whole = self._summed(flat, one.array, within) if within else one.array
        if self.divided.isdisjoint(one.members):
            self._square(flat, whole)
            return
        parts = self._parts.setdefault(flat, {})
        earlier = parts.get(self.micro_batch)
        parts[self.micro_batch] = whole.clone() if earlier is None else earlier.add_(whole)

    def end_step(self) -> Tensor | None:
        """The sum over all micro-batches of all replicas, a scalar, the same on every rank; None where none was taken."""
        if not self.measures:
            return None
        for flat, parts in self._parts.items():
            for _, values in sorted(parts.items()):
                if flat.group.mirrored:
                    self._square(flat, self._summed(flat, values, MIRROR_RANKS), num_ends=2)
                else:
                    self._square(flat, values)
        total = torch.stack(self._squares).sum().to(self.control)
        self._squares, self._parts = [], {}
        return self.exchange.sum_and_wait(total, self.axes)

    def _summed(self, flat: FlatParameterGroup, values: Tensor, axes: Axes) -> Tensor:
        """The sum over ranks that have parts of the same gradient."""
        found = values.to(flat.formats.reduced, copy=True)
        self.exchange.all_reduce(found, axes, carries=flat.gradients_carried).wait()
        return found

    def _square(self, flat: FlatParameterGroup, values: Tensor, num_ends: int = 1) -> None:
        """Add the squares of a gradient that so many ends of the pipeline have alike."""
        for split, rows in flat.full_runs():
            self._squares.append(sum_of_squares(values[rows]) / (num_ends * self._copies(split)))

    def _copies(self, split: Collection[str]) -> int:
        """Of the ranks that add up squares, those that have the same gradient of a parameter split over some axes."""
        apart = {"pp", *self.replicas, *split}
        return self.mesh.size([axis for axis in self.axes if axis not in apart])
