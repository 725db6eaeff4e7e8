"""Low-rank adapters: what is frozen has products for its input's gradient, and nothing else of a backward pass or an update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep
from shardwise.derive.sharded_unit import ShardedUnit, derived_unit
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.layout.sharding_scheme import make_sharding_scheme
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.load import load_model
from shardwise.model.operations import Contract
from shardwise.model.parameters_and_flops import model_flops_per_token, num_params, num_trained_params
from shardwise.model.program import Role
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.training_run import checkpoint_bytes
from shardwise.values.errors import InputError

LLAMA = load_model("llama-3-8b")
QKV = replace(LLAMA, lora_rank=8, lora_targets=("qkv",))
JOB = Job(global_batch_tokens=16 * 4096, seq_len=4096)
LAYOUTS = [
    Layout(fsdp=8, zero_stage=3), Layout(fsdp=4, tp=2, zero_stage=1, sequence_parallel=True), Layout(dp=4, tp=2),
    Layout(fsdp=8, zero_stage=2, recompute="full"),
]  # fmt: skip


def unit(architecture: Architecture, layout: Layout, name: str = "block") -> ShardedUnit:
    scheme = make_sharding_scheme(layout, architecture.structure, optimizer=JOB.optimizer, shares_amax=False)
    return derived_unit(scheme, name)


def products(found: ShardedUnit) -> list[Contract]:
    return [
        s.operation for s in found.backward_steps if isinstance(s, ComputeStep) and isinstance(s.operation, Contract)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_adapters_have_gradients_and_state(layout: Layout) -> None:
    found = unit(QKV, layout)
    adapters = {f"w{which}.lora_{part}" for which in "qkv" for part in "ab"}
    assert set(found.trained) == set(found.gradients) == adapters
    assert adapters < set(found.weights) == set(found.forward.program.weights)
    made = {out for one in products(found) for out in one.outputs if found.tensors[out].role is Role.WEIGHT_GRADIENT}
    assert {name.removeprefix("d.").split("#")[0] for name in made} == adapters
    reduced = {s.tensor.name for s in found.update.steps if isinstance(s, CollectiveStep)}
    assert reduced <= {*found.gradients.values(), *(f"{name}'" for name in adapters)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_frozen_matrix_of_a_block_has_one_product_in_the_backward_pass(layout: Layout) -> None:
    taken = [name for one in products(unit(QKV, layout)) for name in one.inputs]
    assert all(taken.count(name) == 1 for name in ("wq", "wk", "wv", "wo", "w_up", "w_gate", "w_down"))


def test_what_only_weight_gradients_read_is_not_saved() -> None:
    everything, adapters, all_adapted = (
        set(unit(model, Layout()).saved)
        for model in (LLAMA, QKV, replace(QKV, lora_targets=("qkv", "attention_out", "mlp")))
    )
    assert everything - adapters == {"v", "mlp_norm.out", "act"}  # a value is read with its adapter's part
    assert {"attention_norm.out", "wq.lora_a.out"} <= adapters
    assert {"mlp_norm.out", "act"} <= all_adapted


def test_a_frozen_embedding_has_no_backward_pass_and_the_head_hands_on_a_gradient() -> None:
    layout = Layout(fsdp=8, zero_stage=3)
    embedding, head = (unit(QKV, layout, name) for name in ("embedding", "head"))
    assert not embedding.backward_steps
    assert not embedding.update.steps
    assert not head.gradients
    assert [head.tensors[name].gradient_of for name in head.backward.program.outputs] == ["x"]


def test_parameters_and_flops() -> None:
    """Of rank 8: A of 8 x 4096 for each of q, k and v; B of 4096 x 8 for q and of 1024 x 8 for k and v."""
    adapters = 32 * (3 * 8 * 4096 + 8 * 4096 + 2 * 8 * 1024)
    assert num_trained_params(QKV) == adapters
    assert num_params(QKV) == num_params(LLAMA) + adapters
    assert num_trained_params(LLAMA) == num_params(LLAMA)
    matrices = num_params(LLAMA) - LLAMA.vocab_size * LLAMA.d_model - (2 * 32 + 1) * LLAMA.d_model
    assert model_flops_per_token(QKV, 4096) == pytest.approx(
        model_flops_per_token(LLAMA, 4096) - 2 * matrices + 6 * adapters
    )
    assert checkpoint_bytes(QKV, JOB) == 14 * adapters


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_estimate_has_weights_in_full_and_state_of_the_adapters(layout: Layout) -> None:
    cluster = load_cluster("h100:8")
    whole, adapted = (estimate(Problem(model, cluster, JOB), layout) for model in (LLAMA, QKV))
    assert adapted.memory["parameters"] == pytest.approx(whole.memory["parameters"], rel=2e-3)
    for term in ("gradients", "master", "optimizer"):
        assert adapted.memory[term] < 0.01 * whole.memory[term]
    assert adapted.time["backward"] < 0.75 * whole.time["backward"]
    assert adapted.time["optimizer"] < 0.01 * whole.time["optimizer"]
    assert adapted.mfu <= adapted.hfu < 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_rank": 8}, "lora_targets = none; both are required"),
        ({"lora_targets": ("mlp",)}, "lora_rank = 0"),
        ({"lora_rank": 8, "lora_targets": ("qk",)}, "lora_targets names 'qk'; one of qkv, attention_out, mlp is required"),
        ({"lora_rank": -1, "lora_targets": ("mlp",)}, "lora_rank is -1; a whole number of at least 1 is required"),
        ({"lora_rank": 8, "lora_targets": ("mlp",), "num_experts": 8, "experts_per_token": 2}, "adapters of experts"),
        ({"lora_rank": 8, "lora_targets": ("qkv",), "num_kv_heads": 32, "kv_lora_rank": 8, "rope_head_dim": 64,
          "v_head_dim": 64}, "adapters of latent attention"),
    ],
)  # fmt: skip
def test_adapters_that_are_not_known(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(LLAMA, **change)  # type: ignore[arg-type]
