"""The collectives of message passing on lists of NumPy arrays: what every rank holds before and after.

Rank r's array is the r-th of the list. Nothing is changed in place. Source: S1, the crash course in an appendix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from shardwise.values.errors import InputError

Array = NDArray[Any]
Reduction = Literal["sum", "product", "max", "min"]

_REDUCTIONS: Mapping[str, Any] = {"sum": np.add, "product": np.multiply, "max": np.maximum, "min": np.minimum}


def _arrays(arrays: Sequence[ArrayLike]) -> list[Array]:
    if not len(arrays):
        raise InputError("ranks: found none; at least one array is required")
    return [np.array(array) for array in arrays]


def _parts(parts: Sequence[Sequence[ArrayLike]]) -> list[list[Array]]:
    """One array for each rank on each rank."""
    for rank, own in enumerate(parts):
        if len(own) != len(parts):
            raise InputError(
                f"rank {rank}: found {len(own)} arrays; one for each of the {len(parts)} ranks is required"
            )
    return [_arrays(own) for own in parts]


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
    """Every rank has the source's array."""
    held = _arrays(arrays)
    _rank("source", source, len(held))
    return [held[source].copy() for _ in held]


def reduce(arrays: Sequence[ArrayLike], destination: int = 0, reduction: Reduction = "sum") -> list[Array]:
    """The destination has the sum of all arrays, the others keep their own (what a library leaves there is its affair)."""
    held = _arrays(arrays)
    _rank("destination", destination, len(held))
    total = _reduce_arrays(held, reduction)
    return [total if rank == destination else array for rank, array in enumerate(held)]


def all_reduce(arrays: Sequence[ArrayLike], reduction: Reduction = "sum") -> list[Array]:
    """Every rank has the sum of all arrays."""
    held = _arrays(arrays)
    total = _reduce_arrays(held, reduction)
    return [total.copy() for _ in held]


def gather(arrays: Sequence[ArrayLike], destination: int = 0) -> list[list[Array]]:
    """The destination has the list of all arrays, the others an empty one."""
    held = _arrays(arrays)
    _rank("destination", destination, len(held))
    return [held if rank == destination else [] for rank in range(len(held))]


def all_gather(arrays: Sequence[ArrayLike]) -> list[list[Array]]:
    """Every rank has the list of all arrays."""
    held = _arrays(arrays)
    return [[array.copy() for array in held] for _ in held]


def scatter(parts: Sequence[ArrayLike]) -> list[Array]:
    """Rank r has the r-th of the arrays that one rank hands out."""
    return _arrays(parts)


def reduce_scatter(parts: Sequence[Sequence[ArrayLike]], reduction: Reduction = "sum") -> list[Array]:
    """Rank j has the sum of every rank's j-th array; `parts[r][j]` is the j-th of rank r."""
    held = _parts(parts)
    return [_reduce_arrays([own[j] for own in held], reduction) for j in range(len(held))]


def all_to_all(parts: Sequence[Sequence[ArrayLike]]) -> list[list[Array]]:
    """Rank j has every rank's j-th array, that of rank r as its r-th: the transpose."""
    held = _parts(parts)
    return [[own[j] for own in held] for j in range(len(held))]


def barrier_s(arrival_s: Sequence[float]) -> list[float]:
    """Seconds at which each rank leaves a barrier, from those at which they reach it: when the last has come.

    Assumes: the barrier's own messages take no time.
    """
    if not len(arrival_s):
        raise InputError("ranks: found none; at least one time of arrival is required")
    return [float(max(arrival_s))] * len(arrival_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RingResult:
    """What a ring all-reduce leaves on every rank, its steps, and the elements that each rank sent."""

    arrays: list[Array]
    num_steps: int
    sent_elements: tuple[int, ...]


def ring_all_reduce(arrays: Sequence[ArrayLike]) -> RingResult:
    """Sum all arrays by sends to the next rank only: a reduce-scatter of N chunks, then an all-gather of them.

    Each of the 2(N - 1) steps sends one chunk, so a rank sends 2(N - 1)/N of its array. Source: S1.
    """
    held = _arrays(arrays)
    count, shape = len(held), held[0].shape
    _reduce_arrays(held, "sum")
    chunks = [[np.array(chunk) for chunk in np.array_split(array.ravel(), count)] for array in held]
    sent = [0] * count
    for step in range(2 * (count - 1)):
        outgoing = [(rank - step) % count for rank in range(count)]
        moving = [chunks[rank][outgoing[rank]].copy() for rank in range(count)]
        for rank, chunk in enumerate(moving):
            sent[rank] += chunk.size
            after, place = (rank + 1) % count, outgoing[rank]
            chunks[after][place] = chunks[after][place] + chunk if step < count - 1 else chunk
    return RingResult(
        arrays=[np.concatenate(own).reshape(shape) for own in chunks],
        num_steps=2 * (count - 1),
        sent_elements=tuple(sent),
    )


def _matrices(left: ArrayLike, right: ArrayLike) -> tuple[Array, Array]:
    a, b = np.array(left), np.array(right)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise InputError(f"product: found {a.shape} and {b.shape}; two matrices with a common inner dim are required")
    return a, b


def _split_array(array: Array, num_ranks: int, dim: int) -> list[Array]:
    size = array.shape[dim]
    if num_ranks < 1 or size % num_ranks:
        near = [n for n in range(1, size + 1) if size % n == 0]
        raise InputError(f"ranks: found {num_ranks} for a dim of {size}; a divisor is required, one of {near}")
    return [np.array(part) for part in np.split(array, num_ranks, axis=dim)]


def column_products(left: ArrayLike, right: ArrayLike, num_ranks: int) -> list[Array]:
    """Each rank multiplies all of `left` by its columns of `right`: its columns of the product."""
    a, b = _matrices(left, right)
    return [a @ part for part in _split_array(b, num_ranks, 1)]


def row_products(left: ArrayLike, right: ArrayLike, num_ranks: int) -> list[Array]:
    """Each rank multiplies its columns of `left` by its rows of `right`: partial sums, which an all-reduce adds up.

    With as many ranks as rows these are outer products. Source: S2, the product of matrices in blocks.
    """
    a, b = _matrices(left, right)
    pairs = zip(_split_array(a, num_ranks, 1), _split_array(b, num_ranks, 0), strict=True)
    return [x @ y for x, y in pairs]


def concatenate_parts(parts: Sequence[ArrayLike], dim: int = -1) -> Array:
    """What ranks that gathered parts of an array have: the parts side by side along `dim`."""
    return np.concatenate(_arrays(parts), axis=dim)
