"""Unions of intervals of time: sorted, and apart from one another."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, in order.

    >>> merged([(3, 4), (0, 2), (1, 3)])
    [(0, 4)]
    """
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def common(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What two unions have in common.

    >>> common([(0, 4)], [(1, 2), (3, 6)])
    [(1, 2), (3, 4)]
    """
    found, left, right = [], list(some), list(others)
    i = j = 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start, end))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return found


def total(intervals: Iterable[Interval]) -> float:
    """Their length."""
    return sum(end - start for start, end in intervals)
