"""Polynomials of one size: their coefficients from values, and where they first rise above zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from shardwise.errors import InputError

NOISE = 1e-12  # of a difference of numbers that are equal but for rounding, as a part of them
MOST_DEGREE = 6  # of a cost in one size; a product of four tensors' dims has four
POINTS = MOST_DEGREE + 2  # one more than determines the polynomial, to see that it is one


def coefficients(values: Sequence[float]) -> list[float]:
    """Coefficients, the constant first, of the polynomial whose values at 0, 1, 2, ... these are.

    Source: Newton's forward differences. Raises `InputError` where the values are of no polynomial of degree `MOST_DEGREE`.

    >>> coefficients([2.0 * n**3 + 1.0 for n in range(POINTS)])
    [1.0, 0.0, 0.0, 2.0]
    """
    differences, row = [], [Fraction(value) for value in values]
    while row:
        differences.append(row[0])
        row = [after - before for before, after in pairwise(row)]
    rounding = NOISE * max(map(abs, values))
    while differences and abs(differences[-1]) <= rounding * 2.0 ** len(differences):  # order k adds 2^k values up
        differences.pop()
    if len(differences) == len(values):
        raise InputError(f"size: FLOPs and bytes are required to be polynomials of it, of degree {MOST_DEGREE} at most")
    found, binomial = [Fraction(0)] * len(differences), [Fraction(1)]
    for order, difference in enumerate(differences):
        for power, factor in enumerate(binomial):
            found[power] += difference * factor
        # times (size - order) / (order + 1)
        raised, kept = [Fraction(0), *binomial], [*binomial, Fraction(0)]
        binomial = [(high - order * low) / (order + 1) for high, low in zip(raised, kept, strict=True)]
    largest = len(values) - 1
    return [float(factor) if abs(factor) * largest**power > rounding else 0.0 for power, factor in enumerate(found)]


def first_rise(polynomial: Sequence[float]) -> float:
    """The least size above zero from which a polynomial (constant first) is positive: 0 where it is from the start.

    Infinite where it never is.

    >>> first_rise([-8.0, 0.0, 0.0, 1.0])
    2.0
    """
    lowest = next((factor for factor in polynomial if factor), 0.0)
    return 0.0 if lowest > 0 else min(_roots(polynomial), default=math.inf)


def _roots(polynomial: Sequence[float]) -> list[float]:
    """Positive roots at which the sign changes, in order: between two turning points there is one at most."""
    factors = list(polynomial)
    while factors and not factors[-1]:
        factors.pop()
    while factors and not factors[0]:  # a root at zero
        factors.pop(0)
    if len(factors) < 2:
        return []
    if len(factors) == 2:
        root = -factors[0] / factors[1]
        return [root] if root > 0 else []
    largest = 1.0 + max(abs(factor / factors[-1]) for factor in factors)  # Cauchy's bound of all roots
    turning = [root for root in _roots(_derivative(factors)) if root < largest]
    ends = [0.0, *turning, largest]
    return [_bisected(factors, low, high) for low, high in pairwise(ends) if _changes(factors, low, high)]


def _changes(polynomial: Sequence[float], low: float, high: float) -> bool:
    return (_value(polynomial, low) < 0) != (_value(polynomial, high) < 0)


def _bisected(polynomial: Sequence[float], low: float, high: float) -> float:
    negative = _value(polynomial, low) < 0
    while low < (middle := (low + high) / 2.0) < high:
        if (_value(polynomial, middle) < 0) == negative:
            low = middle
        else:
            high = middle
    return high


def _derivative(polynomial: Sequence[float]) -> list[float]:
    return [power * factor for power, factor in enumerate(polynomial)][1:]


def _value(polynomial: Sequence[float], size: float) -> float:
    total = 0.0
    for factor in reversed(polynomial):
        total = total * size + factor
    return total
