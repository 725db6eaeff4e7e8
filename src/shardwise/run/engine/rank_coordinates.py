"""Where a rank is on the mesh, how it exchanges tensors with others, and which positions of a sequence it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from shardwise.run.kernels.attention_mask import PositionRange
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.spec import Axes, Spec


class CollectiveHandle(Protocol):
    """A collective on its way."""

    def wait(self) -> None:
        """Until it is done."""


class CollectiveOps(Protocol):
    """Collectives over axes of the mesh, in the background; the ranks of a group are in the order of its axes."""

    def all_gather(self, whole: Tensor, part: Tensor, axes: Axes) -> CollectiveHandle:
        """Parts of all ranks, one after the other, into `whole`."""

    def reduce_scatter(self, part: Tensor, whole: Tensor, axes: Axes) -> CollectiveHandle:
        """The sum of all ranks' `whole`, each rank its `part`."""

    def all_reduce(self, values: Tensor, axes: Axes, reduction: str = "sum") -> CollectiveHandle:
        """The sum, or the maximum, over all ranks, in place."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, axes: Axes, rows: tuple[Sequence[int], Sequence[int]] | None = None
    ) -> CollectiveHandle:
        """The parts of `sent` each to its rank; into `received` what the ranks have sent to this one, in their order. `rows` are
        those of each part of either; None: parts are even."""

    def shift(self, received: Sequence[Tensor], sent: Sequence[Tensor], axes: Axes) -> CollectiveHandle:
        """Tensors to the next rank, the last one's to the first; those of the rank before into `received`."""


@dataclass(frozen=True)
class Rank:
    """A rank of a mesh. `pieces` of a sequence are what a rank along `cp` takes
    (`layout.context_parallel.ContextParallelVariant.sequence_pieces`); of its tokens'
    rows an expert takes `capacity_factor` times an even share at most (None: all)."""

    mesh: Mesh
    coordinate: Mapping[str, int] = field(default_factory=dict)
    exchange: CollectiveOps | None = None
    pieces: int = 1
    capacity_factor: float | None = None

    def nontrivial_axes(self, axes: Iterable[str]) -> Axes:
        """Of some axes those with more than one rank."""
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    def position(self, axes: Axes) -> int:
        """This rank's place along some axes, the first axis the major one."""
        own = self.nontrivial_axes(axes)
        return self.mesh.position(self.coordinate, own) if own else 0

    def sharding(self, spec: Spec) -> Spec:
        """The same without axes of one rank."""
        axes = tuple(self.nontrivial_axes(of_dim) for of_dim in spec.axes)
        return Spec(spec.dims, axes, self.nontrivial_axes(spec.partial), spec.reduction)

    def sequence_ranges(self, length: int, axes: Axes, place: int | None = None) -> tuple[PositionRange, ...] | None:
        """The places that this rank, or that at another `place` along the axes, has of sequences that are split over them.

        None: all in their order.

        Raises `ValueError` where the pieces do not divide the sequence.
        """
        ranks, own = self.mesh.size("cp") if "cp" in self.mesh.names else 1, self.nontrivial_axes(axes)
        pieces = self.pieces if ranks > 1 else 1
        count, parts = ranks * pieces, self.mesh.size(own)
        if length % count or length % parts:
            raise ValueError(f"a sequence of {length} tokens is not divisible into {count} pieces on {parts} ranks")
        if parts == pieces == 1:
            return None
        order = [number for rank in range(ranks) for number in _chunks_of_rank(rank, ranks, pieces)]
        width, first = length // count, (self.position(own) if place is None else place) * (length // parts)
        return tuple(
            _merge_ranges(_slice_ranges([(number * width, width) for number in order], first, first + length // parts))
        )


def _slice_ranges(runs: Iterable[PositionRange], start: int, stop: int) -> Iterator[PositionRange]:
    """The rows from `start` to `stop` of some runs."""
    row = 0
    for place, length in runs:
        low, high = max(start, row), min(stop, row + length)
        if low < high:
            yield place + low - row, high - low
        row += length


def _merge_ranges(runs: Iterable[PositionRange]) -> Iterator[PositionRange]:
    """Runs, those that follow one another as one."""
    last: PositionRange | None = None
    for place, length in runs:
        if last is not None and sum(last) == place:
            last = last[0], last[1] + length
            continue
        if last is not None:
            yield last
        last = place, length
    if last is not None:
        yield last


def _chunks_of_rank(rank: int, ranks: int, pieces: int) -> list[int]:
    """Forth and back over the ranks, so that causal work is even: with two pieces one from either end of the sequence.

    >>> [_chunks_of_rank(rank, 4, 2) for rank in range(4)]
    [[0, 7], [1, 6], [2, 5], [3, 4]]
    """
    return [turn * ranks + (ranks - 1 - rank if turn % 2 else rank) for turn in range(pieces)]
