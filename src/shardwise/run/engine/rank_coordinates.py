"""A rank's place on the mesh, the collectives that it may issue, and the positions of a sequence that it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from shardwise.run.kernels.positions_and_masks import PositionRange
from shardwise.sharding import Axes, Mesh, Spec


class CollectiveHandle(Protocol):
    """A collective that has been started."""

    def wait(self) -> None:
        """Wait until it is done."""


class CollectiveOps(Protocol):
    """Collectives over mesh axes, in the background; the ranks of a group are in the order of its axes."""

    def all_gather(self, full: Tensor, part: Tensor, axes: Axes) -> CollectiveHandle:
        """Write the parts of all ranks, one after the other, into `full`."""

    def reduce_scatter(self, part: Tensor, full: Tensor, axes: Axes) -> CollectiveHandle:
        """Sum all ranks' `full`, and write this rank's slice to `part`."""

    def all_reduce(self, values: Tensor, axes: Axes, reduction: str = "sum") -> CollectiveHandle:
        """Sum over all ranks, or take their maximum, in place."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, axes: Axes, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> CollectiveHandle:
        """Send each part of `sent` to its rank, and write what the ranks send to this one into `received`, in their
        order.

        `rows` are the number of rows of each part of `received` and of `sent`; None: all parts are equal.
        """

    def shift(self, received: Sequence[Tensor], sent: Sequence[Tensor], axes: Axes) -> CollectiveHandle:
        """Send tensors to the next rank in a ring, and write those of the rank before into `received`."""


@dataclass(frozen=True)
class Rank:
    """A rank of a mesh.

    `pieces` is the number of chunks of a sequence that a rank along `cp` takes
    (`layout.layout.ContextParallelVariant.sequence_pieces`). An expert takes at most `capacity_factor` times
    its even share of its tokens' rows (None: all rows).
    """

    mesh: Mesh
    coordinate: Mapping[str, int] = field(default_factory=dict)
    collective_ops: CollectiveOps | None = None
    pieces: int = 1
    capacity_factor: float | None = None

    @property
    def collectives(self) -> CollectiveOps:
        """Collectives of a rank that has others."""
        assert self.collective_ops is not None, "a rank of several has collectives"
        return self.collective_ops

    def nontrivial_axes(self, axes: Iterable[str]) -> Axes:
        """Return those of some axes that have more than one rank."""
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    def position(self, axes: Axes) -> int:
        """Return this rank's index along some axes, the first axis the major one."""
        split_axes = self.nontrivial_axes(axes)
        return self.mesh.position(self.coordinate, split_axes) if split_axes else 0

    def sharding(self, spec: Spec) -> Spec:
        """Return a sharding without the axes of one rank."""
        axes = tuple(self.nontrivial_axes(of_dim) for of_dim in spec.axes)
        return Spec(spec.dims, axes, self.nontrivial_axes(spec.partial), spec.reduction)

    def sequence_ranges(
        self, length: int, axes: Axes, rank_index: int | None = None
    ) -> tuple[PositionRange, ...] | None:
        """Return the position ranges that this rank has of sequences split over `axes`, or that the rank at
        `rank_index` along them has.

        None: all positions in their order. Raises `ValueError` where the chunks do not divide the sequence.
        """
        ranks, split_axes = self.mesh.size("cp") if "cp" in self.mesh.names else 1, self.nontrivial_axes(axes)
        pieces = self.pieces if ranks > 1 else 1
        count, parts = ranks * pieces, self.mesh.size(split_axes)
        if length % count or length % parts:
            raise ValueError(f"a sequence of {length} tokens is not divisible into {count} pieces on {parts} ranks")
        if parts == pieces == 1:
            return None
        order = [number for rank in range(ranks) for number in _chunks_of_rank(rank, ranks, pieces)]
        width = length // count
        first = (self.position(split_axes) if rank_index is None else rank_index) * (length // parts)
        chunks = [(number * width, width) for number in order]
        return tuple(_merge_ranges(_slice_ranges(chunks, first, first + length // parts)))


def _slice_ranges(ranges: Iterable[PositionRange], start: int, stop: int) -> Iterator[PositionRange]:
    """Yield rows `start` to `stop` of position ranges laid one after the other."""
    row = 0
    for position, length in ranges:
        low, high = max(start, row), min(stop, row + length)
        if low < high:
            yield position + low - row, high - low
        row += length


def _merge_ranges(ranges: Iterable[PositionRange]) -> Iterator[PositionRange]:
    """Yield position ranges, adjacent ones merged."""
    last: PositionRange | None = None
    for position, length in ranges:
        if last is not None and sum(last) == position:
            last = last[0], last[1] + length
            continue
        if last is not None:
            yield last
        last = position, length
    if last is not None:
        yield last


def _chunks_of_rank(rank: int, ranks: int, pieces: int) -> list[int]:
    """Return the chunks of a rank: forth and back over the ranks, so that causal work is even. With two chunks, one
    comes from either end of the sequence.

    >>> [_chunks_of_rank(rank, 4, 2) for rank in range(4)]
    [[0, 7], [1, 6], [2, 5], [3, 4]]
    """
    return [turn * ranks + (ranks - 1 - rank if turn % 2 else rank) for turn in range(pieces)]
