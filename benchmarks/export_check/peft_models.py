"""Compare the trained parameters of adapters with those of PEFT's own models, built by transformers on the meta device.

    python -m venv peft-check && peft-check/bin/pip install torch transformers==5.23.0 peft==0.21.2
    peft-check/bin/python -P benchmarks/export_check/peft_models.py

`-P` keeps this folder, whose files have the frameworks' names, off the path. Needs `shardwise` on it. PEFT 0.21 differs from its
own rule in two models, which are compared as the rule has them: beside experts it drops dense MLPs and shared experts (it
replaces their names by those of the experts' parameters), and Mixtral's experts have other names in target lists (w1, w2, w3).
It adapts experts of the types for which it knows a conversion alone (not of Jamba, Kimi Linear, Granite 4, Qwen3.5's), and
refuses `out_proj` of Mamba, which all-linear names (Nemotron-H, Falcon-H1): these are not compared.
Prints a line for each model and target list, and exits with 1 if any differs.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.model import Architecture
from shardwise.model.huggingface.config import parse_config
from shardwise.model.parameters_and_flops import num_trained_params, require_adapters
from shardwise.values import InputError

RANK = 4
SIZES = {"num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 256, "head_dim": 16}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
          "num_experts_per_tok": 2, "first_k_dense_replace": 1, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
          "qk_nope_head_dim": 16, "v_head_dim": 16, "head_dim": 8}  # fmt: skip
HYBRID = {**SIZES, "num_hidden_layers": 4, "pad_token_id": 0}
DELTA = {"linear_num_value_heads": 8, "linear_num_key_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
MAMBA_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 256, "state_size": 16, "time_step_rank": 4, "num_heads": 8,
    "head_dim": 16, "n_groups": 1,
}  # fmt: skip
MAMBA_ALONE = ("mamba", "mamba2", "falcon_mamba")  # PEFT refuses out_proj of them, and so all-linear
# Target lists that name modules otherwise than here: LFM2's output product and MLP, experts of MiniMax and Mixtral (w1, w2, w3).
OTHER_NAMES = ("lfm2", "minimax", "mixtral")
# Models of which PEFT is asked for target lists alone: the plan refuses all-linear, which names matrices that it lacks here.
WITHOUT_ALL_LINEAR = ("deepseek_v32", "gemma3n_text", *MAMBA_ALONE)
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES, "mistral": SIZES, "qwen2": SIZES, "qwen3": SIZES, "gemma2": SIZES,
    "mixtral": {**SIZES, "num_local_experts": 4},
    "qwen3_moe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "deepseek_v3": {**SIZES, **LATENT, "q_lora_rank": 24, "n_shared_experts": 1},
    "deepseek_v2": {**SIZES, **LATENT, "q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy"},
    "qwen3_5_text": {**HYBRID, **DELTA}, "qwen3_next": {**HYBRID, **DELTA, **EXPERTS}, "olmo_hybrid": {**HYBRID, **DELTA},
    "bamba": {**HYBRID, **MAMBA, "attn_layer_indices": [1]},
    "recurrent_gemma": {**HYBRID, "num_hidden_layers": 3, "lru_width": 64},
    "lfm2": {**HYBRID, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    "minimax": {**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2,
                "layer_types": ["linear_attention", "full_attention"] * 2},
    "deepseek_v32": {**SIZES, **LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "index_n_heads": 2, "index_head_dim": 16,
                     "index_topk": 4},
    "gemma3n_text": {**HYBRID, "num_kv_shared_layers": 0, "laurel_rank": 4, "hidden_size_per_layer_input": 8,
                     "vocab_size_per_layer_input": 90, "altup_num_inputs": 2, "activation_sparsity_pattern": None,
                     "layer_types": ["full_attention"] * 4},
    **dict.fromkeys(MAMBA_ALONE, MAMBA_SIZES),
}  # fmt: skip
SEVEN = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: list[str | list[str]] = [
    "all-linear",
    SEVEN,
    ["q_proj", "v_proj"],
    ["o_proj"],
    ["q_proj", "k_proj", "v_proj", "o_proj"],
    ["in_proj"],
    ["x_proj", "dt_proj"],
]


def trained_by_peft(config: Any, targets: str | list[str]) -> int:
    """Return the parameters that PEFT trains in a model of a configuration; 0 where it refuses the targets."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    try:
        adapted = get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM"))
    except ValueError:  # no module has one of the names
        return 0
    return sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


def dropped_by_peft(architecture: Architecture, targets: tuple[str, ...]) -> int:
    """Return the parameters of adapters of dense MLPs and shared experts beside experts, if targets name these."""
    if not architecture.num_experts or targets[-1] not in ("all-linear", "down_proj"):
        return 0
    width, num_sparse = architecture.d_model, architecture.num_layers - architecture.num_dense_layers
    dense = architecture.num_dense_layers * 3 * RANK * (width + architecture.dense_d_ff)
    has_shared = bool(architecture.shared_expert_width)
    return dense + num_sparse * has_shared * 3 * RANK * (width + architecture.shared_expert_width)


def main() -> int:
    """Compare all models and target lists; return the exit status."""
    num_wrong = num_compared = 0
    for model_type, sizes in MODELS.items():
        config = AutoConfig.for_model(model_type, **sizes)
        architecture = parse_config(config.to_dict(), name=model_type)
        for targets in TARGETS:
            names = (targets,) if isinstance(targets, str) else tuple(targets)
            if (
                model_type in OTHER_NAMES
                and names != ("all-linear",)
                and (model_type == "lfm2" or names == tuple(SEVEN))
            ):
                continue
            if model_type in WITHOUT_ALL_LINEAR and names == ("all-linear",):
                continue
            try:
                adapted = replace(architecture, lora_rank=RANK, lora_targets=names)
                require_adapters(adapted)
                ours = num_trained_params(adapted)
            except InputError:
                ours = 0
            theirs = trained_by_peft(config, targets)
            theirs += dropped_by_peft(architecture, names)
            num_wrong += ours != theirs
            num_compared += 1
            print(f"{model_type:12} {' '.join(names):60} {ours:>9,} {theirs:>9,} {'' if ours == theirs else 'DIFFERS'}")
    print(f"{num_compared - num_wrong} equal, {num_wrong} different")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
