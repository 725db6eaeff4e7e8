"""The verdict on memory has three values: usable memory less the margin of predictions, usable memory, or beyond it."""

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
def test_capacity_is_the_memory_that_a_program_sees(name: str, gib: float) -> None:
    chip = load_chip(name)
    assert chip.capacity_bytes == pytest.approx(gib * GIB, rel=1e-3)
    assert chip.capacity_bytes != chip.memory_bytes
    assert "total capacity" in chip.sources["usable_bytes"]


@pytest.mark.parametrize(
    ("name", "gib"), [("tpu-v4", 30.75), ("tpu-v5e", 15.75), ("tpu-v5p", 95.74), ("tpu-v6e", 31.246)]
)
def test_programs_of_a_tpu_have_the_memory_that_xla_reports(name: str, gib: float) -> None:
    chip = load_chip(name)
    assert (chip.capacity_bytes - chip.runtime_bytes) / GIB == pytest.approx(gib, abs=1e-3)


def test_usable_memory_is_near_the_nominal_memory_and_sourced() -> None:
    for name in chip_names():
        chip = load_chip(name)
        assert 0.95 < chip.capacity_bytes / chip.memory_bytes < 1.08
        assert (chip.usable_bytes is None) == ("usable_bytes" not in chip.sources)


def test_an_overridden_memory_is_the_capacity() -> None:
    chip = load_chip("h100")
    assert replace(chip, memory_bytes=96e9).capacity_bytes == 96e9
    assert replace(chip, memory_bytes=96e9, usable_bytes=94e9).capacity_bytes == 94e9
    priced_step = sw.estimate("llama-3-8b", "h100:8", layout="fsdp=8", **JOB, overrides=["chip.memory_bytes=96GB"])
    assert priced_step.memory_capacity_bytes == 96e9


def estimate_at_share(share: float) -> sw.Estimate:
    """An estimate that takes this share of a device."""
    memory_bytes = sw.estimate("llama-3-8b", "h100:8", layout="fsdp=8", **JOB).memory_bytes
    return sw.estimate(
        "llama-3-8b", "h100:8", layout="fsdp=8", **JOB, overrides=[f"chip.memory_bytes={memory_bytes / share}"]
    )


def test_three_verdicts_with_the_number_and_the_margin() -> None:
    fits, tight, over = estimate_at_share(0.89), estimate_at_share(0.95), estimate_at_share(1.01)
    assert tuple(estimate.verdict for estimate in (fits, tight, over)) == MEMORY_VERDICTS
    assert [estimate.fits for estimate in (fits, tight, over)] == [True, True, False]
    assert "TIGHT, 5.0% free of the 10% that predictions need" in repr(tight)
    notes = [any("may run out of memory" in note for note in estimate.notes) for estimate in (fits, tight, over)]
    assert notes == [False, True, False]


def test_reports_and_payloads_state_tight_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "estimate",
        "llama-3-8b",
        "h100:8",
        "--layout",
        "fsdp=8",
        "--batch-tokens",
        "64Ki",
        "--seq-len",
        "4096",
    ]
    assert main([*arguments, "--json"]) == 0
    memory_bytes = json.loads(capsys.readouterr().out)["estimate"]["memory_bytes"]
    arguments += ["--set", f"chip.memory_bytes={memory_bytes / 0.95}"]
    assert main(arguments) == 0
    report = capsys.readouterr().out
    assert "(TIGHT, 5.0% free of the 10% that predictions need)" in report
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["estimate"]["verdict"] == "tight"
    memory = sw.memory("llama-3-8b", "h100:8", ["fsdp=8", "dp=8"], **JOB, overrides=arguments[-1:])
    assert [layout.verdict for layout in memory.layouts] == ["tight", "does not fit"]


def test_a_plan_is_tight_only_where_nothing_fits() -> None:
    """A search prefers layouts that leave the margin free, at the cost of speed; otherwise it takes a tight one with a note."""
    plan = sw.plan("llama-3-8b", "h100:8", **JOB)
    assert plan.estimate.verdict == "fits"
    memory = f"chip.memory_bytes={plan.estimate.memory_bytes / 0.96}"
    replanned = sw.plan("llama-3-8b", "h100:8", **JOB, overrides=[memory])
    assert replanned.estimate.verdict == "fits"
    assert replanned.layout != plan.layout
    pinned = sw.plan("llama-3-8b", "h100:8", **JOB, pins=str(plan.layout), overrides=[memory])
    assert pinned.layout == plan.layout
    assert pinned.estimate.verdict == "tight"
    assert any("memory is tight: 4.0% of a device is free" in note for note in pinned.estimate.notes)
    assert pinned.estimate.margin < TIGHT_MARGIN
