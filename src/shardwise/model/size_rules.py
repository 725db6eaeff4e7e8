"""Rules for sizes and parts of an architecture that depend on one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from shardwise.model.adapters import ALL_LINEAR, LORA_TARGETS, USUAL_TARGETS
from shardwise.model.carried_tensors import carried_problems, carried_sources
from shardwise.model.layer_pattern import pattern_problems
from shardwise.model.shared_blocks import owner_problems, shared_block_problems
from shardwise.model.structure import ACTIVATION_WEIGHTS, IS_GATED
from shardwise.values import InputError

Architecture = Any  # `model.architecture` imports this module


def combination_problems(model: Architecture) -> Iterator[str]:
    """Yield what is wrong with sizes that depend on one another."""
    if model.num_dense_layers and not (model.num_experts and model.dense_d_ff):
        yield "num_dense_layers lead a model with experts and have a width: num_experts and dense_d_ff are required"
    if model.num_dense_layers >= model.num_layers:
        yield f"num_dense_layers = {model.num_dense_layers} of num_layers = {model.num_layers}; fewer are required"
    latent = (model.kv_lora_rank, model.rope_head_dim, model.v_head_dim)
    if any((*latent[:2], model.q_lora_rank)) and not all(latent) and not model.shared_keys:
        yield "latent attention has kv_lora_rank, rope_head_dim and v_head_dim; all three are required"
    elif model.kv_lora_rank and not (model.num_heads == model.num_kv_heads and model.rope_head_dim < model.head_dim):
        yield (
            f"latent attention makes a key for each of num_heads = {model.num_heads} heads, of which rope_head_dim = "
            f"{model.rope_head_dim} is a part; num_kv_heads = {model.num_heads} and a larger head_dim are required"
        )
    elif model.kv_lora_rank and model.qk_norm:
        yield "latent attention with qk_norm is not known here; qk_norm = false is required"
    if model.embedding_norm and model.num_predict_layers:
        yield "multi-token prediction behind a normalised embedding is not known here; num_predict_layers = 0 is required"
    if bool(model.lora_rank) != bool(model.lora_targets):
        yield (
            f"adapters have a rank and matrices, found lora_rank = {model.lora_rank} and lora_targets = "
            f"{', '.join(model.lora_targets) or 'none'}; both are required, of {', '.join(LORA_TARGETS)} one or more, "
            "or neither"
        )
    yield from _unknown_adapters(model, model.lora_targets)
    if not model.has_mixer and model.feed_forward == "none":
        yield "a layer without mixer and without feed_forward does nothing; one of the two is required"
    if not (model.has_mixer and model.feed_forward != "none") and model.parallel:
        yield "parallel blocks have a mixer and a feed_forward; parallel = false is required"
    if model.feed_forward == "none" and (model.num_experts or model.shared_expert_width):
        yield "experts are a feed_forward, found none; num_experts = 0 and shared_expert_width = 0 are required"
    if model.expert_latent_dim and not model.num_experts:
        yield "expert_latent_dim is a width of experts, and there are none; expert_latent_dim = 0 is required"
    has_both = model.num_experts and model.dense_d_ff and not model.shared_expert_width and not model.parallel
    if model.feed_forward == "mlp_and_experts" and not has_both:
        yield (
            f"mlp_and_experts has num_experts and an MLP of width dense_d_ff, found {model.num_experts} and "
            f"{model.dense_d_ff}; both are required, without shared_expert_width and parallel"
        )
    if model.expert_scales and not model.num_experts:
        yield "expert_scales are of experts, and there are none; expert_scales = false is required"
    if model.kv_lora_rank and (model.values_from_keys or model.value_norm):
        yield "latent attention has values of its own; values_from_keys = false and value_norm = false are required"
    yield from carried_problems(model)
    yield from _part_problems(model)
    yield from _indexer_problems(model)
    yield from _shared_key_problems(model)
    yield from shared_block_problems(model)


def _indexer_problems(model: Architecture) -> Iterator[str]:
    indexer = (model.index_heads, model.index_head_dim, model.index_topk)
    if model.index_block:
        if (
            not all(indexer)
            or model.index_heads != model.num_kv_heads
            or model.kv_lora_rank
            or model.mixer != "attention"
        ):
            yield (
                f"an indexer of blocks has index_head_dim and index_topk and a head for each of num_kv_heads = "
                f"{model.num_kv_heads} heads, found index_heads = {model.index_heads}; attention without latents and "
                f"index_heads = {model.num_kv_heads} are required"
            )
    elif any(indexer) and not (all(indexer) and model.q_lora_rank and model.mixer == "attention"):
        yield (
            "an indexer has index_heads, index_head_dim and index_topk and reads the latent of queries; all three and a "
            "q_lora_rank are required"
        )


def _shared_key_problems(model: Architecture) -> Iterator[str]:
    """Yield what is wrong with attention to one head of keys, with compressed keys, and with several residual streams."""
    if model.shared_keys:
        if not (model.q_lora_rank and model.output_rank) or model.kv_lora_rank or model.mixer != "attention":
            yield (
                "shared_keys have queries from a latent and an output product of each group of heads, found q_lora_rank = "
                f"{model.q_lora_rank} and output_rank = {model.output_rank}; both and attention without kv_lora_rank are required"
            )
        if model.index_topk and not model.overlapping_windows:
            yield "an indexer beside shared_keys selects keys of overlapping_windows, and there are none; both are required"
    elif model.compress_window or model.output_rank:
        yield "compress_window and output_rank are about shared_keys, and there are none; shared_keys = true is required"
    if model.overlapping_windows and not model.compress_window:
        yield "overlapping_windows have a compress_window, found 0; at least 1 is required"
    if model.hashed_experts and not model.num_experts:
        yield "hashed_experts are experts, and there are none; num_experts or hashed_experts = false is required"
    is_plain = model.has_mixer and model.feed_forward == "mlp" and not model.parallel and not model.num_predict_layers
    if model.num_streams and not is_plain:
        yield (
            "layers with several residual streams have a mixer and a feed_forward one after the other and no prediction modules "
            "behind them; parallel = false, feed_forward = mlp and num_predict_layers = 0 are required"
        )


def _part_problems(model: Architecture) -> Iterator[str]:
    """Yield fields of a part that the model lacks, each with what it is about."""
    if model.choice_bias and not model.num_experts:
        yield "choice_bias is about the choice of experts, and there are none; choice_bias = false is required"
    if model.attention_gate == "none" and (
        "attention_gate" in model.bias or model.attention_gate_function != "sigmoid"
    ):
        yield "a bias or function of attention's gate, and there is none; attention_gate = head or element is required"
    yield from _latent_and_vocabulary_problems(model)
    if model.stream_norms != "none" and (model.pre_norms or model.post_norms or model.parallel):
        yield "stream_norms are in place of other norms; pre_norms = false, post_norms = false and parallel = false are required"
    plain = not (model.kv_lora_rank or model.sinks or model.attention_gate != "none")
    if model.differential and not (plain and model.v_head_dim and model.mixer == "attention"):
        yield "differential attention has values of a width of their own, without latents, sinks, gates; v_head_dim is required"
    if model.rotary_key_norm and not model.kv_lora_rank:
        yield "rotary_key_norm is about keys from a latent, and there is none; rotary_key_norm = false is required"
    if model.values_from_keys and model.v_head_dim:
        yield "values that are keys have the width of keys; v_head_dim = 0 or values_from_keys = false is required"
    if model.window_kind != "sliding" and not model.sliding_window:
        yield "window_kind is about a window, and there is none; sliding_window, the tokens of a chunk, is required"
    yield from _alternating_stream_problems(model)
    if not model.mixed_streams and not model.num_streams:
        yield "mixed_streams is about several residual streams, and there is one; num_streams is required"
    for name in ("pre_norms", "post_norms"):
        if getattr(model, f"{name}_over") != "both" and not getattr(model, name):
            yield f"{name}_over says for what {name} are, and there are none; {name} = true is required"
    if model.num_experts and ACTIVATION_WEIGHTS.get(model.mlp):
        yield f"{model.mlp} has weights of its own, which are known for an MLP alone; num_experts = 0 is required"


def _alternating_stream_problems(model: Architecture) -> Iterator[str]:
    """Yield what is wrong with streams that predict one another, a learned residual, and gates of which the largest are kept."""
    if model.alternating_streams and (model.num_streams < 2 or not model.mixed_streams):
        yield (
            f"alternating_streams are one that layers compute and others that they predict, found num_streams = "
            f"{model.num_streams}; at least 2 are required, with mixed_streams = true"
        )
    has_halves = model.has_mixer and model.feed_forward != "none" and model.pre_norms and not model.parallel
    if model.laurel_rank and (not has_halves or (model.num_streams and not model.alternating_streams)):
        yield (
            "laurel_rank is that of a residual beside attention's, between a mixer and a feed_forward with norms before them; "
            "parallel = false, pre_norms = true and one stream or alternating_streams are required"
        )
    if model.sparse_activation and (model.feed_forward != "mlp" or model.num_experts or not IS_GATED.get(model.mlp)):
        yield "sparse_activation is about the gates of an MLP, and there are none; a gated mlp and num_experts = 0 are required"


def _latent_and_vocabulary_problems(model: Architecture) -> Iterator[str]:
    if model.raw_query_latent and not model.q_lora_rank:
        yield "raw_query_latent is about a latent of queries, and there is none; raw_query_latent = false is required"
    if model.norm_gate_rank and not (model.pre_norms and model.norm_weight):
        yield "norm_gate_rank gates norms with weights of what a half of a block reads; pre_norms = true is required"
    if model.norm_gates_over != "both" and not model.norm_gate_rank:
        yield "norm_gates_over says for what gates of norms are, and there are none; norm_gate_rank is required"
    if model.embedding_rows and (
        model.tied_embeddings or model.num_predict_layers or model.embedding_rows < model.vocab_size
    ):
        yield (
            f"embedding_rows = {model.embedding_rows:,} are of an embedding that no head shares, for vocab_size = "
            f"{model.vocab_size:,} or more; tied_embeddings = false and num_predict_layers = 0 are required"
        )


def _unknown_adapters(model: Architecture, targets: Sequence[str]) -> Iterator[str]:
    """Yield what adapters are not known: of parts with matrices of other shapes, and of parts that `all-linear` names too."""
    parts = {"one head of keys": model.shared_keys, "a shared block": model.shared_block}
    if targets and any(parts.values()):
        names = " and of ".join(name for name, is_present in parts.items() if is_present)
        yield f"adapters of {names} are not known here; lora_rank = 0 is required"
    parts = {
        "an indexer": bool(model.index_topk), "a latent of experts": bool(model.expert_latent_dim),
        "an embedding for each layer": bool(model.layer_input_dim), "streams that layers predict": model.alternating_streams,
        "a learned residual": bool(model.laurel_rank), "a gate that reads a latent": model.raw_query_latent,
        "gates of norms": bool(model.norm_gate_rank),
    }  # fmt: skip
    if ALL_LINEAR in targets and any(parts.values()):
        names = " and of ".join(name for name, is_present in parts.items() if is_present)
        yield (
            f"adapters of {names} are not known here, and all-linear names them; lora_targets of others are required, such as "
            f"{','.join(USUAL_TARGETS)}, which leave them frozen, or lora_rank = 0"
        )


def kind_problems(model: Architecture) -> list[str]:
    """Return what is wrong with kinds of layers and with their pattern."""
    problems = pattern_problems(model.layer_kinds, model.layer_pattern, model.num_layers)
    if model.layer_pattern and model.num_dense_layers:
        problems.append("num_dense_layers beside a layer_pattern; a kind of layer with num_experts = 0 is required")
    if model.layer_pattern and model.global_every:
        problems.append("global_every beside a layer_pattern; a kind with another sliding_window is required")
    problems = [f"model {model.name}: {problem}" for problem in problems]
    for kind in model.layer_kinds if not problems else ():
        try:
            # Adapters are of modules that some kind has: what a kind lacks is skipped.
            fields = {"lora_rank": 0, "lora_targets": (), **model.layer_kinds[kind]}
            layer = replace(model.base_architecture(), name=f"{model.name}, layer_kinds.{kind}", **fields)
        except InputError as error:
            problems += error.problems
            continue
        problems += [f"model {layer.name}: {problem}" for problem in _unknown_adapters(layer, model.lora_targets)]
        if layer.num_experts and not model.num_experts:
            problems.append(
                f"model {layer.name}: experts that the base layer lacks; a base layer with experts is required"
            )
        if layer.positions != model.positions and "learned" in (layer.positions, model.positions):
            problems.append(f"model {layer.name}: learned positions are all layers' or none's; the same are required")
    if not problems and any("key_sharing" in fields for fields in model.layer_kinds.values()):
        try:
            carried_sources(model)
        except ValueError as error:
            problems.append(f"model {model.name}: {error}")
    if not problems and model.layer_pattern:
        problems += [f"model {model.name}: {problem}" for problem in owner_problems(model)]
    return problems
