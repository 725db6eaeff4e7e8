"""LLaMA-Factory: a YAML of arguments, read as its dataclasses read it.

Source: LLaMA-Factory at ff6d4d12 (2026-08-18): hparams (names, types, defaults), its model's adapter.py
(dtypes of trained weights) and model_utils (quantization, checkpointing).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.trainers.adapter_options import adapter_fields, quantized_precision, read_targets
from shardwise.interop.frameworks.trainers.trainer_fields import (
    Sharding,
    any_on,
    batch_fields,
    deepspeed_fields,
    number_formats,
    optimizer_field,
    read_deepspeed,
    read_only,
    require_supervised,
    sharding_fields,
    yaml_trainer_target,
)
from shardwise.interop.launches.launch_scripts import is_true
from shardwise.interop.launches.target import LaunchFiles, OptionReader
from shardwise.interop.text_formats.config_trees import flatten, has_sections, normalize_values, parse_yaml
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.values import InputError

OBJECTIVES: Mapping[str, tuple[str, ...]] = {"stage": ("sft", "pt"), "do_predict": ()}
# Engines beside transformers' Trainer, with the option that turns one on.
ENGINES = {"use_kt": "KTransformers, which computes experts on the CPU", "use_mca": "Megatron-Core by mcore_adapter",
           "use_hyper_parallel": "HyperParallel"}  # fmt: skip
# Optimizers of their own, with the option that turns one on.
OPTIMIZER_SWITCHES = ("use_galore", "use_apollo", "use_badam", "use_adam_mini")


def _read_files(files: LaunchFiles) -> Options:
    marked = {name: text for name, text in files.items() if name.endswith((".yaml", ".yml"))}
    trees = {name: parse_yaml(text, name) for name, text in marked.items()}
    launches = [tree for tree in trees.values() if "model_name_or_path" in tree and "stage" in tree]
    if len(launches) != 1:
        raise InputError(
            f"read: found {len(launches)} YAML files with model_name_or_path and stage in {', '.join(files)}; the arguments of "
            "LLaMA-Factory are required"
        )
    tree = launches[0]
    require_supervised(tree, OBJECTIVES)
    if not is_true(tree.get("do_train", True)):
        raise InputError("do_train: is false, so that nothing is trained; the arguments of a training are required")
    for switch, engine in ENGINES.items():
        if is_true(tree.get(switch, False)):
            raise InputError(f"{switch}: {engine}, is not priced; a launch with transformers' Trainer is required")
    deepspeed = tree.pop("deepspeed", None)
    table = option_table("llama_factory")
    accelerate_files = [tree for tree in trees.values() if tree is not launches[0] and "distributed_type" in tree]
    for accelerate_file in accelerate_files:  # of Accelerate, which starts it
        tree |= (
            {"fsdp_config": accelerate_file.get("fsdp_config"), "fsdp": True}
            if accelerate_file.get("distributed_type") == "FSDP"
            else {}
        )
    options = {name: value for name, value in flatten(tree, table).items() if value is not None}
    options = {name.replace("fsdp_config.fsdp_", "fsdp_config."): value for name, value in options.items()}
    referred = read_deepspeed(deepspeed, files) if deepspeed else {}
    return normalize_values({**options, **referred}, table)


def _sharding(reader: OptionReader) -> Sharding:
    if any(name.startswith("deepspeed_config.") for name in reader.options):
        return Sharding(zero_stage=deepspeed_fields(reader)[0], software="deepspeed")
    strategy_words = reader.get("fsdp", False)
    if not strategy_words and not any(name.startswith("fsdp_config.") for name in reader.options):
        return Sharding(zero_stage=0, software="ddp")
    text = " ".join(strategy_words) if isinstance(strategy_words, list) else str(strategy_words)
    strategy = str(reader.get("fsdp_config.sharding_strategy", "FULL_SHARD")).upper()
    reshards = is_true(reader.get("fsdp_config.reshard_after_forward", True))
    keeps = "shard_grad_op" in text or strategy == "SHARD_GRAD_OP" or not reshards
    copies = reader.machines.num_nodes if "hybrid" in text or strategy.startswith("HYBRID") else 1
    return Sharding(zero_stage=2 if keeps else 3, software="fsdp", copies=copies)


def _read_layout(reader: OptionReader) -> Mapping[str, Any]:
    sharding = _sharding(reader)
    fields = dict(sharding_fields(reader, sharding))
    fields |= deepspeed_fields(reader)[1] if sharding.software == "deepspeed" else {}
    keeps_activations = is_true(reader.get("disable_gradient_checkpointing", False))
    reader.acknowledge("gradient_checkpointing", "fsdp_config.activation_checkpointing")
    offloads = is_true(reader.get("use_unsloth_gc", False)) and not keeps_activations
    if offloads:
        fields["layout.offload"] = "both" if fields.get("layout.offload") == "optimizer" else "activations"
    return {**fields, "layout.recompute": "none" if keeps_activations else "full"}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    micro_batch = reader.get_count("per_device_train_batch_size", 8) or 8
    steps = reader.get_count("gradient_accumulation_steps", 1) or 1
    length = reader.get_count("cutoff_len", 2048) or 2048
    packs = any_on(reader, "packing", "neat_packing") or reader.get("stage") == "pt"
    if not packs:
        reader.notes.append("sequences are priced as full; without packing they are as long as the data's")
    return batch_fields(reader, _sharding(reader), micro_batch, steps, length)


def _read_adapters(reader: OptionReader) -> Mapping[str, Any]:
    kind = reader.get("finetuning_type", "lora")
    rank, names = reader.get_count("lora_rank", 8), reader.get("lora_target", "all")
    reader.acknowledge("lora_alpha", "lora_dropout", "use_rslora")
    if kind == "full":
        return {}
    if kind != "lora":
        raise InputError(f"finetuning_type: found {str(kind)[:40]!r}; lora or full is what can be read")
    return adapter_fields(rank, read_targets(names, "lora_target", reader))


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    sharding, has_adapters = _sharding(reader), reader.get("finetuning_type", "lora") == "lora"
    bits, method = reader.get("quantization_bit"), str(reader.get("quantization_method", "bnb")).lower()
    pure = is_true(reader.get("pure_bf16", False))
    half = (
        "bf16" if pure or is_true(reader.get("bf16", False)) else "fp16" if is_true(reader.get("fp16", False)) else None
    )
    double = is_true(reader.get("double_quantization", True))
    if bits is not None:
        if method not in ("bnb", "bitsandbytes") or bits not in (4, 8):
            raise InputError(f"quantization_bit: found {bits!r} by {method[:20]!r}; 4 or 8 by bnb is what is priced")
        return {"job.precision": quantized_precision(four_bits=bits == 4, eight_bits=bits == 8, double=double)}
    if is_true(reader.get("fp8", False)) and sharding.software == "fsdp":
        reader.acknowledge("fp8_backend", "fp8_enable_fsdp_float8_all_gather")
        return {"job.precision": "fp8_torchao"}
    if has_adapters:
        return {"job.precision": half or "bf16"}
    return {"job.precision": number_formats(half or "bf16", sharding, pure=pure)}


def _read_optimizer(reader: OptionReader) -> Mapping[str, Any]:
    switched = [name for name in OPTIMIZER_SWITCHES if is_true(reader.get(name, False))]
    if switched:
        raise InputError(
            f"{switched[0]}: the state of this optimizer is not priced; adamw, lion, muon and others are; leave it out"
        )
    if is_true(reader.get("use_muon", False)):
        reader.acknowledge("optim")
        return {"job.optimizer": "muon"}
    return optimizer_field(reader.get("optim", "adamw_torch_fused"), "optim", {}, reader)


def _read_kernels(reader: OptionReader) -> Mapping[str, Any]:
    unfused = str(reader.get("flash_attn", "auto")).lower() in ("disabled", "off", "false")
    liger = any_on(reader, "enable_liger_kernel", "use_liger_kernel")
    return {**({"job.attention": "unfused"} if unfused else {}), **({"job.loss": "chunked"} if liger else {})}


TARGET = yaml_trainer_target(
    model_key="model_name_or_path", name="llama-factory", title="LLaMA-Factory", version="ff6d4d12", source="https://github.com/hiyouga/LLaMA-Factory",
    options_file="llama_factory", read=_read_files,
    recognizes=lambda files: has_sections(files, ["model_name_or_path", "stage", "finetuning_type"]),
    mappings=(
        read_only(_read_layout), read_only(_read_batch), read_only(_read_adapters), read_only(_read_precision),
        read_only(_read_optimizer), read_only(_read_kernels),
    ),
)  # fmt: skip
