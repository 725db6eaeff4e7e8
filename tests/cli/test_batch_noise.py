"""`batch noise`: the noise scale of a run's log, in parts, as a picture, and where plans find it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.batch_size.noise_scale import parse_noise_scale
from shardwise.batch_size.run_noise import noise_sample_of
from shardwise.present.command_line import main
from shardwise.records.run_folder import RunFolder
from shardwise.records.step_log import LogWriter, MfuFormula, StepRecord, format_step_line, read_log
from shardwise.run.trainer.noise_scale import noise_sample
from shardwise.run.trainer.run_reporter import write_noise
from shardwise.values.errors import InputError

SMALL, BIG, TRACE = 512.0, 4096.0, 2.0e4
RATES = MfuFormula(
    num_devices=1, chip="a CPU", peak_format="fp32", peak_flops_per_s=None, flops_per_token=1e6, hardware_ratio=1.0
)


def record(step: int, *, squared: float | None) -> StepRecord:
    """Return a step with the exact norms of a gradient of this squared norm; None: a step without a measurement."""
    noise = {} if squared is None else {
        "small_norm_squared": squared + TRACE / SMALL, "big_norm_squared": squared + TRACE / BIG, "small_tokens": SMALL,
        "big_tokens": BIG,
    }  # fmt: skip
    return StepRecord(
        step=step, loss=5.0 - 0.01 * step, grad_norm=1.0, learning_rate=1e-3, num_tokens=int(BIG), num_targets=int(BIG),
        step_time_s=1.0, **noise,
    )  # fmt: skip


def write_log(path: Path, records: Sequence[StepRecord]) -> str:
    path.mkdir()
    with LogWriter(RunFolder(path).log) as log:
        for step_record in records:
            log.write(format_step_line(step_record, RATES, {}))
    return str(path)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Write a log of 100 steps, every other one measured: a noise scale of 2,500 tokens, 10,000 in the second half."""
    steps = range(1, 101)
    return write_log(
        tmp_path / "a", [record(step, squared=None if step % 2 else 8.0 if step <= 50 else 2.0) for step in steps]
    )


def test_the_noise_scale_is_that_of_the_last_half(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "noise", run, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == "shardwise.batch_noise/1"
    assert report["noise"]["tokens"] == pytest.approx(10_000)
    assert report["noise"]["interval90"] == pytest.approx([10_000, 10_000])
    assert (report["num_measured"], report["noise"]["num_measured"], len(report["parts"])) == (50, 25, 10)
    assert report["progress"] == pytest.approx(1 / (1 + 10_000 / BIG))
    tokens = [part["noise"]["tokens"] for part in report["parts"]]
    assert tokens == pytest.approx([2_500] * 5 + [10_000] * 5)
    assert (report["parts"][0]["first_step"], report["parts"][-1]["last_step"]) == (2, 100)
    assert report["parts"][0]["seen_tokens"] == pytest.approx(BIG * (1 + 3 + 5 + 7 + 9) / 5)


def test_report_compares_the_batch_with_the_noise_scale(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["batch", "noise", run]) == 0
    text = capsys.readouterr().out
    assert "50 steps measured the noise scale" in text
    assert "noise scale: 10K tokens, 90% interval 10K to 10K" in text
    assert "a batch of 4,096 tokens makes 29.1% of the progress" in text
    assert "from gradients of 512 tokens" in text


def test_plot_draws_noise_scale_and_batch(run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "noise.svg"
    assert main(["batch", "noise", run, "--plot", str(target)]) == 0
    text = target.read_text(encoding="utf-8")
    assert "noise scale" in text
    assert "batch" in text


def test_interval_is_unbounded_where_the_gradient_is_lost_in_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_log(tmp_path / "b", [record(step, squared=-0.1 if step % 2 else 0.1) for step in range(1, 41)])
    assert main(["batch", "noise", run, "--json"]) == 0
    noise = json.loads(capsys.readouterr().out)["noise"]
    assert noise["interval90"][1] is None
    assert main(["batch", "noise", run]) == 0
    assert "∞" in capsys.readouterr().out


def test_a_run_that_measured_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_log(tmp_path / "c", [record(1, squared=None)])
    assert main(["batch", "noise", run]) == 2
    assert "train --noise-scale-every N" in capsys.readouterr().err
    with pytest.raises(InputError, match="no step measured"):
        sw.run_noise(run)


def test_plan_reads_the_noise_scale_of_a_run(run: str) -> None:
    folder = RunFolder(Path(run))
    write_noise(folder, read_log(folder.log))
    scale = parse_noise_scale(run)
    assert scale.tokens == pytest.approx(10_000)
    assert scale.interval90 == pytest.approx((10_000, 10_000))
    assert sw.run_noise(run).noise_scale is not None


def test_a_step_is_a_sample_where_its_batch_has_two_parts() -> None:
    assert noise_sample(1.0, 2.0, [8]) is None
    assert noise_sample(1.0, 2.0, [8, 0, 0]) is None
    assert noise_sample(math.inf, 2.0, [8, 8]) is None
    sample = noise_sample(3.0, 2.0, [8, 0, 8])
    assert sample is not None
    assert (sample.small_norm_squared, sample.big_norm_squared, sample.small_tokens, sample.big_tokens) == (
        6.0,
        4.0,
        8.0,
        16.0,
    )
    assert noise_sample_of(record(1, squared=None)) is None
