"""Accelerate: a configuration for `accelerate launch` with PyTorch's FSDP, and a script that starts a training script with it.

Source of names and types: Accelerate 1.15.0: commands/config/config_args.py and commands/launch.py; requirements:
parallelism_config.py, accelerator.py and FullyShardedDataParallelPlugin in utils/dataclasses.py.

Degrees are those of FSDP of either version, and the sizes of ParallelismConfig. With mixed precision, FSDP keeps weights in
fp32 and gathers and reduces them in the 16-bit dtype of the computation (utils/fsdp_utils.py, fsdp2_prepare_model;
utils/dataclasses.py, set_mixed_precision): as many bytes as bf16 weights with an fp32 master copy. Plain replicas are torch's
DistributedDataParallel, which reduces the fp32 weights' gradients in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.trainers.adapter_options import (
    ADAPTER_MAPPING,
    quantization_options,
    script_quantization,
)
from shardwise.interop.frameworks.training_arguments import (
    TRAINER_DEFAULTS,
    deepspeed_options,
    has_argument_file,
    launcher_options,
    referred_file,
    split_files,
    with_defaults,
    with_prefix,
)
from shardwise.interop.frameworks.training_script_models import find_script_model, script_model_name
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import (
    LENGTH_MAPPING,
    OPTIMIZER_MAPPING,
    PORT,
    SCRIPT_PREFIX,
    STEPS_MAPPING,
    TRAINING_SCRIPT,
    argument_lines,
    config_files,
    drop_script_options,
    is_true,
    read_launcher_and_script_options,
    read_tokens,
)
from shardwise.interop.launches.target import (
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Target,
    add_options,
)
from shardwise.interop.text_formats.config_trees import flatten, format_yaml, normalize_values
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.values import InputError, describe_unknown

NUM_PROCESSES = "num_processes"
DISTRIBUTED_TYPE, FSDP_VERSION = "distributed_type", "fsdp_config.fsdp_version"
DEEPSPEED_FILE = "deepspeed_config.deepspeed_config_file"
RESHARD_AFTER_FORWARD = "fsdp_config.fsdp_reshard_after_forward"
SHARDING_STRATEGY = "fsdp_config.fsdp_sharding_strategy"
DEGREE_OPTION = "parallelism_config.parallelism_config_{}_size"
CP_STRATEGY = "parallelism_config.parallelism_config_cp_comm_strategy"
AXES = {"dp_replicate": "dp", "dp_shard": "fsdp", "cp": "cp", "tp": "tp"}  # theirs: ours
# torch's set_rotate_method; in both, a rank has a chunk from either end of the sequence.
CP_VARIANTS = {"all_gather": "allgather", "zigzag": "alltoall"}
# Strategies of FSDP1 in the order of their numbers, from 1: (ZeRO stage, whether each node has a whole replica).
# Source: utils/constants.py, FSDP_SHARDING_STRATEGY.
STRATEGIES = {"FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False), "HYBRID_SHARD": (3, True),
              "HYBRID_SHARD_ZERO2": (2, True)}  # fmt: skip


def _sharding_options(launch: Launch) -> Options:
    """Return the options of FSDP; plain replicas are DDP, and tensor parallelism alone needs no FSDP."""
    layout = launch.layout
    sizes = {DEGREE_OPTION.format(theirs): getattr(layout, ours) for theirs, ours in AXES.items()}
    if not layout.zero_stage:
        return {DISTRIBUTED_TYPE: "MULTI_GPU"} if layout.tp == 1 else {DISTRIBUTED_TYPE: "MULTI_GPU", **sizes}
    if layout.cp > 1 and layout.cp_variant in CP_VARIANTS:
        sizes |= {CP_STRATEGY: CP_VARIANTS[layout.cp_variant]}
    return {DISTRIBUTED_TYPE: "FSDP", FSDP_VERSION: 2, RESHARD_AFTER_FORWARD: layout.zero_stage == 3, **sizes}


def _get_degree(reader: OptionReader, axis: str) -> int:
    """Return a size of ParallelismConfig, 1 if it is not set."""
    return reader.get_count(DEGREE_OPTION.format(axis)) or 1


def read_replicas(reader: OptionReader) -> int:
    """Return how many groups of processes have sequences of their own. Raises `InputError` if sizes do not match the cluster."""
    devices, processes = reader.machines.num_devices, reader.get(NUM_PROCESSES)
    if processes not in (None, -1, devices):
        raise InputError(
            f"{NUM_PROCESSES}: found {processes!r} on a cluster of {devices} devices; give the cluster of the launch"
        )
    ulysses = _get_degree(reader, "sp")
    if ulysses > 1 and reader.get(DISTRIBUTED_TYPE) != "DEEPSPEED":
        raise InputError(
            "parallelism_config_sp_size: Ulysses is DeepSpeed's; a launch with FSDP, or a ds_config.json, is required"
        )
    sizes = {axis: _get_degree(reader, axis) for axis in AXES}
    model_parallel = sizes["tp"] * sizes["cp"] * ulysses
    product = model_parallel * sizes["dp_replicate"] * sizes["dp_shard"]
    if product not in (1, ulysses, devices):
        listed = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise InputError(
            f"parallelism_config: found {listed} = {product} on {devices} devices; their product is required to be that"
        )
    return devices // model_parallel


def _read_parallelism(reader: OptionReader) -> Mapping[str, Any]:
    replicas, distributed_type = read_replicas(reader), reader.get(DISTRIBUTED_TYPE)
    if distributed_type not in ("FSDP", "MULTI_GPU", "NO", "DEEPSPEED"):
        raise InputError(
            f"{DISTRIBUTED_TYPE}: found {distributed_type!r}; FSDP, DEEPSPEED or MULTI_GPU is what can be read"
        )
    if distributed_type == "DEEPSPEED":
        return _read_deepspeed(reader, replicas)
    tp, cp = _get_degree(reader, "tp"), _get_degree(reader, "cp")
    rotated = reader.get(CP_STRATEGY, CP_VARIANTS["all_gather"])
    variants = {theirs: ours for ours, theirs in CP_VARIANTS.items()}
    if rotated not in variants:
        raise InputError(f"parallelism_config_cp_comm_strategy: {describe_unknown(str(rotated), variants)}")
    stage, whole_nodes = _read_strategy(reader) if distributed_type == "FSDP" else (0, False)
    dp = _num_shard_copies(reader, replicas, whole_nodes) if stage else replicas
    is_alone = replicas * cp == 1
    if stage and not is_alone and cp * replicas == dp:
        raise InputError(
            "FSDP has nothing to shard over: dp_shard and cp are 1; set distributed_type MULTI_GPU, or a dp_shard_size"
        )
    return {
        "layout.tp": tp, "layout.cp": cp, **({"layout.cp_variant": variants[rotated]} if cp > 1 else {}), "layout.dp": dp,
        "layout.fsdp": replicas // dp, "layout.zero_stage": 0 if is_alone else stage, "layout.sequence_parallel": False,
    }  # fmt: skip


def _read_deepspeed(reader: OptionReader, replicas: int) -> Mapping[str, Any]:
    """Return the sharding of a DeepSpeed configuration within the file. Raises `InputError` for one in another file."""
    if str(reader.get("deepspeed_config.offload_param_device", "none")) != "none":
        raise InputError("offload_param_device: weights that rest on the host are not priced; set it to none")
    ulysses = _get_degree(reader, "sp")
    stage = reader.get("deepspeed_config.zero_stage", 2) if replicas * ulysses > 1 else 0
    reader.acknowledge("deepspeed_config.zero3_init_flag", "deepspeed_config.zero3_save_16bit_model")
    shards = {"layout.dp": 1, "layout.fsdp": replicas} if stage else {"layout.dp": replicas}
    sequences = {"layout.cp": ulysses, "layout.cp_variant": "ulysses"} if ulysses > 1 else {}
    return {**shards, **sequences, "layout.zero_stage": stage, "layout.sequence_parallel": False}


def _num_shard_copies(reader: OptionReader, replicas: int, whole_nodes: bool) -> int:
    """Return how many copies of the shards there are: one per node, or ParallelismConfig's dp_replicate."""
    return reader.machines.num_nodes if whole_nodes else min(_get_degree(reader, "dp_replicate"), replicas)


def _read_strategy(reader: OptionReader) -> tuple[int, bool]:
    """Return the ZeRO stage, and whether each node has a replica."""
    version, reshard = reader.get(FSDP_VERSION, 1), reader.get(RESHARD_AFTER_FORWARD, True)
    strategy = reader.get(SHARDING_STRATEGY)
    if strategy is None:  # of FSDP1, the newer name of the option may have the strategy as its value
        strategy = reshard if str(reshard).upper() in STRATEGIES else "FULL_SHARD"
    if str(version) == "2":
        return (3 if is_true(reshard) else 2), False
    names = list(STRATEGIES)
    text = str(strategy).upper()
    name = names[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text
    if name not in STRATEGIES:
        raise InputError(f"fsdp_sharding_strategy: {describe_unknown(name, names)}")
    return STRATEGIES[name]


def _deepspeed_options(launch: Launch) -> Options:
    layout = launch.layout
    ulysses = {DEGREE_OPTION.format("sp"): layout.cp} if layout.cp > 1 else {}
    host = {"deepspeed_config.offload_optimizer_device": "cpu"} if layout.offloads_optimizer else {}
    recompute = {f"{SCRIPT_PREFIX}gradient_checkpointing": True} if layout.recompute == "full" else {}
    return {
        DISTRIBUTED_TYPE: "DEEPSPEED",
        "deepspeed_config.zero_stage": layout.zero_stage,
        **ulysses,
        **host,
        **recompute,
    }


SHARDING_MAPPINGS = (OptionMapping(_sharding_options, _read_parallelism),)

MIXED_PRECISION, FP8_PREFIX = "mixed_precision", "fp8_config.fp8_"
FP8_ALL_GATHER = f"{FP8_PREFIX}enable_fsdp_float8_all_gather"
SHARDED_PRECISIONS: Mapping[str, Options] = {
    "bf16": {MIXED_PRECISION: "bf16"},
    "fp32": {MIXED_PRECISION: "no"},
    "fp8_torchao": {MIXED_PRECISION: "fp8", f"{FP8_PREFIX}backend": "ao", FP8_ALL_GATHER: True},
}
REPLICATED_PRECISIONS: Mapping[str, Options] = {
    "bf16_fp32_reduction": {MIXED_PRECISION: "bf16"},
    "fp32": {MIXED_PRECISION: "no"},
}


def _known_precisions(sharded: bool) -> Mapping[str, Options]:
    return SHARDED_PRECISIONS if sharded else REPLICATED_PRECISIONS


def _precision_options(launch: Launch) -> Options:
    precision = launch.job.precision
    if quantization := quantization_options(precision, SCRIPT_PREFIX, "use_bnb_nested_quant"):
        return {MIXED_PRECISION: "bf16", **quantization}
    return _known_precisions(launch.layout.zero_stage > 0).get(precision, {})


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    """Return the precision whose options these are. fp8 must name torchao as its backend.

    What the script's arguments say counts before the launcher's, as transformers' TrainingArguments sets it.
    """
    half = next((name for name in ("bf16", "fp16") if is_true(reader.get(SCRIPT_PREFIX + name, False))), None)
    dtypes = {str(reader.get(SCRIPT_PREFIX + name, "")).rpartition(".")[2] for name in ("dtype", "torch_dtype")}
    if (quantized := script_quantization(reader)) is not None:
        reader.acknowledge(MIXED_PRECISION)
        return {"job.precision": quantized}
    mixed_precision = half or reader.get(MIXED_PRECISION, "no")
    is_replicated = reader.get(DISTRIBUTED_TYPE) not in ("FSDP", "DEEPSPEED")
    if mixed_precision == "fp16":
        return {"job.precision": "fp16"}
    if is_replicated and dtypes & {"bfloat16", "bf16"} and mixed_precision in ("bf16", "no"):
        return {"job.precision": "bf16_bf16_state"}  # PyTorch's optimizer keeps moments in the format of the weights
    settings: dict[str, Any] = {MIXED_PRECISION: mixed_precision}
    if mixed_precision == "fp8":
        settings[f"{FP8_PREFIX}backend"] = reader.get(f"{FP8_PREFIX}backend")
        settings[FP8_ALL_GATHER] = is_true(reader.get(FP8_ALL_GATHER, True))
    table = _known_precisions(not is_replicated)
    name = next((name for name, options in table.items() if options == settings), None)
    if name is None:
        listed = ", ".join(f"{option.rpartition('.')[2]} {setting}" for option, setting in settings.items())
        raise InputError(
            f"{MIXED_PRECISION}: found {listed}; bf16, fp16, no and, with FSDP, fp8 by AO with its own gathers can be read"
        )
    return {"job.precision": name}


PRECISION_MAPPING = OptionMapping(_precision_options, _read_precision)

CONFIG, SCRIPT = "config.yaml", "launch.sh"
MICRO_BATCH, ACCUMULATION = f"{SCRIPT_PREFIX}per_device_train_batch_size", f"{SCRIPT_PREFIX}gradient_accumulation_steps"
# Options of torchrun and of deepspeed's launcher, which say on which machines a script runs. Sources: PyTorch documentation,
# torchrun (Elastic Launch); DeepSpeed 0.19.8, launcher/runner.py.
PROCESS_OPTION_NAMES = (
    "nnodes", "nproc_per_node", "node_rank", "rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "standalone",
    "max_restarts",
    "master_addr", "master_port", "num_gpus", "num_nodes", "hostfile", "include", "exclude", "launcher", "no_ssh", "module",
)  # fmt: skip
CONFIG_ACCUMULATION = "gradient_accumulation_steps"  # in the YAML file
RECOMPUTE = "fsdp_config.fsdp_activation_checkpointing"


def _batch_options(launch: Launch) -> Options:
    return {MICRO_BATCH: launch.layout.micro_batch_seqs, ACCUMULATION: launch.num_micro_batches}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    micro_batch = reader.get_count(MICRO_BATCH, reader.user_fields.get("layout.micro_batch_seqs"))
    if micro_batch is None:
        return {}
    in_file = reader.get_count(CONFIG_ACCUMULATION, reader.get_count("deepspeed_config.gradient_accumulation_steps"))
    steps = reader.get_count(ACCUMULATION, in_file)
    user_batch = reader.user_fields.get("job.global_batch_seqs")
    if steps is None and (user_batch or MICRO_BATCH not in reader):
        return {"layout.micro_batch_seqs": micro_batch}  # the user gives the batch, or has to
    seqs = micro_batch * (steps or 1) * read_replicas(reader)
    seq_len = LENGTH_MAPPING.from_options(reader).get("job.seq_len", reader.user_fields.get("job.seq_len"))
    return {"layout.micro_batch_seqs": micro_batch, "job.global_batch_seqs": seqs, **read_tokens(reader, seqs, seq_len)}


def _recompute_options(launch: Launch) -> Options:
    """Return FSDP's checkpointing of whole layers; plain replicas leave that to the training script."""
    layout = launch.layout
    if not layout.zero_stage:
        return {f"{SCRIPT_PREFIX}gradient_checkpointing": True} if layout.recompute == "full" else {}
    host = {f"{RECOMPUTE}_offload": True} if layout.offloads_activations else {}
    return {RECOMPUTE: layout.recompute == "full", **host}


def _read_recompute(reader: OptionReader) -> Mapping[str, Any]:
    full = any(is_true(reader.get(name, False)) for name in (RECOMPUTE, f"{SCRIPT_PREFIX}gradient_checkpointing"))
    host = is_true(reader.get(f"{RECOMPUTE}_offload", False))
    if is_true(reader.get("fsdp_config.fsdp_offload_params", False)):
        raise InputError("fsdp_offload_params: weights that rest on the host are not priced; set it to false")
    offload = "activations" if host else "none"
    if str(reader.get("deepspeed_config.offload_optimizer_device", "none")) == "cpu":
        offload = "both" if host else "optimizer"
    return {"layout.recompute": "full" if full else "none", "layout.offload": offload}


def _read_kernels(reader: OptionReader) -> Mapping[str, Any]:
    """Return the loss of Liger's kernels, and attention that writes its scores, where the script's arguments turn them on."""
    chunked = is_true(reader.get(f"{SCRIPT_PREFIX}use_liger_kernel", False))
    eager = reader.get(f"{SCRIPT_PREFIX}attn_implementation") == "eager"
    return {**({"job.loss": "chunked"} if chunked else {}), **({"job.attention": "unfused"} if eager else {})}


def _wrapping_options(launch: Launch) -> Options:
    """Return options that make each layer a unit of FSDP, and checkpoints sharded."""
    names = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
             "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False}  # fmt: skip
    return {f"fsdp_config.{name}": value for name, value in names.items()} if launch.layout.zero_stage else {}


def _machine_options(launch: Launch) -> Options:
    machines = launch.machines
    return {"compute_environment": "LOCAL_MACHINE", NUM_PROCESSES: machines.num_devices, "num_machines": machines.num_nodes,
            "rdzv_backend": "static", "same_network": True, "main_training_function": "main", "use_cpu": False,
            "debug": False}  # fmt: skip


MAPPINGS: tuple[OptionMapping, ...] = (
    add_options("compute_environment", NUM_PROCESSES, "num_machines", "rdzv_backend", "same_network", "main_training_function",
                "use_cpu", "debug", to_options=_machine_options),
    *SHARDING_MAPPINGS,
    add_options("fsdp_config.fsdp_auto_wrap_policy", "fsdp_config.fsdp_state_dict_type",
           "fsdp_config.fsdp_cpu_ram_efficient_loading", to_options=_wrapping_options),
    PRECISION_MAPPING,
    OptionMapping(_recompute_options, _read_recompute),
    OptionMapping(_batch_options, _read_batch),
    OptionMapping(lambda launch: {}, _read_kernels), OPTIMIZER_MAPPING, LENGTH_MAPPING, STEPS_MAPPING, ADAPTER_MAPPING,
)  # fmt: skip


# Mappings of a launch whose configuration has DeepSpeed do the sharding: it is changed by DeepSpeed's options.
DEEPSPEED_MAPPINGS = (OptionMapping(_deepspeed_options, _read_parallelism), *(
    OptionMapping(lambda launch: {}, mapping.from_options) if mapping.to_options is _recompute_options else mapping
    for mapping in MAPPINGS if mapping not in SHARDING_MAPPINGS and mapping.to_options is not _wrapping_options
))  # fmt: skip


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    multi_node = launch.machines.num_nodes > 1
    rendezvous = (
        f'--machine_rank "${{NODE_RANK:-${{SLURM_NODEID:?}}}}" --main_process_ip "${{HEAD_NODE:?the first node}}" '
        f"--main_process_port {PORT} "
    ) if multi_node else ""  # fmt: skip
    script = (
        f"#!/bin/bash\n# Starts on each node, beside {CONFIG}.\nset -euo pipefail\n\n{argument_lines(options)}\n\n"
        f'accelerate launch --config_file {CONFIG} {rendezvous}{TRAINING_SCRIPT} "${{ARGS[@]}}"\n'
    )
    return {CONFIG: format_yaml(drop_script_options(options)), SCRIPT: script}


def _read_files(files: LaunchFiles) -> Options:
    """Return the options of Accelerate's file, of the script's arguments in another, and of the command, which counts first."""
    table = option_table("accelerate")
    file_arguments, tree, referred = split_files(config_files(files))
    launcher, flags = read_launcher_and_script_options(files, "accelerate")
    arguments = {**file_arguments, **{name.removeprefix(SCRIPT_PREFIX): value for name, value in flags.items()}}
    _require_used_files(arguments, tree, file_arguments, referred)
    arguments = with_defaults(
        {**(TRAINER_DEFAULTS if file_arguments else {}), **arguments},
        [files[name] for name in files.keys() - config_files(files).keys()],
    )
    configured = {_full_option_name(option, table): value for option, value in flatten(tree, table).items()}
    if configured.get(DEEPSPEED_FILE) not in (None, "none") and DISTRIBUTED_TYPE in configured:
        configured |= deepspeed_options(configured.pop(DEEPSPEED_FILE), files)
    options = {**configured, **_launcher_overrides(launcher)}
    if arguments and not tree and DISTRIBUTED_TYPE not in options:
        options = {**launcher_options(arguments, files), **options}
    return normalize_values({**options, **with_prefix(arguments, table)}, table)


def _require_used_files(
    arguments: Options, tree: Options, file_arguments: Options, referred: Mapping[str, str]
) -> None:
    """Raise `InputError` for a file that no option refers to, and for a file of arguments that is not given."""
    references = " ".join(
        str(value) for value in (*arguments.values(), *flatten(tree).values()) if isinstance(value, str)
    )
    unused = [name for name in referred if name not in references]
    if unused:
        raise InputError(
            f"Accelerate: found {', '.join(unused)}, which nothing refers to; one YAML, the file of the script's arguments, and "
            "the script that starts it are what can be read"
        )
    missing = referred_file(arguments)
    if missing is not None and not file_arguments:
        raise InputError(f"--config: refers to {missing[:80]!r}, which is not given; give this file too")


def _full_option_name(option: str, table: Mapping[str, Any]) -> str:
    """Return an option's full name: in a section, the part of the name that repeats the section may be left out."""
    section, dot, name = option.partition(".")
    full_name = f"{section}.{section.removesuffix('_config')}_{name}"
    return full_name if dot and option not in table and full_name in table else option


def _launcher_overrides(launcher: Options) -> dict[str, Any]:
    """Return the options of `accelerate launch` flags, which override the YAML file, under their names with section."""
    names = [name for name in option_table("accelerate") if not name.startswith(SCRIPT_PREFIX)]
    full_names = {name.rpartition(".")[2]: name for name in names}
    # Rank and rendezvous differ on each node.
    ignored = {
        "config_file",
        *PROCESS_OPTION_NAMES,
        *(name for name, value in launcher.items() if str(value).startswith("$")),
    }
    overrides = {full_names.get(name, name): value for name, value in launcher.items() if name not in ignored}
    return {**({"distributed_type": "FSDP"} if overrides.pop("use_fsdp", False) else {}), **overrides}


def _notes(launch: Launch) -> Iterator[str]:
    yield "the model, its data and the learning rate are those of your training script: TRAIN_DIR is its folder"
    yield "the script is taken to have the arguments of transformers' TrainingArguments, and --block_size for a sequence's length"
    if launch.layout.tp > 1:
        yield f"the script loads the model split: from_pretrained(..., tp_plan='auto') on {launch.layout.tp} devices"
    if launch.layout.cp > 1:
        yield "the script's step runs in Accelerator.maybe_context_parallel, which transformers' Trainer does by itself"


TARGET = Target(
    name="accelerate", title="Accelerate", version="1.15.0", source="https://github.com/huggingface/accelerate",
    stack="accelerate", options_file="accelerate", mappings=MAPPINGS, requirements=(),
    write=_write_files, read=_read_files, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
    choose_stack=lambda options: "deepspeed" if options.get(DISTRIBUTED_TYPE) == "DEEPSPEED" else "accelerate",
    model_name=script_model_name, find_model=find_script_model, includes_model=False,
    stack_mappings=(("deepspeed", DEEPSPEED_MAPPINGS),), recognizes=has_argument_file,
)  # fmt: skip
