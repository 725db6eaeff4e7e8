"""Accelerate: a configuration for `accelerate launch` with PyTorch's FSDP, and a script that starts a training script with it.

Source of names and types: Accelerate 1.15.0: commands/config/config_args.py and commands/launch.py; what it requires:
parallelism_config.py, accelerator.py and FullyShardedDataParallelPlugin in utils/dataclasses.py.

Degrees are those of FSDP of either version, and the sizes of ParallelismConfig. With mixed precision FSDP's weights rest in fp32
and are gathered and reduced in the 16 bits that they are used in (utils/fsdp_utils.py, fsdp2_prepare_model; utils/dataclasses.py,
set_mixed_precision): as many bytes as bf16 weights with an fp32 master copy. Plain replicas are torch's DistributedDataParallel,
which reduces the gradients of fp32 weights as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import (
    LENGTH,
    OPTIMIZER,
    PORT,
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
)
from shardwise.interop.launches.target import Field, Files, Given, Need, Options, Target, beside, option_table
from shardwise.interop.text_formats.config_trees import dotted, spelt, yaml_text, yaml_tree
from shardwise.values.errors import InputError, unknown

NODE = "num_processes"
KIND, VERSION, RESHARD = "distributed_type", "fsdp_config.fsdp_version", "fsdp_config.fsdp_reshard_after_forward"
STRATEGY = "fsdp_config.fsdp_sharding_strategy"
SIZE = "parallelism_config.parallelism_config_{}_size"
ROTATE = "parallelism_config.parallelism_config_cp_comm_strategy"
AXES = {"dp_replicate": "dp", "dp_shard": "fsdp", "cp": "cp", "tp": "tp"}  # theirs: ours
VARIANTS = {
    "all_gather": "allgather",
    "zigzag": "alltoall",
}  # as torch's set_rotate_method; both have a piece from either end
# Strategies of the first version in the order of their numbers, from 1: ZeRO stage, and whether nodes have whole replicas.
# Source: utils/constants.py, FSDP_SHARDING_STRATEGY.
STRATEGIES = {"FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False), "HYBRID_SHARD": (3, True),
              "HYBRID_SHARD_ZERO2": (2, True)}  # fmt: skip


def _sharding_options(launch: Launch) -> Options:
    """Plain replicas are DDP, and tensor parallelism alone needs no FSDP."""
    layout = launch.layout
    sizes = {SIZE.format(theirs): getattr(layout, ours) for theirs, ours in AXES.items()}
    if not layout.zero_stage:
        return {KIND: "MULTI_GPU"} if layout.tp == 1 else {KIND: "MULTI_GPU", **sizes}
    rotated = {ROTATE: VARIANTS[layout.cp_variant]} if layout.cp > 1 and layout.cp_variant in VARIANTS else {}
    return {KIND: "FSDP", VERSION: 2, RESHARD: layout.zero_stage == 3, **sizes, **rotated}


def degree(given: Given, axis: str) -> int:
    """A size of ParallelismConfig."""
    return whole(given, SIZE.format(axis)) or 1


def replicas_of(given: Given) -> int:
    """Groups of processes with sequences of their own. Raises `InputError` for sizes that are not those of the cluster."""
    devices, processes = given.machines.num_devices, given.get(NODE)
    if processes not in (None, -1, devices):
        raise InputError(
            f"{NODE}: found {processes!r} on a cluster of {devices} devices; give the cluster of the launch"
        )
    if degree(given, "sp") > 1:
        raise InputError(
            "parallelism_config_sp_size: Ulysses is DeepSpeed's; a launch with FSDP, or a ds_config.json, is required"
        )
    sizes = {axis: degree(given, axis) for axis in AXES}
    within = sizes["tp"] * sizes["cp"]
    whole = within * sizes["dp_replicate"] * sizes["dp_shard"]
    if whole not in (1, devices):
        words = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise InputError(
            f"parallelism_config: found {words} = {whole} on {devices} devices; their product is required to be that"
        )
    return devices // within


def _read_sharding(given: Given) -> Mapping[str, Any]:
    replicas, kind = replicas_of(given), given.get(KIND)
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise InputError(
            f"{KIND}: found {kind!r}; FSDP or MULTI_GPU is what can be read (of DEEPSPEED its ds_config.json)"
        )
    tp, cp = degree(given, "tp"), degree(given, "cp")
    rotated = given.get(ROTATE, VARIANTS["all_gather"])
    back = {theirs: ours for ours, theirs in VARIANTS.items()}
    if rotated not in back:
        raise InputError(f"parallelism_config_cp_comm_strategy: {unknown(str(rotated), back)}")
    stage, whole_nodes = _strategy(given) if kind == "FSDP" else (0, False)
    dp = _replicated(given, replicas, whole_nodes) if stage else replicas
    alone = replicas * cp == 1
    if stage and not alone and cp * replicas == dp:
        raise InputError(
            "FSDP has nothing to shard over: dp_shard and cp are 1; set distributed_type MULTI_GPU, or a dp_shard_size"
        )
    return {
        "layout.tp": tp, "layout.cp": cp, **({"layout.cp_variant": back[rotated]} if cp > 1 else {}), "layout.dp": dp,
        "layout.fsdp": replicas // dp, "layout.zero_stage": 0 if alone else stage, "layout.sequence_parallel": False,
    }  # fmt: skip


def _replicated(given: Given, replicas: int, whole_nodes: bool) -> int:
    """Copies of the shards: as ParallelismConfig has it, or one on each node."""
    return given.machines.num_nodes if whole_nodes else min(degree(given, "dp_replicate"), replicas)


def _strategy(given: Given) -> tuple[int, bool]:
    """Stage of ZeRO, and whether each node has a replica."""
    version, reshard, strategy = given.get(VERSION, 1), given.get(RESHARD, True), given.get(STRATEGY, "FULL_SHARD")
    if str(version) == "2":
        return (3 if is_true(reshard) else 2), False
    names = list(STRATEGIES)
    text = str(strategy).upper()
    name = names[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text
    if name not in STRATEGIES:
        raise InputError(f"fsdp_sharding_strategy: {unknown(name, names)}")
    return STRATEGIES[name]


SHARDING = (Field(_sharding_options, _read_sharding),)

MIXED, EIGHT = "mixed_precision", "fp8_config.fp8_"
GATHERED = f"{EIGHT}enable_fsdp_float8_all_gather"
SHARDED: Mapping[str, Options] = {
    "bf16": {MIXED: "bf16"},
    "fp32": {MIXED: "no"},
    "fp8_torchao": {MIXED: "fp8", f"{EIGHT}backend": "ao", GATHERED: True},
}
REPLICATED: Mapping[str, Options] = {"bf16_fp32_reduction": {MIXED: "bf16"}, "fp32": {MIXED: "no"}}


def _table(sharded: bool) -> Mapping[str, Options]:
    return SHARDED if sharded else REPLICATED


def _precision_options(launch: Launch) -> Options:
    return _table(launch.layout.zero_stage > 0).get(launch.job.precision, {})


def _read_precision(given: Given) -> Mapping[str, Any]:
    """What the formats of either table say; the backend of fp8 is torchao's where it is named so."""
    value = given.get(MIXED, "no")
    said: dict[str, Any] = {MIXED: value}
    if value == "fp8":
        said |= {
            f"{EIGHT}backend": given.get(f"{EIGHT}backend"),
            GATHERED: is_true(given.get(GATHERED, True)),
        }
    table = _table(given.get(KIND) == "FSDP")
    name = next((name for name, options in table.items() if options == said), None)
    if name is None:
        found = ", ".join(f"{option.rpartition('.')[2]} {one}" for option, one in said.items())
        raise InputError(
            f"{MIXED}: found {found}; one of bf16, no and, with FSDP, fp8 by AO with its own gathers, can be read"
        )
    return {"job.precision": name}


FORMATS = Field(_precision_options, _read_precision)

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
