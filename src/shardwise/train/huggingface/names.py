"""Where models of `transformers` keep each weight of ours: one table, with what some families have elsewhere.

Source: the files that each family's `save_pretrained` writes; a test reads and writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.model.decoder import PREDICTS
from shardwise.train.conversion.naming import Naming, Stored

LAYER = Stored("model.layers.{layer}.")  # modules of multi-token prediction are numbered behind the layers
_ATTENTION = {
    "wq": Stored("self_attn.q_proj.weight", "K G H, D"),
    "wk": Stored("self_attn.k_proj.weight", "K H, D"),
    "wv": Stored("self_attn.v_proj.weight", "K H, D"),
    "wo": Stored("self_attn.o_proj.weight", "D, K G H"),
    "q_flat.bias": Stored("self_attn.q_proj.bias"),
    "k_flat.bias": Stored("self_attn.k_proj.bias"),
    "v.bias": Stored("self_attn.v_proj.bias"),
    "attention_out.bias": Stored("self_attn.o_proj.bias"),
    "q_norm.weight": Stored("self_attn.q_norm.weight"),
    "k_norm.weight": Stored("self_attn.k_norm.weight"),
    "attention_norm.weight": Stored("input_layernorm.weight"),
    "mlp_norm.weight": Stored("post_attention_layernorm.weight"),
}
_MLP = {
    "w_gate": Stored("mlp.gate_proj.weight", "F, D"),
    "w_up": Stored("mlp.up_proj.weight", "F, D"),
    "w_down": Stored("mlp.down_proj.weight", "D, F"),
    "gate.bias": Stored("mlp.gate_proj.bias"),
    "up.bias": Stored("mlp.up_proj.bias"),
    "mlp_out.bias": Stored("mlp.down_proj.bias"),
}
_EXPERTS = {
    "router": Stored("mlp.gate.weight", "E, D"),
    "experts_gate": Stored("mlp.experts.{expert}.gate_proj.weight", "M, D"),
    "experts_up": Stored("mlp.experts.{expert}.up_proj.weight", "M, D"),
    "experts_down": Stored("mlp.experts.{expert}.down_proj.weight", "D, M"),
    "shared_gate": Stored("mlp.shared_expert.gate_proj.weight", "S, D"),
    "shared_up": Stored("mlp.shared_expert.up_proj.weight", "S, D"),
    "shared_down": Stored("mlp.shared_expert.down_proj.weight", "D, S"),
    "shared_expert_gate": Stored("mlp.shared_expert_gate.weight", "1, D"),
}
_ENDS = {
    "embedding": Stored("model.embed_tokens.weight", "V, D"),
    "final_norm.weight": Stored("model.norm.weight"),
    "head": Stored("lm_head.weight", "V, D"),
}
# A module's own weights beside those of its block, and copies of what it borrows. Source: the files of DeepSeek-V3
# (README_WEIGHTS.md); GLM-4.5 has the same.
_PREDICT = {
    "embedding_norm.weight": Stored("enorm.weight"),
    "hidden_norm.weight": Stored("hnorm.weight"),
    "pair_projection": Stored("eh_proj.weight", "D, J"),
    "final_norm.weight": Stored("shared_head.norm.weight"),
}
_COPIES = {"embedding": Stored("embed_tokens.weight", "V, D"), "head": Stored("shared_head.head.weight", "V, D")}
_MIXTRAL = {
    "router": Stored("block_sparse_moe.gate.weight", "E, D"),
    "experts_gate": Stored("block_sparse_moe.experts.{expert}.w1.weight", "M, D"),
    "experts_up": Stored("block_sparse_moe.experts.{expert}.w3.weight", "M, D"),
    "experts_down": Stored("block_sparse_moe.experts.{expert}.w2.weight", "D, M"),
}
_SHARED_EXPERTS = {
    "shared_gate": Stored("mlp.shared_experts.gate_proj.weight", "S, D"),
    "shared_up": Stored("mlp.shared_experts.up_proj.weight", "S, D"),
    "shared_down": Stored("mlp.shared_experts.down_proj.weight", "D, S"),
}
_LATENT = {
    "w_q_down": Stored("self_attn.q_a_proj.weight", "Q, D"),
    "q_latent_norm.weight": Stored("self_attn.q_a_layernorm.weight"),
    "w_q_plain": Stored("self_attn.q_b_proj.weight", "K G [I]+R, Q"),
    "w_q_rotary": Stored("self_attn.q_b_proj.weight", "K G I+[R], Q"),
    "w_kv_down": Stored("self_attn.kv_a_proj_with_mqa.weight", "[C]+R, D"),
    "w_k_rotary": Stored("self_attn.kv_a_proj_with_mqa.weight", "C+[R], D"),
    "kv_latent_norm.weight": Stored("self_attn.kv_a_layernorm.weight"),
    "w_k_up": Stored("self_attn.kv_b_proj.weight", "K [I]+U, C"),
    "w_v_up": Stored("self_attn.kv_b_proj.weight", "K I+[U], C"),
    "wo": Stored("self_attn.o_proj.weight", "D, K G U"),
}
_DIRECT = {
    "w_q_plain": Stored("self_attn.q_proj.weight", "K G [I]+R, D"),
    "w_q_rotary": Stored("self_attn.q_proj.weight", "K G I+[R], D"),
}
_POST_NORMS = {
    "attention_post_norm.weight": Stored("post_attention_layernorm.weight"),
    "mlp_norm.weight": Stored("pre_feedforward_layernorm.weight"),
    "mlp_post_norm.weight": Stored("post_feedforward_layernorm.weight"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFamily:
    """How a family keeps its weights and spells in its config what the planner does not read.

    `elsewhere` are names in a block that the other families do not have. `layer_types`: the config lists each layer's kind.
    `experts` are the keys of their number and width, `balance_bias` the name of the bias of a router's choice ("": it has none).
    `silent` is what a config means that does not say it, `needed` what its code has whatever the config says. `side_by_side`: the
    two dims of a pair that turns (of R, in latent attention) are neighbours, and not one of either half. How it spells constants
    of its arithmetic: `FamilyRule.numerics`.
    """

    built_as: str
    elsewhere: Mapping[str, Stored] = field(default_factory=dict)
    activation: str = "hidden_act"
    layer_types: bool = False
    experts: tuple[str, str] = ("", "")
    balance_bias: str = ""
    silent: Mapping[str, Any] = field(default_factory=dict)
    needed: Mapping[str, Any] = field(default_factory=dict)
    side_by_side: bool = False

    @property
    def naming(self) -> Naming:
        """Where it keeps each weight."""
        return Naming(
            title=self.built_as, ends=_ENDS, block=self._placed({**_ATTENTION, **_MLP, **_EXPERTS, **self.elsewhere}),
            layer=LAYER, direct=self._placed(_DIRECT), module=LAYER, predict=_PREDICT, copies=dict.fromkeys(PREDICTS, _COPIES),
            balance_bias=Stored(self.balance_bias) if self.balance_bias else None,
        )  # fmt: skip

    def _placed(self, names: Mapping[str, Stored]) -> Mapping[str, Stored]:
        """The names, with the dims that turn in the family's order."""
        if not self.side_by_side:
            return names
        return {weight: Stored(stored.name, stored.layout.replace("R", "R~")) for weight, stored in names.items()}


_DEEPSEEK_EXPERTS = ("n_routed_experts", "moe_intermediate_size")
_BALANCE_BIAS = "mlp.gate.e_score_correction_bias"
_QWEN_EXPERTS = ("num_experts", "moe_intermediate_size")
FAMILIES: Mapping[str, StoredFamily] = {
    "llama": StoredFamily(built_as="LlamaForCausalLM"),
    "mistral": StoredFamily(built_as="MistralForCausalLM"),
    "qwen2": StoredFamily(built_as="Qwen2ForCausalLM"),
    "qwen3": StoredFamily(built_as="Qwen3ForCausalLM"),
    "mixtral": StoredFamily(
        built_as="MixtralForCausalLM", elsewhere=_MIXTRAL, experts=("num_local_experts", "intermediate_size")
    ),
    "qwen2_moe": StoredFamily(built_as="Qwen2MoeForCausalLM", experts=_QWEN_EXPERTS),
    "qwen3_moe": StoredFamily(built_as="Qwen3MoeForCausalLM", experts=_QWEN_EXPERTS),
    "glm4_moe": StoredFamily(
        built_as="Glm4MoeForCausalLM", elsewhere=_SHARED_EXPERTS, experts=_DEEPSEEK_EXPERTS, balance_bias=_BALANCE_BIAS
    ),
    # Pairs of a head's width that turn together lie side by side unless the config says otherwise (DeepseekV3Config), and norms
    # of latents have an epsilon of their own (DeepseekV3RMSNorm).
    "deepseek_v3": StoredFamily(
        built_as="DeepseekV3ForCausalLM", elsewhere={**_SHARED_EXPERTS, **_LATENT}, experts=_DEEPSEEK_EXPERTS,
        balance_bias=_BALANCE_BIAS, silent={"rope_interleave": True}, needed={"rms_norm_eps": 1e-6},
    ),
    "gemma": StoredFamily(built_as="GemmaForCausalLM"),
    "gemma2": StoredFamily(
        built_as="Gemma2ForCausalLM", elsewhere=_POST_NORMS, activation="hidden_activation", layer_types=True
    ),
    "gemma3_text": StoredFamily(
        built_as="Gemma3ForCausalLM", elsewhere=_POST_NORMS, activation="hidden_activation", layer_types=True
    ),
    "olmo2": StoredFamily(built_as="Olmo2ForCausalLM", elsewhere=_POST_NORMS),
}  # fmt: skip
