"""Whether a layout fits a device, in three values: against usable memory, and with the margin that predictions need."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.hardware.chips import chip_names, load_chip
from shardwise.present.command_line import main
from shardwise.price.device_memory import MEMORY_VERDICTS, TIGHT_MARGIN

GIB = 2.0**30
JOB = {"global_batch_tokens": "64Ki", "seq_len": 4096}


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("h100", 79.1),
        ("a100-80gb", 79.15),
        ("h200", 139.7),
        ("b200", 178.35),
        ("gb200", 184.3),
        ("v100", 31.74),
        ("mi300x", 191.7),
    ],
)
def test_capacity_is_what_a_program_sees(name: str, gib: float) -> None:
    chip = load_chip(name)
    assert chip.capacity_bytes == pytest.approx(gib * GIB, rel=1e-3)
    assert chip.capacity_bytes != chip.memory_bytes
    assert "total capacity" in chip.sources["usable_bytes"]


@pytest.mark.parametrize(
    ("name", "gib"), [("tpu-v4", 30.75), ("tpu-v5e", 15.75), ("tpu-v5p", 95.74), ("tpu-v6e", 31.246)]
)
def test_programs_of_a_tpu_have_what_xla_says(name: str, gib: float) -> None:
    chip = load_chip(name)
    assert (chip.capacity_bytes - chip.runtime_bytes) / GIB == pytest.approx(gib, abs=1e-3)


def test_usable_memory_is_near_the_nominal_one_and_sourced() -> None:
    for name in chip_names():
        chip = load_chip(name)
        assert 0.95 < chip.capacity_bytes / chip.memory_bytes < 1.08
        assert (chip.usable_bytes is None) == ("usable_bytes" not in chip.sources)


def test_a_memory_that_is_set_is_the_capacity() -> None:
    chip = load_chip("h100")
    assert replace(chip, memory_bytes=96e9).capacity_bytes == 96e9
    assert replace(chip, memory_bytes=96e9, usable_bytes=94e9).capacity_bytes == 94e9
    found = sw.estimate("llama-3-8b", "h100:8", layout="fsdp=8", **JOB, overrides=["chip.memory_bytes=96GB"])
    assert found.memory_capacity_bytes == 96e9


def at(share: float) -> sw.Estimate:
    """An estimate that takes this share of a device."""
    taken = sw.estimate("llama-3-8b", "h100:8", layout="fsdp=8", **JOB).memory_bytes
    return sw.estimate("llama-3-8b", "h100:8", layout="fsdp=8", **JOB, overrides=[f"chip.memory_bytes={taken / share}"])


def test_three_verdicts_with_the_number_and_the_margin() -> None:
    fits, tight, over = at(0.89), at(0.95), at(1.01)
    assert tuple(estimate.verdict for estimate in (fits, tight, over)) == MEMORY_VERDICTS
    assert [estimate.fits for estimate in (fits, tight, over)] == [True, True, False]
    assert "TIGHT, 5.0% free of the 10% that predictions need" in repr(tight)
    notes = [any("may run out of memory" in note for note in estimate.notes) for estimate in (fits, tight, over)]
    assert notes == [False, True, False]


def test_reports_and_payloads_say_tight(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "llama-3-8b", "h100:8", "--layout", "fsdp=8", "--batch-tokens", "64Ki", "--seq-len", "4096"]
    assert main([*words, "--json"]) == 0
    taken = json.loads(capsys.readouterr().out)["estimate"]["memory_bytes"]
    words += ["--set", f"chip.memory_bytes={taken / 0.95}"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "(TIGHT, 5.0% free of the 10% that predictions need)" in shown
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["verdict"] == "tight"
    memory = sw.memory("llama-3-8b", "h100:8", ["fsdp=8", "dp=8"], **JOB, overrides=words[-1:])
    assert [layout.verdict for layout in memory.layouts] == ["tight", "does not fit"]


def test_a_plan_is_tight_only_where_nothing_fits() -> None:
    """A search prefers what leaves the margin free, however fast the rest; without any it takes a tight layout and says so."""
    plan = sw.plan("llama-3-8b", "h100:8", **JOB)
    assert plan.estimate.verdict == "fits"
    memory = f"chip.memory_bytes={plan.estimate.memory_bytes / 0.96}"
    other = sw.plan("llama-3-8b", "h100:8", **JOB, overrides=[memory])
    assert other.estimate.verdict == "fits"
    assert other.layout != plan.layout
    pinned = sw.plan("llama-3-8b", "h100:8", **JOB, pins=str(plan.layout), overrides=[memory])
    assert pinned.layout == plan.layout
    assert pinned.estimate.verdict == "tight"
    assert any("memory is tight: 4.0% of a device is free" in note for note in pinned.estimate.notes)
    assert pinned.estimate.margin < TIGHT_MARGIN
