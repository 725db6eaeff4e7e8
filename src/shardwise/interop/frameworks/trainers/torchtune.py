"""torchtune: a YAML of components for its recipes of supervised fine-tuning, read with the defaults of those recipes.

Source: meta-pytorch/torchtune at bd2a0fc7 (2026-04-23): recipes/full_finetune_distributed.py, lora_finetune_distributed.py and
their single-device forms (sharding, dtypes, batches), models/*/_model_builders.py (names of models, adapters, quantization).
Weights, gradients and moments have the format `dtype`; FSDP2 shards them and gathers weights for each pass.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.huggingface_hub_names import hub_model
from shardwise.interop.frameworks.trainers.adapter_options import adapter_fields, read_targets
from shardwise.interop.frameworks.trainers.trainer_fields import (
    Sharding,
    batch_fields,
    num_replicas,
    optimizer_field,
    read_only,
    sharding_fields,
    trainer_target,
)
from shardwise.interop.launches.launch_scripts import is_true
from shardwise.interop.launches.target import LaunchFiles, OptionReader
from shardwise.interop.text_formats.config_trees import find_yaml, flatten, normalize_values, parse_yaml
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.model import Architecture, load_model
from shardwise.model.load import find_model_name
from shardwise.values import InputError

COMPONENT = "model._component_"
# A builder: torchtune.models.FAMILY.[lora_|qlora_]FAMILY_SIZE.
_BUILDER = re.compile(r"torchtune\.models\.(?P<family>\w+)\.(?P<adapters>q?lora_)?(?P=family)_(?P<size>\w+)")
_FAMILY_VERSION = re.compile(r"^(llama|gemma|phi)(?=\d)")
NAMES = {"phi-4-14b": "phi-4"}
# What a configuration has only for recipes that generate, judge, distill or tune preferences.
OTHER_RECIPES = (
    "teacher_model",
    "quantizer",
    "policy_model",
    "reward_and_value_model",
    "ref_checkpointer",
    "base_model_path",
    "tasks",
    "prompt",
)
# Classes of optimizers, with transformers' names of the same.
OPTIMIZERS: Mapping[str, str] = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd",
    "bitsandbytes.optim.PagedAdamW": "adamw", "bitsandbytes.optim.PagedAdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.AdamW8bit": "adamw_8bit", "torchao.optim.AdamW8bit": "adamw_8bit",
    "torchao.prototype.low_bit_optim.AdamW8bit": "adamw_8bit",
}  # fmt: skip
MODULES = {"output_proj": "o_proj"}  # torchtune's names of matrices, with PEFT's


def _read_files(files: LaunchFiles) -> Options:
    name, text = find_yaml(files, "a configuration of torchtune")
    tree = parse_yaml(text, name)
    marks = [key for key in OTHER_RECIPES if key in tree]
    if marks or not isinstance(tree.get("optimizer"), dict):
        raise InputError(
            f"{name}: has {marks[0] if marks else 'no optimizer'}: a configuration of torchtune's supervised fine-tuning is "
            "required, not one that generates, evaluates, quantizes, distills or tunes preferences"
        )
    table = option_table("torchtune")
    return normalize_values({key: value for key, value in flatten(tree, table).items() if value is not None}, table)


def _builder(options: Options) -> re.Match[str] | None:
    return _BUILDER.fullmatch(str(options.get(COMPONENT, "")))


def _model_name(options: Options) -> str | None:
    """Return the model that a builder's name stands for: llama3_1_8b is llama-3.1-8b, qwen2_5_0_5b_base is qwen2.5-0.5b-base."""
    match = _builder(options)
    if match is None:
        return None
    family = _FAMILY_VERSION.sub(r"\1-", match["family"].replace("_", "."))
    size = re.sub(r"(?<=\d)_(?=\d)", ".", match["size"]).replace("_", "-")
    return NAMES.get(f"{family}-{size}", f"{family}-{size}")


def _find_model(options: Options) -> Architecture | None:
    name = _model_name(options)
    if name is None:
        return None
    catalog_name = find_model_name(name)
    return load_model(catalog_name) if catalog_name else hub_model(name)


def _sharding(reader: OptionReader) -> Sharding:
    tp, copies = reader.get_degree("tensor_parallel_dim"), reader.get_degree("data_parallel_replicate_dim")
    reader.acknowledge("data_parallel_shard_dim")
    stage = 3 if is_true(reader.get("fsdp_reshard_after_forward", True)) else 2
    return Sharding(zero_stage=stage, software="fsdp", copies=copies, tp=tp)


def _read_layout(reader: OptionReader) -> Mapping[str, Any]:
    recomputes = is_true(reader.get("enable_activation_checkpointing", False))
    offloads = is_true(reader.get("enable_activation_offloading", False)) and recomputes
    return {
        **sharding_fields(reader, _sharding(reader)), "layout.recompute": "full" if recomputes else "none",
        "layout.offload": "activations" if offloads else "none",
    }  # fmt: skip


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    micro_batch, steps = reader.get_count("batch_size", 1) or 1, reader.get_count("gradient_accumulation_steps", 1) or 1
    length = reader.get_count("tokenizer.max_seq_len")
    if not is_true(reader.get("dataset.packed", False)):
        reader.notes.append("sequences are priced as full; without packing they are as long as the data's")
    if length is None:
        seqs = micro_batch * steps * num_replicas(reader, _sharding(reader))
        return {"layout.micro_batch_seqs": micro_batch, "job.global_batch_seqs": seqs}
    return batch_fields(reader, _sharding(reader), micro_batch, steps, length)


def _read_adapters(reader: OptionReader) -> Mapping[str, Any]:
    match = _builder(reader.options)
    if match is None or not match["adapters"]:
        return {}
    attention = [MODULES.get(str(name), str(name)) for name in reader.get("model.lora_attn_modules", [])]
    mlp = ["gate_proj", "up_proj", "down_proj"] if is_true(reader.get("model.apply_lora_to_mlp", False)) else []
    if is_true(reader.get("model.apply_lora_to_output", False)):
        reader.notes.append("model.apply_lora_to_output: adapters of the head are left out of the price")
    reader.acknowledge("model.lora_alpha", "model.lora_dropout")
    return adapter_fields(
        reader.get_count("model.lora_rank", 8), read_targets([*attention, *mlp], "model.lora_attn_modules", reader)
    )


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    dtype, match = str(reader.get("dtype", "bf16")), _builder(reader.options)
    reader.acknowledge(COMPONENT)
    adapters = match["adapters"] if match else None
    if adapters == "qlora_":
        return {"job.precision": "qlora_nf4"}
    if dtype not in ("bf16", "fp32"):
        raise InputError(f"dtype: found {dtype[:20]!r}; bf16 or fp32 is required")
    full_recipe = "bf16_bf16_state" if dtype == "bf16" else "fp32"
    return {"job.precision": dtype if adapters else full_recipe}


def _read_optimizer(reader: OptionReader) -> Mapping[str, Any]:
    chunked = "loss._component_" in reader and "Chunked" in str(reader.get("loss._component_", ""))
    linear = str(reader.get("loss._component_", "")).endswith("LinearCrossEntropyLoss")
    optimizer = optimizer_field(reader.get("optimizer._component_"), "optimizer._component_", OPTIMIZERS, reader)
    return {**optimizer, **({"job.loss": "chunked"} if chunked or linear else {})}


TARGET = trainer_target(
    name="torchtune", title="torchtune", version="bd2a0fc7", source="https://github.com/meta-pytorch/torchtune",
    stack="torchtitan-eager", choose_stack=lambda options: "torchtitan" if options.get("compile") is True else "torchtitan-eager",
    options_file="torchtune", read=_read_files, model_name=_model_name, find_model=_find_model,
    recognizes=lambda files: any(re.search(r"^\s*_component_:\s*torchtune\.", text, re.MULTILINE) for text in files.values()),
    mappings=(
        read_only(_read_layout), read_only(_read_batch), read_only(_read_adapters), read_only(_read_precision),
        read_only(_read_optimizer),
    ),
)  # fmt: skip
