"""Attention that writes its scores, and masks of dropout, as options of a job.

Independent truth: S1, activation memory: 34 + 5·a·s/h bytes for each token, layer and width h of GPT in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.hardware.stacks import get_stack
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.model.load import load_model
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.layout_pricer import Pricing
from shardwise.search.vectorised.search_layouts import SearchChecks, search_layouts
from shardwise.values.errors import InputError

GPT = load_model("gpt-2")
SEQ_LEN = 1024
JOB = sw.Job(global_batch_tokens=8 * SEQ_LEN, seq_len=SEQ_LEN, loss="unfused")


def saved_bytes(text: str, **options: Any) -> float:
    """Bytes that a block saves for one sequence."""
    layout = Layout.parse(f"dp=8 {text}" if "tp=" not in text else text)
    job = replace(JOB, **options)
    pricing = Pricing(Problem(GPT, load_cluster("h100:8"), job), layout)
    return float(pricing.unit_costs()[0]["block"].saved_bytes)


def statistics(tp: int = 1) -> float:
    """Sums of two norms (two each) and of the softmax, in fp32, which S1 leaves out as small."""
    return 4.0 * SEQ_LEN * (4 + GPT.num_heads / tp)


@pytest.mark.parametrize("attention", ["fused", "unfused"])
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    ("text", "tp", "sequence_parallel"), [("", 1, False), ("dp=2 tp=4 sequence_parallel=true", 4, True)]
)
def test_the_rule_equals_the_priced_program(
    attention: str, dropout: bool, text: str, tp: int, sequence_parallel: bool
) -> None:
    expected = sw.rule(
        "layer_activation_bytes", tokens=SEQ_LEN, d_model=GPT.d_model, num_heads=GPT.num_heads, seq_len=SEQ_LEN, tp=tp,
        sequence_parallel=sequence_parallel, fused_attention=attention == "fused", dropout=dropout,
    ).value  # fmt: skip
    priced = saved_bytes(text, attention=attention, dropout=dropout)
    assert priced == pytest.approx(expected, rel=0.01)
    assert 0 <= priced - expected <= statistics(1)


def test_the_rule_equals_s1() -> None:
    width, heads = 768, 12
    expected = SEQ_LEN * width * (34 + 5 * heads * SEQ_LEN / width)
    value = sw.rule("layer_activation_bytes", tokens=SEQ_LEN, d_model=width, num_heads=heads, seq_len=SEQ_LEN).value
    assert value == expected


def test_recompute_of_attention_frees_its_scores_and_no_other_mask() -> None:
    masks = 2 * SEQ_LEN * GPT.d_model
    fused = saved_bytes("recompute=core_attn", attention="fused")
    assert saved_bytes("recompute=core_attn", attention="unfused", dropout=True) == fused + masks
    full = saved_bytes("recompute=full", attention="fused")
    assert saved_bytes("recompute=full", attention="unfused", dropout=True) == full


def test_a_job_takes_precedence_over_its_stack() -> None:
    layout = Layout.parse("dp=1 micro_batch_seqs=8")
    stack = load_cluster("a100-80gb:1", stack="megatron-2022")
    assert get_stack("megatron-2022").policy.dropout
    memory = {
        attention: estimate(Problem(GPT, stack, replace(JOB, attention=attention)), layout)
        for attention in (None, "unfused", "fused")
    }
    assert memory[None] == memory["unfused"]
    assert memory["fused"].memory["activations"] < memory["unfused"].memory["activations"]
    assert memory["fused"].step_time_s < memory["unfused"].step_time_s


def test_a_search_prices_unfused_attention_as_an_estimate_does() -> None:
    job = replace(JOB, attention="unfused", dropout=True)
    problem = Problem(GPT, load_cluster("h100:8", stack="megatron"), job)
    result = search_layouts(problem, choices=Choices(), checks=SearchChecks(num_samples=50))
    for row in (*result.best, *result.sampled):
        priced = estimate(problem, row.layout)
        assert row.step_time_s == pytest.approx(priced.step_time_s, rel=1e-9)
        assert row.memory_bytes == pytest.approx(priced.memory_bytes, rel=1e-9)


def test_other_kinds_of_attention_are_refused() -> None:
    with pytest.raises(InputError, match="attention is 'flash'; one of fused, unfused is required"):
        replace(JOB, attention="flash")  # type: ignore[arg-type]
