"""Kept answers of the H100 and TPU compilers (benchmarks/xla_golden.py makes them): collectives, bytes and peak memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.derive.sharded_einsum import ShardedExpression, derive_by_cases, shard_expression
from shardwise.sharding.notation import parse_expression
from shardwise.sharding.spec import Mesh
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.symbolic import SymbolValues

GOLDEN = Path(__file__).parent / "golden"
PRODUCTS = json.loads((GOLDEN / "products.json").read_text())
STEPS = {"train-h100": "h100:8", "train-v5e": "tpu-v5e:4x4", "train-v5p": "tpu-v5p:2x2x1"}

# Predicted peak memory over the compiler's, at most. XLA streams the loss. The estimate must never be below; it is above by what
# XLA frees early: gradients of a step, and the gathered head.
LARGEST_RATIO = {"train-h100": 1.05, "train-v5p": 1.08, "train-v5e": 1.12}


def shard_row(row: dict[str, Any]) -> ShardedExpression:
    expression = parse_expression(row["expression"])
    return shard_expression(expression, Mesh.of(PRODUCTS["mesh"]), PRODUCTS["sizes"], PRODUCTS["dtype"])


@pytest.mark.parametrize("row", PRODUCTS["products"], ids=lambda row: row["expression"])
def test_the_derived_collectives_are_those_of_the_h100_compiler(row: dict[str, Any]) -> None:
    expression = shard_row(row)
    values = SymbolValues({**expression.sizes, **dict(expression.mesh.axes)})
    width = bytes_per_element(expression.dtype)
    derived = [
        (c.collective.kind, sorted(c.collective.axes), float(c.collective.received_elements.evaluate(values)) * width)
        for c in derive_by_cases(expression).communication
    ]
    chosen = [(c["op"], sorted(c["axes"]), c["bytes"]) for c in row["collectives"]]
    assert sorted(derived) == sorted(chosen)


@pytest.mark.parametrize("name", list(STEPS))
def test_predicted_memory_of_a_training_step_bounds_the_compilers_peak(name: str) -> None:
    kept = json.loads((GOLDEN / f"{name}.json").read_text())
    devices = kept["devices"]
    tokens = kept["global_batch_seqs"] * kept["seq_len"]
    job = sw.Job(global_batch_tokens=tokens, seq_len=kept["seq_len"], loss="streamed")
    layout = sw.Layout(dp=1, fsdp=devices, tp=1, cp=1, pp=1, zero_stage=3, recompute="full")
    estimated = sw.estimate(sw.load_model(kept["model"]), sw.load_cluster(STEPS[name]), job, layout)
    at_rest = sum(estimated.memory[term] for term in ("parameters", "master", "optimizer"))
    assert at_rest == pytest.approx(kept["argument_bytes"], rel=0.001)
    predicted = (
        estimated.memory_bytes - estimated.memory["runtime"]
    )  # the compiler does not count what the runtime takes
    assert 1.0 <= predicted / kept["peak_bytes"] <= LARGEST_RATIO[name]
