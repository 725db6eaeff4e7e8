"""Which sequence a sample is: arithmetic on the sample's number, with no state to keep."""

from __future__ import annotations

from typing import Any

import numpy as np

UInt64s = np.ndarray[Any, np.dtype[np.uint64]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
# Four rounds of a Feistel network give a pseudo-random permutation where the rounds' function is one (Luby and Rackoff 1988);
# the two more make up for a function that is a cheap one.
ROUNDS = 6
# The mixing function of SplitMix64 (Steele, Lea and Flood 2014).
_GAMMA, _MIX = np.uint64(0x9E3779B97F4A7C15), ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


def sequence_numbers(samples: Int64s, num_sequences: int, seed: int | None) -> Int64s:
    """The sequence that each sample is: every epoch takes each of `num_sequences` once, in an order of its own.

    Without a seed every epoch takes them from the first to the last.
    """
    epochs, positions = np.divmod(samples, num_sequences)
    if seed is None:
        return positions
    found = np.empty_like(positions)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = permuted(positions[here], num_sequences, _key(seed, int(epoch)))
    return found


def permuted(positions: Int64s, size: int, key: int) -> Int64s:
    """Where a permutation of [0, size) takes each of `positions`; it is one of many, chosen by `key`, and held nowhere.

    A balanced Feistel network permutes the next power of four; what falls outside is sent through again until it is inside
    (cycle walking: Black and Rogaway 2002), less than four times on average.
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    found = positions.astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():
        found[outside] = _feistel(found[outside], half, key)
        outside = found >= size
    return found.astype(np.int64)


def _feistel(values: UInt64s, half: np.uint64, key: int) -> UInt64s:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (_mixed(right ^ np.uint64(_key(key, turn))) & mask)
    return (left << half) | right


def _key(seed: int, number: int) -> int:
    """A number in [0, 2^64) of two others."""
    first = _mixed(np.array([seed % 2**64], np.uint64))
    return int(_mixed(first ^ np.array([number % 2**64], np.uint64))[0])


def _mixed(values: UInt64s) -> UInt64s:
    values = values + _GAMMA
    for shift, factor in _MIX:
        values = (values ^ (values >> np.uint64(shift))) * factor
    return values ^ (values >> np.uint64(31))
