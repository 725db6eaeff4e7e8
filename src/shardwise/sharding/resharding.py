"""Collectives that take a tensor from one sharding to another, in the order that moves the fewest bytes.

The order is fixed: what shrinks the shard comes first (ReduceScatter, slices), then AllToAll and AllReduce, and AllGather,
which grows it, comes last.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.sharding.collectives import Collective, CollectiveKind
from shardwise.sharding.spec import Axes, Spec, num_shared_axes
from shardwise.values import ShardingError


def reshard(before: Spec, after: Spec) -> tuple[Collective, ...]:
    """Return the collectives from `before` to `after`, which must have the same dims; `after` has no partial axis that
    `before` lacks.

    Raises `ShardingError` if no sequence of collectives does it.
    """
    if before.dims != after.dims:
        raise ShardingError(f"reshard: {before} and {after} have different dims")
    if not set(after.partial) <= set(before.partial):
        raise ShardingError(f"reshard: {after} is partial over axes that {before} is not")
    builder = _ReshardBuilder(before, after)
    builder.reduce_scatter()
    builder.slice()
    builder.all_to_all()
    builder.all_reduce()
    builder.all_gather()  # grows the shard, so as late as possible
    builder.slice()  # again: by axes that the gathers freed
    if builder.now != after:
        raise ShardingError(f"reshard: no way found from {before} to {after}")
    return tuple(builder.done)


class _ReshardBuilder:
    """Current sharding of the tensor, and the collectives so far."""

    def __init__(self, before: Spec, goal: Spec) -> None:
        self.now = before
        self.goal = goal
        self.done: list[Collective] = []

    def append_collective(self, kind: CollectiveKind, axes: Iterable[str], after: Spec) -> None:
        self.done.append(Collective(kind, tuple(axes), self.now, after))
        self.now = after

    def missing_axes(self, dim: str) -> Axes:
        """Return the axes that `dim` lacks, if its current axes are a prefix of the goal's; else none."""
        current, goal = self.now.axes_of(dim), self.goal.axes_of(dim)
        return goal[len(current) :] if goal[: len(current)] == current else ()

    def surplus_axes(self, dim: str) -> Axes:
        """Return the axes that `dim` has to lose: all after the prefix shared with the goal."""
        current = self.now.axes_of(dim)
        return current[num_shared_axes(current, self.goal.axes_of(dim)) :]

    def reduce_scatter(self) -> None:
        for dim in self.now.dims:
            axes = _prefix(self.missing_axes(dim), self.now.partial)
            if axes:
                remaining = tuple(axis for axis in self.now.partial if axis not in axes)
                after = self.now.with_partial(remaining).with_axes(dim, self.now.axes_of(dim) + axes)
                self.append_collective(CollectiveKind.REDUCE_SCATTER, axes, after)

    def slice(self) -> None:
        for dim in self.now.dims:
            missing = self.missing_axes(dim)
            used = self.now.sharded_axes.union(self.now.partial) if missing else missing
            axes = _prefix(missing, [axis for axis in missing if axis not in used])
            if axes:
                self.append_collective(
                    CollectiveKind.SLICE, axes, self.now.with_axes(dim, self.now.axes_of(dim) + axes)
                )

    def all_to_all(self) -> None:
        """Move trailing axes between dims until none can be moved."""
        while any(self.move_trailing_axes(source, target) for source in self.now.dims for target in self.now.dims):
            pass

    def move_trailing_axes(self, source: str, target: str) -> bool:
        """Move the longest run of axes that ends the surplus of `source` and begins what `target` lacks; return False if
        there is none."""
        missing = self.missing_axes(target)
        surplus = self.surplus_axes(source) if missing else ()
        for length in range(min(len(missing), len(surplus)), 0, -1):
            axes = missing[:length]
            if surplus[-length:] == axes:
                remaining = self.now.axes_of(source)[:-length]
                after = self.now.with_axes(source, remaining).with_axes(target, self.now.axes_of(target) + axes)
                self.append_collective(CollectiveKind.ALL_TO_ALL, axes, after)
                return True
        return False

    def all_reduce(self) -> None:
        axes = tuple(axis for axis in self.now.partial if axis not in self.goal.partial)
        if axes:
            self.append_collective(CollectiveKind.ALL_REDUCE, axes, self.now.with_partial(self.goal.partial))

    def all_gather(self) -> None:
        for dim in self.now.dims:
            axes = self.surplus_axes(dim)
            if axes:
                remaining = self.now.axes_of(dim)[: -len(axes)]
                self.append_collective(CollectiveKind.ALL_GATHER, axes, self.now.with_axes(dim, remaining))


def _prefix(axes: Axes, allowed: Iterable[str]) -> Axes:
    """Return the longest prefix of `axes` made of allowed ones."""
    allowed = set(allowed)
    length = 0
    while length < len(axes) and axes[length] in allowed:
        length += 1
    return axes[:length]
