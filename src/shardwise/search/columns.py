"""Columns of numbers over rows, and cost tables gathered at some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.symbolic import Value

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Array = NDArray[Any]


def codes(*columns: Array) -> tuple[Ints, Ints]:
    """Number the distinct rows of some columns: (a row that represents each number, the number of each row)."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        code = code * len(values) + inverse
        # keep the numbers small, so that columns never overflow
        _, code = np.unique(code, return_inverse=True)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


class Gathered:
    """Columns of cost tables at some rows; each is gathered on first use. With several tables, one for each ZeRO stage, a
    column has a line from each, unless all of them are equal."""

    def __init__(self, costs: Sequence[ActivationCost | StateCost], rows: Ints) -> None:
        self._costs = costs
        self._rows = rows
        self._got: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        got: dict[str, Any] = self.__dict__["_got"]
        if name not in got:
            columns = [getattr(cost, name) for cost in self._costs]
            by_axis = isinstance(columns[0], Mapping)
            got[name] = _Taken(columns, self._rows) if by_axis else _taken(columns, self._rows)
        return got[name]


class _Taken(dict[str, Any]):
    """Columns by axis at some rows, gathered likewise."""

    def __init__(self, columns: Sequence[Mapping[str, Any]], rows: Ints) -> None:
        super().__init__()
        self._columns, self._rows = columns, rows

    def __missing__(self, axis: str) -> Any:
        self[axis] = _taken([column[axis] for column in self._columns], self._rows)
        return self[axis]


def alike(columns: Sequence[Value]) -> bool:
    """Whether all are one column, or one number."""
    first = columns[0]
    return all(
        column is first or (np.ndim(column) == 0 and np.ndim(first) == 0 and column == first) for column in columns
    )


def _taken(columns: Sequence[Any], rows: Ints) -> Any:
    first = columns[0]
    if alike(columns):
        return first.take(rows, mode="clip") if np.ndim(first) else first
    found = np.empty((len(columns), len(rows)))
    for line, column in zip(found, columns, strict=True):
        if np.ndim(column):
            column.take(rows, out=line, mode="clip")
        else:
            line[:] = column
    return found
