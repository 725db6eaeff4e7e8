"""Units of chips: a source for every value, and the derived peaks beside the printed ones."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from shardwise.hardware.chip_units import (
    UNIT_KEYS,
    ChipUnits,
    derive_peaks,
    flops_per_usd,
    load_chip_units,
    read_chip_units,
)
from shardwise.hardware.chips import chip_names, load_chip
from shardwise.present.catalogue_values import chip_values
from shardwise.values.errors import InputError

WITH_UNITS = [name for name in chip_names() if load_chip_units(name)]
# Dense TFLOP/s that vendors print for the same clocks, from their data sheets rather than from the catalogue.
PRINTED = {
    ("h100", "bf16"): 989.4, ("h100", "fp32"): 66.9, ("a100-80gb", "int4"): 1248, ("v100", "fp16"): 125,
    ("mi300x", "bf16"): 1307.4, ("mi300x", "fp32"): 163.4, ("mi355x", "fp32"): 157.3, ("mi355x", "fp4"): 10066,
    ("tpu-v5e", "bf16"): 197, ("tpu-v4", "bf16"): 275, ("tpu-v3", "bf16"): 123,
}  # fmt: skip


def units_of(name: str) -> ChipUnits:
    units = load_chip_units(name)
    assert units is not None
    return units


@pytest.mark.parametrize("name", WITH_UNITS)
def test_every_value_has_a_source(name: str) -> None:
    units = units_of(name)
    present = {f.name for f in fields(units) if getattr(units, f.name) not in (None, {})} - {"unit", "sources"}
    assert set(units.sources) == present
    assert all(len(source) > 20 for source in units.sources.values())


def test_units_belong_to_chips_of_the_catalogue() -> None:
    assert {"h100", "h200", "a100-80gb", "mi355x", "gb300", "tpu-v7x"} <= set(WITH_UNITS)
    assert load_chip_units("h800") is None


def test_vector_units_of_tpus_add_once_a_cycle() -> None:
    """How to Scale Your Model, chapter 2, appendix C; no vendor prints a peak of them."""
    peaks = {name: [*derive_peaks(load_chip(name), units_of(name))][-1] for name in ("tpu-v4", "tpu-v5e", "tpu-v5p")}
    assert peaks["tpu-v4"].flops_per_s == 2 * 2 * 8 * 128 * 1.05e9
    assert peaks["tpu-v5e"].flops_per_s == 4 * 8 * 128 * 1.5e9
    assert (peaks["tpu-v5p"].flops_per_s, peaks["tpu-v5p"].printed) == (None, None)


@pytest.mark.parametrize(("name", "dtype"), PRINTED)
def test_peaks_follow_from_units_and_clocks(name: str, dtype: str) -> None:
    peaks = {peak.dtype: peak for peak in derive_peaks(load_chip(name), units_of(name))}
    assert peaks[dtype].flops_per_s == pytest.approx(PRINTED[name, dtype] * 1e12, rel=0.003)


@pytest.mark.parametrize("name", WITH_UNITS)
def test_only_the_peak_of_v3_disagrees(name: str) -> None:
    """The book prints 140 TFLOP/s for v3, Google 123: the catalogue keeps Google's and reports the difference."""
    disagreeing = [peak.dtype for peak in derive_peaks(load_chip(name), units_of(name)) if peak.disagrees]
    assert disagreeing == (["bf16"] if name == "tpu-v3" else [])


def test_a_peak_without_a_clock_implies_one() -> None:
    """Clocks of the whitepaper's H100 PCIe, 1.62 GHz for tensor cores and 1.755 for the rest, which no entry states."""
    peaks = {peak.dtype: peak for peak in derive_peaks(load_chip("h100-pcie"), units_of("h100-pcie"))}
    assert peaks["bf16"].flops_per_s is None
    assert peaks["bf16"].difference is None
    assert not peaks["bf16"].disagrees
    assert peaks["bf16"].implied_clock_hz == pytest.approx(1.62e9, rel=2e-3)
    assert peaks["fp32"].implied_clock_hz == pytest.approx(1.755e9, rel=6e-3)


def test_lanes_and_memories_equal_the_books() -> None:
    """How to Scale Your Model, chapter 12, quiz 1: lanes of H100, B200 and v5p, and 33 MB of registers on an H100."""
    assert [units_of(name).total("vector_lanes") for name in ("h100", "b200", "tpu-v5p")] == [16896, 18944, 8192]
    assert units_of("h100").total("registers_bytes") == 132 * 256 * 1024
    assert units_of("tpu-v5p").total("scratchpad_bytes") == 128 * 2**20
    assert units_of("h100").total("tensor_memory_bytes") is None


# FLOPs of a compute unit in a cycle: 16 bits, int8, fp32 outside matrix cores. Source: AMD's CDNA 2 whitepaper, table 1
# (page 10), CDNA 3's (page 7), CDNA 4's (page 8).
CDNA_CYCLES = {
    "mi250x": (1024, 1024, 128), "mi300x": (2048, 4096, 256), "mi325x": (2048, 4096, 256), "mi355x": (4096, 8192, 256)
}  # fmt: skip


@pytest.mark.parametrize("name", CDNA_CYCLES)
def test_compute_units_of_amd_chips_equal_the_whitepapers(name: str) -> None:
    units = units_of(name)
    cycles = (units.flops_per_cycle["bf16"], units.flops_per_cycle["int8"], units.vector_flops_per_cycle)
    assert cycles == CDNA_CYCLES[name]
    assert units.matrix_units == 4  # of each compute unit since CDNA


def test_caches_of_nvidia_are_in_kib() -> None:
    """Their whitepapers' tables: 6,144 KB on V100, 40,960 KB on A100, as `cudaDeviceProp.l2CacheSize` has them in bytes."""
    assert units_of("v100").l2_bytes == 6144 * 1024
    assert units_of("a100-80gb").l2_bytes == 40960 * 1024


def test_flops_per_dollar_are_an_hour_of_the_peak_over_the_price() -> None:
    chip = load_chip("tpu-v5e")
    assert flops_per_usd(chip)["bf16"] == pytest.approx(197e12 * 3600 / 1.2)
    assert flops_per_usd(replace(chip, price_usd_per_hour=None)) == {}


def test_show_prints_where_the_data_sheet_disagrees() -> None:
    v3, h100, b200 = (
        {key: (value, source) for key, value, source in chip_values(name)} for name in ("tpu-v3", "h100", "b200")
    )
    assert "disagrees: +13.6%" in v3["derived_flops_per_s.bf16"][1]
    assert h100["derived_flops_per_s.bf16"][1].endswith("agrees")
    assert "derived_flops_per_s.bf16" not in b200
    assert b200["implied_clock_hz.bf16"][0] == pytest.approx(1.856e9, rel=1e-3)
    assert dict.fromkeys(["units"]) == {key: value for key, value, _ in chip_values("h800") if key.startswith("units")}
    assert "flops_per_usd.bf16" not in {key for key, _, _ in chip_values("h800")}


def test_errors_of_a_table_name_every_problem() -> None:
    with pytest.raises(InputError) as error:
        read_chip_units({"unit": "SM", "count": 0, "clock": 1e9, "flops_per_cycle": {"bf17": 1}}, "units of x")
    text = "\n".join(error.value.problems)
    assert all(part in text for part in ("'clock'", "count: found 0", "'bf17'"))
    assert set(UNIT_KEYS) >= {"unit", "count", "sources"}
