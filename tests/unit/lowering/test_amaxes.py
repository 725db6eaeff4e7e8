"""Operands with a delayed scale: counted by hand; maxima are exchanged once per step, with equal bytes in lists and prices."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardwise as sw
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price import Problem
from shardwise.price.instruction_prices import InstructionPricer
from shardwise.price.layout_pricer import Pricing
from shardwise.sharding.collectives import CollectiveKind, IssuedCollective
from shardwise.step.collectives import count_operands, layer_counts, operands_by_path
from shardwise.step.issued_collectives import count_collectives
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import PRECISIONS
from shardwise.values.symbolic import SymbolValues

DENSE = Architecture(
    name="d", num_layers=3, d_model=64, d_ff=128, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=96
)
ROUTED = replace(DENSE, name="r", num_experts=4, experts_per_token=2)
LEADING = replace(ROUTED, name="l", num_dense_layers=1, dense_d_ff=96, num_predict_layers=2)
# The operands of a block's seven matrices (the input of queries, keys and values, the result of attention, the input of gate and
# up, and the activation), the matrices, and the gradients of their results. With experts it is the same number.
OF_BLOCK = 4 + 7 + 7
OF_PREDICTING = OF_BLOCK + 3  # a matrix, its input of two concatenated hidden states, and the gradient of its result
BY_HAND = {DENSE: 3 * OF_BLOCK, ROUTED: 3 * OF_BLOCK, LEADING: 3 * OF_BLOCK + 2 * OF_PREDICTING}


@pytest.mark.parametrize("architecture", BY_HAND, ids=lambda model: model.name)
def test_every_operand_of_a_block_has_a_scale(architecture: Architecture) -> None:
    paths = operands_by_path(architecture)
    assert sum(map(len, paths.values())) == BY_HAND[architecture]
    counted = count_operands(architecture.structure).evaluate(SymbolValues(layer_counts(architecture)))
    assert counted == BY_HAND[architecture]


LAYOUTS = {
    "dp": (Layout(dp=2), ("dp",)),
    "zero-3 and tp": (Layout(fsdp=2, tp=2, zero_stage=3), ("fsdp", "tp_kv")),
    "pp": (Layout(pp=3, dp=2, schedule="1f1b"), ("pp", "dp")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_maxima_are_exchanged_once_per_step_over_all_ranks(name: str) -> None:
    layout, axes = LAYOUTS[name]
    instance = RankProgram(architecture=DENSE, layout=layout, precision=PRECISIONS["fp8_delayed"], seq_len=32)
    issued = {
        collective: count for collective, count in count_collectives(instance, 4).items() if collective.what == "amax"
    }
    assert issued == {IssuedCollective(CollectiveKind.ALL_REDUCE, axes, "fp32", 4 * BY_HAND[DENSE], "amax"): 1}
    assert axes in instance.axes
    current_scaling = replace(instance, precision=PRECISIONS["fp8_current"])
    assert not [collective for collective in count_collectives(current_scaling, 4) if collective.what == "amax"]


def test_a_plan_prices_the_exchange_as_it_prices_the_norm() -> None:
    """Both are latency: 576 numbers of 32 layers take as long as a single number, except for their bytes over the network."""
    job = Job(global_batch_tokens=2**17, seq_len=2048, precision="fp8_delayed")
    layout = Layout(fsdp=16, zero_stage=3)
    pricing = Pricing(Problem(sw.load_model("llama-3-8b"), sw.load_cluster("h100:16"), job), layout)
    pricer = InstructionPricer(pricing, "head")
    seconds = {
        collective.tensors[0]: pricer.collective_s(collective)
        for collective in pricer.parts.collectives
        if collective.is_control
    }
    assert set(seconds) == {"loss", "norm", "amax"}
    assert 0 < seconds["amax"] - seconds["norm"] < 4 * 32 * OF_BLOCK / 10e9
