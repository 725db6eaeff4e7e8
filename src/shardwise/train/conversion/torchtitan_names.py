"""Where torchtitan's models keep each weight, and which models its code computes.

Source: the wheel of torchtitan 0.3.0, models/common (decoder.py, attention.py, feed_forward.py, moe.py), models/llama3,
models/qwen3 and models/deepseek_v3 (model.py, mtp.py, state_dict_adapter.py). Llama 3 and DeepSeek-V3 turn pairs of places that
lie side by side (ComplexRoPE), Qwen 3 the halves of a head (CosSinRoPE).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.errors import InputError
from shardwise.model.architecture import Architecture
from shardwise.train.conversion.models import ROTARY, Condition, Models, scaled
from shardwise.train.conversion.naming import Naming, Stored

LAYER, MODULE = Stored("layers.{layer}."), Stored("mtp_layers.{module}.")
_ENDS = {
    "embedding": Stored("tok_embeddings.weight", "V, D"),
    "final_norm.weight": Stored("norm.weight"),
    "head": Stored("lm_head.weight", "V, D"),
}
_BLOCK = {
    "wq": Stored("attention.qkv_linear.wq.weight", "K G H, D"),
    "wk": Stored("attention.qkv_linear.wk.weight", "K H, D"),
    "wv": Stored("attention.qkv_linear.wv.weight", "K H, D"),
    "wo": Stored("attention.wo.weight", "D, K G H"),
    "attention_norm.weight": Stored("attention_norm.weight"),
    "mlp_norm.weight": Stored("ffn_norm.weight"),
    "w_gate": Stored("feed_forward.w1.weight", "F, D"),
    "w_down": Stored("feed_forward.w2.weight", "D, F"),
    "w_up": Stored("feed_forward.w3.weight", "F, D"),
}
_PAIRS = {
    "wq": Stored("attention.qkv_linear.wq.weight", "K G H~, D"),
    "wk": Stored("attention.qkv_linear.wk.weight", "K H~, D"),
}
_QK_NORM = {"q_norm.weight": Stored("attention.q_norm.weight"), "k_norm.weight": Stored("attention.k_norm.weight")}
_EXPERTS = {
    "router": Stored("moe.router.gate.weight", "E, D"),
    "experts_gate": Stored("moe.routed_experts.inner_experts.w1_EFD", "{expert}, M, D"),
    "experts_down": Stored("moe.routed_experts.inner_experts.w2_EDF", "{expert}, D, M"),
    "experts_up": Stored("moe.routed_experts.inner_experts.w3_EFD", "{expert}, M, D"),
    "shared_gate": Stored("moe.shared_experts.w1.weight", "S, D"),
    "shared_down": Stored("moe.shared_experts.w2.weight", "D, S"),
    "shared_up": Stored("moe.shared_experts.w3.weight", "S, D"),
}
_LATENT = {
    "w_q_down": Stored("attention.wq_a.weight", "Q, D"),
    "q_latent_norm.weight": Stored("attention.q_norm.weight"),
    "w_q_plain": Stored("attention.wq_b.weight", "K G [I]+R, Q"),
    "w_q_rotary": Stored("attention.wq_b.weight", "K G I+[R~], Q"),
    "w_kv_down": Stored("attention.wkv_a.weight", "[C]+R, D"),
    "w_k_rotary": Stored("attention.wkv_a.weight", "C+[R~], D"),
    "kv_latent_norm.weight": Stored("attention.kv_norm.weight"),
    "w_k_up": Stored("attention.wkv_b.weight", "K [I]+U, C"),
    "w_v_up": Stored("attention.wkv_b.weight", "K I+[U], C"),
    "wo": Stored("attention.wo.weight", "D, K G U"),
}
_DIRECT = {
    "w_q_plain": Stored("attention.wq.weight", "K G [I]+R, D"),
    "w_q_rotary": Stored("attention.wq.weight", "K G I+[R~], D"),
}
_PREDICT = {
    "embedding_norm.weight": Stored("enorm.weight"),
    "hidden_norm.weight": Stored("hnorm.weight"),
    "pair_projection": Stored("eh_proj.weight", "D, J"),
    "final_norm.weight": Stored("mtp_norm.weight"),
}
# A tied model's state dict has its one matrix under both names (Decoder.__init__).
_TIED = {"head": {"head": Stored("lm_head.weight", "V, D")}}


def _naming(title: str, block: Mapping[str, Stored]) -> Naming:
    return Naming(
        title=title, ends=_ENDS, block={**_BLOCK, **_EXPERTS, **block}, direct=_DIRECT, layer=LAYER, module=MODULE,
        predict=_PREDICT, copies=_TIED, balance_bias=Stored("moe.expert_bias_E", "E"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TitanModel:
    """A folder of torchtitan's models: its names, and the models that it has."""

    naming: Naming
    models: Models


_ROUTED = frozenset({"num_experts", "experts_per_token", "numerics.normalised_gates"})
_LATENTS = frozenset({"q_lora_rank", "kv_lora_rank", "rope_head_dim", "v_head_dim", "num_dense_layers", "dense_d_ff"})
_GATING = frozenset(f"numerics.gating.{name}" for name in ("scores", "scale", "groups", "chosen_groups", "votes"))
MODELS: Mapping[str, TitanModel] = {
    "llama3": TitanModel(
        _naming("llama3 of torchtitan", _PAIRS),
        Models(any_of=frozenset({"tied_embeddings"}) | ROTARY, conditions=(scaled("none", "llama3"),)),
    ),
    "qwen3": TitanModel(
        _naming("qwen3 of torchtitan", _QK_NORM),
        Models(any_of=frozenset({"tied_embeddings"}) | _ROUTED, values={"qk_norm": (True,)}),
    ),
    "deepseek_v3": TitanModel(
        _naming("deepseek_v3 of torchtitan", _LATENT),
        Models(
            any_of=_ROUTED | _LATENTS | _GATING | {"shared_expert_width"},
            values={"num_predict_layers": (0, 1)},  # its second module would read what the first one's norm gives
            conditions=(
                Condition(lambda one: one.kv_lora_rank > 0, "kv_lora_rank is 0; latent attention is required"),
                Condition(
                    lambda one: one.numerics.gating.groups == 1 or one.numerics.gating.votes == 2,
                    "groups of experts are chosen by other than their 2 best scores; 2 is required",
                ),
            ),
        ),
    ),
}  # fmt: skip


def titan_model(architecture: Architecture) -> TitanModel:
    """The naming that fits a model. Raises `InputError` with the reason against each."""
    for model in MODELS.values():
        if not any(model.models.problems(architecture)):
            return model
    raise InputError(f"model {architecture.name}: no model of torchtitan 0.3.0 computes it", *_reasons(architecture))


def _reasons(architecture: Architecture) -> Iterator[str]:
    for name, model in MODELS.items():
        first, *more = model.models.problems(architecture)
        yield f"{name}: {first}" + (f" ({len(more)} more)" if more else "")
