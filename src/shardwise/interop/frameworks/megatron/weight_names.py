"""Tensor names of Megatron-Core's GPTModel, which models it computes, and the names of files in its checkpoint folders.

Source: Megatron-LM at d98e8a64 (2026-08-22, Megatron-Core 0.20.0), the state dicts of the models that it builds on a CPU, and
models/gpt/gpt_layer_specs.py for the names under Transformer Engine, whose norms are fused into the linear layer that follows.
Queries, keys and values of a group lie together (attention.py, get_query_key_value_tensors), a gate before what it gates
(mlp.py, glu), and rotated pairs of latent attention side by side (rope_utils.py, mla_rotary_interleaved).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from shardwise.interop.frameworks.weight_table import (
    ROTARY_FIELDS,
    ModelCondition,
    SupportedModels,
    TensorPattern,
    WeightTable,
    rotary_scaling,
)
from shardwise.model import Architecture
from shardwise.model.numerics import SIGMOID
from shardwise.values import FileMessages, parse_digits, raise_problems, read_text, short_repr

TITLE = "GPTModel of Megatron-Core"


def require_supported(architecture: Architecture) -> None:
    """Raise `InputError` with the reasons if GPTModel does not compute a model."""
    problems = MEGATRON_MODELS.problems(architecture)
    raise_problems([f"model {architecture.name}: {TITLE}: {problem}" for problem in problems])


def default_biases(has_experts: bool, has_dense: bool) -> tuple[str, ...]:
    """Return the projections that have a bias by default: all that the model has (add_bias_linear)."""
    mlp = ("mlp",) if has_dense or not has_experts else ()
    return ("qkv", "attention_out", *mlp, *(("router", "experts") if has_experts else ()))


def _all_biases(architecture: Architecture) -> set[str]:
    return set(default_biases(architecture.num_experts > 0, architecture.num_dense_layers > 0))


MEGATRON_MODELS = SupportedModels(
    any_of=frozenset(
        {"tied_embeddings", "qk_norm", "sinks", "shared_gate", "sliding_window", "global_every", "num_experts",
         "experts_per_token", "shared_expert_width", "num_dense_layers", "dense_d_ff", "q_lora_rank", "kv_lora_rank",
         "rope_head_dim", "v_head_dim", "numerics.normalised_gates", "numerics.rotary.part", "bias", "norm_bias",
         *(f"numerics.gating.{name}" for name in ("scores", "scale", "groups", "chosen_groups", "votes"))}
    ) | ROTARY_FIELDS,
    values={
        "mlp": ("swiglu", "gelu", "clamped_swiglu"), "norm": ("rms", "layer"), "positions": ("rotary", "learned", "none"),
        "numerics.norm_offset": (0.0, 1.0),  # --apply-layernorm-1p
        # Its modules read the hidden state behind the final norm (transformer_block.py), those of DeepSeek-V3 the one before it.
        "num_predict_layers": (0,),
    },
    conditions=(
        ModelCondition(
            lambda architecture: architecture.norm_bias == (architecture.norm == "layer"),
            "norms have a bias where they are of kind layer, and none where they are of kind rms; that is required",
        ),
        ModelCondition(
            lambda architecture: set(architecture.bias) in ({*()}, {"qkv"}, _all_biases(architecture)),
            "projections have biases, but not all of them; none, those of queries, keys and values alone, or all are required",
        ),
        ModelCondition(
            lambda architecture: rotary_scaling(architecture) != "llama3" or _llama3_constants(architecture) == (1.0, 4.0, 8192),
            "frequencies are scaled with other constants than low = 1, high = 4 and 8192 positions, which it has in its code",
        ),
        ModelCondition(
            lambda architecture: architecture.numerics.rotary.part == 1.0 or not architecture.kv_lora_rank,
            "latent attention turns a part of its rotary dims; all of them are required",
        ),
        ModelCondition(
            lambda architecture: architecture.numerics.rotary.width(architecture.head_dim) % 2 == 0,
            "the part of each head that turns has an odd number of dims; an even one is required",
        ),
        ModelCondition(
            lambda architecture: not architecture.num_experts or _divides_gates(architecture),
            "gates are divided by their sum where a token takes one expert, or are not where it takes several by their sigmoids; "
            "the other way round is required",
        ),
        ModelCondition(
            lambda architecture: architecture.numerics.gating.groups == 1
            or _group_votes(architecture) == architecture.numerics.gating.votes,
            "groups of experts are chosen by other than experts_per_token / chosen_groups of their scores, which is required",
        ),
    ),
)  # fmt: skip


def _divides_gates(architecture: Architecture) -> bool:
    """Return whether gates are divided by their sum as in its router (moe_utils.py, topk_routing_with_score_function)."""
    takes_several, divided = architecture.experts_per_token > 1, architecture.numerics.normalised_gates
    return divided == takes_several if architecture.numerics.gating.scores == SIGMOID else takes_several or not divided


def _group_votes(architecture: Architecture) -> int:
    """Return how many of a group's scores count (moe_utils.py, group_limited_topk)."""
    return architecture.experts_per_token // architecture.numerics.gating.chosen_groups


def _llama3_constants(architecture: Architecture) -> tuple[float, float, int]:
    rotary = architecture.numerics.rotary
    return rotary.low, rotary.high, rotary.original_positions


STACKED = TensorPattern("decoder.layers.", "{layer}")  # a distributed checkpoint stacks layers of one kind
NUMBERED = TensorPattern("decoder.layers.{layer}.")
_ENDS = {
    "embedding": TensorPattern("embedding.word_embeddings.weight", "[V]+Z, D"),
    "position_embedding": TensorPattern("embedding.position_embeddings.weight", "P, D"),
    "final_norm.weight": TensorPattern("decoder.final_layernorm.weight", "D"),
    "final_norm.bias": TensorPattern("decoder.final_layernorm.bias", "D"),
    "head": TensorPattern("output_layer.weight", "[V]+Z, D"),
}
_ATTENTION = {
    "wq": TensorPattern("self_attention.linear_qkv.weight", "K [GH]+H+H, D"),
    "wk": TensorPattern("self_attention.linear_qkv.weight", "K GH+[H]+H, D"),
    "wv": TensorPattern("self_attention.linear_qkv.weight", "K GH+H+[H], D"),
    "q_flat.bias": TensorPattern("self_attention.linear_qkv.bias", "K [GH]+H+H"),
    "k_flat.bias": TensorPattern("self_attention.linear_qkv.bias", "K GH+[H]+H"),
    "v.bias": TensorPattern("self_attention.linear_qkv.bias", "K GH+H+[H]"),
    "wo": TensorPattern("self_attention.linear_proj.weight", "D, K G H"),
    "attention_out.bias": TensorPattern("self_attention.linear_proj.bias", "D"),
    "q_norm.weight": TensorPattern("self_attention.q_layernorm.weight", "H"),
    "k_norm.weight": TensorPattern("self_attention.k_layernorm.weight", "H"),
    "sinks": TensorPattern("self_attention.core_attention.softmax_offset", "K G"),
}
_LATENT = {
    "w_q_down": TensorPattern("self_attention.linear_q_down_proj.weight", "Q, D"),
    "w_q_plain": TensorPattern("self_attention.linear_q_up_proj.weight", "K G [I]+R, Q"),
    "w_q_rotary": TensorPattern("self_attention.linear_q_up_proj.weight", "K G I+[R~], Q"),
    "w_kv_down": TensorPattern("self_attention.linear_kv_down_proj.weight", "[C]+R, D"),
    "w_k_rotary": TensorPattern("self_attention.linear_kv_down_proj.weight", "C+[R~], D"),
    "w_k_up": TensorPattern("self_attention.linear_kv_up_proj.weight", "K [I]+U, C"),
    "w_v_up": TensorPattern("self_attention.linear_kv_up_proj.weight", "K I+[U], C"),
    "wo": TensorPattern("self_attention.linear_proj.weight", "D, K G U"),
}
_DIRECT = {
    "w_q_plain": TensorPattern("self_attention.linear_q_proj.weight", "K G [I]+R, D"),
    "w_q_rotary": TensorPattern("self_attention.linear_q_proj.weight", "K G I+[R~], D"),
}
_ROUTER = {
    "router": TensorPattern("mlp.router.weight", "E, D"),
    "router_logits.bias": TensorPattern("mlp.router.bias", "E"),
    "shared_expert_gate": TensorPattern("mlp.shared_experts.gate_weight", "1, D"),
}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Tensor names of experts: a prefix and a suffix, and what stands before the dims of each pattern."""

    prefix: str
    dims: str = ""
    suffix: str = ""

    def tensor_of(self, module: str, weight: str, dims: str) -> TensorPattern:
        """Return the pattern of a weight in a module of the experts."""
        return TensorPattern(f"{self.prefix}{module}.{weight}{self.suffix}", f"{self.dims}{dims}")


DISTRIBUTED_EXPERTS = ExpertNames("mlp.experts.experts.", "{expert}, ")  # of a distributed checkpoint
GROUPED_EXPERTS = ExpertNames("mlp.experts.", suffix="{expert}")  # TEGroupedMLP
SEQUENTIAL_EXPERTS = ExpertNames("mlp.experts.local_experts.{expert}.")  # SequentialMLP
DENSE_MLP = ExpertNames("mlp.")
SHARED_EXPERTS = ExpertNames("mlp.shared_experts.")


def _mlp_patterns(
    kind: ExpertNames, weights: Mapping[str, str], width: str, *, gated: bool
) -> dict[str, TensorPattern]:
    """Return the patterns of an MLP by our names; `width` is its hidden dim, and a gate lies before what it gates."""
    gate, up = (f"[{width}]+{width}", f"{width}+[{width}]") if gated else ("", width)
    patterns = {
        "up": kind.tensor_of("linear_fc1", "weight", f"{up}, D"), "down": kind.tensor_of("linear_fc2", "weight", f"D, {width}"),
        "up.bias": kind.tensor_of("linear_fc1", "bias", up), "down.bias": kind.tensor_of("linear_fc2", "bias", "D"),
    }  # fmt: skip
    if gated:
        patterns["gate"] = kind.tensor_of("linear_fc1", "weight", f"{gate}, D")
        patterns["gate.bias"] = kind.tensor_of("linear_fc1", "bias", gate)
    return {weights[name]: pattern for name, pattern in patterns.items() if name in weights}


_DENSE_MLP = {"gate": "w_gate", "up": "w_up", "down": "w_down", "gate.bias": "gate.bias", "up.bias": "up.bias",
              "down.bias": "mlp_out.bias"}  # fmt: skip
_ROUTED_MLP = {name: f"experts_{name}" for name in ("gate", "up", "down", "gate.bias", "up.bias", "down.bias")}
_SHARED_MLP = {"gate": "shared_gate", "up": "shared_up", "down": "shared_down"}


class NormNames(NamedTuple):
    """Prefixes of the names of norms: of a layer, of its MLP, and of an MLP with experts."""

    layer: str
    mlp: str
    routed: str


FUSED_NORMS = NormNames("self_attention.linear_qkv.layer_norm_", "mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
FUSED_LATENT_NORMS = FUSED_NORMS._replace(layer="input_layernorm.")
SEPARATE_NORMS = NormNames("input_layernorm.", "pre_mlp_layernorm.", "pre_mlp_layernorm.")
# sharded_state_dict_keys_map of Megatron-Core's own modules.
RENAMED_NORMS = FUSED_NORMS._replace(routed=FUSED_NORMS.mlp)
FUSED_LATENT_NAMES = (
    "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.linear_kv_up_proj.layer_norm_weight",
)
SEPARATE_LATENT_NAMES = ("self_attention.q_layernorm.weight", "self_attention.kv_layernorm.weight")


class ModuleNames(NamedTuple):
    """Names of norms in layers without and with latent attention, of the norms of latents, and of experts."""

    norms: NormNames
    latent_norms: NormNames
    latents: tuple[str, str]
    experts: ExpertNames


# Names in a distributed checkpoint: those of Transformer Engine, and those that Megatron-Core's own modules ask for.
DISTRIBUTED_NAMES = (
    ModuleNames(FUSED_NORMS, FUSED_LATENT_NORMS, FUSED_LATENT_NAMES, DISTRIBUTED_EXPERTS),
    ModuleNames(RENAMED_NORMS, SEPARATE_NORMS, SEPARATE_LATENT_NAMES, DISTRIBUTED_EXPERTS),
)  # fmt: skip
# Names in a rank's file, by --transformer-impl.
RANK_NAMES: Mapping[str, ModuleNames] = {
    "transformer_engine": ModuleNames(FUSED_NORMS, FUSED_LATENT_NORMS, FUSED_LATENT_NAMES, GROUPED_EXPERTS),
    "local": ModuleNames(SEPARATE_NORMS, SEPARATE_NORMS, SEPARATE_LATENT_NAMES, SEQUENTIAL_EXPERTS),
}


def megatron_weight_table(architecture: Architecture, names: ModuleNames, layer: TensorPattern) -> WeightTable:
    """Return the names of a model's weights. Raises `InputError` if GPTModel does not compute it."""
    require_supported(architecture)
    latent, gated = architecture.kv_lora_rank > 0, architecture.structure.has_gated_mlp
    norms = names.latent_norms if latent else names.norms
    latents = zip(("q", "kv"), names.latents, "QC", strict=True)
    block = {
        **_ATTENTION, **(_LATENT if latent else {}), **_ROUTER, **_norm_patterns("attention_norm", norms.layer),
        **_norm_patterns("mlp_norm", norms.mlp),
        **{f"{ours}_latent_norm.weight": TensorPattern(name, dim) for ours, name, dim in latents},
        **_mlp_patterns(DENSE_MLP, _DENSE_MLP, "F", gated=gated), **_mlp_patterns(names.experts, _ROUTED_MLP, "M", gated=gated),
        **_mlp_patterns(SHARED_EXPERTS, _SHARED_MLP, "S", gated=gated),
    }  # fmt: skip
    moves = architecture.numerics.gating.scores == SIGMOID  # routers that score by softmax have no bias (TopKRouter)
    return WeightTable(
        title=TITLE, ends=_ENDS, block=block, routed=_norm_patterns("mlp_norm", norms.routed), direct=_DIRECT, layer=layer,
        balance_bias=TensorPattern("mlp.router.expert_bias", "E") if moves else None,
    )  # fmt: skip


def _norm_patterns(norm: str, prefix: str) -> dict[str, TensorPattern]:
    return {f"{norm}.{weight}": TensorPattern(f"{prefix}{weight}", "D") for weight in ("weight", "bias")}


TRACKER_FILE, RELEASE_FOLDER = "latest_checkpointed_iteration.txt", "release"
EMBEDDING = "embedding.word_embeddings.weight"
EXTRA_STATE = "_extra_state"
MAX_TRACKER_BYTES, MAX_ITERATION_DIGITS = 1_000, 18
SIGMOID_FIX = "routers that score by sigmoid, of which it keeps the biases,"


def tracked_folder(folder: Path) -> Path:
    """Return the folder of the checkpoint that a tracker names, or the folder itself if it has no tracker."""
    tracker = folder / TRACKER_FILE
    if not tracker.exists():
        return folder
    messages = FileMessages("model: ", f"the number of an iteration, or {RELEASE_FOLDER!r}, is required")
    named = read_text(tracker, messages, MAX_TRACKER_BYTES).strip()
    iteration = parse_digits(named, MAX_ITERATION_DIGITS)
    if iteration is None and named != RELEASE_FOLDER:
        raise messages.fail(f"{tracker}: found {short_repr(named)}")
    return folder / (RELEASE_FOLDER if iteration is None else f"iter_{iteration:07d}")
