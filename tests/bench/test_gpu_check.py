"""The script for a GPU, at sizes of a CPU: its parts run, and one that takes too long leaves the others alone."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shardwise.present import command_line
from shardwise.present.verbs.kernels import LADDER_NAMES

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # The script adds its folder, which has another `train` than the tests, and tells its processes of it: undone at the end.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


def check(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *parts: str
) -> tuple[int, dict[str, dict[str, object]]]:
    arguments = [argument for part in parts for argument in ("--part", part)]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--tiny", "--out", str(out), *arguments])
    code: int = gpu_check.main()
    record = json.loads(out.read_text())
    assert record["card"] == "CPU"
    assert record["versions"]["torch"].startswith("2.13.0")
    return code, record["parts"]


def test_the_engine_beside_plain_pytorch(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both begin with random weights of their own: a loss of ln V, which falls."""
    code, parts = check(gpu_check, monkeypatch, tmp_path / "check.json", "train-1b")
    assert (code, parts["train-1b"]["state"]) == (0, "ok")
    sides = parts["train-1b"]["result"]["sides"]  # type: ignore[index]
    assert set(sides) == {
        "shardwise", "plain, fp32 weights under autocast", "plain, bf16 weights", "shardwise, again"
    }  # fmt: skip
    for side in sides.values():
        assert side["tokens_per_s"] == pytest.approx(64 / side["seconds"])
        assert side["losses"][0] == pytest.approx(5.95, abs=0.4)
        assert side["losses"][-1] < side["losses"][0]


def test_ladders_machine_and_calibration(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In this process: of each part what a CPU can show. Rungs at twice their rooflines are kernels at half of the peaks."""
    monkeypatch.setattr(gpu_check, "run_part", lambda name, tiny: {
        "state": "ok", "seconds": 0.0, "result": gpu_check.PARTS[name](tiny)
    })  # fmt: skip
    monkeypatch.setattr(gpu_check, "run_verb", lambda *arguments: run_verb_here(arguments))
    code, parts = check(gpu_check, monkeypatch, tmp_path / "check.json", "products", "machine", "calibrate", "demo")
    assert code == 0
    results: dict[str, Any] = {name: part["result"] for name, part in parts.items()}
    assert [ladder["name"] for ladder in results["products"]["ladders"]] == list(gpu_check.PRODUCT_LADDERS)
    assert "[calibration.constants]" in results["machine"]["cluster_file"]
    constants = {name: shift["after"] for name, shift in results["calibrate"]["constants"].items()}
    assert constants["matmul_fraction"] < 0.6
    assert constants["memory_fraction"] < 0.6
    assert results["demo"]["device"] == "cpu"


def run_verb_here(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Return the payload of a verb that runs in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert command_line.main((*arguments, "--json")) == 0
    payload: dict[str, Any] = json.loads(printed.getvalue())
    return payload


def test_every_ladder_is_in_a_part(gpu_check: ModuleType) -> None:
    assert sorted((*gpu_check.LADDERS, *gpu_check.PRODUCT_LADDERS)) == sorted(LADDER_NAMES)


def test_a_part_that_takes_too_long_leaves_the_others_alone(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "PART_LIMIT_S", 0.01)
    code, parts = check(gpu_check, monkeypatch, tmp_path / "check.json", "losses", "ladder")
    assert (code, {name: part["state"] for name, part in parts.items()}) == (
        1,
        {"losses": "timeout", "ladder": "timeout"},
    )


def test_a_part_that_fails_says_why(gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "pytest.py").write_text("raise SystemExit('no pytest here')")
    code, parts = check(gpu_check, monkeypatch, tmp_path / "check.json", "kernels")
    assert (code, parts["kernels"]["state"]) == (1, "failed")
    assert "no pytest here" in str(parts["kernels"]["error"])
