"""The unit of every quantity of the catalogue: what it covers, in which direction, and that sources print the same.

`printed_figures.csv` has each figure as a source prints it, with its own unit: GB or GiB; of a chip, one link, all links, a host,
a rack or a pod; one direction or both; with the factor 2 of sparsity or without. `MEANING` says the same of the catalogue's
fields. A figure converted to the catalogue's meaning is the catalogue's value, and read with any other meaning it is not.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pytest

from shardwise.hardware.chips import Chip, chip_names, get_catalog_entry, load_chip
from shardwise.values.units import parse_quantity

PREFIXES = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "Mi": 2.0**20, "Gi": 2.0**30, "": 1.0}
BASES = {"FLOP/s": 1.0, "B/s": 1.0, "b/s": 1 / 8, "B": 1.0, "W": 1.0}
# What a quantity of the catalogue is of, and in how many directions.
MEANING = {
    "peak": ("chip", 1), "memory_bytes": ("chip", 1), "memory_bytes_per_s": ("chip", 1), "available_bytes": ("chip", 1),
    "usable_bytes": ("chip", 1),
    "power_w": ("chip", 1), "pcie_bytes_per_s": ("chip", 1), "dcn_bytes_per_s_per_host": ("host", 1), "vmem_bytes": ("chip", 1),
    "vmem_bytes_per_s": ("chip", 1), "torus": ("link", 1), "tier": ("chip", 1),
}  # fmt: skip
# Numbers without a unit that a source could print otherwise; the rest of a chip's fields are names and shapes.
PLAIN = {
    "matmul_fraction", "fp8_matmul_fraction", "attention_fraction", "memory_fraction",
    "matrix_unit", "host_shape", "name", "vendor", "sources",
    "price_date",
}  # fmt: skip
RACK = 72  # GPUs of a GB200 or GB300 NVL72
ROUNDED = 0.005


@dataclass(frozen=True)
class Figure:
    """A number as a source prints it."""

    chip: str
    field: str
    number: float
    unit: str
    covers: str
    directions: int
    sparse: bool

    def value(self) -> float:
        """The figure in the unit and with the meaning of the catalogue's field."""
        base = next(base for base in BASES if self.unit.endswith(base) and self.unit.removesuffix(base) in PREFIXES)
        plain = self.number * PREFIXES[self.unit.removesuffix(base)] * BASES[base] / (2 if self.sparse else 1)
        covers, directions = MEANING[self.field.partition(".")[0]]
        return plain / self.directions * directions * chips_of(self.chip, covers) / chips_of(self.chip, self.covers)


def chips_of(name: str, covers: str) -> float:
    """Chips (or, for links, the part of a chip's egress) that a figure covers that is printed for a chip, link, host or pod."""
    entry, chip = get_catalog_entry(name), load_chip(name)
    if covers in ("chip", "links"):
        return 1.0
    if covers == "link":
        return 1 / (2 * entry["torus"]["num_axes"])
    if covers == "peer":
        return 1 / entry["tiers"][0]["links"]
    if covers == "pod":
        return math.prod(entry["torus"]["pod"])
    assert chip.devices_per_host is not None
    return {"half": 0.5, "rack": RACK, "host": chip.devices_per_host}[covers]


def figures() -> Iterator[Figure]:
    with (Path(__file__).parent / "printed_figures.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            for chip in row["chips"].split():
                yield Figure(
                    chip, row["field"], float(row["number"]), row["unit"], row["of"], int(row["directions"] or 1),
                    row["sparse"] == "yes",
                )  # fmt: skip


FIGURES = tuple(figures())


def quantities(name: str) -> dict[str, float]:
    """Every value with a unit that the catalogue has of a chip."""
    chip, entry = load_chip(name), get_catalog_entry(name)
    values = {f"peak.{dtype}": peak for dtype, peak in chip.peak_flops_per_s.items()}
    values |= {field: getattr(chip, field) for field in MEANING if field in entry and field != "torus"}
    values |= {f"tier.{tier['name']}": parse_quantity(tier["bytes_per_s"]) for tier in entry.get("tiers", ())}
    if "torus" in entry:
        values["torus"] = parse_quantity(entry["torus"]["bytes_per_s"])
        values["available_bytes"] = chip.memory_bytes - chip.runtime_bytes
    return values


def misreadings(figure: Figure) -> Iterator[Figure]:
    """The figure with another unit, coverage, number of directions, or with sparsity's factor."""
    confused_units = {
        "GB": "GiB",
        "GiB": "GB",
        "Gb/s": "GB/s",
        "GB/s": "Gb/s",
        "Tb/s": "TB/s",
        "TB/s": "Tb/s",
        "MiB": "MB",
    }
    if figure.unit in confused_units:
        yield replace(figure, unit=confused_units[figure.unit])
    if figure.unit.endswith("/s") and not figure.field.startswith(("peak", "memory", "vmem")):
        yield replace(figure, directions=3 - figure.directions)
    if figure.field.startswith("peak"):
        yield replace(figure, sparse=not figure.sparse)
    for covers in ("host", "chip") if figure.covers in ("host", "chip") else ("chip",):
        if chips_of(figure.chip, covers) != chips_of(figure.chip, figure.covers):
            yield replace(figure, covers=covers)


def test_every_field_has_a_unit() -> None:
    quantity = {*MEANING, "peak_flops_per_s", "runtime_bytes", "price_usd_per_hour"} - {
        "peak",
        "available_bytes",
        "torus",
        "tier",
    }
    assert {field.name for field in fields(Chip)} == quantity | PLAIN | {"base"}


@pytest.mark.parametrize("name", chip_names())
def test_every_quantity_is_printed_by_a_source(name: str) -> None:
    assert set(quantities(name)) == {figure.field for figure in FIGURES if figure.chip == name}


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.chip}-{figure.field}-{figure.covers}")
def test_a_quantity_equals_the_printed_figure_in_the_sources_unit(figure: Figure) -> None:
    assert quantities(figure.chip)[figure.field] == pytest.approx(figure.value(), rel=ROUNDED)


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: f"{figure.chip}-{figure.field}-{figure.covers}")
def test_a_figure_read_with_another_unit_is_another_value(figure: Figure) -> None:
    for wrong in misreadings(figure):
        assert quantities(figure.chip)[figure.field] != pytest.approx(wrong.value(), rel=ROUNDED), wrong


@pytest.mark.parametrize("name", chip_names())
def test_plain_numbers_are_in_their_ranges(name: str) -> None:
    """Latencies in seconds, prices of a single chip, capacities of some milliseconds of the memory bandwidth."""
    chip, entry = load_chip(name), get_catalog_entry(name)
    links = [*entry.get("tiers", ()), *([entry["torus"]] if "torus" in entry else [])]
    for latency in (link[key] for link in links for key in ("hop_latency_s", "base_latency_s") if key in link):
        assert 5e-7 < latency < 2e-5
    if chip.price_usd_per_hour is not None:
        assert 0.5 < chip.price_usd_per_hour < 15
    if "runtime_bytes" in entry:
        assert 0.001 < chip.runtime_bytes / chip.memory_bytes < 0.07  # 1.5 GB of an RTX 4090
    if name != "cpu":
        assert 0.008 < chip.memory_bytes / chip.memory_bytes_per_s < 0.06
