"""Columns of cost tables: number distinct rows, gather columns at rows, and merge columns that a step only adds up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.model import OverlapConvention
from shardwise.price import StateCost
from shardwise.price.overlap import get_convention
from shardwise.price.unit_cost import ActivationCost, SecondsByAxis
from shardwise.values import Value, sum_values

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Array = NDArray[Any]


def number_distinct_rows(*columns: Array) -> tuple[Ints, Ints]:
    """Number the distinct rows of some columns; returns (a row that represents each number, the number of each row)."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        distinct, inverse = np.unique(column, return_inverse=True)
        code = code * len(distinct) + inverse
        # Renumber after each column, so that the products stay within int64.
        _, code = np.unique(code, return_inverse=True)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


class GatheredColumns:
    """Columns of cost tables at some rows, each gathered on first use.

    With several tables, one for each ZeRO stage, a column has a line from each, unless all of them are equal."""

    def __init__(self, costs: Sequence[ActivationCost | StateCost], rows: Ints) -> None:
        self._costs = costs
        self._rows = rows
        self._gathered: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        gathered: dict[str, Any] = self.__dict__["_gathered"]
        if name not in gathered:
            columns = [getattr(cost, name) for cost in self._costs]
            by_axis = isinstance(columns[0], Mapping)
            gathered[name] = _GatheredByAxis(columns, self._rows) if by_axis else _gather(columns, self._rows)
        return gathered[name]


class _GatheredByAxis(dict[str, Any]):
    """Columns by axis at some rows, each gathered on first use."""

    def __init__(self, columns: Sequence[Mapping[str, Any]], rows: Ints) -> None:
        super().__init__()
        self._columns, self._rows = columns, rows

    def __missing__(self, axis: str) -> Any:
        self[axis] = _gather([column[axis] for column in self._columns], self._rows)
        return self[axis]


def are_same_column(columns: Sequence[Value]) -> bool:
    """Return True if all are one array object, or one number."""
    first = columns[0]
    return all(
        column is first or (np.ndim(column) == 0 and np.ndim(first) == 0 and column == first) for column in columns
    )


def _gather(columns: Sequence[Any], rows: Ints) -> Any:
    first = columns[0]
    if are_same_column(columns):
        return first.take(rows, mode="clip") if np.ndim(first) else first
    gathered = np.empty((len(columns), len(rows)))
    for line, column in zip(gathered, columns, strict=True):
        if np.ndim(column):
            column.take(rows, out=line, mode="clip")
        else:
            line[:] = column
    return gathered


def merge_activation_columns(
    cost: ActivationCost, overlap: OverlapConvention, *, pairs: bool, measured: bool
) -> ActivationCost:
    """Merge columns that a step only adds up, so that fewer are gathered.

    Experts' traffic stays apart if passes run in `pairs`, which hide it (`overlap.HIDEABLE_TOGETHER`), and under a `measured`
    stack, where a share of it is exposed and all of the others' (`overlap.BLOCKING`)."""
    cost = replace(cost, backward_s=cost.backward_s + cost.recompute_s, recompute_s=0.0)
    if not get_convention(overlap).adds_up:  # the longest axis counts, so the axes stay apart
        return cost
    merged_axes = ("tp", "cp") if measured or pairs else ("tp", "cp", "ep")
    return replace(
        cost, forward_traffic_s=_sum_axes(cost.forward_traffic_s, *merged_axes),
        backward_traffic_s=_sum_axes(cost.backward_traffic_s, *merged_axes),
    )  # fmt: skip


def _sum_axes(traffic: SecondsByAxis, axis: str, *merged: str) -> SecondsByAxis:
    """Add the seconds of the merged axes to those of `axis`."""
    return {**traffic, axis: sum_values(traffic[name] for name in (axis, *merged)), **dict.fromkeys(merged, 0.0)}


def merge_state_columns(cost: StateCost, overlap: OverlapConvention, *, offloads: bool = False) -> StateCost:
    """Merge state likewise: bytes at rest into one column, or two if the optimizer's can rest on the host."""
    optimizer = cost.master_bytes + cost.optimizer_bytes
    rest = cost.parameters_bytes + cost.gradients_bytes + (0.0 if offloads else optimizer)
    cost = replace(
        cost, parameters_bytes=rest, gradients_bytes=0.0, master_bytes=0.0, optimizer_bytes=optimizer if offloads else 0.0
    )  # fmt: skip
    if not get_convention(overlap).adds_up:
        return cost
    return replace(cost, step_traffic_s=_sum_axes(cost.step_traffic_s, "fsdp", "dp", "control"))
