"""Collectives as values: what one does to a sharding, how many elements it moves, and its transpose; and those that take a
tensor from one sharding to another.

AllGather removes axes from a subscript, ReduceScatter turns partial axes into a subscript, AllReduce drops partial axes,
AllToAll moves axes from one dim to another, a permute sends shards, or parts of them, to other devices (I_XY to I_YX, or I_X
to I_Y), and a slice (each device keeps its part) moves nothing. Source: S2.

The transpose of a product `A * B -> C` for A is `dC * B -> dA`, and for B is `A * dC -> dB`. AllGather and ReduceScatter are
each other's transposes. An AllReduce whose result is used replicated has the identity as its transpose, and the identity on a
replicated tensor that partial work consumes has an AllReduce (S1's conjugate pairs f/f* and g/g*).

Resharding moves the fewest bytes in a fixed order: what shrinks the shard comes first (ReduceScatter, slices), then AllToAll and
AllReduce, and AllGather, which grows it, comes last.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from shardwise.sharding.spec import Axes, Spec, num_shared_axes
from shardwise.values import Monomial, Polynomial, ShardingError, multiply_symbols


class CollectiveKind(StrEnum):
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    ALL_TO_ALL = "all_to_all"
    PERMUTE = "permute"
    SLICE = "slice"
    SEND_RECV = "send_recv"  # both ends of a message
    SEND = "send"  # one end of a message, as a rank issues it
    RECEIVE = "receive"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective over `axes` that takes a tensor from `before` to `after`."""

    kind: CollectiveKind
    axes: Axes
    before: Spec
    after: Spec

    @property
    def payload_elements(self) -> Polynomial:
        """Elements of the array that the collective's group shares, on one device, padding included: the gathered array of an
        AllGather, the summand of a ReduceScatter or AllReduce, the local shard of an AllToAll, what a permute receives."""
        if self.kind is CollectiveKind.ALL_GATHER:
            return self.before.local_elements() * multiply_symbols(self.axes)
        if self.kind is CollectiveKind.REDUCE_SCATTER:
            return self.after.local_elements() * multiply_symbols(self.axes)
        if self.kind is CollectiveKind.PERMUTE:
            return self.after.local_elements()
        return self.before.local_elements()

    @property
    def received_elements(self) -> Polynomial:
        """Elements that one device receives over links (see the function `received_elements`)."""
        return received_elements(self.kind, self.axes, self.payload_elements)

    def __str__(self) -> str:
        return f"{self.kind}_{{{','.join(self.axes)}}} {self.before} -> {self.after}"


def received_elements(kind: CollectiveKind, axes: Axes, payload: Polynomial) -> Polynomial:
    """Return the elements that one device receives: (n-1)/n of the payload, twice that for an AllReduce, all of it for a
    permute or a message, none for a slice.

    `n` is the product of the axes' degrees. Source: S1, "ring all-reduce"; S2, "collectives".
    """
    if kind in (CollectiveKind.SLICE, CollectiveKind.SEND):
        return Polynomial()
    if kind in (CollectiveKind.SEND_RECV, CollectiveKind.RECEIVE, CollectiveKind.PERMUTE):
        return payload
    local_share = payload * Polynomial((Monomial(1.0, tuple((axis, -1) for axis in sorted(axes))),))
    return (payload + local_share * -1.0) * (2.0 if kind is CollectiveKind.ALL_REDUCE else 1.0)


ROWS = "rows"
MESSAGE_ENDS = (CollectiveKind.SEND, CollectiveKind.RECEIVE)


class IssuedCollective(NamedTuple):
    """A collective and its payload (`Collective.payload_elements`, in bytes, padding included). `what` it carries: weights,
    gradients, activations, rows of tokens to their experts and back (`ROWS`: as many as there are on average), loss, norm or
    routing."""

    kind: CollectiveKind
    axes: Axes
    dtype: str
    num_bytes: int
    what: str


def transpose_contraction(
    left: tuple[str, ...], right: tuple[str, ...], result: tuple[str, ...]
) -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the dims of the two backward products: "left" `(d result, right, d left)`, "right" `(left, d result, d right)`."""
    return {"left": (result, right, left), "right": (left, result, right)}


def gradient_spec(spec: Spec) -> Spec:
    """Return the sharding of a tensor's gradient: split as the tensor is, and not partial."""
    return spec.with_partial(())


def transpose_collective(collective: Collective) -> Collective | None:
    """Return the collective on the gradient, or None for the identity (AllReduce: the gradient is replicated already)."""
    transposed_kinds = {
        CollectiveKind.ALL_GATHER: CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.REDUCE_SCATTER: CollectiveKind.ALL_GATHER,
        CollectiveKind.ALL_TO_ALL: CollectiveKind.ALL_TO_ALL,
        CollectiveKind.SLICE: CollectiveKind.ALL_GATHER,
        CollectiveKind.SEND_RECV: CollectiveKind.SEND_RECV,
    }
    if collective.kind is CollectiveKind.ALL_REDUCE:
        return None
    before = gradient_spec(collective.after)
    if collective.kind is CollectiveKind.ALL_GATHER:
        before = before.with_partial(collective.axes)
    return Collective(transposed_kinds[collective.kind], collective.axes, before, gradient_spec(collective.before))


@lru_cache(maxsize=2**14)
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
