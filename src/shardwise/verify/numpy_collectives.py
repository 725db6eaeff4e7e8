"""Collectives of message passing on lists of NumPy arrays: what every rank holds before and after.

The r-th array of a list is rank r's. Nothing is changed in place. Source: S1, the crash course in an appendix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.values import InputError

Array = NDArray[Any]
Reduction = Literal["sum", "product", "max", "min"]

_REDUCTIONS: Mapping[str, Any] = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


def _arrays(arrays: Sequence[ArrayLike]) -> list[Array]:
    if not len(arrays):
        raise InputError("ranks: found none; at least one array is required")
    return [np.array(array) for array in arrays]


def _parts(parts: Sequence[Sequence[ArrayLike]]) -> list[list[Array]]:
    for rank, rank_parts in enumerate(parts):
        if len(rank_parts) != len(parts):
            raise InputError(
                f"rank {rank}: found {len(rank_parts)} arrays; one for each of the {len(parts)} ranks is required"
            )
    return [_arrays(rank_parts) for rank_parts in parts]


def _rank(name: str, rank: int, count: int) -> None:
    if not 0 <= rank < count:
        raise InputError(f"{name}: found rank {rank}; one of 0 to {count - 1} is required")


def _reduce_arrays(arrays: Sequence[Array], reduction: str) -> Array:
    if reduction not in _REDUCTIONS:
        raise InputError(f"reduction: found {reduction!r}; one of {', '.join(_REDUCTIONS)} is required")
    if len({array.shape for array in arrays}) > 1:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise InputError(f"reduction: found arrays of shapes {shapes}; one shape is required")
    return np.asarray(_REDUCTIONS[reduction].reduce(np.stack(arrays)))


def broadcast(arrays: Sequence[ArrayLike], source: int = 0) -> list[Array]:
    """Return the source's array on every rank."""
    rank_arrays = _arrays(arrays)
    _rank("source", source, len(rank_arrays))
    return [rank_arrays[source].copy() for _ in rank_arrays]


def reduce(arrays: Sequence[ArrayLike], destination: int = 0, reduction: Reduction = "sum") -> list[Array]:
    """Return the sum of all arrays on the destination; the others keep their own (libraries leave that open)."""
    rank_arrays = _arrays(arrays)
    _rank("destination", destination, len(rank_arrays))
    total = _reduce_arrays(rank_arrays, reduction)
    return [total if rank == destination else array for rank, array in enumerate(rank_arrays)]


def all_reduce(arrays: Sequence[ArrayLike], reduction: Reduction = "sum") -> list[Array]:
    """Return the sum of all arrays on every rank."""
    rank_arrays = _arrays(arrays)
    total = _reduce_arrays(rank_arrays, reduction)
    return [total.copy() for _ in rank_arrays]


def gather(arrays: Sequence[ArrayLike], destination: int = 0) -> list[list[Array]]:
    """Return the list of all arrays on the destination, and an empty list on the others."""
    rank_arrays = _arrays(arrays)
    _rank("destination", destination, len(rank_arrays))
    return [rank_arrays if rank == destination else [] for rank in range(len(rank_arrays))]


def all_gather(arrays: Sequence[ArrayLike]) -> list[list[Array]]:
    """Return the list of all arrays on every rank."""
    rank_arrays = _arrays(arrays)
    return [[array.copy() for array in rank_arrays] for _ in rank_arrays]


def scatter(parts: Sequence[ArrayLike]) -> list[Array]:
    """Return on rank r the r-th of the arrays that one rank sends."""
    return _arrays(parts)


def reduce_scatter(parts: Sequence[Sequence[ArrayLike]], reduction: Reduction = "sum") -> list[Array]:
    """Return on rank j the sum of every rank's j-th array; `parts[r][j]` is the j-th of rank r."""
    rank_parts = _parts(parts)
    return [_reduce_arrays([sent[j] for sent in rank_parts], reduction) for j in range(len(rank_parts))]


def all_to_all(parts: Sequence[Sequence[ArrayLike]]) -> list[list[Array]]:
    """Return on rank j every rank's j-th array, in the order of ranks: the transpose."""
    rank_parts = _parts(parts)
    return [[sent[j] for sent in rank_parts] for j in range(len(rank_parts))]


def barrier_s(arrival_s: Sequence[float]) -> list[float]:
    """Return the seconds at which each rank leaves a barrier, from those at which they reach it: the last arrival.
    Assumes: the barrier's own messages take no time."""
    if not len(arrival_s):
        raise InputError("ranks: found none; at least one time of arrival is required")
    return [float(max(arrival_s))] * len(arrival_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingResult:
    """Arrays that a ring all-reduce leaves on every rank, its steps, and the elements that each rank sent."""

    arrays: list[Array]
    num_steps: int
    sent_elements: tuple[int, ...]


def ring_all_reduce(arrays: Sequence[ArrayLike]) -> RingResult:
    """Sum all arrays by sends to the next rank only: a reduce-scatter of N chunks, then an all-gather of them. Each of
    the 2(N - 1) steps sends one chunk, so a rank sends 2(N - 1)/N of its array. Source: S1."""
    rank_arrays = _arrays(arrays)
    num_ranks, shape = len(rank_arrays), rank_arrays[0].shape
    _reduce_arrays(rank_arrays, "sum")
    chunks = [[np.array(chunk) for chunk in np.array_split(array.ravel(), num_ranks)] for array in rank_arrays]
    sent_elements = [0] * num_ranks
    for step in range(2 * (num_ranks - 1)):
        outgoing = [(rank - step) % num_ranks for rank in range(num_ranks)]
        moving = [chunks[rank][outgoing[rank]].copy() for rank in range(num_ranks)]
        for rank, chunk in enumerate(moving):
            sent_elements[rank] += chunk.size
            next_rank, chunk_index = (rank + 1) % num_ranks, outgoing[rank]
            chunks[next_rank][chunk_index] = chunks[next_rank][chunk_index] + chunk if step < num_ranks - 1 else chunk
    return RingResult(
        arrays=[np.concatenate(rank_chunks).reshape(shape) for rank_chunks in chunks],
        num_steps=2 * (num_ranks - 1),
        sent_elements=tuple(sent_elements),
    )


def _matrices(left: ArrayLike, right: ArrayLike) -> tuple[Array, Array]:
    a, b = np.array(left), np.array(right)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise InputError(f"product: found {a.shape} and {b.shape}; two matrices with a common inner dim are required")
    return a, b


def _split_array(array: Array, num_ranks: int, dim: int) -> list[Array]:
    size = array.shape[dim]
    if num_ranks < 1 or size % num_ranks:
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        raise InputError(f"ranks: found {num_ranks} for a dim of {size}; a divisor is required, one of {divisors}")
    return [np.array(part) for part in np.split(array, num_ranks, axis=dim)]


def column_parallel_products(left: ArrayLike, right: ArrayLike, num_ranks: int) -> list[Array]:
    """Return each rank's columns of the product: all of `left` times its columns of `right`."""
    a, b = _matrices(left, right)
    return [a @ part for part in _split_array(b, num_ranks, 1)]


def row_parallel_products(left: ArrayLike, right: ArrayLike, num_ranks: int) -> list[Array]:
    """Return each rank's partial sum: its columns of `left` times its rows of `right`. An all-reduce adds them up. With
    as many ranks as rows these are outer products. Source: S2, the product of matrices in blocks."""
    a, b = _matrices(left, right)
    pairs = zip(_split_array(a, num_ranks, 1), _split_array(b, num_ranks, 0), strict=True)
    return [x @ y for x, y in pairs]


def concatenate_parts(parts: Sequence[ArrayLike], dim: int = -1) -> Array:
    """Return the gathered parts of an array, concatenated along `dim`."""
    return np.concatenate(_arrays(parts), axis=dim)
