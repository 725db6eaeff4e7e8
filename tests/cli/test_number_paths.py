"""Every number of a report that names a place in the `--json` payload equals the number there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.present.registry import payload_of, report_of
from shardwise.present.rendering.report import Line, Number, Report, Table
from shardwise.search import LayoutPlan, find_smallest_change

SUPERPOD = Path(__file__).parents[2] / "examples" / "clusters" / "dgx-h100-superpod.toml"
SIZES: dict[str, Any] = {"global_batch_tokens": "64Ki", "seq_len": 1024, "tokens": "10G"}


def numbers(report: Report) -> Iterator[Number]:
    """The numbers of a report, in tables and in lines."""

    def of(cell: Any) -> Iterator[Number]:
        if isinstance(cell, Number):
            yield cell
        elif isinstance(cell, Line):
            for part in cell.parts:
                yield from of(part)

    for section in report:
        for block in section.blocks:
            if isinstance(block, Table):
                for row in block.rows:
                    for cell in row:
                        yield from of(cell)
            else:
                yield from of(block)


def value_at(payload: Any, path: str) -> Any:
    for key in path.split("."):
        payload = payload[int(key)] if isinstance(payload, list) else payload[key]
    return payload


def results() -> dict[str, Any]:
    plan = sw.plan("gpt-2", "h100:8", **SIZES)
    piped = sw.plan("llama-3.2-1b", "h100:8", global_batch_tokens="256Ki", seq_len=4096, pins="pp=2")
    full = sw.plan_layout(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), plan.job, sw.Layout.parse("dp=8"))
    search = sw.plan_to_loss("gpt-2", ["h100:4", "h100:8"], noise_scale="64Ki", batches=["64Ki", "128Ki"], seq_len=1024)
    assert search.plan is not None
    return {
        "plan": plan,
        "estimate": LayoutPlan(plan=full, smallest_change=find_smallest_change(full)),
        "comparison": sw.plan_clusters("gpt-2", ["h100:4", "h100:8"], **SIZES),
        "network": sw.network("h100:64", layout="tp=8 dp=8"),
        "levels of switches": sw.network(str(SUPERPOD)),
        "cheat sheet": sw.cheat_sheet("gpt-2", "h100:16", **SIZES),
        "sweep": sw.sweep("gpt-2", "h100:8", over=["gpus=4,8", "tp=1,2"], **SIZES),
        "to loss": search,
        "explanation": sw.explain(piped, "tp=8"),
        "explanation of a run": sw.explain(search.plan),
        "term": sw.explain(piped, "tp=8", term="memory.activations"),
        "memory": sw.memory("gpt-2", "h100:8", ["dp=8", "fsdp=4 pp=2"]),
    }


@pytest.fixture(scope="module")
def all_results() -> dict[str, Any]:
    return results()


@pytest.mark.parametrize(
    ("name", "min_numbers"),
    [
        ("plan", 30), ("estimate", 15), ("comparison", 16), ("sweep", 35), ("to loss", 50), ("explanation", 60),
        ("explanation of a run", 60), ("term", 10), ("memory", 20),
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_payload(all_results: dict[str, Any], name: str, min_numbers: int) -> None:
    result = all_results[name]
    payload = json.loads(json.dumps(payload_of(result)))
    placed = [number for number in numbers(report_of(result)) if number.path]
    assert len({number.path for number in placed}) >= min_numbers
    for number in placed:
        assert value_at(payload, number.path) == pytest.approx(number.value), number
