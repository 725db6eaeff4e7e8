"""Where Megatron-Core's GPTModel keeps each weight, which models it computes, and the names of files in its checkpoint folders.

Source: Megatron-LM at d98e8a64 (2026-08-22, Megatron-Core 0.20.0), the state dicts of the models that it builds on a CPU, and
models/gpt/gpt_layer_specs.py for the names under Transformer Engine, whose norms are parts of the products behind them. Queries,
keys and values of a group lie together (attention.py, get_query_key_value_tensors), a gate before what it gates (mlp.py, glu),
and pairs of latent attention side by side (rope_utils.py, mla_rotary_interleaved).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwise.interop.frameworks.weight_table import ROTARY, Condition, Models, Naming, Stored, scaling
from shardwise.model.architecture import Architecture
from shardwise.model.numerics import SIGMOID
from shardwise.values.errors import require

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


STACKED = Stored(
    "decoder.layers.", "{layer}"
)  # all layers in one tensor, as a distributed checkpoint has layers of one kind
NUMBERED = Stored("decoder.layers.{layer}.")
_ENDS = {
    "embedding": Stored("embedding.word_embeddings.weight", "[V]+Z, D"),
    "position_embedding": Stored("embedding.position_embeddings.weight", "P, D"),
    "final_norm.weight": Stored("decoder.final_layernorm.weight", "D"),
    "final_norm.bias": Stored("decoder.final_layernorm.bias", "D"),
    "head": Stored("output_layer.weight", "[V]+Z, D"),
}
_ATTENTION = {
    "wq": Stored("self_attention.linear_qkv.weight", "K [GH]+H+H, D"),
    "wk": Stored("self_attention.linear_qkv.weight", "K GH+[H]+H, D"),
    "wv": Stored("self_attention.linear_qkv.weight", "K GH+H+[H], D"),
    "q_flat.bias": Stored("self_attention.linear_qkv.bias", "K [GH]+H+H"),
    "k_flat.bias": Stored("self_attention.linear_qkv.bias", "K GH+[H]+H"),
    "v.bias": Stored("self_attention.linear_qkv.bias", "K GH+H+[H]"),
    "wo": Stored("self_attention.linear_proj.weight", "D, K G H"),
    "attention_out.bias": Stored("self_attention.linear_proj.bias", "D"),
    "q_norm.weight": Stored("self_attention.q_layernorm.weight", "H"),
    "k_norm.weight": Stored("self_attention.k_layernorm.weight", "H"),
    "sinks": Stored("self_attention.core_attention.softmax_offset", "K G"),
}
_LATENT = {
    "w_q_down": Stored("self_attention.linear_q_down_proj.weight", "Q, D"),
    "w_q_plain": Stored("self_attention.linear_q_up_proj.weight", "K G [I]+R, Q"),
    "w_q_rotary": Stored("self_attention.linear_q_up_proj.weight", "K G I+[R~], Q"),
    "w_kv_down": Stored("self_attention.linear_kv_down_proj.weight", "[C]+R, D"),
    "w_k_rotary": Stored("self_attention.linear_kv_down_proj.weight", "C+[R~], D"),
    "w_k_up": Stored("self_attention.linear_kv_up_proj.weight", "K [I]+U, C"),
    "w_v_up": Stored("self_attention.linear_kv_up_proj.weight", "K I+[U], C"),
    "wo": Stored("self_attention.linear_proj.weight", "D, K G U"),
}
_DIRECT = {
    "w_q_plain": Stored("self_attention.linear_q_proj.weight", "K G [I]+R, D"),
    "w_q_rotary": Stored("self_attention.linear_q_proj.weight", "K G I+[R~], D"),
}
_ROUTER = {
    "router": Stored("mlp.router.weight", "E, D"),
    "router_logits.bias": Stored("mlp.router.bias", "E"),
    "shared_expert_gate": Stored("mlp.shared_experts.gate_weight", "1, D"),
}


@dataclass(frozen=True, slots=True)
class Experts:
    """How the tensors of experts are called, what stands before the dims of each, and what behind the name."""

    prefix: str
    layout: str = ""
    suffix: str = ""

    def stored(self, module: str, weight: str, layout: str) -> Stored:
        """A weight of a module of the experts."""
        return Stored(f"{self.prefix}{module}.{weight}{self.suffix}", f"{self.layout}{layout}")


DISTRIBUTED = Experts("mlp.experts.experts.", "{expert}, ")  # of a distributed checkpoint
GROUPED = Experts("mlp.experts.", suffix="{expert}")  # TEGroupedMLP
SEQUENTIAL = Experts("mlp.experts.local_experts.{expert}.")  # SequentialMLP
PLAIN = Experts("mlp.")
SHARED = Experts("mlp.shared_experts.")


def _mlp(kind: Experts, ours: Mapping[str, str], width: str, *, gated: bool) -> dict[str, Stored]:
    """An MLP of this width, whose gate and what it gates lie one after the other."""
    gate, up = (f"[{width}]+{width}", f"{width}+[{width}]") if gated else ("", width)
    found = {
        "up": kind.stored("linear_fc1", "weight", f"{up}, D"), "down": kind.stored("linear_fc2", "weight", f"D, {width}"),
        "up.bias": kind.stored("linear_fc1", "bias", up), "down.bias": kind.stored("linear_fc2", "bias", "D"),
    }  # fmt: skip
    if gated:
        found["gate"] = kind.stored("linear_fc1", "weight", f"{gate}, D")
        found["gate.bias"] = kind.stored("linear_fc1", "bias", gate)
    return {ours[name]: stored for name, stored in found.items() if name in ours}


_DENSE = {
    "gate": "w_gate",
    "up": "w_up",
    "down": "w_down",
    "gate.bias": "gate.bias",
    "up.bias": "up.bias",
    "down.bias": "mlp_out.bias",
}
_ROUTED = {name: f"experts_{name}" for name in ("gate", "up", "down", "gate.bias", "up.bias", "down.bias")}
_SHARED = {"gate": "shared_gate", "up": "shared_up", "down": "shared_down"}


class Norms(NamedTuple):
    """What the names of norms begin with: of a layer, of its MLP, and of an MLP with experts."""

    layer: str
    mlp: str
    routed: str


FUSED = Norms("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
FUSED_LATENT = FUSED._replace(layer="input_layernorm.")
OWN = Norms("input_layernorm.", "pre_mlp_layernorm.", "pre_mlp_layernorm.")
RENAMED = FUSED._replace(routed=FUSED.mlp)  # sharded_state_dict_keys_map of the modules of its own
FUSED_LATENTS = (
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
)
OWN_LATENTS = ("self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight")


class Implementation(NamedTuple):
    """Names of norms in layers without and with latent attention, those of the norms of latents, and of experts."""

    norms: Norms
    latent_norms: Norms
    latents: tuple[str, str]
    experts: Experts


# Of a distributed checkpoint: those of Transformer Engine, and where a model of Megatron-Core's own modules asks for others.
DISTRIBUTED_NAMES = (
    Implementation(FUSED, FUSED_LATENT, FUSED_LATENTS, DISTRIBUTED), Implementation(RENAMED, OWN, OWN_LATENTS, DISTRIBUTED),
)  # fmt: skip
# Of a rank's own file, by --transformer-impl.
RANK_NAMES: Mapping[str, Implementation] = {
    "transformer_engine": Implementation(FUSED, FUSED_LATENT, FUSED_LATENTS, GROUPED),
    "local": Implementation(OWN, OWN, OWN_LATENTS, SEQUENTIAL),
}


def naming_of(architecture: Architecture, names: Implementation, layer: Stored) -> Naming:
    """The names of a model's weights. Raises `InputError` where GPTModel computes no such model."""
    require_computed(architecture)
    latent, gated = architecture.kv_lora_rank > 0, architecture.structure.gated
    norms = names.latent_norms if latent else names.norms
    latents = zip(("q", "kv"), names.latents, "QC", strict=True)
    block = {
        **_ATTENTION, **(_LATENT if latent else {}), **_ROUTER, **_norm("attention_norm", norms.layer),
        **_norm("mlp_norm", norms.mlp), **{f"{ours}_latent_norm.weight": Stored(name, dim) for ours, name, dim in latents},
        **_mlp(PLAIN, _DENSE, "F", gated=gated), **_mlp(names.experts, _ROUTED, "M", gated=gated),
        **_mlp(SHARED, _SHARED, "S", gated=gated),
    }  # fmt: skip
    moves = architecture.numerics.gating.scores == SIGMOID  # routers that score by softmax have no bias (TopKRouter)
    return Naming(
        title=TITLE, ends=_ENDS, block=block, routed=_norm("mlp_norm", norms.routed), direct=_DIRECT, layer=layer,
        balance_bias=Stored("mlp.router.expert_bias", "E") if moves else None,
    )  # fmt: skip


def _norm(ours: str, prefix: str) -> dict[str, Stored]:
    return {f"{ours}.{weight}": Stored(f"{prefix}{weight}", "D") for weight in ("weight", "bias")}


TRACKER, RELEASE = "latest_checkpointed_iteration.txt", "release"
EMBEDDING = "embedding.word_embeddings.weight"
EXTRA = "_extra_state"
SIGMOID_FIX = "routers that score by sigmoid, of which it keeps the biases,"


def folder_of(folder: Path) -> Path:
    """Where the checkpoint lies that a folder's tracker names, or the folder itself."""
    try:
        named = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return folder
    return folder / (f"iter_{int(named):07d}" if named.isdigit() else named)
