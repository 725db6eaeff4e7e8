"""Models whose layers read weights, keys or streams of other layers: their training cases, and a prompt served with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.derive.inference_unit import INSTANCE_AXES, InferenceScheme, derive_inference_unit
from shardwise.model import Architecture, borrowed_weights
from shardwise.model.layer_pattern import FrozenFields
from shardwise.run.numpy.inference import ServedModel, lay_out_tokens
from shardwise.sharding import Mesh

from .training_step import Case

VOCAB_SIZE = 64
PROMPT_TOKENS = 6
PAGE_TOKENS = 16
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "fsdp": {"fsdp": 2, "zero_stage": 3, "recompute": "full", "num_micro_batches": 2},
    "zero_2": {"dp": 2, "fsdp": 2, "zero_stage": 2},
    "tp": {"tp_kv": 2, "tp_rep": 2},
    "replicated_keys": {"tp_rep": 2},
    "sequence_parallel": {"tp_kv": 2, "sequence_parallel": True, "recompute": "selective"},
    "sequence_parallel_4": {"tp_kv": 2, "tp_rep": 2, "sequence_parallel": True, "recompute": "selective"},
    "ring": {"cp": 2, "cp_variant": "ring", "recompute": "full"},
    "ulysses": {"cp": 2, "cp_variant": "ulysses", "zero_stage": 2},
    "all": {
        "dp": 2, "fsdp": 2, "cp": 2, "tp_kv": 2, "zero_stage": 3, "cp_variant": "ring", "sequence_parallel": True,
        "recompute": "selective",
    },
}  # fmt: skip


@dataclass(frozen=True)
class LinkedModel:
    """A structure: its fields in training cases and in served models, the sizes of the cases and the spread of weights."""

    fields: Mapping[str, Any]
    served_fields: Mapping[str, Any]
    sizes: Mapping[str, Any]
    seed: int
    weight_spread: float

    def case(self, layout: str, **fields: Any) -> Case:
        """Return a training step in a layout, with some fields changed."""
        structure = tuple({**self.fields, **fields}.items())
        sizes = {"half_head_dim": 2, "positions": 4, "num_micro_batches": 1, **self.sizes, **LAYOUTS[layout]}
        return Case(structure=structure, seed=self.seed, **sizes)

    def slope_case(self, **fields: Any) -> Case:
        """Return a step of so few elements that the slope along each weight can be taken."""
        sizes = {"width": 6, "hidden": 4, "positions": 5, "half_head_dim": 2, "num_micro_batches": 1, "seed": 1}
        structure = tuple({**self.fields, **fields}.items())
        return Case(**{**sizes, "num_layers": self.sizes["num_layers"]}, structure=structure)

    def architecture(self, **fields: Any) -> Architecture:
        """Return the architecture of a small model, with some fields changed."""
        sizes: dict[str, Any] = {
            "name": "small", "num_layers": self.sizes["num_layers"], "d_model": 16, "d_ff": 32, "num_heads": 4,
            "num_kv_heads": 2, "head_dim": 8, "vocab_size": VOCAB_SIZE,
        }  # fmt: skip
        return Architecture(**{**sizes, **self.served_fields, **fields})

    def serve_prompt(self, chunks: Sequence[int], tp: int, **fields: Any) -> tuple[Any, ServedModel]:
        """Return the logits after a prompt in chunks, with random weights, and the served model."""
        architecture, rng = self.architecture(**fields), np.random.default_rng(0)
        scheme = InferenceScheme(structure=architecture.structure)
        weights = _random_weights(architecture, scheme, self.weight_spread, rng)
        ids = rng.integers(VOCAB_SIZE, size=PROMPT_TOKENS).tolist()
        mesh = Mesh(tuple((axis, tp if axis == "kv_m" else 1) for axis in INSTANCE_AXES))
        served, start, logits = ServedModel(architecture, scheme, mesh, weights, 1, PAGE_TOKENS), 0, None
        for length in chunks:
            logits = served.run(lay_out_tokens([(0, ids[start : start + length], start)], 1, {0: (0, 0)}))
            start += length
        return logits, served


def _random_weights(
    architecture: Architecture, scheme: InferenceScheme, spread: float, rng: np.random.Generator
) -> dict[str, dict[str, Any]]:
    """Draw the weights of each unit; borrowed weights are those of the first layer of the unit that owns them."""
    paths = {f"layers.{i}": unit for i, unit in enumerate(architecture.layer_units)}
    first_paths = {unit: path for path, unit in reversed(paths.items())}
    weights: dict[str, dict[str, Any]] = {}
    for path, unit in {"embedding": "embedding", **paths, "head": "head"}.items():
        program, owners = derive_inference_unit(scheme, unit).program, borrowed_weights(architecture, unit)
        weights[path] = {
            name: weights[first_paths[owners[name].unit]][name] if name in owners
            else rng.normal(size=[architecture.dims[dim] for dim in program.dims(name)]) * spread
            for name in program.weights
        }  # fmt: skip
    return weights


# Zamba2 has Mamba-2 before its shared blocks, Zamba Mamba-1 with channels in groups with keys, queries and steps of their own.
MAMBA2 = {
    "kind": "mamba2", "num_heads": 8, "num_groups": 2, "head_dim": 4, "key_dim": 4, "conv_width": 3, "chunk": 2,
    "norm": "after_gate", "conv_bias": True,
}  # fmt: skip
MAMBA1 = {
    "kind": "mamba1", "num_heads": 8, "num_groups": 2, "key_dim": 4, "gate_rank": 4, "conv_width": 3, "norm": "none",
    "conv_bias": True,
}  # fmt: skip
BLOCK: dict[str, Any] = {
    "mixer": "attention", "feed_forward": "mlp", "shared_block": True, "adapted_parts": "attention_and_mlp",
}  # fmt: skip
BLOCK_KINDS: dict[str, dict[str, Any]] = {
    "first": BLOCK, "second": BLOCK, "first_again": {**BLOCK, "weights_of": "first"},
    "second_again": {**BLOCK, "weights_of": "second"},
}  # fmt: skip
BLOCK_FIELDS: dict[str, Any] = {
    "mlp": "geglu", "mixer": "none", "feed_forward": "none", "recurrence": FrozenFields(MAMBA2), "carried_embedding": True,
    "adapter_rank": 4, "layer_kinds": FrozenFields(BLOCK_KINDS),
    "layer_pattern": ("block", "first", "first_again", "second", "second_again"),
}  # fmt: skip
KEY_KINDS: dict[str, dict[str, Any]] = {"store": {"key_sharing": "store"}, "reuse": {"key_sharing": "reuse"}}
KEY_PATTERN = ("block", "store", "reuse", "reuse")
KEY_FIELDS: dict[str, Any] = {
    "layer_input_dim": 8, "layer_input_rows": 8, "mlp": "geglu", "post_norms": True, "qk_norm": True, "value_norm": True,
    "layer_kinds": FrozenFields(KEY_KINDS), "layer_pattern": KEY_PATTERN,
}  # fmt: skip
SERVED_KEY_FIELDS: dict[str, Any] = {"layer_kinds": KEY_KINDS, "layer_pattern": KEY_PATTERN, "layer_input_dim": 8}
STREAM_FIELDS: dict[str, Any] = {
    "num_streams": 4, "alternating_streams": True, "laurel_rank": 2, "sparse_activation": True,
}  # fmt: skip

SHARED_BLOCKS = LinkedModel(
    fields=BLOCK_FIELDS, served_fields=BLOCK_FIELDS, seed=1, weight_spread=0.25,
    sizes={"hidden": 8, "num_layers": 5, "kv_heads_per_rank": 1, "weight_spread": 0.25},
)  # fmt: skip
SHARED_KEYS = LinkedModel(
    fields=KEY_FIELDS, served_fields=SERVED_KEY_FIELDS, seed=2, weight_spread=0.5,
    sizes={"hidden": 4, "num_layers": 4, "kv_heads_per_rank": 2},
)  # fmt: skip
# With so many gates that some are above the cutoff.
STREAMS = LinkedModel(
    fields={**KEY_FIELDS, **STREAM_FIELDS}, served_fields={**SERVED_KEY_FIELDS, **STREAM_FIELDS}, seed=3, weight_spread=0.5,
    sizes={"hidden": 16, "num_layers": 4, "kv_heads_per_rank": 2},
)  # fmt: skip
MODELS: Mapping[str, LinkedModel] = {"shared blocks": SHARED_BLOCKS, "shared keys": SHARED_KEYS, "streams": STREAMS}
