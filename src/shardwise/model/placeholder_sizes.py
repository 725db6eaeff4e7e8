"""An architecture of a structure with placeholder sizes: programs, which have dims by letter, are built without the others."""

from __future__ import annotations

from shardwise.model.architecture import Architecture, shared_fields
from shardwise.model.recurrent_mixers import placeholder_mixer
from shardwise.model.structure import ModelStructure


def placeholder_architecture(structure: ModelStructure) -> Architecture:
    """Return an architecture of a structure with placeholder sizes, which derivations do not read; all its layers are base
    layers."""
    return Architecture(
        name="sizeless", num_layers=2, d_model=1, d_ff=1, num_heads=1, num_kv_heads=1, head_dim=2, vocab_size=1,
        **shared_fields(structure), bias=tuple(sorted(structure.bias)), max_positions=1,
        num_experts=1 if structure.experts else 0, experts_per_token=1 if structure.experts else 0,
        shared_expert_width=int(structure.shared_experts), kv_lora_rank=int(structure.latent),
        rope_head_dim=int(structure.latent), v_head_dim=int(structure.latent or structure.separate_values),
        q_lora_rank=int(structure.latent_queries),
        num_predict_layers=int(structure.predict), index_heads=int(structure.indexer), index_head_dim=int(structure.indexer),
        index_topk=int(structure.indexer), index_block=int(structure.block_indexer),
        dense_d_ff=int(structure.feed_forward == "mlp_and_experts"), expert_latent_dim=int(structure.latent_experts),
        norm_gate_rank=int(structure.norm_gates), output_rank=int(structure.shared_keys),
        num_streams=structure.streams * (1 + structure.alternating_streams), laurel_rank=int(structure.laurel),
        compress_window=int(structure.compressed_keys), layer_input_dim=int(structure.layer_inputs),
        sliding_window=1 if structure.window_kind == "chunked" else None,
        recurrence=None if structure.recurrence is None else placeholder_mixer(structure.recurrence),
        adapter_rank=int(structure.adapted_parts != "none"), lora_rank=int(bool(structure.lora_targets)),
        lora_targets=tuple(sorted(structure.lora_targets)),
    )  # fmt: skip
