"""The record that a run keeps of its observed step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.records.run_folder import RunFolder
from shardwise.records.step_inspection import MeasuredMemory, StepInspection
from shardwise.run.trainer import machine_probe, step_inspector


def memory_of(peak: int) -> MeasuredMemory:
    return MeasuredMemory(
        peak_bytes=peak, at_peak={"activations": peak - 10, "parameters": 10}, largest={"activations": peak}
    )


@pytest.mark.parametrize(("peaks", "fullest"), [((100, 300, 200), 1), ((50, 40, 60), 2), ((9, 8, 7), 0)])
def test_the_memory_of_the_fullest_rank_is_kept(
    peaks: tuple[int, ...], fullest: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the first rank does it, with what the others say of the same step."""

    def gather_memory(world: Any, numbers: list[int], label: str) -> list[list[int]]:
        return [
            machine_probe._MemoryRow.numbers(memory_of(peak), step_inspector.process_memory(torch.device("cpu")))
            for peak in peaks
        ]

    monkeypatch.setattr(machine_probe, "all_gather_ints", gather_memory)
    world: Any = SimpleNamespace(device=torch.device("cpu"), rank=0, size=3, rendezvous=None)
    folder = RunFolder(tmp_path)
    measuring = machine_probe.MachineProbe(world, folder, lambda: {"product": 1.0})
    record: Any = SimpleNamespace(step=4)
    measuring.step(record, StepInspection(memory_of(peaks[0]), Counter()))
    (written,) = (json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.glob("measured.json"))
    assert (measuring.inspection.rank, measuring.inspection.step) == (fullest, 4)
    assert written["rank"] == fullest
    assert measuring.inspection.memory is not None
    assert measuring.inspection.memory.peak_bytes == max(peaks)
    assert measuring.inspection.memory.at_peak["activations"] == max(peaks) - 10
