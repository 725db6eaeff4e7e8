"""Axolotl: a YAML configuration of a fine-tuning, read as its schema reads it.

Source: Axolotl at 067b021c (2026-07-24): utils/schemas (names, types, defaults), loaders/model.py (quantization, dtypes),
loaders/adapter.py, core/builders/base.py (optimizers), utils/schemas/validation.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.trainers.adapter_options import (
    adapter_fields,
    default_targets,
    quantized_precision,
    read_targets,
)
from shardwise.interop.frameworks.trainers.trainer_fields import (
    Sharding,
    any_on,
    batch_fields,
    deepspeed_fields,
    is_on,
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
from shardwise.interop.text_formats.config_trees import find_yaml, flatten, has_sections, normalize_values, parse_yaml
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.model.adapters import ALL_LINEAR
from shardwise.values import InputError

# Values of options that say the job is supervised training.
OBJECTIVES: Mapping[str, tuple[str, ...]] = {
    "rl": (),
    "reward_model": (),
    "process_reward_model": (),
    "diffusion": (),
    "ebft": (),
}
# Names of optimizers beside transformers' (utils/schemas/enums.py, CustomSupportedOptimizers).
OPTIMIZERS: Mapping[str, str] = {
    "optimi_adamw": "adamw", "adamw_torch_4bit": "adamw_8bit", "ao_adamw_4bit": "adamw_8bit", "ao_adamw_8bit": "adamw_8bit",
    "muon": "muon", "dist_muon": "muon",
}  # fmt: skip
RENAMED = {"sequence_parallel_degree": "context_parallel_size", "model_config": "overrides_of_model_config",
           "bfloat16": "bf16", "float16": "fp16", "max_packed_sequence_len": "sequence_len"}  # fmt: skip
EXPERT_PARAMETERS = ("experts", "mlp.experts")


def _read_files(files: LaunchFiles) -> Options:
    configs = {name: text for name, text in files.items() if not name.lower().endswith(".json")}
    name, text = find_yaml(configs, "a configuration of Axolotl")
    tree = parse_yaml(text, name)
    if "base_model" not in tree:
        raise InputError(f"{name}: has no base_model; a configuration of Axolotl is required")
    require_supervised(tree, OBJECTIVES)
    deepspeed = tree.pop("deepspeed", None)
    options = flatten(tree, option_table("axolotl"))
    for old, new in RENAMED.items():
        if options.get(old) is not None:
            options.setdefault(new, options.pop(old))
    options = {_plain_fsdp_name(option): value for option, value in options.items() if value is not None}
    referred = read_deepspeed(deepspeed, files) if deepspeed else {}
    return normalize_values({**options, **referred}, option_table("axolotl"))


def _plain_fsdp_name(option: str) -> str:
    """Return an option of `fsdp_config` without the prefix that it may repeat."""
    return option.replace("fsdp_config.fsdp_", "fsdp_config.")


def _sharding(reader: OptionReader) -> Sharding:
    degrees = {"tp": reader.get_degree("tensor_parallel_size"), "cp": reader.get_degree("context_parallel_size")}
    copies, shards = reader.get_degree("dp_replicate_size"), reader.get("dp_shard_size")
    if any(name.startswith("deepspeed_config.") for name in reader.options):
        return Sharding(zero_stage=deepspeed_fields(reader)[0], software="deepspeed", **degrees)
    uses_fsdp = bool(reader.get("fsdp")) or any(name.startswith("fsdp_config.") for name in reader.options)
    if not (uses_fsdp or "fsdp_version" in reader):
        return Sharding(zero_stage=0, software="ddp", **degrees)
    strategy = str(reader.get("fsdp_config.sharding_strategy", "FULL_SHARD")).upper()
    reshards = is_true(reader.get("fsdp_config.reshard_after_forward", True)) and strategy != "SHARD_GRAD_OP"
    reader.acknowledge("fsdp_version")
    if strategy.startswith("HYBRID") and copies == 1:
        copies = reader.machines.num_nodes
    _require_devices(reader, (degrees["tp"], degrees["cp"], copies), shards)
    return Sharding(zero_stage=3 if reshards else 2, software="fsdp", copies=copies, **degrees)


def _require_devices(reader: OptionReader, degrees: tuple[int, ...], shards: Any) -> None:
    """Raise `InputError` where a size of shards is set, and its product with the other degrees is not all devices."""
    if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
        return
    product, devices = shards, reader.machines.num_devices
    for degree in degrees:
        product *= degree
    if product != devices:
        raise InputError(
            f"dp_shard_size: found {shards}, with the other degrees {product} devices of {devices}; a cluster of {product} is "
            "required"
        )


def _read_layout(reader: OptionReader) -> Mapping[str, Any]:
    sharding = _sharding(reader)
    checkpoints = reader.get("gradient_checkpointing")
    recomputes = is_true(checkpoints) or str(checkpoints).startswith("offload")
    recomputes = recomputes or is_true(reader.get("fsdp_config.activation_checkpointing", False))
    reader.acknowledge("gradient_checkpointing_kwargs")
    activations = str(checkpoints) == "offload" or str(reader.get("activation_offloading", False)).lower() in (
        "true",
        "legacy",
    )
    fields = dict(sharding_fields(reader, sharding))
    fields |= deepspeed_fields(reader)[1] if sharding.software == "deepspeed" else {}
    if activations and recomputes:
        fields["layout.offload"] = "both" if fields.get("layout.offload") == "optimizer" else "activations"
    elif activations:
        reader.notes.append("activation_offloading without gradient_checkpointing is priced as activations that stay")
    return {**fields, "layout.recompute": "full" if recomputes else "none",
            **({"layout.cp_variant": "all_gather"} if sharding.cp > 1 else {})}  # fmt: skip


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    micro_batch = reader.get_count("micro_batch_size", 1) or 1
    steps = reader.get_count("gradient_accumulation_steps", 1)
    reader.acknowledge("batch_size")  # is replaced by the product of the others, one of which is always set
    if not is_true(reader.get("sample_packing", False)) and not is_true(reader.get("pad_to_sequence_len", False)):
        reader.notes.append("sequences are priced as full; without sample_packing they are as long as the data's")
    return batch_fields(
        reader, _sharding(reader), micro_batch, steps or 1, reader.get_count("sequence_len", 512) or 512
    )


def _read_adapters(reader: OptionReader) -> Mapping[str, Any]:
    kind = reader.get("adapter")
    rank, names = reader.get_count("lora_r"), reader.get("lora_target_modules")
    linear, parameters = is_true(reader.get("lora_target_linear", False)), reader.get("lora_target_parameters")
    reader.acknowledge("lora_alpha", "lora_dropout", "peft_use_rslora", "load_in_4bit", "load_in_8bit")
    if kind in (None, "none"):
        return {}
    if kind not in ("lora", "qlora"):
        raise InputError(f"adapter: found {str(kind)[:40]!r}; lora, qlora or none is what can be read")
    targets: tuple[str, ...] = (ALL_LINEAR,) if linear else ()
    if names:
        targets += read_targets(names, "lora_target_modules", reader)
    if parameters:
        paths = parameters if isinstance(parameters, list) else [parameters]
        targets += read_targets(
            [str(word).replace("mlp.experts.", "experts.") for word in paths], "lora_target_parameters", reader
        )
    return adapter_fields(rank or 8, dict.fromkeys(targets or default_targets(reader.model)))  # 8: PEFT's LoraConfig.r


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    sharding, kind = _sharding(reader), reader.get("adapter")
    formats = {name: is_on(reader, name) for name in ("bf16", "fp16", "float32")}
    half = "bf16" if formats["bf16"] else "fp16" if formats["fp16"] else None
    quantized = quantized_precision(
        four_bits=is_true(reader.get("load_in_4bit", False)) or kind == "qlora",
        eight_bits=is_true(reader.get("load_in_8bit", False)),
        double=is_true(reader.get("bnb_config_kwargs.bnb_4bit_use_double_quant", True)),
    )
    if quantized and half == "bf16" and kind:
        return {"job.precision": quantized}
    if is_true(reader.get("fp8", False)) and sharding.software == "fsdp":
        reader.acknowledge("fp8_enable_fsdp_float8_all_gather")
        return {"job.precision": "fp8_torchao"}
    if kind:  # adapters have fp32 weights, whose gradients DDP reduces: 16 bytes
        return {"job.precision": half or "fp32"}
    return {"job.precision": number_formats(half, sharding, pure=half == "bf16")}


def _read_optimizer(reader: OptionReader) -> Mapping[str, Any]:
    return optimizer_field(reader.get("optimizer", "adamw_torch_fused"), "optimizer", OPTIMIZERS, reader)


def _read_attention(reader: OptionReader) -> Mapping[str, Any]:
    eager = is_true(reader.get("eager_attention", False)) or reader.get("attn_implementation") == "eager"
    chunked = any_on(reader, "liger_fused_linear_cross_entropy", "cut_cross_entropy", "chunked_cross_entropy")
    return {**({"job.attention": "unfused"} if eager else {}), **({"job.loss": "chunked"} if chunked else {})}


TARGET = yaml_trainer_target(
    model_key="base_model", name="axolotl", title="Axolotl", version="067b021c", source="https://github.com/axolotl-ai-cloud/axolotl",
    options_file="axolotl", read=_read_files,
    recognizes=lambda files: has_sections(files, ["base_model", "micro_batch_size"]),
    mappings=(
        read_only(_read_layout), read_only(_read_batch), read_only(_read_adapters), read_only(_read_precision),
        read_only(_read_optimizer), read_only(_read_attention),
    ),
)  # fmt: skip
