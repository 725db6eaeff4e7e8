"""Tables of serving configurations as columns of NumPy arrays, for searches, and what an estimate of them gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from shardwise.serve.serving_layout import FORMS, ServingLayout

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
MAX_CODE = 2**62  # combinations of values that one number can tell apart


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigurationTable:
    """Configurations, a row each; all columns have the same length.

    The degrees are those of `ServingLayout`, `expert_tp` filled in; a form is its position in `FORMS`. `concurrency` is the
    number of requests in the system over all replicas; `max_batched_tokens` the tokens of one pass of a copy of attention.

    >>> layout = ServingLayout.parse("tp=4 replicas=2")
    >>> table = ConfigurationTable.of([layout, layout], concurrency=[8.0, 16.0], max_batched_tokens=[8192, 8192])
    >>> len(table), table.num_devices.tolist(), table.layout_of(1)
    (2, [8, 8], ServingLayout.parse('tp=4 replicas=2'))
    """

    tp: Integers
    attention_dp: Integers
    pp: Integers
    cp: Integers
    ep: Integers
    expert_tp: Integers
    ws: Integers
    replicas: Integers
    dispatch: Integers
    redundant_experts: Integers
    cache_split: Integers
    concurrency: Floats
    max_batched_tokens: Integers

    @classmethod
    def of(
        cls, layouts: Sequence[ServingLayout], concurrency: Sequence[float], max_batched_tokens: Sequence[int]
    ) -> Self:
        """Return the table with these rows."""
        degrees = {name: [getattr(layout, name) for layout in layouts] for name in DEGREES}
        for name, values in FORMS.items():
            degrees[name] = [values.index(getattr(layout, name)) for layout in layouts]
        columns: dict[str, Any] = {name: np.array(values, dtype=np.int64) for name, values in degrees.items()}
        columns["expert_tp"] = np.array([layout.expert_tp_degree for layout in layouts], dtype=np.int64)
        return cls(
            **columns, concurrency=np.array(concurrency, dtype=np.float64),
            max_batched_tokens=np.array(max_batched_tokens, dtype=np.int64),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Integers | NDArray[np.bool_]) -> Self:
        """Return the table of some rows, by index or by mask."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def distinct(self, names: Sequence[str]) -> tuple[Integers, Integers]:
        """Return the first row of each combination of some columns of numbers, and for each row the position of its combination.

        >>> layouts = [ServingLayout.parse(text) for text in ("tp=4", "tp=8", "tp=4")]
        >>> table = ConfigurationTable.of(layouts, concurrency=[8.0] * 3, max_batched_tokens=[8192] * 3)
        >>> [rows.tolist() for rows in table.distinct(["tp", "pp"])]
        [[0, 1], [0, 1, 0]]
        """
        # One number for each combination: sorting numbers costs a tenth of sorting rows.
        code = np.zeros(len(self), dtype=np.int64)
        size = 1
        for column in (getattr(self, name) for name in names if len(self)):
            low, width = int(column.min()), int(np.ptp(column)) + 1
            if size * width > MAX_CODE:
                values, code = np.unique(code, return_inverse=True)
                size = len(values)
            if width > 1:
                code, size = code * width + (column - low), size * width
        _, first, rows = np.unique(code, return_index=True, return_inverse=True)
        return first, rows

    def layout_of(self, row: int) -> ServingLayout:
        """Return the layout of a row."""
        degrees: dict[str, Any] = {name: int(getattr(self, name)[row]) for name in DEGREES}
        forms: dict[str, Any] = {name: values[int(getattr(self, name)[row])] for name, values in FORMS.items()}
        return ServingLayout(**degrees, **forms, expert_tp=int(self.expert_tp[row]))

    @property
    def devices_per_replica(self) -> Integers:
        """Devices of one instance of each row."""
        return self.tp * self.attention_dp * self.pp * self.cp * self.ws

    @property
    def num_devices(self) -> Integers:
        """Devices of all instances of each row."""
        return self.devices_per_replica * self.replicas


# Columns of numbers that a layout has as fields, but for expert_tp.
DEGREES = ("tp", "attention_dp", "pp", "cp", "ep", "ws", "replicas", "redundant_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEstimate:
    """Estimates of a table's rows, as columns: mean latencies and their 90% intervals in seconds, output tokens/s per device,
    requests/s of all replicas, tokens of cache of one copy of attention, and requests that it holds. `fits` is True where
    weights and the concurrency's caches fit."""

    ttft_s: Floats
    ttft_low_s: Floats
    ttft_high_s: Floats
    tpot_s: Floats
    tpot_low_s: Floats
    tpot_high_s: Floats
    tokens_per_s_per_device: Floats
    requests_per_s: Floats
    cache_tokens: Floats
    largest_batch: Floats
    fits: NDArray[np.bool_]
