"""Scripts that start supervised fine-tuning of OpenRLHF and verl, read with the defaults of their own parsers.

Sources: OpenRLHF at 3c3be623 (2026-08-13), cli/train_sft.py (`--section.name value`) and utils/deepspeed; verl at b178a3cd
(2026-01-29), trainer/fsdp_sft_trainer.py and trainer/config/sft_trainer.yaml (`section.name=value`). Their reinforcement learning
is other programs, which are refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.huggingface_hub_names import hub_model
from shardwise.interop.frameworks.trainers.adapter_options import adapter_fields, quantized_precision, read_targets
from shardwise.interop.frameworks.trainers.trainer_fields import (
    Sharding,
    num_replicas,
    read_only,
    sharding_fields,
    trainer_target,
)
from shardwise.interop.launches.launch_scripts import is_true
from shardwise.interop.launches.target import LaunchFiles, OptionReader
from shardwise.interop.text_formats.command_flags import parse_flags
from shardwise.interop.text_formats.config_trees import normalize_values, parse_yaml, require_length
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.model import Architecture
from shardwise.values import InputError

OPENRLHF_PROGRAM, VERL_PROGRAM = "openrlhf.cli.train_sft", "verl.trainer.fsdp_sft_trainer"
_OVERRIDE = re.compile(r"\+{0,2}(\w[\w.]*)=(.*)")  # Hydra's: section.name=value, with + for one that is new
_COMMENT_LINE = re.compile(r"^\s*#[^\n]*\n", re.MULTILINE)


def _find_script(files: LaunchFiles, program: str) -> tuple[str, str]:
    """Return name and text of the script that starts a program. Raises `InputError` if there is none."""
    script = next(((name, text) for name, text in files.items() if program in text), None)
    if script is None:
        raise InputError(f"read: no script in {', '.join(files)} starts {program}; one that does is required")
    return script


def _words_behind(text: str, program: str, source: str) -> list[str]:
    """Return the words behind a program, in a command or a text that a command takes in."""
    require_length(text, source, "a launch script")
    command = _COMMENT_LINE.sub("", text).replace("\\\n", " ").partition(program)[2].partition("\n")[0]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InputError(f"{source}: not a shell command: {error}") from None


def _read_openrlhf(files: LaunchFiles) -> Options:
    name, text = _find_script(files, OPENRLHF_PROGRAM)
    tokens = _words_behind(text, OPENRLHF_PROGRAM, name)
    table = option_table("openrlhf")
    flags = parse_flags(tokens, {option.replace("_", "-"): entry for option, entry in table.items()})
    return normalize_values({flag.replace("-", "_"): value for flag, value in flags.items()}, table)


def _read_verl(files: LaunchFiles) -> Options:
    name, text = _find_script(files, VERL_PROGRAM)
    matches = [match for word in _words_behind(text, VERL_PROGRAM, name) if (match := _OVERRIDE.fullmatch(word))]
    values = {match[1]: match[2] for match in matches if "$" not in match[2] and match[2]}
    return normalize_values(
        {option: parse_yaml(f"value: {value}", name)["value"] for option, value in values.items()}, option_table("verl")
    )


def _openrlhf_sharding(reader: OptionReader) -> Sharding:
    return Sharding(
        zero_stage=reader.get("ds.zero_stage", 2), software="deepspeed", tp=reader.get_degree("ds.tensor_parallel_size"),
        cp=reader.get_degree("ds.ring_attn_size"),
    )  # fmt: skip


def _openrlhf_fields(reader: OptionReader) -> Mapping[str, Any]:
    """Return the fields of a job: the batch is that of all devices, and bf16 the format unless `ds.param_dtype` says fp16."""
    sharding = _openrlhf_sharding(reader)
    half = str(reader.get("ds.param_dtype", "bf16"))
    if half not in ("bf16", "fp16"):
        raise InputError(f"ds.param_dtype: found {half[:20]!r}; bf16 or fp16 is required")
    quantized = quantized_precision(four_bits=bool(reader.get("ds.load_in_4bit", False)), eight_bits=False, double=True)
    rank, targets = reader.get("ds.lora.rank", 0), reader.get("ds.lora.target_modules", "all-linear")
    reader.acknowledge("ds.lora.alpha", "ds.lora.dropout", "ds.packing_samples")
    accumulates = reader.get("ds.grad_accum_dtype") == "fp32"
    recipe = "bf16_fp32_gradients" if accumulates and half == "bf16" else half
    optimizer = {"adam": "adamw", "muon": "muon"}.get(str(reader.get("optim", "adam")))
    if optimizer is None:
        raise InputError(f"optim: found {reader.get('optim')!r}; adam or muon is required")
    return {
        **sharding_fields(reader, sharding), "layout.micro_batch_seqs": reader.get_count("train.micro_batch_size", 8),
        "layout.recompute": "full" if reader.get("model.gradient_checkpointing_enable", False) else "none",
        "layout.offload": "optimizer" if reader.get("ds.adam_offload", False) else "none",
        "job.global_batch_seqs": reader.get_count("train.batch_size", 128), "job.seq_len": reader.get_count("data.max_len", 2048),
        "job.precision": quantized or recipe, "job.optimizer": optimizer,
        **({"layout.cp_variant": "zigzag"} if sharding.cp > 1 else {}),
        **({"job.loss": "chunked"} if reader.get("ds.use_liger_kernel", False) else {}),
        **adapter_fields(rank, read_targets(targets, "ds.lora.target_modules", reader)),
    }  # fmt: skip


def _verl_fields(reader: OptionReader) -> Mapping[str, Any]:
    """Return the fields of a job: FSDP with weights in `model_dtype`, bf16 for products and fp32 for reductions.

    Ulysses' ranks share sequences: the batch is divided by the replicas of whole sequences.
    """
    sharding = Sharding(zero_stage=3, software="fsdp", cp=reader.get_degree("ulysses_sequence_parallel_size"))
    dtype = str(reader.get("model.fsdp_config.model_dtype", "fp32"))
    if dtype not in ("fp32", "bf16", "float32", "bfloat16"):
        raise InputError(f"model.fsdp_config.model_dtype: found {dtype[:20]!r}; fp32 or bf16 is what can be read")
    is_fp32 = dtype in ("fp32", "float32")
    batch = reader.get_count("data.train_batch_size", 256) or 256
    micro_batch = reader.get_count("data.micro_batch_size_per_gpu", reader.get_count("data.micro_batch_size", 4)) or 4
    rank, targets = reader.get("model.lora_rank", 0), reader.get("model.target_modules", "all-linear")
    seq_len, steps = reader.get_count("data.max_length", 1024) or 1024, reader.get_count("trainer.total_training_steps")
    reader.acknowledge("model.lora_alpha", "use_remove_padding", "model.strategy")
    replicas = num_replicas(reader, sharding)
    if batch % replicas:
        raise InputError(f"data.train_batch_size: found {batch} on {replicas} replicas; a multiple is required")
    return {
        **sharding_fields(reader, sharding), "layout.micro_batch_seqs": min(micro_batch, batch // replicas),
        "layout.recompute": "full" if is_true(reader.get("model.enable_gradient_checkpointing", True)) else "none",
        "job.global_batch_seqs": batch, "job.seq_len": seq_len,
        **({"job.tokens": float(steps * batch * seq_len)} if steps else {}),
        "job.precision": "bf16_fp32_reduction" if is_fp32 else "bf16_bf16_state", "job.optimizer": "adamw",
        **({"layout.cp_variant": "ulysses"} if sharding.cp > 1 else {}),
        **({"job.loss": "chunked"} if is_true(reader.get("model.use_liger", False)) else {}),
        **adapter_fields(rank, read_targets(targets, "model.target_modules", reader)),
    }  # fmt: skip


def _name_reader(option: str) -> Any:
    def model_name(options: Options) -> str | None:
        name = options.get(option)
        return name if isinstance(name, str) else None

    return model_name


def _model_finder(option: str) -> Any:
    def find_model(options: Options) -> Architecture | None:
        name = options.get(option)
        return hub_model(name) if isinstance(name, str) else None

    return find_model


OPENRLHF = trainer_target(
    name="openrlhf", title="OpenRLHF (SFT)", version="3c3be623", source="https://github.com/OpenRLHF/OpenRLHF",
    stack="deepspeed", options_file="openrlhf", read=_read_openrlhf, mappings=(read_only(_openrlhf_fields),),
    recognizes=lambda files: any(OPENRLHF_PROGRAM in text for text in files.values()),
    model_name=_name_reader("model.model_name_or_path"), find_model=_model_finder("model.model_name_or_path"),
)  # fmt: skip
VERL = trainer_target(
    name="verl", title="verl (SFT)", version="b178a3cd", source="https://github.com/volcengine/verl",
    stack="torchtitan-eager", options_file="verl", read=_read_verl, mappings=(read_only(_verl_fields),),
    recognizes=lambda files: any(VERL_PROGRAM in text for text in files.values()),
    model_name=_name_reader("model.partial_pretrain"), find_model=_model_finder("model.partial_pretrain"),
)  # fmt: skip
