"""`matmul` and `reshard` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.present.command_line import main

GATHER = ["matmul", "A[I_X, J] * B[J, K_X] -> C[I_X, K]", "--mesh", "X=4,Y=2", "--size", "I=64,J=64,K=64"]
MLP = [
    "matmul", "In[B_X, D_Y] * W1[D_X, F_Y] * W2[F_Y, D'_X] -> Out[B_X, D'_Y]", "--mesh", "X=16,Y=4",
    "--size", "B=65536,D=8192,F=28672,D'=8192", "--on", "h100:64",
]  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def payload(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    code, out, err = run(capsys, *arguments, "--json")
    assert (code, err) == (0, "")
    parsed: dict[str, object] = json.loads(out)
    return parsed


def test_payload_has_the_keys_that_other_tools_read(capsys: pytest.CaptureFixture[str]) -> None:
    report = payload(capsys, *GATHER, "--on", "tpu-v5p")
    assert report["schema"] == "shardwise.matmul/1"
    assert {"expression", "mesh", "sizes", "program", "bytes_per_device", "flops_per_device", "time_s", "result",
            "alternatives"} <= report.keys()  # fmt: skip
    program = report["program"]
    assert isinstance(program, list)
    assert all({"op", "operand", "axes", "dim", "bytes_per_device", "time_s"} <= step.keys() for step in program)
    ops = {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "slice", "local_product"}
    assert {step["op"] for step in program} <= ops
    times = report["time_s"]
    assert isinstance(times, dict)
    assert times["lower"] == max(times["math"], times["comms"])
    assert times["upper"] == pytest.approx(times["math"] + times["comms"])
    assert sum(step["bytes_per_device"] for step in program) == pytest.approx(report["bytes_per_device"])


def test_without_a_chip_there_are_bytes_and_no_times(capsys: pytest.CaptureFixture[str]) -> None:
    report = payload(capsys, *GATHER)
    assert report["objective"] == "bytes"
    assert report["time_s"] is None


def test_question_5_of_the_book(capsys: pytest.CaptureFixture[str]) -> None:
    """S2, question 5: split I or K over all axes and gather the result; 37.4 us of compute, 248.6 us of communication."""
    report = payload(capsys, "matmul", "A[I, J] * B[J, K] -> C[I, K]", "--mesh", "X=4,Y=4,Z=4", "--size",
                    "I=8192,J=8192,K=8192", "--on", "tpu-v5p:4x4x4", "--free", "A", "--free", "B")  # fmt: skip
    times = report["time_s"]
    assert isinstance(times, dict)
    assert times["math"] == pytest.approx(37.4e-6, rel=2e-3)
    assert times["comms"] == pytest.approx(248.6e-6, rel=2e-3)
    program = report["program"]
    assert isinstance(program, list)
    assert [step["op"] for step in program] == ["local_product", "all_gather"]


def test_question_6_of_the_book(capsys: pytest.CaptureFixture[str]) -> None:
    """S2, question 6: an AllReduce of three one-way hops, twice; 279.6 us against 43.6 us of compute."""
    report = payload(capsys, "matmul", "A[I_X, J_Y] * B[J_Y, K] -> C[I_X, K]", "--mesh", "X=4,Y=4", "--size",
                    "I=4096,J=4096,K=4096", "--on", "tpu-v5e:4x4")  # fmt: skip
    cases = report["by_cases"]
    assert isinstance(cases, dict)
    assert [step["op"] for step in cases["program"]] == ["local_product", "all_reduce"]
    assert cases["time_s"]["comms"] == pytest.approx(279.6e-6, rel=2e-3)
    assert cases["time_s"]["math"] == pytest.approx(43.6e-6, rel=2e-3)


def test_backward_gives_the_books_list(capsys: pytest.CaptureFixture[str]) -> None:
    """S0's twelve steps of mixed FSDP and TP: three activation and four weight collectives backward."""
    report = payload(capsys, *MLP, "--backward")
    back = report["backward"]
    assert isinstance(back, dict)
    moves = [(step["op"], step["operand"].split("#")[0]) for step in back["program"] if step["op"] != "local_product"]
    assert sorted(moves) == sorted([
        ("all_gather", "d.Out"), ("all_gather", "W2"), ("reduce_scatter", "d.W2"), ("all_gather", "In"),
        ("reduce_scatter", "d.W1"), ("all_gather", "W1"), ("reduce_scatter", "d.In"),
    ])  # fmt: skip


def test_the_report_gives_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *MLP, "--backward")
    assert code == 0
    for part in (
        "cheapest by time",
        "another way:",
        "by the four cases",
        "case 4:",
        "gradients of all operands",
        "-> Out[",
    ):
        assert part in out


def test_report_notes_sums_of_single_operands(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["matmul", "A[I, J] * B[K, L] -> C[I, L]", "--mesh", "X=2", "--size", "I=4,J=4,K=4,L=4"]
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "  note: A is summed over J by itself, before any product: neither another operand nor C has J\n" in out
    assert "  note: B is summed over K by itself" in out
    assert "local_sum                  A " in out
    report = payload(capsys, *arguments, "--backward")
    assert [str(note)[:24] for note in report["notes"]] == ["A is summed over J by it", "B is summed over K by it"]  # type: ignore[attr-defined]
    assert isinstance(report["program"], list)
    assert [step["op"] for step in report["program"]] == ["local_sum", "local_sum", "local_product"]
    assert report["flops_per_device"] == 16 + 16 + 16
    back = report["backward"]
    assert isinstance(back, dict)
    assert [step["op"] for step in back["program"]] == ["local_product"] * 2 + ["local_broadcast"] * 2
    assert payload(capsys, *GATHER)["notes"] == []


def test_times_count_sums_as_compute(capsys: pytest.CaptureFixture[str]) -> None:
    report = payload(capsys, "matmul", "A[I, J] -> B[I]", "--mesh", "X=1", "--size", "I=1Mi,J=1Mi", "--on", "h100:1")
    times = report["time_s"]
    assert isinstance(times, dict)
    assert times["math"] == pytest.approx(2**40 / 989.4e12, rel=1e-3)
    assert times["comms"] == 0


def test_run_on_virtual_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert float(str(payload(capsys, *GATHER, "--run", "numpy")["max_relative_error"])) < 1e-12


def test_emit_prints_source_that_compiles(capsys: pytest.CaptureFixture[str]) -> None:
    for framework in ("jax", "torch"):
        code, out, _ = run(capsys, *GATHER, "--emit", framework)
        assert code == 0
        assert "def product(" in out
        compile(out, "product.py", "exec")


def test_draw_writes_a_picture_or_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "shards.svg"
    assert run(capsys, *GATHER, "--draw", str(target))[0] == 0
    picture = target.read_text(encoding="utf-8")
    assert picture.startswith("<svg")
    assert "B[J, K_X]" in picture
    _, out, _ = run(capsys, *GATHER, "--draw", "-")
    assert "| 0-1 | 2-3 | 4-5 | 6-7 |" in out


def test_reshard_finds_a_way_that_moves_less_than_gathering(capsys: pytest.CaptureFixture[str]) -> None:
    report = payload(capsys, "reshard", "A[I_X, J_Y] -> A[I_Y, J_X]", "--mesh", "X=4,Y=4", "--size", "I=64,J=64")
    assert report["schema"] == "shardwise.reshard/1"
    cases = report["by_cases"]
    assert isinstance(cases, dict)
    assert float(str(report["bytes_per_device"])) < cases["bytes_per_device"] / 4


WRONG = [
    (["matmul", "A[I_X, J_X] * B[J, K]", "--mesh", "X=2"], ["used twice", "^"]),
    (["matmul", "A[I_X J] * B[J, K]", "--mesh", "X=2"], ["expected ','", "^"]),
    (["matmul", "A[I_X, J] * B[J, K]", "--mesh", "X=2"], ["sizes: none for I, J, K", "--size"]),
    (["matmul", "A[I_Z, J] * B[J, K]", "--mesh", "X=2", "--size", "I=4,J=4,K=4"], ["no axis 'Z'", "X"]),
    (["matmul", "A[I_X, J] * B[J, K]", "--mesh", "X=3", "--size", "I=4,J=4,K=4"], ["does not divide", "3 and 6"]),
    (
        ["matmul", "A[I_X, J] * B[J, K] -> C[I, L]", "--mesh", "X=2", "--size", "I=4,J=4,K=4"],
        ["dim L is in no operand"],
    ),
    (["matmul", "A[I] * A[I]", "--mesh", "X=2", "--size", "I=4"], ["two operands are called A"]),
    (
        ["matmul", "A[I, J] * B[J, K] -> A[I, K]", "--mesh", "X=2", "--size", "I=4,J=4,K=4"],
        ["the result is called A, as an operand is"],
    ),
    (["reshard", "A[I_X, J] -> A[I]", "--mesh", "X=2", "--size", "I=4,J=4"], ["the same dims", "`matmul`"]),
    (["matmul", "A[I=4] * B[I=8]", "--mesh", "X=2"], ["I is 4 and 8"]),
    (["matmul", "A: bf16[I=4] * B: fp32[I]", "--mesh", "X=2"], ["bf16, fp32", "one number format"]),
    (["matmul", "A[I, J] * B[J]", "--mesh", "X", "--size", "I=4,J=4"], ["--mesh", "NAME=SIZE"]),
    (
        ["matmul", "A[I, J] * B[J]", "--mesh", "X=2", "--size", "I=4,J=4", "--on", "tpu-v5e:4x4"],
        ["16", "fill the cluster"],
    ),
    (["matmul", "A[I, J] * B[J]", "--mesh", "X=2", "--size", "I=4,J=4", "--free", "Q"], ["no operand 'Q'", "A, B"]),
    (["reshard", "A[I] * B[I] -> C[I]", "--mesh", "X=2", "--size", "I=4"], ["one tensor before and after"]),
    (["matmul", "A[I, J] * B[J]", "--mesh", "X=2", "--size", "I=4,J=4", "--draw", "/nowhere/x.svg"], ["cannot write"]),
    (
        ["reshard", "A[I_V, J] -> A[I, J_V]", "--mesh", "V=2,W=2,X=2,Y=2,Z=2", "--size", "I=64,J=64"],
        ["found 5 axes (V, W, X, Y, Z)", "at most 4"],
    ),
    (
        ["reshard", "A[I_X, J] -> A[I, J_X]", "--mesh", "X=64,Y=64", "--size", "I=64,J=64", "--draw", "-"],
        ["--draw: found 4,096 devices", "at most 1,024"],
    ),
    (
        ["matmul", "A[I_X, J] * B[J, K]", "--mesh", "X=4", "--size", "I=64Ki,J=64Ki,K=64Ki", "--run", "numpy"],
        ["--run numpy", "elements", "smaller sizes"],
    ),
    (["matmul", "A[I_X, J] * B[J, K]", "--mesh", "X=4", "--size", "I=1e15,J=4,K=4"], ["--size I", "at most 1e+12"]),
]


@pytest.mark.parametrize(("arguments", "parts"), WRONG, ids=[w[0][1] for w in WRONG])
def test_wrong_input_exits_2_with_the_problem(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    for part in parts:
        assert part in err


@pytest.mark.parametrize("verb", [
    (*GATHER[:3], "X=4,Y=2", *GATHER[4:]),
    ("reshard", "A[I_X, J] -> A[I, J_X]", "--mesh", "X=4,Y=2", "--size", "I=1024,J=4096"),
])  # fmt: skip
def test_a_cluster_file_takes_the_place_of_a_slice(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    path = tmp_path / "My-Slice.toml"
    path.write_text('chip = "tpu-v5e"\ntorus = { shape = [4, 2] }\n', encoding="utf-8")
    report = payload(capsys, *verb, "--on", str(path))
    assert report == payload(capsys, *verb, "--on", "tpu-v5e:4x2")
    assert report["time_s"] is not None
    path.write_text('chip = "tpu-v5e"\ntorus = { shape = [4, 4] }\n', encoding="utf-8")
    code, _, err = run(capsys, *verb, "--on", str(path))
    assert code == 2
    assert "which has 16; the mesh must fill the cluster" in err
