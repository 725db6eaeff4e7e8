"""Structure of a decoder-only transformer: what its layers consist of, without sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.model.adapters import LORA_TARGETS
from shardwise.model.carried_tensors import KeySharing
from shardwise.model.layer_pattern import BASE_LAYER
from shardwise.model.recurrent_mixers import RecurrentStructure
from shardwise.model.shared_blocks import AdaptedParts
from shardwise.values import did_you_mean, raise_problems

MixerKind = Literal["attention", "none"]  # what mixes the tokens of a layer, beside a recurrence
# What follows it: an MLP, or experts where the layer has some; or both side by side, each between norms of its own.
FeedForwardKind = Literal["mlp", "mlp_and_experts", "none"]
MlpKind = Literal[
    "swiglu", "geglu", "gelu", "relu", "relu2", "gated_relu2", "clamped_swiglu", "limited_swiglu", "xielu"
]
NormKind = Literal["rms", "layer"]
PositionKind = Literal["rotary", "learned", "none"]
NormWidth = Literal["head", "each_head", "projection"]
AttentionGate = Literal["none", "head", "element"]
GateFunction = Literal["sigmoid", "softplus"]
# The module that has the matrix of attention's gate in transformers: that of queries, or one of its own by either name.
GateModule = Literal["g_proj", "gate_proj", "q_proj"]
# Norms of the residual stream itself: of what enters each half of a block, which is also what its result is added to, or of the
# sum behind it.
StreamNorms = Literal["none", "before", "behind"]
# Keys of a window: the last ones before a query, or those of the query's own chunk of the sequence (Llama 4).
WindowKind = Literal["sliding", "chunked"]
NormedParts = Literal["both", "mixer", "feed_forward"]  # halves of a block that a norm is for
IS_GATED: Mapping[str, bool] = {
    "swiglu": True, "limited_swiglu": True, "geglu": True, "clamped_swiglu": True, "gated_relu2": True, "gelu": False,
    "relu": False,
    "relu2": False, "xielu": False,
}  # fmt: skip
# Activations with weights of their own: numbers that all of a layer's elements share (Huang et al. 2024, xIELU).
ACTIVATION_WEIGHTS: Mapping[str, tuple[str, ...]] = {"xielu": ("alpha_p", "alpha_n")}
HAS_NORM: Mapping[tuple[str, str], bool] = {
    ("both", "mixer"): True, ("both", "feed_forward"): True, ("mixer", "mixer"): True, ("mixer", "feed_forward"): False,
    ("feed_forward", "mixer"): False, ("feed_forward", "feed_forward"): True,
}  # fmt: skip
NORMS_BEFORE: Mapping[str, bool] = {"none": False, "before": True, "behind": False}
NORMS_BEHIND: Mapping[str, bool] = {"none": False, "before": False, "behind": True}
# How positions enter: by rotating queries and keys, by rows of a learned table, or not at all.
IS_ROTARY: Mapping[str, bool] = {"rotary": True, "learned": False, "none": False}
IS_LAYER_NORM: Mapping[str, bool] = {"rms": False, "layer": True}
HAS_WEIGHT_PER_HEAD: Mapping[str, bool] = {
    "head": False,
    "each_head": True,
    "projection": False,
}  # norms of queries and keys
IS_LEARNED: Mapping[str, bool] = {"rotary": False, "learned": True, "none": False}
BIAS_PROJECTIONS = (
    "qkv",
    "attention_out",
    "attention_gate",
    "mlp",
    "router",
    "experts",
    "head",
)  # projections that may have a bias


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStructure:
    """Structure of a decoder block, without its sizes: all that a derivation reads of an architecture.

    `bias` sets: which projections have one (of `BIAS_PROJECTIONS`). Norms have a weight unless `norm_weight` is false.
    `qk_norm` normalises queries and keys: each head, with weights that heads share ("head") or not ("each_head"), or the
    whole projection; `value_norm` normalises each head of values, without weights; with `values_from_keys` these are the keys
    as they leave their product. `sinks` are a learned logit for each query head that takes its share of the attention (OpenAI
    2025). `pre_norms` normalise what attention and MLP read, `post_norms` what they add to the residual stream, `inner_norms`
    what their last products read (Wang et al. 2023, BitNet), `embedding_norm` what leaves the embedding. `pre_norms_over` and
    `post_norms_over` say whether these norms are for both halves of a block or for one. `parallel` blocks feed attention and
    MLP from one norm, or from one each (`separate_norms`). `shared_gate` weights the shared expert by a sigmoid of each
    token. `latent` keys and values are made from one latent of each token, `latent_queries` likewise from one of their own.
    `predict` layers follow the others and predict further tokens. `recurrence` mixes the tokens in place of attention or
    beside it, where both results are added. `attention_gate` multiplies what attention gives by a sigmoid of each head or
    element, or by another function; its matrix is a part of `attention_gate_module`, whose adapter it shares. `separate_values`
    are of another width than keys. `window_kind`: which keys are in a window. `stream_norms` normalise the residual stream,
    `final_norm` what the head reads, which has a layer of its own
    before the logits with `head_layer`: a product, GELU and a norm. `differential` attention is the difference of two (Ye et
    al. 2024). `norm_gates` multiply what a norm of the hidden state gives by the sigmoid of a narrow MLP. With
    `raw_query_latent` queries and gates read the latent of queries before its norm as well. `rotary_key_norm` normalises the
    rotary part of keys from a latent. `choice_bias` is a frozen number that is added to the scores of each expert while
    experts are chosen (Wang et al. 2024). `indexer`: a query attends to the keys that an indexer selects, one by one or
    (`block_indexer`) in blocks, a choice for each key-value head. `latent_experts` read and write a latent of each token;
    `expert_scales` multiply what each expert gives. `lora_targets`: which modules (`model.adapters`) have low-rank adapters;
    where there are any, nothing else is trained. `streams`: the residual stream is several, which layers read, write and mix
    by weights of each token, or (`mixed_streams` false) read and write alone; of `alternating_streams` a layer computes one and
    predicts the others. `laurel` is a learned residual of low rank, and `sparse_activation` keeps the largest gates of an MLP.
    `shared_keys`: one head of keys, which are its values as well, serves all query heads, and each group of heads has an output
    product of its own; `compressed_keys` stand for windows of tokens beside it, or for `overlapping_windows`. `layer_inputs`:
    each layer reads an embedding of its own, and `key_sharing` layers store keys and values for later ones, or reuse these
    (`carried_tensors`). A `shared_block` of attention and an MLP is what the mixer reads beside the residual stream; its
    weights are those of the layer `weights_of`, and `adapted_parts` have adapters of each layer (`shared_blocks`).
    `carried_embedding`: layers read the embedding. `hashed_experts` are chosen by the token. `kinds` are the structures of the
    layers that differ from this one, by the names of their units, in the order in which the model first has them.
    """

    mixer: MixerKind = "attention"
    feed_forward: FeedForwardKind = "mlp"
    mlp: MlpKind = "swiglu"
    norm: NormKind = "rms"
    norm_weight: bool = True
    norm_bias: bool = False
    positions: PositionKind = "rotary"
    bias: frozenset[str] = frozenset()
    qk_norm: bool = False
    qk_norm_over: NormWidth = "head"
    value_norm: bool = False
    values_from_keys: bool = False
    inner_norms: bool = False
    sinks: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    pre_norms_over: NormedParts = "both"
    post_norms_over: NormedParts = "both"
    embedding_norm: bool = False
    streams: bool = False
    mixed_streams: bool = True
    alternating_streams: bool = False
    laurel: bool = False
    sparse_activation: bool = False
    parallel: bool = False
    separate_norms: bool = False
    shared_gate: bool = False
    experts: bool = False
    shared_experts: bool = False
    latent: bool = False
    latent_queries: bool = False
    shared_keys: bool = False
    compressed_keys: bool = False
    overlapping_windows: bool = False
    hashed_experts: bool = False
    expert_scales: bool = False
    indexer: bool = False
    block_indexer: bool = False
    attention_gate: AttentionGate = "none"
    attention_gate_function: GateFunction = "sigmoid"
    attention_gate_module: GateModule = "g_proj"
    separate_values: bool = False
    rotary_key_norm: bool = False
    stream_norms: StreamNorms = "none"
    window_kind: WindowKind = "sliding"
    final_norm: bool = True
    head_layer: bool = False
    differential: bool = False
    raw_query_latent: bool = False
    layer_inputs: bool = False
    key_sharing: KeySharing = "none"
    carried_embedding: bool = False
    shared_block: bool = False
    weights_of: str = ""
    adapted_parts: AdaptedParts = "none"
    norm_gates: bool = False
    norm_gates_over: NormedParts = "both"
    choice_bias: bool = False
    latent_experts: bool = False
    recurrence: RecurrentStructure | None = None
    predict: bool = False
    lora_targets: frozenset[str] = frozenset()
    kinds: tuple[tuple[str, ModelStructure], ...] = ()

    def __post_init__(self) -> None:
        allowed = {
            "mixer": MixerKind, "feed_forward": FeedForwardKind, "mlp": MlpKind, "norm": NormKind, "positions": PositionKind,
            "qk_norm_over": NormWidth, "attention_gate": AttentionGate, "attention_gate_function": GateFunction,
            "attention_gate_module": GateModule,
            "pre_norms_over": NormedParts, "post_norms_over": NormedParts, "norm_gates_over": NormedParts,
            "stream_norms": StreamNorms, "window_kind": WindowKind, "key_sharing": KeySharing, "adapted_parts": AdaptedParts,
        }  # fmt: skip
        problems = [
            f"model: {name} is {value!r}{did_you_mean(value, get_args(kind))}; one of {', '.join(get_args(kind))} is required"
            for name, kind in allowed.items()
            if (value := getattr(self, name)) not in get_args(kind)
        ]
        unknown = sorted(set(self.bias) - set(BIAS_PROJECTIONS))
        problems += [
            f"model: bias names {name!r}; one of {', '.join(BIAS_PROJECTIONS)} is required" for name in unknown
        ]
        unknown = sorted(set(self.lora_targets) - set(LORA_TARGETS))
        problems += [
            f"model: lora_targets names {name!r}{did_you_mean(name, LORA_TARGETS)}; one of {', '.join(LORA_TARGETS)} is required"
            for name in unknown
        ]
        if self.shared_gate and not self.shared_experts:
            problems.append("model: shared_gate weights a shared expert, and there is none; give a shared_expert_width")
        if self.norm_bias and not self.norm_weight:
            problems.append(
                "model: norms with a bias have a weight as well; norm_weight = true or norm_bias = false is required"
            )
        raise_problems(problems)

    @property
    def has_gated_mlp(self) -> bool:
        """True if the MLP has two input matrices (gate and up)."""
        return IS_GATED[self.mlp]

    @property
    def has_rotary(self) -> bool:
        """True if queries and keys are rotated by their positions."""
        return IS_ROTARY[self.positions]

    @property
    def has_learned_positions(self) -> bool:
        """True if positions have a table of weights."""
        return IS_LEARNED[self.positions]

    @property
    def layer_units(self) -> tuple[str, ...]:
        """The units that the model's layers are, the base layer last."""
        return (*(name for name, _ in self.kinds), BASE_LAYER)

    def unit_structure(self, unit: str) -> ModelStructure:
        """Return the structure that a unit is built from: that of its kind of layer, or of the base layer."""
        return next((structure for name, structure in self.kinds if name == unit), self)
