"""What is shown of a running run: a line rewritten on a terminal, and TensorBoard."""

from __future__ import annotations

import io
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from train.stand_in import small_plan

from shardwise.hardware.cluster_loading import load_cluster
from shardwise.records.run_folder import RunFolder
from shardwise.records.step_log import StepRecord, read_log
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.flags import RunSettings
from shardwise.run.trainer.run_reporter import RunReporter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """A terminal that has been closed."""

    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step, loss=2.5, grad_norm=1.0, learning_rate=1e-3, num_tokens=1000, num_targets=1000, step_time_s=0.5
    )


def settings(place: Path, **changes: Any) -> RunSettings:
    return RunSettings(plan=place / "plan.json", out=RunFolder(place), recipe=TrainingRecipe(steps=10), **changes)


def test_a_terminal_has_one_line_that_is_rewritten(tmp_path: Path) -> None:
    terminal = Terminal()
    with RunReporter(small_plan(), settings(tmp_path), device="cpu", first_step=0, stream=terminal) as watch:
        before = len(terminal.getvalue())
        for step in (1, 2, 3):
            watch.step(record(step), {})
        progress = terminal.getvalue()[before:]
        watch.validation(3, 2.25, {})
    assert progress.count("\n") == 0
    lines = progress.split("\r\x1b[K")[1:]
    assert [line.split()[1] for line in lines] == ["1/10", "2/10", "3/10"]
    assert "loss 2.5000  2,000 tokens/s  MFU " in lines[0]
    assert lines[2].endswith("3.5 s left")
    assert terminal.getvalue().endswith("\r\x1b[Kstep 3: held-out loss 2.2500\n\n")


def test_tensorboard_gets_every_number_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[str, float, int]] = []

    class SummaryWriter:
        def __init__(self, folder: str) -> None:
            assert folder == str(tmp_path / "tensorboard")

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0.0, 0))

    module = types.ModuleType("torch.utils.tensorboard.writer")
    module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.ModuleType("torch.utils.tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard.writer", module)
    with RunReporter(
        small_plan(), settings(tmp_path, tensorboard=True), device="cpu", first_step=0, stream=io.StringIO()
    ) as watch:
        watch.step(record(1), {})
        watch.validation(1, 2.25, {})
    assert ("loss_metrics/global_avg_loss", 2.5, 1) in written
    assert ("validation_metrics/loss", 2.25, 1) in written
    assert written[-1][0] == "closed"


def test_a_chip_without_a_sourced_peak_has_no_mfu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.hardware.chips import Chip
    from shardwise.values.errors import MissingValueError

    plan, terminal = small_plan(), Terminal()

    def unknown(chip: Chip, dtype: str) -> float:
        raise MissingValueError(f"chip {chip.name}: no sourced {dtype} peak")

    monkeypatch.setattr(Chip, "peak", unknown)
    monkeypatch.setattr(
        "shardwise.run.trainer.run_reporter.Pricing",
        lambda *arguments: types.SimpleNamespace(hardware_ratio=lambda: 1.0),
    )
    with RunReporter(plan, settings(tmp_path), device="cpu", first_step=0, stream=terminal) as watch:
        watch.step(record(1), {})
    assert "MFU n/a: local has no sourced fp32 peak" in terminal.getvalue()
    assert "MFU n/a  " in terminal.getvalue()


def test_a_run_on_cpus_is_not_held_against_the_peak_of_an_accelerator(tmp_path: Path) -> None:
    plan, terminal = small_plan(), Terminal()
    plan = replace(plan, cluster=load_cluster(f"h100:{plan.layout.num_devices}"))
    with RunReporter(plan, settings(tmp_path), device="cpu", first_step=0, stream=terminal) as watch:
        watch.step(record(1), {})
    assert "MFU n/a: a CPU (the plan is for h100) has no sourced fp32 peak" in terminal.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_goes_on_when_nobody_reads_its_output(tmp_path: Path, terminal: bool) -> None:
    gone = Gone()
    gone.isatty = lambda: terminal  # type: ignore[method-assign]
    with RunReporter(small_plan(), settings(tmp_path), device="cpu", first_step=0, stream=gone) as watch:
        for step in range(1, 4):
            watch.step(record(step), {})
        watch.validation(3, 2.25, {})
    assert len(read_log(tmp_path / "log.jsonl").steps) == 3
