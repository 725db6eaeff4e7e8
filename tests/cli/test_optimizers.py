"""Optimizers as a user plans and trains them in bf16, by two processes; and where Muon is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from train.launching import launch_command

from shardwise.present.command_line import main

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
# Elements of the model: blocks of attention with half as many key-value heads and an MLP; embedding and head; norms.
LAYERS, D_FF = 2, 256
MATRICES = LAYERS * (2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * D_FF)
VOCABULARY, NORMS = 2 * 2048 * 256, (2 * LAYERS + 1) * 256
# Both of each of a block's: queries and output, keys and values, the MLP.
SIDES = 2 * [256, 256] + 2 * [128, 256] + 3 * [D_FF, 256]
# Of its matrices, each with a column for each element of the hidden state.
ROWS, COLUMNS = LAYERS * (2 * 256 + 2 * 128 + 3 * D_FF) + 2 * 2048, (LAYERS * 7 + 2) * 256


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("data") / "tokens")
    assert main(["tokenize", "--python-library", "100kB", "--vocab-size", "512", "--out", folder]) == 0
    return folder


def write_plan(place: Path, precision: str, layout: str, optimizer: str = "muon", *, runnable: bool = True) -> str:
    """A plan's file."""
    smaller = {**read(CONFIG), "num_hidden_layers": LAYERS, "intermediate_size": D_FF}
    (place / "config.json").write_text(json.dumps(smaller), encoding="utf-8")
    (place / "cpu.toml").write_text(CLUSTER, encoding="utf-8")
    pins = [word for pin in layout.split() for word in ("--pin", pin)]
    size = ["--batch-tokens", "128", "--seq-len", "64", "--precision", precision]
    where = [str(place / "config.json"), str(place / "cpu.toml"), "--out", str(place / "plan.json")]
    assert main(["plan", *where, *size, *pins, *["--runnable"] * runnable, "--set", f"job.optimizer={optimizer}"]) == 0
    return str(place / "plan.json")


def read(file: Path | str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(Path(file).read_text(encoding="utf-8"))
    return parsed


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("precision", "layout", "moment_bytes", "whole_norms"),
    [
        ("bf16", "fsdp=2 zero_stage=1", 4, 0),
        ("bf16", "tp=2", 4, 1),  # whose norms are on both
        ("bf16_bf16_moments", "fsdp=2 zero_stage=1", 2, 0),
    ],
)
def test_a_run_of_muon_in_bf16_learns_and_keeps_the_state_that_is_planned(
    precision: str, layout: str, moment_bytes: int, whole_norms: int, data: str, tmp_path: Path
) -> None:
    """One momentum of matrices, two moments of all else, and a master copy in fp32, of half of the weights."""
    plan = write_plan(tmp_path, precision, layout)
    norms = NORMS if whole_norms else NORMS // 2
    num_other_elements = VOCABULARY // 2 + norms
    expected = {
        "master": 4 * (MATRICES // 2 + num_other_elements),
        "optimizer": moment_bytes * (MATRICES // 2 + 2 * num_other_elements),
    }
    require_loss_and_state(plan, expected, data, tmp_path / "run", rate=0.01)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("precision", "layout", "parts_of_rows", "parts_of_norms", "moment_bytes"),
    [
        ("bf16", "fsdp=2 zero_stage=1", 1, 2, 4),
        ("bf16_fp32_main_gradients", "fsdp=2 zero_stage=3", 1, 2, 4),
        ("bf16_bf16_moments", "tp=2", 2, 1, 2),  # which splits the rows of every matrix
    ],
)
def test_a_run_of_adafactor_in_bf16_learns_and_keeps_the_state_that_is_planned(
    precision: str, layout: str, parts_of_rows: int, parts_of_norms: int, moment_bytes: int, data: str, tmp_path: Path
) -> None:
    """One number for each row and column of a matrix, whole along fsdp, and one for each of a norm's, of which a rank may have
    all of a unit's: flat arrays are cut anywhere, and plans count even shares."""
    plan = write_plan(tmp_path, precision, layout, "adafactor")
    norms = NORMS // parts_of_norms
    numbers = ROWS // parts_of_rows + COLUMNS + norms
    expected = {"master": 4 * ((MATRICES + VOCABULARY) // 2 + norms), "optimizer": moment_bytes * numbers}
    off = moment_bytes * (NORMS - norms)
    require_loss_and_state(plan, expected, data, tmp_path / "run", rate=0.1, off=off)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("precision", "layout", "parts_of_norms", "moment_bytes"),
    [("bf16", "fsdp=2 zero_stage=3", 2, 4), ("bf16_bf16_moments", "tp=2", 1, 2)],
)
def test_a_run_in_8_bits_learns_and_keeps_the_state_that_is_planned(
    precision: str, layout: str, parts_of_norms: int, moment_bytes: int, data: str, tmp_path: Path
) -> None:
    """A byte of each moment of a matrix and four for 256 of them, and of a norm's the bytes that the recipe has. Halves of the
    last norm, an array of its own, are padded to 256; and flat arrays may have a unit's norms on one rank."""
    plan = write_plan(tmp_path, precision, layout, "adamw_8bit")
    num_matrix_elements, norms = (MATRICES + VOCABULARY) // 2, NORMS // parts_of_norms
    padding = 256 - 256 // parts_of_norms
    state = 2 * (num_matrix_elements + padding) * 65 // 64 + 2 * moment_bytes * norms
    expected = {"master": 4 * (num_matrix_elements + norms + padding), "optimizer": state}
    off = 2 * moment_bytes * (NORMS - norms)
    require_loss_and_state(plan, expected, data, tmp_path / "run", rate=0.001, off=off)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("precision", "layout", "parts_of_norms", "moment_bytes"),
    [("bf16", "fsdp=2 zero_stage=1", 2, 4), ("bf16_bf16_moments", "tp=2", 1, 2)],
)
def test_a_run_of_shampoo_in_bf16_learns_and_keeps_the_state_that_is_planned(
    precision: str, layout: str, parts_of_norms: int, moment_bytes: int, data: str, tmp_path: Path
) -> None:
    """Of each matrix the average step, and whole on both ranks the squares of its sides and their roots, in fp32."""
    plan = write_plan(tmp_path, precision, layout, "shampoo")
    squares = LAYERS * 2 * sum(side**2 for side in SIDES)
    num_other_elements = VOCABULARY // 2 + NORMS // parts_of_norms
    expected = {
        "master": 4 * (MATRICES // 2 + num_other_elements),
        "optimizer": moment_bytes * (MATRICES // 2 + 2 * num_other_elements) + 4 * squares,
    }
    require_loss_and_state(plan, expected, data, tmp_path / "run", rate=0.01)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("layout", ["fsdp=2 zero_stage=2", "tp=2"])
@pytest.mark.parametrize(("optimizer", "rate"), [("lion", 0.001), ("sgd", 0.1)])
def test_a_run_with_one_moment_keeps_the_state_that_is_planned(
    optimizer: str, rate: float, layout: str, data: str, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path, "bf16", layout, optimizer)
    num_elements = (MATRICES + VOCABULARY) // 2 + (NORMS if "tp" in layout else NORMS // 2)
    require_loss_and_state(
        plan, {"master": 4 * num_elements, "optimizer": 4 * num_elements}, data, tmp_path / "run", rate=rate
    )


def require_loss_and_state(
    plan: str, expected: dict[str, int], data: str, run: Path, *, rate: float, off: int = 0
) -> None:
    """A run of a plan, whose loss goes down and whose state takes these bytes, as planned; of the moments within `off`."""
    learning = ["--learning-rate", str(rate), "--warmup", "0", "--steps", "4"]
    trained = launch_command("train", plan, "--data", data, "--out", str(run), "--device", "cpu", *learning)
    assert trained.ended() == 0, trained.err
    summary = read(run / "summary.json")
    assert summary["last_loss"] < summary["first_loss"] - 0.05
    memory, measured = read(plan)["estimate"]["memory"], read(run / "measured.json")["memory"]["largest"]
    assert {term: memory[term] for term in expected} == expected
    assert measured["master"] == expected["master"]
    assert abs(measured["optimizer"] - expected["optimizer"]) <= off


def test_fp16_is_refused_by_name(tmp_path: Path, data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Squares of gradients of 1e-5 are 0 in fp16, and a matrix over its norm of 0 is no number."""
    plan = write_plan(tmp_path, "fp16", "fsdp=2", runnable=False)
    capsys.readouterr()
    size = ["--batch-tokens", "128", "--seq-len", "64", "--precision", "fp16", "--set", "job.optimizer=muon"]
    for command in (
        ["train", plan, "--data", data, "--out", str(tmp_path / "run"), "--steps", "2", "--device", "cpu"],
        ["plan", str(tmp_path / "config.json"), str(tmp_path / "cpu.toml"), *size, "--runnable"],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        problem = "precision fp16: muon takes whole matrices in the format of the activations, and fp16 has no"
        assert error.startswith(f"error: {problem}")
        assert "; one of bf16, bf16_fp32_gradients, " in error
        assert " fp16," not in error.partition("one of")[2]
    assert not (tmp_path / "run").exists()
