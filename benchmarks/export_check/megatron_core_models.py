"""GPTModel of Megatron-Core on the meta device, and how it differs from a model here: tensors, angles, scales, norms, router.

What judges of Megatron-LM and of Megatron Bridge share. One GPU is pretended; layers are Megatron-Core's own (the local spec),
since those of Transformer Engine cannot be made without it.
"""

from __future__ import annotations

import inspect
import logging
import math
import os
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from model_verdicts import compare_shapes

from shardwise.interop.frameworks.megatron.weight_names import NUMBERED, RANK_NAMES, megatron_weight_table
from shardwise.model import Architecture, num_params
from shardwise.model.parameters_and_flops import num_mtp_params
from shardwise.values import InputError

NUM_ANGLES = 64  # positions whose angles are compared
ANGLE_TOLERANCE = 2e-5  # theirs are computed in float32
SCALE_TOLERANCE = 1e-6  # an mscale is written with six decimals


def pretend_gpu() -> None:
    """Let Megatron-Core answer as on an H100, with one process; angles are computed on the CPU."""
    import torch

    logging.disable(logging.WARNING)
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    device = type("H100", (), {"major": 9, "minor": 0, "name": "NVIDIA H100 80GB HBM3"})()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda index=None: device  # type: ignore[assignment, misc]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    torch.cuda.Stream = type("Stream", (), {"__init__": lambda self, *arguments, **named: None})  # type: ignore
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1"
    )  # fmt: skip
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401 (before Transformer Engine is stubbed)
    from megatron.core.transformer import multi_latent_attention, multi_token_prediction, transformer_block  # noqa: F401
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    multi_latent_attention.HAVE_TE = False  # its own modules are imported without it
    multi_token_prediction.is_inference_column_parallel_linear = lambda linear: (
        False
    )  # which asks for Transformer Engine
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    build, known = DotProductAttention.__init__, set(inspect.signature(DotProductAttention.__init__).parameters)

    def build_without_latent_widths(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **{name: value for name, value in named.items() if name in known})

    DotProductAttention.__init__ = build_without_latent_widths


def local_layers(config: Any) -> Any:
    """Return the layers of a configuration, made of Megatron-Core's own modules."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    return get_gpt_layer_local_spec(
        None, False, config.qk_layernorm, config.multi_latent_attention, normalization=config.normalization
    )


def needs_transformer_engine(model: Architecture) -> bool:
    """Return whether the local layers lack a norm of a model: that of the latent of keys alone."""
    return model.kv_lora_rank > 0 and not model.q_lora_rank


def model_problems(model: Architecture, built: Any, lost: set[str]) -> Iterator[str]:
    """Yield how a built GPTModel differs from a model here; fields that the export names as lost may."""
    ours = num_params(model) + num_mtp_params(model)
    difference = sum(parameter.numel() for parameter in built.parameters()) - ours
    if difference:
        yield f"{difference:+,} parameters to here"
    yield from _tensor_problems(model, built)
    yield from _rotary_problems(model, built, lost)
    yield from config_problems(model, built.config, lost)


def _tensor_problems(model: Architecture, built: Any) -> Iterator[str]:
    """Yield how names and shapes differ from those of our table, of models that it has (the table has no prediction modules)."""
    from shardwise.interop.weights.stored_slices import list_slices

    try:
        table = megatron_weight_table(replace(model, num_predict_layers=0), RANK_NAMES["local"], NUMBERED)
    except InputError:
        return
    entries = list_slices(replace(model, num_predict_layers=0), table)
    theirs = {
        name: tuple(tensor.shape)
        for name, tensor in built.state_dict().items()
        if tensor is not None and not name.startswith("mtp.") and "_extra_state" not in name
    }
    buffers = {
        name for name in theirs if name.rpartition(".")[2] in ("local_tokens_per_expert", "global_tokens_per_expert")
    }
    yield from compare_shapes(
        {entry.name: tuple(entry.tensor_shape) for entry in entries if not entry.copy},
        {name: shape for name, shape in theirs.items() if name not in buffers},
    )


def _rotary_problems(model: Architecture, built: Any, lost: set[str]) -> Iterator[str]:
    """Yield how angles, their magnitude and the scale of scores differ."""
    import torch

    from shardwise.run.kernels.positions_and_masks import frequencies

    if not model.structure.has_rotary:
        return
    attention = built.decoder.layers[0].self_attention
    embedding = attention.rotary_pos_emb if model.kv_lora_rank else built.rotary_pos_emb
    angles = embedding(NUM_ANGLES)
    angles, magnitude = angles if isinstance(angles, tuple) else (angles, 1.0)
    rotary, width = model.numerics.rotary, model.rope_head_dim or model.head_dim
    ours = torch.arange(NUM_ANGLES)[:, None] * frequencies(width, rotary, torch.float64, torch.device("cpu"))
    theirs = angles[:, 0, 0, : ours.shape[1]].double()
    if not lost & {f"numerics.rotary.{name}" for name in ("factor", "rounded", "ramp", "high", "low", "base")}:
        if theirs.shape != ours.shape or not torch.allclose(theirs, ours, rtol=ANGLE_TOLERANCE, atol=ANGLE_TOLERANCE):
            yield "other rotary angles"
        if not math.isclose(float(magnitude), rotary.amplitude, rel_tol=SCALE_TOLERANCE):
            yield f"rotary magnitude {float(magnitude)} for {rotary.amplitude}"
    scale = model.numerics.attention_scale or model.head_dim**-0.5
    theirs_scale = attention.softmax_scale if model.kv_lora_rank else attention.core_attention.softmax_scale
    if "numerics.attention_scale" not in lost and not math.isclose(theirs_scale, scale, rel_tol=SCALE_TOLERANCE):
        yield f"scores are multiplied by {theirs_scale} for {scale}"


def config_problems(model: Architecture, config: Any, lost: set[str]) -> Iterator[str]:
    """Yield which fields of a TransformerConfig differ from a model's numerics."""
    numerics, gating = model.numerics, model.numerics.gating
    expected: dict[str, Any] = {
        "layernorm_epsilon": numerics.norm_epsilon, "layernorm_zero_centered_gamma": numerics.norm_offset == 1.0,
        "normalization": {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm],
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    if model.num_experts:
        is_sigmoid = gating.scores == "sigmoid"
        expected |= {
            "moe_router_topk": model.experts_per_token, "moe_router_score_function": gating.scores,
            "moe_router_topk_scaling_factor": gating.scale if gating.scale != 1.0 else None,
            "moe_router_num_groups": gating.groups if gating.groups > 1 else None,
            "moe_router_group_topk": gating.chosen_groups if gating.groups > 1 else None,
            "moe_router_enable_expert_bias": is_sigmoid,
            "moe_router_pre_softmax": not numerics.normalised_gates and not is_sigmoid,
        }  # fmt: skip
    if model.sliding_window:
        expected["window_size"] = (model.sliding_window - 1, 0)
    for name, value in expected.items():
        if getattr(config, name) != value:
            yield f"{name} is {getattr(config, name)!r} for {value!r}"
    is_declared = {
        "numerics.embedding_scale": numerics.embedding_scale == 1.0, "numerics.attention_cap": numerics.attention_cap is None,
        "numerics.logit_cap": numerics.logit_cap is None, "numerics.local_rotary": numerics.local_rotary is None,
    }  # fmt: skip
    for field, is_plain in is_declared.items():
        if not is_plain and field not in lost:
            yield f"{field} is neither GPTModel's nor declared as lost"
