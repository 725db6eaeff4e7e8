"""Which models Megatron-Core's GPTModel computes. Source: Megatron-LM at d98e8a64 (2026-08-22, Megatron-Core 0.20.0)."""

from __future__ import annotations

from shardwise.errors import require
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import SIGMOID
from shardwise.train.conversion.models import ROTARY, Condition, Models, scaling

TITLE = "GPTModel of Megatron-Core"


def require_computed(architecture: Architecture) -> None:
    """Raise `InputError` that says why it does not compute a model."""
    require([f"model {architecture.name}: {TITLE}: {problem}" for problem in MODELS.problems(architecture)])


def _all_biases(architecture: Architecture) -> set[str]:
    """Projections that have a bias where any but those of queries, keys and values has one (add_bias_linear)."""
    experts, dense = architecture.num_experts > 0, architecture.num_dense_layers > 0 or not architecture.num_experts
    return {"qkv", "attention_out", *(("mlp",) if dense else ()), *(("router", "experts") if experts else ())}


MODELS = Models(
    any_of=frozenset(
        {"tied_embeddings", "qk_norm", "sinks", "shared_gate", "sliding_window", "global_every", "num_experts",
         "experts_per_token", "shared_expert_width", "num_dense_layers", "dense_d_ff", "q_lora_rank", "kv_lora_rank",
         "rope_head_dim", "v_head_dim", "numerics.normalised_gates", "numerics.rotary.part", "bias", "norm_bias",
         *(f"numerics.gating.{name}" for name in ("scores", "scale", "groups", "chosen_groups", "votes"))}
    ) | ROTARY,
    values={
        "mlp": ("swiglu", "gelu", "clamped_swiglu"), "norm": ("rms", "layer"), "positions": ("rotary", "learned", "none"),
        "numerics.norm_offset": (0.0, 1.0),  # --apply-layernorm-1p
        # Its modules read the hidden state behind the final norm (transformer_block.py), those of DeepSeek-V3 the one before it.
        "num_predict_layers": (0,),
    },
    conditions=(
        Condition(
            lambda one: one.norm_bias == (one.norm == "layer"),
            "norms have a bias where they are of kind layer, and none where they are of kind rms; that is required",
        ),
        Condition(
            lambda one: set(one.bias) in ({*()}, {"qkv"}, _all_biases(one)),
            "projections have biases, but not all of them; none, those of queries, keys and values alone, or all are required",
        ),
        Condition(
            lambda one: scaling(one) != "llama3" or _llama3(one) == (1.0, 4.0, 8192),
            "frequencies are scaled with other constants than low = 1, high = 4 and 8192 positions, which it has in its code",
        ),
        Condition(
            lambda one: one.numerics.rotary.part == 1.0 or not one.kv_lora_rank,
            "latent attention turns a part of its rotary dims; all of them are required",
        ),
        Condition(
            lambda one: one.numerics.rotary.width(one.head_dim) % 2 == 0,
            "the part of each head that turns has an odd number of dims; an even one is required",
        ),
        Condition(
            lambda one: not one.num_experts or _divides(one),
            "gates are divided by their sum where a token takes one expert, or are not where it takes several by their sigmoids; "
            "the other way round is required",
        ),
        Condition(
            lambda one: one.numerics.gating.groups == 1 or _votes(one) == one.numerics.gating.votes,
            "groups of experts are chosen by other than experts_per_token / chosen_groups of their scores, which is required",
        ),
    ),
)  # fmt: skip


def _divides(one: Architecture) -> bool:
    """Whether gates are divided by their sum as its router has it (moe_utils.py, topk_routing_with_score_function)."""
    several, divided = one.experts_per_token > 1, one.numerics.normalised_gates
    return divided == several if one.numerics.gating.scores == SIGMOID else several or not divided


def _votes(one: Architecture) -> int:
    """How many of a group's scores count (moe_utils.py, group_limited_topk)."""
    return one.experts_per_token // one.numerics.gating.chosen_groups


def _llama3(architecture: Architecture) -> tuple[float, float, int]:
    rotary = architecture.numerics.rotary
    return rotary.low, rotary.high, rotary.original_positions
