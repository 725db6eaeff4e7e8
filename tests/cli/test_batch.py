"""`shardwise batch fit` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from number_paths import require_payload_numbers

import shardwise as sw
from shardwise.batch_size.tradeoff import BatchTradeoff
from shardwise.present.command_line import main
from shardwise.present.verbs.batch_size import batch

EXAMPLE = Path(__file__).parents[2] / "examples" / "batch" / "runs.csv"
LAW = BatchTradeoff(min_steps=1200, noise_tokens=250e3)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_fit_recovers_the_law_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """examples/batch/runs.csv: S_min = 1,200 and B_noise = 250,000, with a scatter of 3%."""
    code, out, err = run(capsys, "batch", "fit", str(EXAMPLE), "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    for name, truth in (("min_steps", 1200), ("min_tokens", 3e8)):
        low, high = report[f"{name}_interval90"]
        assert low <= truth <= high
        assert report[name] == pytest.approx(truth, rel=0.05)
    assert report["critical_batch_tokens"] == pytest.approx(250e3, rel=0.05)
    assert 0.01 < report["rms_residual"] < 0.05


def test_the_sweep_of_the_documents_has_six_batches_of_three_seeds_on_both_sides_of_the_critical_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, "batch", "fit", str(EXAMPLE.parent / "tiny-llama"), "--json")
    report = json.loads(out)
    assert code == 0
    assert sorted((run_record["batch_tokens"], run_record["seed"]) for run_record in report["runs"]) == [
        (256 * 2**power, seed) for power in range(6) for seed in range(3)
    ]
    assert report["critical_batch_within_runs"]
    assert report["rms_residual"] < 0.15


def test_a_folder_with_failures_is_reported_and_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {
            "batch_tokens": batch,
            "learning_rate": 1e-3,
            "seed": 0,
            "steps": LAW.steps(batch),
            "target_loss": 4.2,
            "failed": None,
        }
        for batch in (2**16, 2**18, 2**20)
    ]
    rows.append(
        {
            "batch_tokens": 2**22,
            "learning_rate": 1e-3,
            "seed": 0,
            "steps": None,
            "target_loss": 4.2,
            "failed": "diverged",
        }
    )
    (tmp_path / "runs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    picture = tmp_path / "pareto.svg"
    code, out, _ = run(capsys, "batch", "fit", str(tmp_path), "--plot", str(picture))
    assert code == 0
    for line in (
        "3 runs to the loss of 4.2, 3 batches",
        "critical batch  250K tokens",
        "not fitted: batch 4,194,304, seed 0: diverged",
    ):
        assert line in out
    text = picture.read_text(encoding="utf-8")
    for line in (
        "Steps and tokens to a loss of 4.2",
        "steps S",
        "tokens E",
        "knee",
        "S_min",
        "Critical batch 250K tokens",
    ):
        assert line in text


def test_a_critical_batch_outside_the_runs_is_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = "\n".join(f"{batch},{LAW.steps(batch)}" for batch in (2**10, 2**11, 2**12))
    (tmp_path / "runs.csv").write_text(f"batch_tokens,steps\n{rows}\n", encoding="utf-8")
    _, out, _ = run(capsys, "batch", "fit", str(tmp_path / "runs.csv"))
    assert "the critical batch lies above all batches that were run, and is extrapolated: run some above it" in out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["batch", "fit", "nowhere"], "nowhere: cannot read"),
        (["batch", "fot", "runs.csv"], "found 'fot' (did you mean 'fit'?)"),
        (["batch", "fit", "runs.csv", "--plot", "x.txt"], "a name that ends in .svg"),
        (["batch", "sweep", "plan.json", "--plot", "x.svg"], "--plot: `batch sweep` draws nothing; leave it out"),
        (
            ["batch", "fit", "runs.csv", "--out", "x", "--set", "recipe.beta1=0"],
            "--out: not of `batch fit`; leave out, or `shardwise batch sweep` or `shardwise batch branch` is required\n"
            "--set: not of `batch fit`; leave out, or `shardwise batch sweep` is required",
        ),
    ],
)
def test_wrong_input_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str) -> None:
    try:
        code, _, err = run(capsys, *arguments)
    except SystemExit as ended:
        code, err = int(str(ended.code)), capsys.readouterr().err
    assert code == 2
    assert problem in err


def test_python_result_reports_the_numbers_of_the_payload() -> None:
    sweep = batch("fit", EXAMPLE)
    assert sweep.source == str(EXAMPLE)
    assert require_payload_numbers(sweep) > 10
    noise = batch("noise", EXAMPLE.parents[1] / "noise")
    assert require_payload_numbers(noise) > 10
    with pytest.raises(sw.InputError, match="tolerance: found 0"):
        batch("branch", "runs/a", tolerance=0)
