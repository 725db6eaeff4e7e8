"""The collectives that take a tensor from one sharding to another, in the order that moves the fewest bytes.

The order is fixed: what shrinks the shard comes first (ReduceScatter, slices), then AllToAll and AllReduce, and
AllGather, which grows it, comes last.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.sharding.collectives import Collective, CollectiveKind
from shardwise.sharding.spec import Axes, Spec
from shardwise.values.errors import ShardingError


def reshard(before: Spec, after: Spec) -> tuple[Collective, ...]:
    """Collectives from `before` to `after`; both must have the same dims, and `after` no partial axis that `before` lacks.

    Raises `ShardingError` when no collective can do it.
    """
    if before.dims != after.dims:
        raise ShardingError(f"reshard: {before} and {after} have different dims")
    if not set(after.partial) <= set(before.partial):
        raise ShardingError(f"reshard: {after} is partial over axes that {before} is not")
    steps = _ReshardBuilder(before, after)
    steps.reduce_scatter()
    steps.slice()
    steps.all_to_all()
    steps.all_reduce()
    steps.all_gather()
    steps.slice()
    if steps.now != after:
        raise ShardingError(f"reshard: no way found from {before} to {after}")
    return tuple(steps.done)


class _ReshardBuilder:
    """The way so far: where the tensor is now, and what was done."""

    def __init__(self, before: Spec, goal: Spec) -> None:
        self.now = before
        self.goal = goal
        self.done: list[Collective] = []

    def append_collective(self, kind: CollectiveKind, axes: Iterable[str], after: Spec) -> None:
        self.done.append(Collective(kind, tuple(axes), self.now, after))
        self.now = after

    def missing_axes(self, dim: str) -> Axes:
        """Axes that `dim` still has to be split over, when all that it has now is a prefix of them."""
        have, want = self.now.axes_of(dim), self.goal.axes_of(dim)
        return want[len(have) :] if want[: len(have)] == have else ()

    def surplus_axes(self, dim: str) -> Axes:
        """Axes that `dim` has to lose: all behind the part that the goal shares."""
        have, want = self.now.axes_of(dim), self.goal.axes_of(dim)
        shared = 0
        while shared < min(len(have), len(want)) and have[shared] == want[shared]:
            shared += 1
        return have[shared:]

    def reduce_scatter(self) -> None:
        for dim in self.now.dims:
            axes = _prefix(self.missing_axes(dim), self.now.partial)
            if axes:
                kept = tuple(axis for axis in self.now.partial if axis not in axes)
                after = self.now.with_partial(kept).with_axes(dim, self.now.axes_of(dim) + axes)
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
        """As long as some dim can hand its last axes to one that wants them next."""
        while any(self.move_trailing_axes(source, target) for source in self.now.dims for target in self.now.dims):
            pass

    def move_trailing_axes(self, source: str, target: str) -> bool:
        """Move the most axes that end what `source` has too many and begin what `target` lacks."""
        missing = self.missing_axes(target)
        surplus = self.surplus_axes(source) if missing else ()
        for length in range(min(len(missing), len(surplus)), 0, -1):
            axes = missing[:length]
            if surplus[-length:] == axes:
                rest = self.now.axes_of(source)[:-length]
                after = self.now.with_axes(source, rest).with_axes(target, self.now.axes_of(target) + axes)
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
                kept = self.now.axes_of(dim)[: -len(axes)]
                self.append_collective(CollectiveKind.ALL_GATHER, axes, self.now.with_axes(dim, kept))


def _prefix(axes: Axes, allowed: Iterable[str]) -> Axes:
    """The longest prefix of `axes` made of allowed ones."""
    allowed = set(allowed)
    length = 0
    while length < len(axes) and axes[length] in allowed:
        length += 1
    return axes[:length]
