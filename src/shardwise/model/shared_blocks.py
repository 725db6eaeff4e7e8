"""Blocks of attention and an MLP that several layers share: parts with adapters of each layer, and what is required of layers.

The first layer that uses a block owns its weights, and later ones are of kinds with `weights_of`. Each layer has a product of its
own from the block's result to the residual stream, and adapters of its own: a product W x becomes W x + B A x, as in LoRA, but in
the base model. Source: Glorioso et al. 2024 (Zamba, arXiv 2405.16712; Zamba2, arXiv 2411.15242); `ZambaHybridLayer`,
`Zamba2Attention` and `Zamba2MLP` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from shardwise.model.layer_pattern import BASE_LAYER

Architecture = Any  # `model.architecture` imports this module
AdaptedParts = Literal["none", "mlp", "attention_and_mlp"]
_MLP: Mapping[str, str] = {"w_gate": "gate_up", "w_up": "gate_up"}
# Weights with an adapter of each layer, and the module that they are a part of: weights of one module share the first matrix.
ADAPTED_WEIGHTS: Mapping[str, Mapping[str, str]] = {
    "none": {}, "mlp": _MLP, "attention_and_mlp": {"wq": "q", "wk": "k", "wv": "v", **_MLP},
}  # fmt: skip


def shared_block_problems(model: Architecture) -> Iterator[str]:
    """Yield what is wrong with a block that layers share, in the layers of one kind."""
    has_parts = model.mixer == "attention" and model.feed_forward == "mlp" and model.recurrence is not None
    is_plain = not (
        model.num_experts or model.kv_lora_rank or model.shared_keys or model.differential or model.index_topk
        or model.attention_gate != "none" or model.key_sharing != "none" or model.parallel or model.post_norms
        or model.stream_norms != "none" or model.laurel_rank or model.norm_gate_rank
    )  # fmt: skip
    if model.shared_block and not (has_parts and is_plain and model.carried_embedding and model.pre_norms):
        yield (
            "a shared_block is attention to plain keys and an MLP, each behind a norm, beside a recurrence, and reads the "
            "embedding; mixer = attention, feed_forward = mlp, a recurrence, carried_embedding = true and pre_norms = true are "
            "required, without experts, latents, gates, post_norms and parallel"
        )
    if model.weights_of and not model.shared_block:
        yield f"weights_of = {model.weights_of} is about a shared_block, and there is none; shared_block = true is required"
    if model.adapted_parts != "none" and not (model.adapter_rank and model.shared_block):
        yield (
            f"adapted_parts = {model.adapted_parts} are parts of a shared_block with adapters of a rank, found adapter_rank = "
            f"{model.adapter_rank}; adapter_rank and shared_block = true are required"
        )


def owner_problems(model: Architecture) -> Iterator[str]:
    """Yield what is wrong with the kinds of layers that others take weights of: one layer each, before the others, alike."""
    units = model.layer_units
    for unit in dict.fromkeys(units):
        layer = model.unit_architecture(unit)
        if not layer.weights_of:
            continue
        if layer.weights_of not in units:
            yield f"{unit} has weights_of = {layer.weights_of!r}; one of {', '.join(dict.fromkeys(units))} is required"
            continue
        owner, count = model.unit_architecture(layer.weights_of), model.layer_counts[layer.weights_of]
        if count > 1 or units.index(layer.weights_of) > units.index(unit):
            yield (
                f"{unit} has weights_of = {layer.weights_of}, which is {count} layers, the first of them layer "
                f"{units.index(layer.weights_of)}; one layer before layer {units.index(unit)} is required"
            )
        fields = {name for name in _BLOCK_FIELDS if getattr(layer, name) != getattr(owner, name)}
        if fields:
            yield (
                f"{unit} has weights_of = {layer.weights_of}, from which it differs in {', '.join(sorted(fields))}; the same "
                "are required"
            )
    if model.carried_embedding and not any(model.unit_architecture(unit).shared_block for unit in units):
        yield (
            f"carried_embedding is read by a shared_block, and no kind of layer has one; shared_block = true of {BASE_LAYER} or "
            "of another kind is required"
        )
    if model.adapter_rank and all(model.unit_architecture(unit).adapted_parts == "none" for unit in units):
        yield "adapter_rank is that of adapted_parts, and no kind of layer has any; adapter_rank = 0 is required"


# Fields that decide what the weights of a shared block are.
_BLOCK_FIELDS = (
    "shared_block", "d_ff", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "mlp", "bias", "qk_norm", "qk_norm_over",
    "values_from_keys", "inner_norms", "sinks",
)  # fmt: skip
