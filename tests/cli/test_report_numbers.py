"""Every number of a report that names its place in the payload has the value at that place."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwise.present.command_line import build_parser, main
from shardwise.present.registry import payload_of, report_of
from shardwise.present.rendering.report import Line, Number, Report, Table
from shardwise.values.progress import ignore_progress

PRODUCT = "'A[I_X, J] * B[J, K_Y] -> C[I_X, K_Y]' --mesh X=4,Y=2 --size I=64,J=64,K=64"
RULE = "global_batch_tokens=4Mi d_model=8Ki d_ff=28Ki flops_per_s=459TFLOP/s bytes_per_s=180GB/s fsdp=2240 tp=4"
# Command lines, and how many of a report's numbers are in the payload at least.
SESSIONS = {
    "roofline matmul B=240,D=8192,F=28672 tpu-v5e": 9,
    "roofline matmul B=100,D=100,F=100 tpu-v5e --from host": 10,
    "roofline matmul B=240,D=8192,F=28672 tpu-v5e --with 'attention T=4096,N=32,H=128' --with 'dot N=16Mi'": 14,
    "roofline llama-3-8b T=4096 h100": 50,
    f"rule mlp_layer_times {RULE}": 3,
    "precision": 80,
    f"matmul {PRODUCT} --on h100 --backward --run numpy": 40,
    "reshard 'A[I_X, J] -> A[I, J_X]' --mesh X=4 --size I=64,J=64": 4,
    "collective all-gather 1GB --axes 16 --on tpu-v5p": 7,
    "collective all-reduce 1GB --axes 16 --on h100": 10,
    "schedule dualpipe --stages 4 --micro-batches 10": 13,
    "schedule compare --stages 4 --micro-batches 8,16": 40,
    "simulate {plan} --overlap sum": 25,
    "instructions {plan} --all": 60,
}  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("numbers") / "plan.json"
    words = "plan llama-3-8b h100:16 --batch-tokens 512Ki --seq-len 8192 --pin pp=2 --out"
    assert main([*words.split(), str(path)]) == 0
    return path


def result_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The value of a verb, from its command line."""
    results: list[Any] = []

    def keep(result: Any) -> Report:
        results.append(result)
        return []

    monkeypatch.setattr("shardwise.present.verb.report_of", keep)
    arguments = build_parser().parse_args(words)
    arguments.progress = ignore_progress
    arguments.run(arguments)
    return results[0]


def numbers(report: Report) -> Iterator[Number]:
    for section in report:
        for block in section.blocks:
            rows = block.rows if isinstance(block, Table) else [block.parts] if isinstance(block, Line) else []
            yield from (cell for row in rows for cell in row if isinstance(cell, Number))


def value_at(payload: Any, path: str) -> Any:
    """The value at a dotted path, whose keys may have dots of their own."""
    if path == "":
        return payload
    if isinstance(payload, list | tuple):
        index, _, remaining = path.partition(".")
        return value_at(payload[int(index)], remaining)
    key = next(key for key in payload if path == key or path.startswith(f"{key}."))
    return value_at(payload[key], path[len(key) + 1 :])


@pytest.mark.parametrize("session", SESSIONS)
def test_numbers_are_those_of_the_payload(session: str, plan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = result_of(shlex.split(session.replace("{plan}", str(plan))), monkeypatch)
    payload, report = payload_of(result), report_of(result)
    assert not isinstance(report, str)
    placed = [number for number in numbers(report) if number.path]
    assert len(placed) >= SESSIONS[session], len(placed)
    for number in placed:
        assert value_at(payload, number.path) == number.value, number
