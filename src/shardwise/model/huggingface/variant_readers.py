"""Readers of the fields and lists of families in `families/block_variants.toml`, by the name that their table gives.

Sources: the configuration and modelling code of each family in transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.model.huggingface.field_readers import (
    SIZE_READERS,
    FieldReader,
    TrackedConfig,
    read_first,
    read_optional,
)
from shardwise.model.huggingface.layer_lists import DENSE, FULL, SLIDING, SPARSE, ListReader
from shardwise.model.huggingface.towers import MLLAMA_IMAGE_LAYERS


def _read_laguna_gate(config: TrackedConfig) -> str:
    """Return what Laguna's gates are for: a head, or each of its elements."""
    gating = config.first("gating")
    return "head" if gating is None or gating is True or gating == "per-head" else "element"


def _read_doubled_kv_heads(config: TrackedConfig) -> Any:
    return 2 * read_first("num_key_value_heads")(config)


def _read_halved(key: str) -> FieldReader:
    """Read a number of heads of differential attention, which pairs them."""

    def read(config: TrackedConfig) -> Any:
        heads = read_first(key)(config)
        if not isinstance(heads, int) or heads % 2:
            raise ValueError(f"{key} is {heads!r}; an even number is required for pairs of heads")
        return heads // 2

    return read


def _read_doubled_width(config: TrackedConfig) -> Any:
    return 2 * SIZE_READERS["head_dim"](config)


def _read_halved_width(key: str) -> FieldReader:
    """Read the width of a gated MLP whose config has that of both its input matrices."""

    def read(config: TrackedConfig) -> Any:
        width = read_first(key)(config)
        if not isinstance(width, int) or width % 2:
            raise ValueError(f"{key} is {width!r}; an even number is required, half for the gate")
        return width // 2

    return read


def _read_layers_without_images(config: TrackedConfig) -> Any:
    """Return the number of layers of Llama 3.2 Vision's decoder that attend to tokens of text."""
    num_layers = read_first("num_hidden_layers")(config)
    layers = read_optional(MLLAMA_IMAGE_LAYERS, "cross_attention_layers")(config)
    if len(set(layers)) != len(layers) or not all(layer in range(num_layers) for layer in layers):
        raise ValueError(
            f"cross_attention_layers is {layers!r}; different ones of the {num_layers} layers are required"
        )
    return num_layers - len(layers)


def _read_mllama_rows(config: TrackedConfig) -> Any:
    """Return the rows of an embedding with 8 rows for images beside those of the vocabulary."""
    return read_first("vocab_size")(config) + 8


def _read_padded_rows(config: TrackedConfig) -> Any:
    rows = read_first("vocab_size")(config)
    return rows + 1 if isinstance(rows, int) else rows


def _read_half_window(config: TrackedConfig) -> Any:
    """Return the window of ModernBERT's decoder: half of its encoder's, which is on both sides."""
    window = config.first("sliding_window")
    return read_first("local_attention")(config) // 2 if window is None else window


def _read_width_of_heads(config: TrackedConfig) -> Any:
    """Return the model width of a family whose last product of attention is as wide as the model."""
    width, heads, head_dim = (SIZE_READERS[name](config) for name in ("d_model", "num_heads", "head_dim"))
    if isinstance(heads, int) and isinstance(head_dim, int) and heads * head_dim != width:
        raise ValueError(f"a width of {width} is not that of {heads} heads of {head_dim}; the same is required")
    return width


def _read_dots_shared_width(config: TrackedConfig) -> Any:
    """Return the width of Dots 3's shared experts together, which may differ from that of the others."""
    width = config.first("moe_shared_expert_intermediate_size", "shared_experts_intermediate_size")
    return read_first("n_shared_experts")(config) * width


def _read_xlstm_width(config: TrackedConfig) -> Any:
    """Return the width of xLSTM's MLP: a multiple of the model's, rounded up to a multiple of a number."""
    width = int(SIZE_READERS["d_model"](config) * read_first("ffn_proj_factor")(config))
    multiple = read_first("ffn_round_up_to_multiple_of")(config)
    return -(-width // multiple) * multiple


SLIDING_DEFAULTS = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1024, "kv_lora_rank": 1024, "head_dim": 256,
    "qk_nope_head_dim": 192, "v_head_dim": 128,
}  # fmt: skip


def _read_sliding(key: str) -> FieldReader:
    """Read a size of the layers with a window of Dots 3: of the table of each layer, or under a key of its own."""

    def read(config: TrackedConfig) -> Any:
        table = config.first("per_layer_config")
        if table is None:
            default = SLIDING_DEFAULTS.get(key)
            value = config.first(f"swa_{key}")
            if value is None and key == "qk_rope_head_dim":
                return _read_sliding("head_dim")(config) - _read_sliding("qk_nope_head_dim")(config)
            return default if value is None else value
        values = [fields.get(key, config.first(key)) for fields in table.values()]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"per_layer_config has several values of {key}; one for all layers with a window is known here"
            )
        return values[0] if values else config.first(key)

    return read


def _read_sliding_width(config: TrackedConfig) -> Any:
    return _read_sliding("qk_nope_head_dim")(config) + _read_sliding("qk_rope_head_dim")(config)


VARIANT_READERS: Mapping[str, FieldReader] = {
    "laguna_gate": _read_laguna_gate, "doubled_kv_heads": _read_doubled_kv_heads,
    "halved_heads": _read_halved("num_attention_heads"), "halved_kv_heads": _read_halved("num_key_value_heads"),
    "doubled_width": _read_doubled_width, "halved_width": _read_halved_width("ffn_dim"),
    "halved_intermediate_size": _read_halved_width("intermediate_size"), "layers_without_images": _read_layers_without_images,
    "mllama_rows": _read_mllama_rows, "width_of_heads": _read_width_of_heads,
    "xlstm_width": _read_xlstm_width, "dots_shared_width": _read_dots_shared_width,
    "padded_rows": _read_padded_rows,
    "half_window": _read_half_window, "sliding_width": _read_sliding_width, "sliding_heads": _read_sliding("num_attention_heads"),
    "sliding_query_rank": _read_sliding("q_lora_rank"), "sliding_rank": _read_sliding("kv_lora_rank"),
    "sliding_rotary_width": _read_sliding("qk_rope_head_dim"), "sliding_value_width": _read_sliding("v_head_dim"),
}  # fmt: skip


def _ernie_experts(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers have experts: every n-th between two layers."""
    first, step = read_first("moe_layer_start_index")(config), read_first("moe_layer_interval")(config)
    last = read_first("moe_layer_end_index")(config)
    last = num_layers - 1 if last == -1 else last
    return [SPARSE if first <= layer <= last and (layer + 1) % step == 0 else DENSE for layer in range(num_layers)]


def _first_dense(config: TrackedConfig, num_layers: int) -> list[str]:
    return [DENSE] + [SPARSE] * (num_layers - 1)


def _three_dense(config: TrackedConfig, num_layers: int) -> list[str]:
    return [DENSE if layer < 3 else SPARSE for layer in range(num_layers)]


def _first_and_every_sixth(config: TrackedConfig, num_layers: int) -> list[str]:
    return [FULL if layer == 0 or (layer + 1) % 6 == 0 else SLIDING for layer in range(num_layers)]


def _dots_layers(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers of Dots 3 have an indexer, and which a window and sizes of their own. Checks that these are the layers
    of the table."""
    names = {"full_attention": "indexed_attention"}
    listed = config.first("layer_types") or [
        "indexed_attention" if layer < 2 or layer % 4 == 1 else SLIDING for layer in range(num_layers)
    ]
    kinds = [names.get(kind, kind) for kind in listed]
    table = config.first("per_layer_config")
    with_window = {layer for layer, kind in enumerate(kinds) if kind == SLIDING}
    if table is not None and {int(layer) for layer in table} != with_window:
        raise ValueError("per_layer_config has other layers than those with a window; the same are required")
    return kinds


def _first_has_no_norm(config: TrackedConfig, num_layers: int) -> list[str]:
    return ["first"] + ["plain"] * (num_layers - 1)


def _first_of_n(config: TrackedConfig, num_layers: int) -> list[str]:
    n = config.first("global_attn_every_n_layers") or 3
    return [FULL if layer % n == 0 else SLIDING for layer in range(num_layers)]


def _alternating(config: TrackedConfig, num_layers: int) -> list[str]:
    return [FULL if layer % 2 == 0 else "linear_attention" for layer in range(num_layers)]


def _smollm3_positions(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers rotate queries and keys: those with a 1 in a list, or all but every n-th."""
    listed, interval = config.first("no_rope_layers"), config.first("no_rope_layer_interval") or 4
    listed = [int((layer + 1) % interval != 0) for layer in range(num_layers)] if listed is None else listed
    return ["rotary" if is_rotary else "nope" for is_rotary in listed]


def _repeated_blocks(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return the type of each layer of RecurrentGemma, whose config has a period of them."""
    period = read_optional(("recurrent", "recurrent", "attention"), "block_types")(config)
    if not isinstance(period, (list, tuple)) or not period:
        raise ValueError(f"block_types is {period!r}; a list of a period of layers is required")
    return [*(list(period) * num_layers)[:num_layers]]


def _neo_attention(config: TrackedConfig, num_layers: int) -> list[str]:
    """Return which layers of GPT-Neo see a window: its config has repeated periods of types."""
    periods = config.first("attention_types")
    periods = [[["global", "local"], num_layers // 2]] if periods is None else periods
    return [kind for kinds, times in periods for kind in list(kinds) * times]


VARIANT_LISTS: Mapping[str, ListReader] = {
    "ernie_experts": _ernie_experts, "first_dense": _first_dense, "three_dense": _three_dense,
    "dots_layers": _dots_layers, "first_has_no_norm": _first_has_no_norm, "first_of_n": _first_of_n, "alternating": _alternating,
    "smollm3_positions": _smollm3_positions, "repeated_blocks": _repeated_blocks, "neo_attention": _neo_attention,
    "first_and_every_sixth": _first_and_every_sixth,
}  # fmt: skip
