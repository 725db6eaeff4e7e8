"""Tables of serving configurations: rows convert back to layouts, and masks select rows of all columns."""

from __future__ import annotations

import dataclasses

import numpy as np

from shardwise.serve import ConfigurationTable, ServingLayout

LAYOUTS = [ServingLayout.parse(text) for text in ("tp=8", "tp=2 attention_dp=4 ep=8", "tp=4 pp=2 ep=2 replicas=3")]


def test_rows_convert_back_to_their_layouts() -> None:
    table = ConfigurationTable.of(LAYOUTS, [1.0, 2.0, 3.0], [1024, 2048, 4096])
    for row, layout in enumerate(LAYOUTS):
        assert str(table.layout_of(row)) == str(layout)
    assert table.num_devices.tolist() == [layout.num_devices for layout in LAYOUTS]
    assert table.expert_tp.tolist() == [8, 1, 2]


def test_a_mask_selects_rows_of_all_columns() -> None:
    table = ConfigurationTable.of(LAYOUTS, [1.0, 2.0, 3.0], [1024, 2048, 4096]).take(np.array([True, False, True]))
    assert (table.tp.tolist(), table.concurrency.tolist()) == ([8, 4], [1.0, 3.0])
    assert table.max_batched_tokens.tolist() == [1024, 4096]


def test_combinations_beyond_a_single_integer_are_distinguished() -> None:
    table = ConfigurationTable.of(LAYOUTS[:1] * 4, [1.0] * 4, [1, 2**50, 1, 2**50])
    first, rows = dataclasses.replace(table, tp=np.array([1, 1, 2**40, 1])).distinct(["max_batched_tokens", "tp"])
    assert len(first) == 3
    assert rows[1] == rows[3]
    assert len(set(rows.tolist())) == 3
