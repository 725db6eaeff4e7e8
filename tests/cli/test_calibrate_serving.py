"""`shardwise calibrate` with results of serving benchmarks: the report, the file that estimates and plans take, errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.present.command_line import main

LAUNCH = "vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2"
LENGTHS = ("--isl", "1000", "--osl", "200", "--concurrency", "16")


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def write_result(path: Path, tpot_s: float, ttft_s: float) -> str:
    """Write what `vllm bench serve --save-result` does, at 16 requests of 1000 tokens in and 200 out."""
    result: dict[str, Any] = {
        "endpoint_type": "vllm", "max_concurrency": 16, "request_rate": "inf", "completed": 160, "total_input_tokens": 160_000,
        "total_output_tokens": 32_000, "median_ttft_ms": ttft_s * 1e3, "median_tpot_ms": tpot_s * 1e3,
    }  # fmt: skip
    path.write_text(json.dumps(result), encoding="utf-8")
    return str(path)


def test_calibration_changes_estimates_and_plans(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = sw.serve_estimate(
        "llama-3.1-8b", "h100:2", layout="tp=2", isl=1000, osl=200, concurrency=16, memory_fraction=0.92
    )
    slower = 1.5
    results = [
        write_result(tmp_path / f"{n}.json", plain.tpot_s.value * slower, plain.ttft_s.value * slower) for n in range(3)
    ]
    out = str(tmp_path / "serving.json")
    code, text, err = run(capsys, "calibrate", *results, "--cluster", "h100:2", "--launch", LAUNCH, "--out", out)
    assert (code, err) == (0, "")
    assert "passes take 1.4" in text
    written = json.loads(Path(out).read_text())
    assert (written["schema"], written["chip"]) == ("shardwise.serving_calibration/1", "h100")
    factor = written["calibration"]["pass_factor"]
    share = 3 / (3 + (0.08 / 0.15) ** 2)
    assert factor == pytest.approx(slower**share, rel=1e-6)
    estimate = (
        "serve",
        "estimate",
        "llama-3.1-8b",
        "h100:2",
        "--layout",
        "tp=2",
        *LENGTHS,
        "--calibration",
        out,
        "--json",
    )
    code, text, _ = run(capsys, *estimate, "--memory-fraction", "0.92")
    payload = json.loads(text)
    # Slower passes are fewer while a wave's requests take their turns in the server, so that a token's time is not quite in
    # proportion to a pass's.
    assert payload["tpot_s"]["value"] == pytest.approx(plain.tpot_s.value * factor, rel=1e-3)
    assert "calibrated with 3 results" in payload["notes"][0]
    plans = [
        sw.serve_plan("llama-3.1-8b", "h100:2", isl=1000, osl=200, tpot="12ms", calibration=path)
        for path in (None, out)
    ]
    assert plans[0].concurrency > plans[1].concurrency


def test_an_invalid_calibration_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = write_result(tmp_path / "result.json", 0.01, 0.1)
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"tokens": 1}')
    launch = ("--launch", LAUNCH)
    calibrations = tmp_path / "serving.json"
    run(capsys, "calibrate", result, "--cluster", "h100:2", *launch, "--out", str(calibrations))
    estimate = ("serve", "estimate", "llama-3.1-8b", "h100:2", *LENGTHS, "--calibration")
    for arguments, problem in (
        (("calibrate", result, *launch), "--cluster: missing"),
        (("calibrate", result, "--cluster", "h100:2"), "--launch: missing"),
        (("calibrate", str(wrong), "--cluster", "h100:2", *launch), "wrong.json: completed, total_input_tokens"),
        (("calibrate", result, "--cluster", "h100:2", *launch, "--stack", "torchtitan"), "--stack: of trainings"),
        (("calibrate", "h100:2", "h100:4"), "found 2 words"),
        (("calibrate", result, "--cluster", "h100:1", *launch), "takes 2 devices"),
        ((*estimate, result), "'shardwise.serving_calibration/1' is required"),
        ((*estimate, str(calibrations), "--engine", "sglang"), "it is of engine 'vllm'; 'sglang' is required"),
    ):
        code, _, err = run(capsys, *arguments)
        assert code == 2
        assert problem in err
