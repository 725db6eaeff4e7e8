"""Memory of experts under torchtitan: router scores multiply tokens before experts, and grouped products are run again.

Independent truth: the tensors that torchtitan v0.2.2 saves, counted by hand: models/moe.py (`score_before_experts`) and the
list of operations that selective checkpointing saves (`_op_sac_save_list`), which has aten.mm and no _grouped_mm.
"""

from __future__ import annotations

import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.model.decoder import unit_program
from shardwise.model.load import load_model
from shardwise.model.recompute_policies import get_recompute_policy
from shardwise.price import Problem
from shardwise.price.estimate import estimate

MODEL = load_model("qwen3-30b-a3b")
JOB = sw.Job(global_batch_tokens=8 * 4096, seq_len=4096, precision="bf16_fp32_reduction", loss="unfused")


def activations(stack: str, recompute: str) -> float:
    layout = Layout.parse(f"fsdp=8 ep=8 zero_stage=3 recompute={recompute}")
    return estimate(Problem(MODEL, load_cluster("h100:8", stack=stack), JOB), layout).memory["activations"]


def test_results_of_experts_are_not_saved() -> None:
    """8 experts of a token give 8 rows of D elements in bf16 in each of the layers."""
    results = 4096 * MODEL.experts_per_token * MODEL.d_model * 2 * MODEL.num_layers
    assert activations("automodel", "none") - activations("torchtitan", "none") == pytest.approx(results)


def test_selective_recompute_saves_no_product_of_experts() -> None:
    block = unit_program(MODEL.structure, "block")
    saves = get_recompute_policy("alternate").may_save(block)
    saved = {name for operation in block.operations for name in operation.outputs if saves(name)}
    assert saved == {"q_flat", "v", "attended", "lse", "router_logits", "received", "returned"}
    dense = unit_program(load_model("llama-3-8b").structure, "block")
    keeps = get_recompute_policy("alternate").may_save(dense)
    products = [operation.outputs[0] for operation in dense.operations if operation.kind == "contract"]
    assert [name for name in products if keeps(name)] == products[::2]
