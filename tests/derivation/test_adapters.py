"""Low-rank adapters: what is frozen has products for its input's gradient, and nothing else of a backward pass or an update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep
from shardwise.derive.sharded_unit import ShardedUnit, derived_unit
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.layout import Layout
from shardwise.layout.rules.engine import require_runnable
from shardwise.layout.sharding_scheme import make_sharding_scheme
from shardwise.model.architecture import Architecture
from shardwise.model.huggingface.config import parse_config
from shardwise.model.job import Job
from shardwise.model.load import load_model, override_architecture
from shardwise.model.operations import Contract
from shardwise.model.parameters_and_flops import model_flops_per_token, num_params, num_trained_params
from shardwise.model.program import Role
from shardwise.price import Problem
from shardwise.price.estimate import estimate
from shardwise.price.training_run import checkpoint_bytes
from shardwise.values import get_precision
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


def products(sharded: ShardedUnit) -> list[Contract]:
    return [
        s.operation for s in sharded.backward_steps if isinstance(s, ComputeStep) and isinstance(s.operation, Contract)
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_adapters_have_gradients_and_state(layout: Layout) -> None:
    sharded = unit(QKV, layout)
    adapters = {f"w{letter}.lora_{part}" for letter in "qkv" for part in "ab"}
    assert set(sharded.trained) == set(sharded.gradients) == adapters
    assert adapters < set(sharded.weights) == set(sharded.forward.program.weights)
    weight_gradients = {
        out
        for product in products(sharded)
        for out in product.outputs
        if sharded.tensors[out].role is Role.WEIGHT_GRADIENT
    }
    assert {name.removeprefix("d.").split("#")[0] for name in weight_gradients} == adapters
    reduced = {s.tensor.name for s in sharded.update.steps if isinstance(s, CollectiveStep)}
    assert reduced <= {*sharded.gradients.values(), *(f"{name}'" for name in adapters)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_frozen_matrix_of_a_block_has_one_product_in_the_backward_pass(layout: Layout) -> None:
    taken = [name for product in products(unit(QKV, layout)) for name in product.inputs]
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


def test_parameters_and_flops_of_adapters() -> None:
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
        ({"lora_rank": 8, "lora_targets": ("qk",)}, "lora_targets names 'qk'.*; one of all-linear, qkv, attention_out, mlp"),
        ({"lora_rank": -1, "lora_targets": ("mlp",)}, "lora_rank is -1; a whole number of at least 1 is required"),
    ],
)  # fmt: skip
def test_unknown_adapters_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(LLAMA, **change)  # type: ignore[arg-type]


def test_targets_that_a_model_lacks_are_refused_with_those_that_it_has() -> None:
    with pytest.raises(InputError, match=r"no matrix of lora_targets = q_a_proj; .* q_proj, k_proj, v_proj, o_proj"):
        override_architecture(LLAMA, {"lora_rank": "8", "lora_targets": "q_a_proj"})
    latent = load_model("deepseek-v3")
    with pytest.raises(
        InputError, match=r"no matrix of lora_targets = k_proj; .* q_a_proj, q_b_proj, kv_a_proj_with_mqa"
    ):
        override_architecture(latent, {"lora_rank": "8", "lora_targets": "k_proj"})
    assert num_trained_params(replace(latent, lora_rank=8, lora_targets=("k_proj",))) == 0  # all else is frozen


def linear(rank: int, *matrices: tuple[int, int]) -> int:
    """Return the parameters of adapters of matrices, each of (inputs, outputs): A of [r, inputs], B of [outputs, r]."""
    return rank * sum(inputs + outputs for inputs, outputs in matrices)


def test_trained_parameters_follow_pefts_rule() -> None:
    """PEFT 0.21, tuners/lora/layer.py: A of [r, in], B of [out, r] of each Linear, and of each expert."""
    attention = [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)]
    mlp = [(4096, 14336), (4096, 14336), (14336, 4096)]
    assert count_trained("llama-3-8b", ("q_proj", "v_proj")) == 32 * linear(16, attention[0], attention[2])
    assert count_trained("llama-3-8b", ("all-linear",)) == 32 * linear(16, *attention, *mlp) == 41_943_040
    # experts' gate and up are one parameter, whose adapter has twice the rank
    experts = 8 * (linear(32, (4096, 2 * 14336)) + linear(16, (14336, 4096)))
    assert count_trained("mixtral-8x7b", ("experts",)) == 32 * experts
    assert count_trained("mixtral-8x7b", ("all-linear",)) == 32 * (linear(16, *attention, (4096, 8)) + experts)


def test_modules_of_latent_attention_have_one_adapter_each() -> None:
    """Widths of DeepSeek-V3's config.json: q_lora_rank 1536, kv_lora_rank 512, heads of 128 + 64, values of 128."""
    q_a, q_b = (7168, 1536), (1536, 128 * 192)
    kv_a, kv_b, out = (7168, 512 + 64), (512, 128 * (128 + 128)), (128 * 128, 7168)
    assert count_trained("deepseek-v3", ("qkv",)) == 61 * linear(16, q_a, q_b, kv_a, kv_b)
    assert count_trained("deepseek-v3", ("q_a_proj", "kv_b_proj", "o_proj")) == 61 * linear(16, q_a, kv_b, out)
    # without a latent of queries (DeepSeek-V2-Lite: 16 heads) they are q_proj
    assert count_trained("deepseek-v2-lite", ("q_proj", "k_proj")) == 27 * linear(16, (2048, 16 * 192))


def count_trained(model: str, targets: tuple[str, ...]) -> int:
    return num_trained_params(replace(load_model(model), lora_rank=16, lora_targets=targets))


@pytest.mark.parametrize(
    "layout", [Layout(fsdp=4, ep=2, zero_stage=1), Layout(fsdp=4, tp=2, ep=2, zero_stage=1)], ids=str
)
def test_adapters_of_experts_have_gradients_where_the_experts_are(layout: Layout) -> None:
    mixtral = replace(load_model("mixtral-8x7b"), lora_rank=8, lora_targets=("experts",))
    sharded = unit(mixtral, layout)
    assert set(sharded.trained) == {
        "experts_up.lora_a", "experts_up.lora_b", "experts_gate.lora_b", "experts_down.lora_a", "experts_down.lora_b",
    }  # fmt: skip
    assert all(sharded.weights[name][0] == "E" for name in sharded.trained)


# Bytes of a frozen parameter. Source: QLoRA (arXiv 2305.14314), section 3: 0.127 bits of scales with double quantization, 0.5
# without; LLM.int8() (arXiv 2208.07339): one byte.
FROZEN_BYTES = {"qlora_nf4": 0.5 + 0.127 / 8, "qlora_nf4_single": 0.5 + 0.5 / 8, "qlora_int8": 1.0, "bf16": 2.0}


@pytest.mark.parametrize("precision", FROZEN_BYTES)
@pytest.mark.parametrize("layout", [Layout(), Layout(dp=4, tp=2), Layout(fsdp=8, zero_stage=3)], ids=str)
def test_a_quantized_base_has_the_published_bytes(precision: str, layout: Layout) -> None:
    model = replace(LLAMA, lora_rank=16, lora_targets=("all-linear",))
    cluster, job = load_cluster(f"h100:{layout.num_devices}"), replace(JOB, precision=precision)
    memory = estimate(Problem(model, cluster, job), layout).memory
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    plain = num_params(LLAMA) - matrices + num_trained_params(model)
    splits = layout.tp * layout.fsdp
    expected = (matrices * FROZEN_BYTES[precision] + 2 * plain) / splits
    assert memory["parameters"] == pytest.approx(expected, rel=1e-2)  # norms and halves of adapters are whole under tp
    assert memory["optimizer"] == pytest.approx(8 * num_trained_params(model) / splits, rel=0.4)


def test_a_quantized_base_is_dequantized_for_each_product() -> None:
    """Each pass reads every frozen matrix in 4 bits and writes it in bf16, at the rate of the memory."""
    model, layout = replace(LLAMA, lora_rank=16, lora_targets=("all-linear",)), Layout()
    cluster = load_cluster("h100:1")
    plain, quantized = (
        estimate(Problem(model, cluster, replace(JOB, precision=name)), layout).time for name in ("bf16", "qlora_nf4")
    )
    matrices = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    expected_s = 16 * matrices * (2 + 0.5 + 0.127 / 8) / 3.35e12  # of sixteen micro-batches, at the chip's peak
    for phase in ("forward", "backward"):
        assert quantized[phase] - plain[phase] == pytest.approx(expected_s, rel=1e-3)


def test_the_engine_refuses_a_quantized_base() -> None:
    with pytest.raises(InputError, match=r"frozen weights in nf4_double.*not yet runnable"):
        require_runnable(QKV, Layout(), get_precision("qlora_nf4"))


HYBRID: dict[str, object] = {
    "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "head_dim": 16,
}  # fmt: skip
DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "attn_layer_indices": [1]}
# What the families' configurations of transformers 5.23 have where a config does not say.
CODE_DEFAULTS: dict[str, dict[str, object]] = {
    "qwen3_5_text": {"linear_conv_kernel_dim": 4, "tie_word_embeddings": False},
    "qwen3_next": {"linear_conv_kernel_dim": 4, "tie_word_embeddings": False},
    "olmo_hybrid": {"linear_conv_kernel_dim": 4}, "bamba": {"mamba_d_conv": 4, "mamba_chunk_size": 256},
    "recurrent_gemma": {"conv1d_width": 4, "attention_window_size": 2048, "block_types": ["recurrent", "recurrent", "attention"]},
}  # fmt: skip
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Trained parameters of adapters of rank 4 in PEFT 0.21.2's models of these configs, of all-linear and of seven modules
# (benchmarks/export_check/peft_models.py). Of Qwen3-Next with the shared experts that PEFT drops beside experts: 4 layers of
# 3 matrices of 64 x 32.
PEFT_HYBRIDS = {
    "qwen3_5_text": (DELTA, 18_368, 11_264), "qwen3_next": ({**DELTA, **EXPERTS}, 32_272 + 4_608, 24_576 + 4_608),
    "olmo_hybrid": (DELTA, 19_648, 16_384), "bamba": (MAMBA, 17_632, 11_008),
    "recurrent_gemma": ({"num_hidden_layers": 3, "lru_width": 64}, 9_472, 6_400),
}  # fmt: skip


@pytest.mark.parametrize("family", PEFT_HYBRIDS)
def test_adapters_of_hybrids_have_pefts_counts(family: str) -> None:
    fields, all_linear, seven = PEFT_HYBRIDS[family]
    model = parse_config({"model_type": family, **HYBRID, **CODE_DEFAULTS[family], **fields})
    for targets, expected in ((("all-linear",), all_linear), (SEVEN, seven)):
        assert num_trained_params(replace(model, lora_rank=4, lora_targets=targets)) == expected


# Modules of `nn.Linear` in transformers 5.23's models, of which PEFT 0.21.0 takes any as a target; of a list without any of them
# it says "Target modules {...} not found in the base model" (asked with each of the targets below, but for `out_proj`, which
# PEFT's conversion of Mamba's kernels does not take).
LINEAR_OF_MAMBA = {
    "mamba": ("in_proj", "x_proj", "dt_proj", "out_proj"), "falcon_mamba": ("in_proj", "x_proj", "dt_proj", "out_proj"),
    "mamba2": ("in_proj", "out_proj"),
}  # fmt: skip
MAMBA_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 256, "state_size": 16, "conv_kernel": 4, "expand": 2,
    "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 64, "time_step_rank": 4, "use_conv_bias": True,
    "use_bias": False, "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("family", LINEAR_OF_MAMBA)
def test_targets_of_which_a_model_has_none_are_refused(family: str) -> None:
    model = parse_config({"model_type": family, **MAMBA_SIZES})
    modules = LINEAR_OF_MAMBA[family]
    for target in (*SEVEN, "qkv", "mlp", "in_proj", "x_proj", "dt_proj", "linear_y", "in_proj_qkv"):
        settings = {"lora_rank": "4", "lora_targets": target}
        if target in modules:
            assert 0 < num_trained_params(override_architecture(model, settings)) < num_params(model)
            continue
        with pytest.raises(InputError, match=f"no matrix of lora_targets = {target}; .*") as error:
            override_architecture(model, settings)
        assert set(modules) == set(
            str(error.value).split("are required, ")[1].removesuffix(", or all-linear").split(", ")
        )
    some = override_architecture(model, {"lora_rank": "4", "lora_targets": ",".join((*SEVEN, "in_proj"))})
    single = override_architecture(model, {"lora_rank": "4", "lora_targets": "in_proj"})
    assert num_trained_params(some) == num_trained_params(single)


def test_adapters_of_one_kind_of_layer_leave_the_others_frozen() -> None:
    """PEFT 0.21 trains 4,320 parameters: A and B of rank 4 for `in_proj` of the three layers of Mamba-2, none of attention."""
    model = parse_config({"model_type": "bamba", **HYBRID, **CODE_DEFAULTS["bamba"], **MAMBA, "num_hidden_layers": 4})
    adapted = override_architecture(model, {"lora_rank": "4", "lora_targets": "in_proj"})
    assert num_trained_params(adapted) == 4_320
    attention = override_architecture(model, {"lora_rank": "4", "lora_targets": "q_proj"})
    assert num_trained_params(attention) == linear(4, (64, 64))


def test_a_part_without_known_adapters_is_frozen_or_refused() -> None:
    """An indexer's matrices have adapters under all-linear alone; other targets leave them frozen, as PEFT does."""
    model = replace(
        load_model("deepseek-v3"), name="sparse", index_heads=64, index_head_dim=128, index_topk=2048, lora_rank=16,
        lora_targets=("o_proj",),
    )  # fmt: skip
    assert num_trained_params(model) == 61 * linear(16, (128 * 128, 7168))
    with pytest.raises(
        InputError, match="an indexer are not known here, and all-linear names them; lora_targets of others"
    ):
        replace(model, lora_targets=("all-linear",))
