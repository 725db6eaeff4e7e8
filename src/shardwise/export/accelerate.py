"""Accelerate: a configuration for `accelerate launch` with PyTorch's FSDP, and a script that starts a training script with it.

Source of names and types: Accelerate 1.15.0: commands/config/config_args.py and commands/launch.py; what it asks of them:
parallelism_config.py, accelerator.py and FullyShardedDataParallelPlugin in utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.accelerate_formats import FORMATS
from shardwise.export.accelerate_sharding import NODE, SHARDING, replicas_of
from shardwise.export.field import Field, Given, Options, beside
from shardwise.export.formats.trees import dotted, spelt
from shardwise.export.formats.yaml_text import yaml_text, yaml_tree
from shardwise.export.launch import Launch
from shardwise.export.launchers import PORT
from shardwise.export.scripts import (
    LENGTH,
    OPTIMIZER,
    PREFIX,
    STEPS,
    TRAIN,
    argument_lines,
    configurations,
    heard_tokens,
    is_true,
    script_options,
    whole,
    without_arguments,
)  # fmt: skip
from shardwise.export.target import Files, Need, Target, option_table

CONFIG, SCRIPT = "config.yaml", "launch.sh"
MICRO, STEPS_OF = f"{PREFIX}per_device_train_batch_size", f"{PREFIX}gradient_accumulation_steps"
ACCUMULATED = "gradient_accumulation_steps"  # of the configuration
CHECKPOINTING = "fsdp_config.fsdp_activation_checkpointing"


def _batch(launch: Launch) -> Options:
    layout, seqs = launch.layout, launch.job.num_seqs
    return {MICRO: layout.micro_batch_seqs, STEPS_OF: seqs // (layout.micro_batch_seqs * layout.num_replicas)}


def _heard_batch(given: Given) -> Mapping[str, Any]:
    micro = whole(given, MICRO, given.beside.get("layout.micro_batch_seqs"))
    if micro is None:
        return {}
    steps, said = whole(given, STEPS_OF, whole(given, ACCUMULATED)), given.beside.get("job.global_batch_seqs")
    if steps is None and (said or MICRO not in given):
        return {"layout.micro_batch_seqs": micro}  # whoever reads it says the whole batch, or has to
    seqs = micro * (steps or 1) * replicas_of(given)
    seq_len = LENGTH.hear(given).get("job.seq_len", given.beside.get("job.seq_len"))
    return {"layout.micro_batch_seqs": micro, "job.global_batch_seqs": seqs, **heard_tokens(given, seqs, seq_len)}


def _checkpointing(launch: Launch) -> Options:
    """FSDP checkpoints whole layers; plain replicas leave that to the training script."""
    layout = launch.layout
    if not layout.zero_stage:
        return {f"{PREFIX}gradient_checkpointing": True} if layout.recompute == "full" else {}
    host = {f"{CHECKPOINTING}_offload": True} if layout.offloads_activations else {}
    return {CHECKPOINTING: layout.recompute == "full", **host}


def _heard_checkpointing(given: Given) -> Mapping[str, Any]:
    full = any(is_true(given.get(name, False)) for name in (CHECKPOINTING, f"{PREFIX}gradient_checkpointing"))
    host = is_true(given.get(f"{CHECKPOINTING}_offload", False))
    if is_true(given.get("fsdp_config.fsdp_offload_params", False)):
        raise InputError("fsdp_offload_params: weights that rest on the host are not priced; set it to false")
    return {"layout.recompute": "full" if full else "none", "layout.offload": "activations" if host else "none"}


def _wrapping(launch: Launch) -> Options:
    """Each layer is a unit of FSDP, and checkpoints are of shards."""
    names = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
             "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False}  # fmt: skip
    return {f"fsdp_config.{name}": value for name, value in names.items()} if launch.layout.zero_stage else {}


def _node(launch: Launch) -> Options:
    machines = launch.machines
    return {"compute_environment": "LOCAL_MACHINE", NODE: machines.num_devices, "num_machines": machines.num_nodes,
            "rdzv_backend": "static", "same_network": True, "main_training_function": "main", "use_cpu": False,
            "debug": False}  # fmt: skip


FIELDS: tuple[Field, ...] = (
    beside("compute_environment", NODE, "num_machines", "rdzv_backend", "same_network", "main_training_function", "use_cpu",
           "debug", say=_node),
    *SHARDING,
    beside("fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_state_dict_type",
           "fsdp_config.fsdp_cpu_ram_efficient_loading", say=_wrapping),
    FORMATS,
    Field(_checkpointing, _heard_checkpointing),
    Field(_batch, _heard_batch),
    OPTIMIZER, LENGTH, STEPS,
)  # fmt: skip


def _write(options: Options, launch: Launch) -> Files:
    several = launch.machines.num_nodes > 1
    where = (
        f'--machine_rank "${{NODE_RANK:-${{SLURM_NODEID:?}}}}" --main_process_ip "${{HEAD_NODE:?the first node}}" '
        f"--main_process_port {PORT} "
    ) if several else ""  # fmt: skip
    script = (
        f"#!/bin/bash\n# Starts on each node, beside {CONFIG}.\nset -euo pipefail\n\n{argument_lines(options)}\n\n"
        f'accelerate launch --config_file {CONFIG} {where}{TRAIN} "${{ARGS[@]}}"\n'
    )
    return {CONFIG: yaml_text(without_arguments(options)), SCRIPT: script}


def _read(files: Files) -> Options:
    own = configurations(files)
    if len(own) > 1 or any(name.lower().endswith(".json") for name in own):
        raise InputError(f"Accelerate: found {', '.join(own)}; one YAML, and the script that starts it, is required")
    known = option_table("accelerate")
    options: dict[str, Any] = {}
    for name, text in own.items():
        options = {_placed(option, known): value for option, value in dotted(yaml_tree(text, name), known).items()}
    launcher, arguments = script_options(files, "accelerate")
    return spelt({**options, **_overriding(launcher), **arguments}, known)


def _placed(option: str, known: Mapping[str, Any]) -> str:
    """An option by its whole name: in a section its beginning may be left out."""
    section, dot, name = option.partition(".")
    whole = f"{section}.{section.removesuffix('_config')}_{name}"
    return whole if dot and option not in known and whole in known else option


def _overriding(launcher: Options) -> dict[str, Any]:
    """What the words of `accelerate launch` say in place of the file: options of sections have theirs in front."""
    placed = {name.rpartition(".")[2]: name for name in option_table("accelerate") if not name.startswith(PREFIX)}
    set_by_node = {
        name for name, value in launcher.items() if str(value).startswith("$")
    }  # ranks, and where nodes meet
    found = {
        placed.get(name, name): value for name, value in launcher.items() if name not in {"config_file", *set_by_node}
    }
    return {**({"distributed_type": "FSDP"} if found.pop("use_fsdp", False) else {}), **found}


def _notes(launch: Launch) -> Iterator[str]:
    yield "the model, its data and the learning rate are those of your training script: TRAIN_DIR is its folder"
    yield "the script is taken to have the arguments of transformers' TrainingArguments, and --block_size for a sequence's length"
    if launch.layout.tp > 1:
        yield f"the script loads the model split: from_pretrained(..., tp_plan='auto') on {launch.layout.tp} devices"
    if launch.layout.cp > 1:
        yield "the script's step runs in Accelerator.maybe_context_parallel, which transformers' Trainer does by itself"


NEEDS = (
    Need(lambda launch: launch.job.num_seqs % (launch.layout.num_replicas * launch.layout.micro_batch_seqs) == 0,
         lambda launch: f"a batch of {launch.job.num_seqs} sequences is not a multiple of micro-batch × replicas = "
         f"{launch.layout.num_replicas * launch.layout.micro_batch_seqs}"),
    Need(lambda launch: launch.layout.dp == 1 or launch.layout.fsdp > 1 or launch.layout.tp * launch.layout.cp == 1,
         lambda launch: "tensor and context parallelism go with shards, not with replicas alone; set fsdp > 1, or dp=1"),
    Need(lambda launch: not launch.layout.offloads_activations
         or (launch.layout.recompute == "full" and launch.layout.zero_stage > 0),
         lambda launch: "fsdp_activation_checkpointing_offload moves checkpoints of FSDP; set recompute=full and a zero_stage"),
)  # fmt: skip
TARGET = Target(
    name="accelerate", title="Accelerate", version="1.15.0", source="https://github.com/huggingface/accelerate",
    stack="accelerate", table="accelerate", fields=FIELDS, needs=NEEDS, write=_write, read=_read,
    command=lambda launch: f"bash {SCRIPT}", notes=_notes, says_model=False, order=("tp", "cp", "fsdp", "dp", "pp"),
)  # fmt: skip
