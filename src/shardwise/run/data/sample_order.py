"""The source and sequence of each sample, computed from the number of the sample without state.

A `Mixture` draws sources by their weights; a permutation orders the sequences of a source in each epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from shardwise.values import InputError, raise_problems

MAX_PERIOD = 100_000  # samples, for weights of five digits; computed once in less than a second


class Mixture:
    """Sources that are drawn in proportion to weights, which need not add up to 1.

    Of the first n samples of a mixture, and of n from the start of any period, a source of share w has more than n·w -
    1 and less than n·w + 1. Its draw j (from 1) is due by sample j/w, and allowed once n·w > j - 1; of the sources that
    are allowed the one that is due first is drawn (Tijdeman 1980, The chairman assignment problem; Baruah et al. 1996,
    Proportionate progress: earliest deadline first). Shares are fractions, and the order repeats after their common
    denominator.

    >>> mixture = Mixture([0.5, 0.25, 0.25])
    >>> mixture.draw(np.arange(8))[0].tolist()
    [0, 1, 0, 2, 0, 1, 0, 2]
    >>> mixture.counts(1_000_000_002)
    (500000001, 250000001, 250000000)
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Raises `InputError` for weights that are not positive, or whose order does not repeat within `MAX_PERIOD`
        samples."""
        raise_problems(
            [
                f"weights: found {weight}; a number above 0 is required"
                for weight in weights
                if not 0 < weight < math.inf
            ]
        )
        self.num_draws = _smallest_ratio(weights)  # draws of each source in a period
        self.period = sum(self.num_draws)
        if self.period > MAX_PERIOD:
            listed = ", ".join(f"{weight:g}" for weight in weights)
            raise InputError(
                f"weights: found {listed}, whose order repeats after {self.period:,} samples; "
                f"at most {MAX_PERIOD:,} is required: give shares of fewer digits, such as 0.713"
            )
        self._sources = np.array(_draw_period(self.num_draws), np.int64)
        self._sample_indices = np.empty_like(self._sources)  # the number of a draw within its source
        for source, count in enumerate(self.num_draws):
            self._sample_indices[self._sources == source] = np.arange(count)

    @property
    def shares(self) -> tuple[float, ...]:
        """The weights, scaled to add up to 1."""
        return tuple(count / self.period for count in self.num_draws)

    def draw(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Return the source of each of `samples`, and the number of the sample within its source, both counted from 0."""
        periods, positions = np.divmod(samples, self.period)
        sources: Int64s = self._sources[positions]
        return sources, periods * np.array(self.num_draws)[sources] + self._sample_indices[positions]

    def counts(self, num_samples: int) -> tuple[int, ...]:
        """Return how many of the first `num_samples` samples each source has."""
        periods, remainder = divmod(num_samples, self.period)
        partial_counts = np.bincount(self._sources[:remainder], minlength=len(self.num_draws)).tolist()
        return tuple(periods * count + extra for count, extra in zip(self.num_draws, partial_counts, strict=True))


def _smallest_ratio(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the smallest integers in the ratio of weights as these are written: 0.7 is 7/10."""
    fractions = [Fraction(str(weight)) for weight in weights]
    integers = [int(fraction * math.lcm(*(term.denominator for term in fractions))) for fraction in fractions]
    return tuple(integer // math.gcd(*integers) for integer in integers)


def _draw_period(num_draws: Sequence[int]) -> list[int]:
    """Return the source of each sample of a period."""
    period, num_drawn = sum(num_draws), [0] * len(num_draws)
    due = [-(-period // count) for count in num_draws]
    order = []
    for sample in range(period):
        eligible = (
            source for source, count in enumerate(num_draws) if num_drawn[source] * period < count * (sample + 1)
        )
        source = min(eligible, key=due.__getitem__)
        num_drawn[source] += 1
        due[source] = -(-(num_drawn[source] + 1) * period // num_draws[source])
        order.append(source)
    return order


UInt64s = np.ndarray[Any, np.dtype[np.uint64]]
Int64s = np.ndarray[Any, np.dtype[np.int64]]
# Four rounds of a Feistel network with pseudo-random round functions are a pseudo-random permutation (Luby and Rackoff 1988);
# two more compensate for a cheap round function.
ROUNDS = 6
# The mixing function of SplitMix64 (Steele, Lea and Flood 2014).
_GAMMA, _MIX = np.uint64(0x9E3779B97F4A7C15), ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB)))


def sequence_numbers(samples: Int64s, num_sequences: int, seed: int | None) -> Int64s:
    """Return the sequence of each sample: every epoch takes each of `num_sequences` once, in an order of its own.
    Without a seed every epoch takes them from the first to the last."""
    epochs, positions = np.divmod(samples, num_sequences)
    if seed is None:
        return positions
    numbers = np.empty_like(positions)
    for epoch in np.unique(epochs):
        mask = epochs == epoch
        numbers[mask] = permute(positions[mask], num_sequences, _key(seed, int(epoch)))
    return numbers


def permute(positions: Int64s, size: int, key: int) -> Int64s:
    """Return the images of `positions` under a permutation of [0, size), chosen by `key` and not stored.

    A balanced Feistel network permutes the next power of four; results outside [0, size) are sent through again until
    they are inside (cycle walking: Black and Rogaway 2002), less than four times on average.
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    permuted = positions.astype(np.uint64)
    outside = np.ones(permuted.shape, bool)
    while outside.any():
        permuted[outside] = _feistel(permuted[outside], half, key)
        outside = permuted >= size
    return permuted.astype(np.int64)


def _feistel(bits: UInt64s, half: np.uint64, key: int) -> UInt64s:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = bits >> half, bits & mask
    for round_index in range(ROUNDS):
        left, right = right, left ^ (_mix(right ^ np.uint64(_key(key, round_index))) & mask)
    return (left << half) | right


def _key(seed: int, number: int) -> int:
    """Return a hash of two numbers in [0, 2^64)."""
    first = _mix(np.array([seed % 2**64], np.uint64))
    return int(_mix(first ^ np.array([number % 2**64], np.uint64))[0])


def _mix(bits: UInt64s) -> UInt64s:
    bits = bits + _GAMMA
    for shift, factor in _MIX:
        bits = (bits ^ (bits >> np.uint64(shift))) * factor
    return bits ^ (bits >> np.uint64(31))
