"""ms-swift: scripts of `swift sft` and `swift pt`, read with the defaults of its own parsers.

Source: modelscope/ms-swift at 602360a5 (2026-08-22): arguments (base_args, sft_args, tuner_args), trainers/arguments.py
(gradient_accumulation_steps), cli/main.py. Its other commands generate, serve, convert, or train by Megatron-Core.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.trainers.adapter_options import adapter_fields, quantized_precision, read_targets
from shardwise.interop.frameworks.trainers.trainer_fields import (
    DEEPSPEED,
    Sharding,
    batch_fields,
    deepspeed_fields,
    num_replicas,
    number_formats,
    optimizer_field,
    read_deepspeed,
    read_only,
    sharding_fields,
    yaml_trainer_target,
)
from shardwise.interop.launches.launch_scripts import is_true
from shardwise.interop.launches.target import LaunchFiles, OptionReader
from shardwise.interop.text_formats.command_flags import parse_flags
from shardwise.interop.text_formats.config_trees import normalize_values
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.values import InputError

_VERBS = "sft|pt|rlhf|infer|deploy|export|eval|app|sample|rollout|merge-lora"
_COMMAND = re.compile(rf"(?:^|\s)(swift|megatron)\s+({_VERBS})\b|\bswift/cli/({_VERBS})\.py\b", re.MULTILINE)
_ACCELERATE = re.compile(r"^[^#\n]*\baccelerate\s+launch\b", re.MULTILINE)
_COMMENT_LINE = re.compile(r"^\s*#[^\n]*$", re.MULTILINE)
TRAINED = (("swift", "sft"), ("swift", "pt"))
MODEL = "model"
# Former names of options. Source: ms-swift 2 and 3, docs of its command line.
RENAMED = {
    "train_type": "tuner_type",
    "sft_type": "tuner_type",
    "model_id_or_path": MODEL,
    "lora_target_modules": "target_modules",
}
DEFAULT_BATCH = 16  # sequences of all devices, which steps of accumulation make up where none are set


def find_commands(files: LaunchFiles) -> list[tuple[str, str]]:
    """Return program and command of ms-swift in the scripts, in their order."""
    texts = (
        _COMMENT_LINE.sub("", text)
        for name, text in files.items()
        if not name.endswith((".json", ".yaml", ".yml", ".py"))
    )
    return [(match[1] or "swift", match[2] or match[3]) for text in texts for match in _COMMAND.finditer(text)]


def _read_files(files: LaunchFiles) -> Options:
    commands = find_commands(files)
    if not commands:
        raise InputError(
            f"read: no script in {', '.join(files)} starts `swift sft` or `swift pt`; one that does is required"
        )
    refused = [" ".join(command) for command in commands] if not {*TRAINED} & {*commands} else []
    if refused:
        raise InputError(
            f"read: found `{refused[0]}` of ms-swift, which generates, tunes preferences, serves or converts, or trains by "
            "Megatron-Core with options of its own; a script of `swift sft` or `swift pt` is required"
        )
    name, text = next((name, text) for name, text in files.items() if find_commands({name: text}))
    if _ACCELERATE.search(text):
        raise InputError(
            f"{name}: found `accelerate launch`, whose file shards the model; --fsdp or --deepspeed of swift can be read"
        )
    table = option_table("ms_swift")
    flags = parse_flags(
        training_command(text, name).arguments, {key.replace("_", "-"): row for key, row in table.items()}
    )
    options = {flag.replace("-", "_"): value for flag, value in flags.items()}
    options = {RENAMED.get(option, option): value for option, value in options.items()}
    deepspeed = options.pop("deepspeed", None)
    referred = read_deepspeed(deepspeed, files) if deepspeed else {}
    return normalize_values({**options, **referred}, table)


def _sharding(reader: OptionReader) -> Sharding:
    """Return how the job is sharded: DeepSpeed's stage, `--fsdp fsdp2`, or replicas; sequences are split by Ulysses."""
    cp = reader.get_degree("sequence_parallel_size")
    if any(name.startswith(DEEPSPEED) for name in reader.options):
        return Sharding(zero_stage=deepspeed_fields(reader)[0], software="deepspeed", cp=cp)
    fsdp = reader.get("fsdp")
    if fsdp not in (None, "", "fsdp2"):
        raise InputError(f"fsdp: found {str(fsdp)[:80]!r}; fsdp2, or none, is what can be read")
    return Sharding(zero_stage=3 if fsdp else 0, software="fsdp" if fsdp else "ddp", cp=cp)


def _read_layout(reader: OptionReader) -> Mapping[str, Any]:
    sharding = _sharding(reader)
    fields = {
        **sharding_fields(reader, sharding),
        **(deepspeed_fields(reader)[1] if sharding.software == "deepspeed" else {}),
    }
    recomputes = is_true(reader.get("gradient_checkpointing", True))
    ulysses = {"layout.cp_variant": "ulysses"} if sharding.cp > 1 else {}
    return {**fields, **ulysses, "layout.recompute": "full" if recomputes else "none"}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    sharding, micro_batch = _sharding(reader), reader.get_count("per_device_train_batch_size", 1) or 1
    default_steps = max(1, -(-DEFAULT_BATCH // (micro_batch * reader.machines.num_devices)))
    steps = reader.get_count("gradient_accumulation_steps", default_steps) or default_steps
    length = reader.get_count("packing_length", reader.get_count("max_length"))
    if not is_true(reader.get("packing", False)):
        reader.notes.append("sequences are priced as full; without packing they are as long as the data's")
    if length is None:
        seqs = micro_batch * steps * num_replicas(reader, sharding)
        return {"layout.micro_batch_seqs": micro_batch, "job.global_batch_seqs": seqs}
    return batch_fields(reader, sharding, micro_batch, steps, length)


def _read_adapters(reader: OptionReader) -> Mapping[str, Any]:
    kind, rank = reader.get("tuner_type", "lora"), reader.get_count("lora_rank", 8)
    targets = reader.get("target_modules", "all-linear")
    reader.acknowledge("lora_alpha", "lora_dropout", "use_rslora")
    if kind not in ("lora", "full"):
        raise InputError(f"tuner_type: found {str(kind)[:40]!r}; lora or full is what can be read")
    return {} if kind == "full" else adapter_fields(rank, read_targets(targets, "target_modules", reader))


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    """Return the recipe: weights are loaded in 16 bits, and products are in the same format."""
    sharding, is_full = _sharding(reader), reader.get("tuner_type", "lora") == "full"
    dtype = str(reader.get("torch_dtype", "bfloat16"))
    half = "bf16" if dtype == "bfloat16" or is_true(reader.get("bf16", False)) else "fp16"
    bits, method = reader.get("quant_bits"), reader.get("quant_method", "bnb")
    if bits is not None:
        if method != "bnb" or str(bits) not in ("4", "8") or is_full:
            raise InputError(
                f"quant_bits: found {bits!r} by {str(method)[:20]!r}; 4 or 8 by bnb, of a model with adapters, is priced"
            )
        double = is_true(reader.get("bnb_4bit_use_double_quant", True))
        return {
            "job.precision": quantized_precision(four_bits=str(bits) == "4", eight_bits=str(bits) == "8", double=double)
        }
    return {"job.precision": number_formats(half, sharding, pure=True) if is_full else half}


def _read_kernels(reader: OptionReader) -> Mapping[str, Any]:
    optimizer = optimizer_field(reader.get("optim", "adamw_torch_fused"), "optim", {}, reader)
    chunked = {"job.loss": "chunked"} if is_true(reader.get("use_liger_kernel", False)) else {}
    return {**optimizer, **chunked, **({"job.attention": "unfused"} if reader.get("attn_impl") == "eager" else {})}


TARGET = yaml_trainer_target(
    model_key=MODEL, name="ms-swift", title="ms-swift", version="602360a5", source="https://github.com/modelscope/ms-swift",
    options_file="ms_swift", read=_read_files, recognizes=lambda files: bool(find_commands(files)),
    mappings=(
        read_only(_read_layout), read_only(_read_batch), read_only(_read_adapters), read_only(_read_precision),
        read_only(_read_kernels),
    ),
)  # fmt: skip
