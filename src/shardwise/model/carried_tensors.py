"""Tensors that pass between layers beside the residual stream: the embedding, inputs of each layer made of it, and keys and
values that layers share.

A unit hands such a tensor on as a further result with the role `CARRIED`, and a later one reads it as an input of that role.
`carried_sources` says for each layer which tensor of which unit it reads: programs of whole models and engines follow it. A
carried tensor stays on the devices from its unit's forward pass until the last backward pass that reads it, so its bytes are
those of the unit that computes it.

Dims: a layers, p the width of a layer's inputs, t the rows of their table. Source: Google 2025 (Gemma 3n), Google 2026 (Gemma 4),
Zyphra 2024 (Zamba): `Gemma3nTextModel`, `Gemma4TextModel` and `ZambaModel` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from shardwise.model.operations import Lookup
from shardwise.model.program import ModelPart, ProgramBuilder, Role

Architecture = Any  # `model.architecture` imports this module
TOKENS = ("B", "T")
# Sharing of a layer's keys and values: later layers read them ("store"), or it reads those of an earlier one ("reuse").
KeySharing = Literal["none", "store", "reuse"]
CARRIED_EMBEDDING = "carried_embedding"
LAYER_INPUTS, LAYER_INPUT = "layer_inputs", "layer_input"  # those of all layers, and that of one
SHARED_KEYS, SHARED_VALUES = "reused_k", "reused_v"
LAYERS, INPUT_WIDTH, TABLE_ROWS = "a", "p", "t"
LAYER_INPUTS_DIMS = (*TOKENS, LAYERS, INPUT_WIDTH)
LAYER_INPUT_DIMS = (*TOKENS, INPUT_WIDTH)


class CarriedSource(NamedTuple):
    """A tensor that a layer reads: the layer that computes it (None: the embedding), its position among that unit's results, of
    which the hidden state is the first, and the index along its dim of layers (None: all of it is read)."""

    layer: int | None
    result: int
    layer_index: int | None = None

    @property
    def unit(self) -> int:
        """Position of the unit that computes it: the embedding, then layer after layer."""
        return 0 if self.layer is None else self.layer + 1


def carried_dims(model: Architecture) -> Mapping[str, int]:
    """Return the sizes of the dims of carried tensors, by letter."""
    if not model.layer_input_dim:
        return {}
    rows = model.layer_input_rows or model.vocab_size
    return {LAYERS: model.num_layers, INPUT_WIDTH: model.layer_input_dim, TABLE_ROWS: rows}


def has_carried_tensors(model: Architecture) -> bool:
    """Return whether any tensor passes between layers beside the residual stream."""
    return (
        model.carried_embedding
        or bool(model.layer_input_dim)
        or any(layer.key_sharing != "none" for layer in model.layer_architectures.values())
    )


def describe_carried_tensors(model: Architecture) -> str:
    """Return what passes between the layers of a model beside the residual stream, as messages say it."""
    shares_keys = any(layer.key_sharing != "none" for layer in model.layer_architectures.values())
    parts = {
        "an embedding for each layer": model.layer_input_dim, "keys and values that layers share": shares_keys,
        "the embedding that shared blocks read": model.carried_embedding,
    }  # fmt: skip
    return " and ".join(part for part, is_present in parts.items() if is_present)


def carried_sources(model: Architecture) -> tuple[Mapping[str, CarriedSource], ...]:
    """Return for each layer what it reads beside the residual stream, by the names of its inputs.

    A layer that reuses keys and values reads those of the last layer before it that stores its own, with the same heads and
    window. Raises `ValueError` where there is none.
    """
    stored: dict[tuple[Any, ...], int] = {}
    sources = []
    for number, unit in enumerate(model.layer_units):
        layer = model.unit_architecture(unit)
        reads = {}
        if layer.layer_input_dim:
            reads[LAYER_INPUT] = CarriedSource(None, 1, number)
        if layer.shared_block:
            reads[CARRIED_EMBEDDING] = CarriedSource(None, 1)
        key = (layer.sliding_window, layer.window_kind, layer.num_kv_heads, layer.head_dim)
        if layer.key_sharing == "store":
            stored[key] = number
        elif layer.key_sharing == "reuse":
            if key not in stored:
                raise ValueError(
                    f"layer {number} reuses keys and values, and no layer before it with the same window, num_kv_heads and "
                    "head_dim stores its own; key_sharing = store is required of one"
                )
            reads |= {SHARED_KEYS: CarriedSource(stored[key], 1), SHARED_VALUES: CarriedSource(stored[key], 2)}
        sources.append(reads)
    return tuple(sources)


def carried_problems(model: Architecture) -> list[str]:
    """Return what is wrong with an embedding for each layer and with keys and values that layers share."""
    problems = []
    if model.layer_input_rows and not model.layer_input_dim:
        problems.append(
            "layer_input_rows are of an embedding for each layer, and there is none; layer_input_dim is required"
        )
    shares_keys = model.key_sharing != "none"
    has_plain_keys = model.mixer == "attention" and not (
        model.kv_lora_rank or model.shared_keys or model.differential or model.index_topk
    )
    if shares_keys and not has_plain_keys:
        problems.append(
            "key_sharing is about keys and values from the hidden state, without latents, indexers and differences; "
            "key_sharing = none is required"
        )
    if model.carried_embedding and (model.layer_input_dim or model.num_streams or model.num_predict_layers):
        problems.append(
            "carried_embedding is that of one residual stream, without embeddings for each layer and modules behind the layers; "
            "layer_input_dim = 0, num_streams = 0 and num_predict_layers = 0 are required"
        )
    has_other_streams = model.num_streams and not model.alternating_streams
    if (shares_keys or model.layer_input_dim) and (model.num_predict_layers or has_other_streams or model.parallel):
        problems.append(
            "tensors beside the residual stream are known for one stream or alternating_streams, layers whose halves follow one "
            "another, and without modules behind them; num_streams = 0, parallel = false and num_predict_layers = 0 are required"
        )
    return problems


def add_layer_inputs(builder: ProgramBuilder, embedded: tuple[str, str], prefix: str, norm: Any) -> str:
    """Add the inputs of all layers [B,T,a,p]: rows of a table of their own, and a normalised product of the embedding.

    `embedded` are the token ids and the rows of the embedding; `norm(x, name)` adds a norm over p. Constant factors are those of
    the weights.
    """
    ids, x = embedded
    part = ModelPart.VOCABULARY
    table = builder.weight("layer_embedding", (TABLE_ROWS, LAYERS, INPUT_WIDTH), part=part)
    rows = builder.tensor(f"{prefix}layer_embedded", LAYER_INPUTS_DIMS, Role.RESIDUAL)
    builder.add(Lookup((table, ids), (rows,), TABLE_ROWS))
    matrix = builder.weight("layer_projection", (LAYERS, INPUT_WIDTH, "D"), part=part)
    projected = builder.contract(x, matrix, f"{prefix}layer_projected", LAYER_INPUTS_DIMS)
    normed = norm(projected, "layer_projection_norm")
    return builder.elementwise("add", [normed, rows], f"{prefix}{LAYER_INPUTS}", LAYER_INPUTS_DIMS, Role.CARRIED)
