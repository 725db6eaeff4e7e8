"""Parsing and printing of quantities."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.values.dtypes import BYTES_PER_ELEMENT, bytes_per_element
from shardwise.values.errors import InputError
from shardwise.values.units import (
    format_bytes,
    format_energy,
    format_percent,
    format_quantity,
    format_seconds,
    format_usd,
    parse_count,
    parse_duration,
    parse_quantity,
    parse_usd,
    unit_from_name,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4Mi", 4 * 2**20),
        ("15T", 15e12),
        ("70B", 70e9),
        ("3.35 TB/s", 3.35e12),
        ("96GB", 96e9),
        ("16 GiB", 16 * 2**30),
        ("989 TFLOP/s", 989e12),
        ("2 PFLOPs/s", 2e15),
        (" 1e3 ", 1e3),
        (".5k", 500),
        ("-4K", -4000),
        ("12.", 12),
        (3, 3.0),
        (2.5, 2.5),
    ],
)
def test_quantities_are_parsed(text: str | float, value: float) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "5 X", "1 2", "4MiX", "nan", "1e", "--3", True, None])
def test_invalid_quantities_are_refused_by_name(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_quantity(text, label="batch")
    assert str(caught.value) == (
        f"batch: found {text!r}; a number with a prefix is required, such as 4Mi, 15T or 3.35 TB/s"
    )


@pytest.mark.parametrize(
    ("text", "unit", "required"),
    [
        ("141GB/s", "B", "which is in B/s; a number in B is required, such as 80 GB"),
        ("450 GB", "B/s", "which is in B; a number in B/s is required"),
        ("989 GB/s", "FLOP/s", "which is in B/s; a number in FLOP/s is required"),
        ("989 TFLOP", "FLOP/s", "which is in FLOP; a number in FLOP/s is required"),
        ("15 TB", "", "which is in B; a number without a unit is required, such as 4Mi or 15T"),
        ("8192 B", "", "which is in B; a number without a unit is required"),
    ],
)
def test_another_unit_is_refused(text: str, unit: str, required: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_quantity(text, label="x", unit=unit)
    assert str(caught.value).startswith(f"x: found {text!r}, {required}")
    assert parse_quantity("141G", unit=unit) == 141e9


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("memory_bytes", "B"), ("bytes_per_s", "B/s"), ("dcn_bytes_per_s_per_host", "B/s"), ("peak_flops_per_s", "FLOP/s"),
        ("--set chip.vmem_bytes", "B"), ("num_layers", ""), ("bytes_per_element", ""), ("power_w", ""),
    ],
)  # fmt: skip
def test_units_are_inferred_from_names(name: str, unit: str) -> None:
    assert unit_from_name(name) == unit


@pytest.mark.parametrize("text", ["1e999", math.inf, math.nan])
def test_values_that_are_not_finite_are_refused(text: str | float) -> None:
    with pytest.raises(InputError, match="a finite number is required"):
        parse_quantity(text)


def test_parse_count_requires_whole_positive_numbers() -> None:
    assert parse_count("4Mi", label="batch") == 4194304
    assert isinstance(parse_count("1.5k", label="batch"), int)
    for text in ("0", "-1", "1.5", "0.1k x"):
        with pytest.raises(InputError, match="batch: found"):
            parse_count(text, label="batch")


@given(st.floats(0.1, 9.99e16), st.sampled_from(["B", "B/s", "FLOP/s"]))
def test_format_and_parse_round_trip(value: float, unit: str) -> None:
    """Three digits are kept with any prefix. (A bare "B" is a billion, as in 70B, so bytes need a prefix.)"""
    value = value * 1e4 if unit == "B" else value
    assert parse_quantity(format_quantity(value, unit)) == pytest.approx(value, rel=0.00501)
    assert parse_quantity(format_quantity(value, unit, digits=12)) == pytest.approx(value, rel=1e-11)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.9, "1 kB"),
        (81.6e9, "81.6 GB"),
        (999.6e6, "1 GB"),
        (-5e9, "-5 GB"),
        (math.inf, "inf B"),
    ],
)
def test_bytes_are_printed_with_a_prefix(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-9, "0.001 µs"),
        (745.65e-6, "746 µs"),
        (0.00123, "1.23 ms"),
        (1, "1 s"),
        (3.8e6, "44.0 days"),
        (172800, "2.0 days"),
    ],
)
def test_seconds_are_printed_with_a_unit(value: float, text: str) -> None:
    assert format_seconds(value) == text


def test_number_formats_have_widths() -> None:
    assert {name: bytes_per_element(name) for name in ("fp32", "bf16", "fp8", "fp4")} == {
        "fp32": 4,
        "bf16": 2,
        "fp8": 1,
        "fp4": 0.5,
    }
    with pytest.raises(InputError) as caught:
        bytes_per_element("bf17")
    assert all(name in str(caught.value) for name in ("bf17", *BYTES_PER_ELEMENT))


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30d", 2_592_000), ("12h", 43_200), ("2w", 1_209_600), ("90min", 5400), ("45 s", 45), (" 1.5 d ", 129_600)],
)
def test_durations_are_parsed(text: str, seconds: float) -> None:
    assert parse_duration(text, label="--deadline") == seconds


@pytest.mark.parametrize("text", ["30", "", "d", "0d", "-1d", "1e999d", "3 months", "nan d", "5m"])
def test_invalid_durations_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--deadline: found .* 30d or 12h"):
        parse_duration(text, label="--deadline")


@pytest.mark.parametrize(
    ("text", "usd"), [("2M", 2e6), ("500k", 5e5), ("$1.5M", 1.5e6), ("2M USD", 2e6), ("1B", 1e9), ("20000", 2e4)]
)
def test_dollars_are_parsed(text: str, usd: float) -> None:
    assert parse_usd(text, label="--budget") == usd


@pytest.mark.parametrize("text", ["", "$", "0", "-2M", "2 EUR", "inf", "1e400"])
def test_invalid_dollars_are_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"--budget: found .* 2M or 500k"):
        parse_usd(text, label="--budget")


def test_dollars_and_energy_are_printed() -> None:
    assert [format_usd(value) for value in (930.0, 5.11e6, 1.2e9)] == ["$930", "$5.11M", "$1.2B"]
    assert format_energy(2789.0) == "2.79 GWh"


def test_a_small_share_is_not_printed_as_zero() -> None:
    assert [format_percent(part) for part in (0.42, 1.234, 0.000123, 0.0)] == ["42%", "123%", "0.0123%", "0%"]
