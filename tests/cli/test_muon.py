"""Muon as a user plans and trains it in bf16, by two processes; and where it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main

CONFIG = Path(__file__).parents[2] / "examples" / "small-llama" / "config.json"
CLUSTER = """
[chip]
name = "cpu"
peak_flops_per_s = { bf16 = "100 GFLOP/s", fp16 = "100 GFLOP/s" }
memory_bytes = "4 GB"
memory_bytes_per_s = "10 GB/s"

[[tiers]]
name = "gloo"
size = 2
bytes_per_s = "1 GB/s"
"""
# Elements of the model: three blocks of attention with half as many key-value heads and an MLP; embedding and head; norms.
MATRICES = 3 * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 768)
VOCABULARY, NORMS = 2 * 2048 * 256, 7 * 256


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("data") / "tokens")
    assert main(["tokenize", "--python-library", "100kB", "--vocab-size", "512", "--out", folder]) == 0
    return folder


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def planned(place: Path, precision: str, layout: str) -> str:
    """A plan's file."""
    (place / "cpu.toml").write_text(CLUSTER, encoding="utf-8")
    pins = [word for pin in layout.split() for word in ("--pin", pin)]
    size = ["--batch-tokens", "512", "--seq-len", "64", "--precision", precision]
    where = [str(CONFIG), str(place / "cpu.toml"), "--out", str(place / "plan.json")]
    assert main(["plan", *where, *size, *pins, "--runnable", "--set", "job.optimizer=muon"]) == 0
    return str(place / "plan.json")


def read(file: Path | str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("precision", "layout", "moment_bytes", "whole_norms"),
    [
        ("bf16", "fsdp=2 zero_stage=1", 4, 0),
        ("bf16", "tp=2", 4, 1),  # whose norms are on both
        ("bf16_bf16_moments", "fsdp=2 zero_stage=1", 2, 0),
    ],
)
def test_a_run_in_bf16_learns_and_keeps_the_state_that_is_planned(
    precision: str, layout: str, moment_bytes: int, whole_norms: int, data: str, tmp_path: Path
) -> None:
    """One momentum of matrices, two moments of all else, and a master copy in fp32, of half of the weights."""
    plan, run = planned(tmp_path, precision, layout), tmp_path / "run"
    learning = ["--learning-rate", "0.01", "--warmup", "0", "--steps", "4"]
    assert main(["train", plan, "--data", data, "--out", str(run), "--device", "cpu", *learning]) == 0
    summary = read(run / "summary.json")
    assert summary["last_loss"] < summary["first_loss"] - 0.05
    norms = NORMS if whole_norms else NORMS // 2
    others = VOCABULARY // 2 + norms
    wanted = {"master": 4 * (MATRICES // 2 + others), "optimizer": moment_bytes * (MATRICES // 2 + 2 * others)}
    memory, found = read(plan)["estimate"]["memory"], read(run / "measured.json")["memory"]["largest"]
    assert {term: memory[term] for term in wanted} == wanted
    assert {term: found[term] for term in wanted} == wanted


def test_fp16_is_refused_by_name(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Squares of gradients of 1e-5 are 0 in fp16, and a matrix over its norm of 0 is no number."""
    plan = planned(tmp_path, "fp16", "fsdp=2")
    capsys.readouterr()
    assert main(["train", plan, "--data", data, "--out", str(tmp_path / "run"), "--steps", "2", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "error: precision fp16: muon takes whole matrices in the format of the activations, and fp16 has no"
    )
    assert "; one of bf16, bf16_fp32_gradients, " in error
    assert " fp16," not in error.partition("one of")[2]
    assert not (tmp_path / "run").exists()
