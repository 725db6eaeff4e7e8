"""Gradients of a group: written to flat arrays as they become ready, then reduced over the mesh.

A step's loss is divided by the targets of the whole step, so gradients are summed, never averaged. Where gradients are
accumulated in another dtype than products return, a staging copy has the latter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from shardwise.run.kernels.optimizers import ScaledTensor
from shardwise.run.parallel.flat_parameters import FlatParameterGroup
from shardwise.run.parallel.mesh_collectives import MeshCollectives, PendingWork
from shardwise.sharding import Axes
from shardwise.step import MIRROR_RANKS, GroupMember


class GradientBuffer:
    """The gradients of one group, through all backward passes of a step."""

    def __init__(self, flat: FlatParameterGroup, exchange: MeshCollectives) -> None:
        self.flat, self.exchange = flat, exchange
        self.members = {member.parameter.name: member for member in flat.group.members}
        # Where the gradients of a pass go:
        # - Accumulated in full (no `scatters`): the first pass writes `flat.gradients`, later ones add to it. It is sent in the
        #   last pass, or in each (`GradientReducer.each_pass`). While norms are measured, passes after the first write
        #   `separate_buffer`, which is folded into `flat.gradients` once its norm is taken.
        # - Scattered (`scatters`): every pass writes `separate_buffer` and sends it; the first sum received is copied to
        #   `flat.gradients` (`fresh`), later ones are added to it.
        self.fresh = True  # no scattered gradient has been received in this step yet
        self.begun: set[str] = set()  # members that have a gradient from an earlier pass of this step
        self.uses = Counter[str]()  # how many units of this pass give a gradient of each member
        self.absent = Counter[str]()  # gradients of this pass that are still missing
        self.remaining_passes = 0
        self.measured = False  # the norm of each pass's gradients is taken
        formats = flat.formats
        self.staging = None if formats.accumulated is None or flat.scatters else GradientStaging(flat)
        self.separate_buffer: Tensor | None = None
        self.arriving: Tensor | None = None
        self.pending: PendingWork | None = None
        # called with each buffer made for a reduction
        self.on_allocated: Callable[[Tensor], None] = lambda tensor: None

    def begin_step(self, num_passes: int, *, measured: bool) -> None:
        """Start a step with so many passes; `measured`: the norm of each pass's gradients is taken."""
        self.fresh, self.begun, self.remaining_passes, self.measured = True, set(), num_passes, measured

    def begin_pass(self, uses: Counter[str]) -> None:
        """Start a pass; `uses` counts the units that will give a gradient of each member."""
        self.uses, self.absent = uses, Counter(uses)
        self.remaining_passes -= 1

    def end_pass(self) -> None:
        """Mark the members of this pass as having a gradient."""
        self.begun |= set(self.uses)

    @property
    def last(self) -> bool:
        """True in the step's last pass that gives gradients of the group."""
        return self.remaining_passes == 0

    @property
    def uses_separate_buffer(self) -> bool:
        """True if this pass's gradients have an array of their own: if they are scattered, or, after the first pass, if
        their norm is taken."""
        is_first = not self.begun and len(self.uses) == len(self.members)
        return self.flat.scatters or (self.measured and not is_first)

    @property
    def array(self) -> Tensor:
        """The array that this pass's gradients are written or added to; allocated on first use."""
        flat = self.flat
        if not self.uses_separate_buffer:
            return flat.gradients
        if self.separate_buffer is None:
            dtype = flat.formats.reduced if flat.scatters else flat.gradients.dtype
            self.separate_buffer = flat.empty(flat.group.padded_size, dtype)
            for begin, end in self._unwritten_runs():
                self.separate_buffer[begin:end].zero_()
            self.on_allocated(self.separate_buffer)
        return self.separate_buffer

    def _unwritten_runs(self) -> Iterator[tuple[int, int]]:
        """Yield the elements of a flat array that no gradient of this pass is written to: mostly padding alone."""
        written = sorted((self.members[name].start, self.members[name].stop) for name in self.uses)
        begins = (0, *(stop for _, stop in written))
        ends = (*(start for start, _ in written), self.flat.group.padded_size)
        yield from ((begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)

    def accumulates(self, name: str) -> bool:
        """Return whether a gradient is added to what is in the array."""
        first = self.absent[name] == self.uses[name]
        return not first or (name in self.begun and not self.uses_separate_buffer)

    def target(self, name: str) -> tuple[Tensor | None, bool]:
        """Return where products may write a parameter's gradient, and whether they add; None if dtypes differ."""
        member, formats = self.members[name], self.flat.formats
        if self.staging is not None:
            return self.staging.target(member), False
        if self.array.dtype != formats.activations:
            return None, False
        return self.flat.view(self.array, member), self.accumulates(name)

    def accept(self, name: str, gradient: Tensor | None) -> bool:
        """Take a parameter's gradient (None: it is at its target). Returns whether the group now has all its gradients."""
        member = self.members[name]
        if self.staging is not None:
            gradient = self.staging.accept(member, gradient)
        if gradient is not None:
            target = self.flat.view(self.array, member)
            target.add_(gradient) if self.accumulates(name) else target.copy_(gradient)
        self.absent[name] -= 1
        self.absent += Counter()  # drops members whose count is 0
        return not self.absent

    def fold_separate_buffer(self) -> None:
        """Add a buffer that was separate only for its norm to the accumulated gradients."""
        if self.separate_buffer is None or self.flat.scatters:
            return
        for name in self.uses:
            buffers = self.flat.gradients, self.separate_buffer
            target, separate = (self.flat.view(buffer, self.members[name]) for buffer in buffers)
            target.add_(separate) if name in self.begun else target.copy_(separate)
        self.separate_buffer = None

    def send(self) -> None:
        """Start the reduction of the group over the mesh."""
        flat = self.flat
        if flat.scatters:
            self._scatter(self.array, flat.sync.scatter)
        elif flat.sync.step_scatter:
            self._scatter(flat.gradients.to(flat.formats.reduced), flat.sync.step_scatter)
        elif flat.sync.reduce:
            self.arriving = flat.gradients.to(flat.formats.reduced)
            self.pending = self._summed(self.arriving, flat.sync.reduce)

    def _scatter(self, gradients: Tensor, axes: tuple[str, ...]) -> None:
        self.arriving = self.flat.empty(self.flat.group.shard_size, self.flat.formats.reduced)
        self.on_allocated(self.arriving)
        self.pending = self.exchange.reduce_scatter(self.arriving, gradients, axes, self.flat.gradients_carried)

    def _summed(self, gradients: Tensor, axes: Axes) -> PendingWork:
        return self.exchange.all_reduce(gradients, axes, carries=self.flat.gradients_carried)

    def receive(self) -> None:
        """Wait for the reduction, and add or copy its result to the accumulated gradients."""
        if self.pending is None or self.arriving is None:
            return
        self.pending.wait()
        flat, arrived = self.flat, self.arriving
        target = flat.gradients if len(arrived) == len(flat.gradients) else flat.gradient_shard
        if flat.scatters and not self.fresh:
            target.add_(arrived)
        elif target.data_ptr() != arrived.data_ptr():
            target.copy_(arrived)
        self.separate_buffer = self.arriving = self.pending = None
        self.fresh = self.fresh and not flat.scatters

    def reduce_shards(self) -> None:
        """Start to sum scattered gradients over the axes that replicate them."""
        flat = self.flat
        if flat.sync.reduce and (flat.scatters or flat.sync.step_scatter):
            self.arriving = flat.gradient_shard.to(flat.formats.reduced)
            self.pending = self._summed(self.arriving, flat.sync.reduce)

    def receive_shards(self) -> None:
        """Wait for that sum."""
        if self.pending is not None and self.arriving is not None:
            self.pending.wait()
            if self.arriving.data_ptr() != self.flat.gradient_shard.data_ptr():
                self.flat.gradient_shard.copy_(self.arriving)
        self.arriving = self.pending = None

    def sum_shared_copies(self) -> None:
        """Sum the gradients of parameters of which another stage has a copy (tied embeddings)."""
        flat = self.flat
        if flat.group.mirrored:
            total = flat.gradient_shard.to(flat.formats.reduced, copy=True)
            self._summed(total, MIRROR_RANKS).wait()
            flat.gradient_shard.copy_(total)

    def keep_local_once(self) -> None:
        """After a sum that is not the step's last, keep each part of it on one rank only, so that it is counted once."""
        flat, world = self.flat, self.flat.world
        if flat.scatters:
            return
        local_part = flat.gradient_shard.clone() if world.position(flat.sync.reduce) == 0 else None
        if flat.sync.reduce or flat.sync.step_scatter:
            flat.gradients.zero_()
            if local_part is not None:
                flat.gradient_shard.copy_(local_part)


class GradientStaging:
    """Gradients of a group as products return them: `values` [padded]; in a one-byte format each parameter has a scale,
    from its last pass.

    It stays allocated between steps. Recipes that keep only fp32 gradients have none.
    """

    def __init__(self, flat: FlatParameterGroup) -> None:
        self.flat = flat
        self.values = flat.zeros(flat.group.padded_size, flat.formats.gradients)
        self.scaled: dict[str, ScaledTensor] = {}
        if self.values.element_size() == 1:
            self.scaled = {member.parameter.name: self._scaled(member) for member in flat.group.members}

    def _scaled(self, member: GroupMember) -> ScaledTensor:
        scale = torch.ones(1, device=self.values.device)
        return ScaledTensor(self.values[member.start : member.stop], scale)

    def target(self, member: GroupMember) -> Tensor | None:
        """Return where products write a parameter's gradient; None if it must be complete to be cast."""
        return None if self.scaled else self.flat.view(self.values, member)

    def accept(self, member: GroupMember, gradient: Tensor | None) -> Tensor:
        """Take a parameter's gradient (None: it is at its target), and return it as stored here, for accumulation."""
        if gradient is None:
            return self.flat.view(self.values, member)
        if self.scaled:
            scaled = self.scaled[member.parameter.name].copy_(gradient.reshape(-1))
            return scaled.to(torch.float32).view(member.shape)
        return self.flat.view(self.values, member).copy_(gradient)

    def stored_tensors(self) -> Iterator[Tensor]:
        """Yield the values, and the scales of one-byte formats."""
        yield self.values
        yield from (scaled.scale for scaled in self.scaled.values())
