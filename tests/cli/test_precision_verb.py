"""`shardwise precision` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardwise.present.charts.sharding_charts import NUM_POINTS, format_charts
from shardwise.present.command_line import main
from shardwise.values.dtypes import NUMBER_FORMATS


def test_the_table_has_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(NUMBER_FORMATS)]] == list(NUMBER_FORMATS)
    e4m3 = next(line for line in lines if line.startswith("e4m3")).split()
    # OFP8 1.0, table 1: bias 7, largest 448, smallest normal 2^-6, smallest subnormal 2^-9
    assert e4m3[5:10] == ["7", "448", "0.01562", "0.001953", "0.125"]
    assert e4m3[-2:] == ["-", "yes"]


def test_formats_are_shown_once_in_the_order_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", "e5m2", "fp16", "e5m2", "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert [number_format["name"] for number_format in payload["formats"]] == ["e5m2", "fp16"]
    fp16 = payload["formats"][1]
    assert fp16["max"] == float(np.finfo(np.float16).max)
    assert fp16["num_finite"] == 2 * 31 * 1024


def test_unknown_formats_are_all_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["precision", "e4m4", "bf17"]) == 2
    error = capsys.readouterr().err
    assert "e4m4" in error
    assert "bf17" in error


def test_plot_counts_the_numbers_of_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "formats.svg"
    assert main(["precision", "bf16", "fp16", "e4m3", "e5m2", "--plot", str(target)]) == 0
    assert capsys.readouterr().out
    text = re.sub(r"<[^>]*>", " ", target.read_text())
    for part in ("10,000 points between 1 and 2", "bf16 128, fp16 1,024, e4m3 8, e5m2 4"):
        assert part in text


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bf16", ml_dtypes.bfloat16), ("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)],
)
def test_the_corners_drawn_are_where_the_rounded_points_change(name: str, dtype: type) -> None:
    (line,) = format_charts([NUMBER_FORMATS[name]])[1].panels[0].marks
    x = np.linspace(1.0, 2.0, NUM_POINTS).astype(np.float32)
    assert {y + 1 for _, y in line.points} == set(x.astype(dtype).astype(float).tolist())
    expected = (np.array([x for x, _ in line.points]) + 1).astype(np.float32).astype(dtype).astype(float)
    np.testing.assert_array_equal(expected, [y + 1 for _, y in line.points])


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16", "e4m3", "e5m2"])
def test_distances_drawn_are_those_to_the_next_number(name: str) -> None:
    dtypes = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}
    dtype = dtypes.get(name, ml_dtypes.float8_e5m2)
    (line,) = format_charts([NUMBER_FORMATS[name]])[0].panels[0].marks
    for x, distance in line.points[:-1]:
        following = float(np.nextafter(dtype(x), dtype(NUMBER_FORMATS[name].max)))
        assert distance == (following - x) / x
    assert line.points[-1][0] == NUMBER_FORMATS[name].max
