"""torchtitan up to 0.2.2: a TOML file, and the command that starts with it.

Source of names and types: the wheel of torchtitan 0.2.2: config/job_config.py; requirements: config/manager.py,
distributed/parallel_dims.py, distributed/utils.py, models/*/infra/parallelize.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.primus import framework_options, read_experiment
from shardwise.interop.frameworks.torchtitan.models import flavor_facts, map_flavor, read_flavor, require_flavor
from shardwise.interop.frameworks.torchtitan.parallelism import (
    CP,
    EP,
    LOAD_BALANCER,
    PP,
    SHARED_MAPPINGS,
    TP,
    dtype_options,
    map_stages,
    read_dtypes,
)
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import torchrun_command
from shardwise.interop.launches.target import (
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Requirement,
    Target,
    add_options,
    map_names,
)
from shardwise.interop.text_formats.command_flags import parse_tyro
from shardwise.interop.text_formats.config_trees import format_toml_options, parse_toml_options
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.layout import layers_by_stage
from shardwise.values import InputError

NAME, TITLE = "torchtitan-toml", "torchtitan 0.2.2"
OPTIONS_FILE, MODELS_FILE = "torchtitan_toml", "torchtitan_toml_models"
SCRIPT, CONFIG_FILE = "launch.sh", "run.toml"
CP_ROTATE_METHOD, EXPERT_TP = "parallelism.context_parallel_rotate_method", "parallelism.expert_tensor_parallel_degree"
CP_VARIANTS = {"all_gather": "allgather", "zigzag": "alltoall"}
RECOMPUTE_MODE, RECOMPUTE_OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
CONVERTERS = "model.converters"
LINEAR_CONVERTER, EXPERTS_CONVERTER = "quantize.linear.float8", "quantize.grouped_mm.float8"
# A name of earlier releases, which files of 0.2.2 still have (train_configs/llama3_405b.toml).
# Options under their names before 0.2.2. Sources: torchtitan at d989842f (v0.1.0) and before, torchtitan/config_manager.py.
EARLIER_OPTIONS = {
    "training.batch_size": "training.local_batch_size", "training.compile": "compile.enable",
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    **{
        f"{section}.{name}": f"parallelism.{name}"
        for section in ("training", "experimental")
        for name in (
            "data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree", "context_parallel_degree",
            "pipeline_parallel_degree", "pipeline_parallel_schedule", "pipeline_parallel_microbatch_size",
            "enable_async_tensor_parallel", "fsdp_reshard_after_forward", "disable_loss_parallel",
        )
    },
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    **{
        f"float8.{name}": f"quantize.linear.float8.{name}"
        for name in (
            "enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp", "recipe_name", "filter_fqns", "emulate",
        )
    },
}  # fmt: skip
EARLIER_NAMES = {"float8": LINEAR_CONVERTER}
FP8_ALL_GATHER = f"{LINEAR_CONVERTER}.enable_fsdp_float8_all_gather"
FP8_PRECOMPUTED_SCALES = f"{LINEAR_CONVERTER}.precompute_float8_dynamic_scale_for_fsdp"


def _context_options(launch: Launch) -> Options:
    variant = CP_VARIANTS.get(launch.layout.cp_variant)
    return {LOAD_BALANCER: "headtail", CP_ROTATE_METHOD: variant} if launch.layout.cp > 1 and variant else {}


def _read_context(reader: OptionReader) -> Mapping[str, Any]:
    balancer, method = reader.get(LOAD_BALANCER, "headtail"), reader.get(CP_ROTATE_METHOD, "allgather")
    variants = {theirs: ours for ours, theirs in CP_VARIANTS.items()}
    if reader.get_degree(CP) == 1:
        return {}
    if balancer not in ("headtail", "ptrr") or method not in variants:
        raise InputError(
            f"{CP_ROTATE_METHOD}: found {method} with {LOAD_BALANCER} {balancer}; allgather or alltoall with headtail is required"
        )
    return {"layout.cp_variant": variants[method]}


def _read_experts(reader: OptionReader) -> Mapping[str, Any]:
    """Return etp: experts are whole unless split as layers are; without expert parallelism they always are split."""
    tp, etp = reader.get_degree(TP), reader.get(EXPERT_TP, 1)
    if reader.get_degree(EP) == 1 or tp == 1:
        return {"layout.etp": None}
    if etp not in (1, tp):
        raise InputError(f"{EXPERT_TP}: found {etp}; 1, or tensor_parallel_degree = {tp}, is required")
    return {"layout.etp": 1 if etp == 1 else None}


def _recompute_options(launch: Launch) -> Options:
    """Return recompute: every k-th layer as a whole, or selective, which keeps attention and every other matmul."""
    layout = launch.layout
    match layout.recompute:
        case "none":
            return {RECOMPUTE_MODE: "none"}
        case "alternate" if layout.recompute_layers is None:
            return {RECOMPUTE_MODE: "selective", RECOMPUTE_OPTION: "op"}
        case "full" if layout.recompute_layers is None:
            return {RECOMPUTE_MODE: "full"}
        case "full":
            stage_layers, count = layers_by_stage(launch.model, layout), layout.recompute_layers or 1
            every = max(max(stage_layers) // count, 1)
            if all(layers // every == count for layers in stage_layers):
                return {RECOMPUTE_MODE: "selective", RECOMPUTE_OPTION: str(every)}
    return {RECOMPUTE_MODE: "none"}


def _read_recompute(reader: OptionReader) -> Mapping[str, Any]:
    mode, option = reader.get(RECOMPUTE_MODE, "selective"), str(reader.get(RECOMPUTE_OPTION, "2"))
    if mode in ("none", "full"):
        return {"layout.recompute": mode}
    if mode == "selective" and option == "op":
        return {"layout.recompute": "alternate"}
    if mode != "selective" or not option.isdecimal() or int(option[:9]) < 1:
        raise InputError(
            f"{RECOMPUTE_MODE}: found {mode} ({RECOMPUTE_OPTION} {option}); none, full, or selective with op or a number, "
            "is required"
        )
    layers = read_flavor(MODELS_FILE, reader).fields["model.num_layers"] // reader.get_degree(PP) // int(option[:9])
    return {"layout.recompute": "full", "layout.recompute_layers": layers} if layers else {"layout.recompute": "none"}


def _precision_options(launch: Launch) -> Options:
    recipe, experts = launch.job.precision, launch.model.num_experts > 0
    linear = {**dtype_options(launch), CONVERTERS: [LINEAR_CONVERTER], f"{LINEAR_CONVERTER}.filter_fqns": ["output"]}
    if recipe == "fp8_torchao" and not experts:
        return {**linear, FP8_ALL_GATHER: True, FP8_PRECOMPUTED_SCALES: True}
    if recipe != "fp8_torchao_rowwise":
        return dtype_options(launch)
    grouped = {CONVERTERS: [LINEAR_CONVERTER, EXPERTS_CONVERTER], f"{EXPERTS_CONVERTER}.fqns": ["experts"],
               f"{LINEAR_CONVERTER}.filter_fqns": ["output", "router.gate"]} if experts else {}  # fmt: skip
    return {**linear, f"{LINEAR_CONVERTER}.recipe_name": "rowwise", **grouped}


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    precision, recipe = read_dtypes(reader), reader.get(f"{LINEAR_CONVERTER}.recipe_name", "tensorwise")
    gathered = reader.get(FP8_ALL_GATHER, False)
    converters = [EARLIER_NAMES.get(str(converter), str(converter)) for converter in reader.get(CONVERTERS, [])]
    reader.acknowledge(f"{LINEAR_CONVERTER}.filter_fqns", f"{EXPERTS_CONVERTER}.fqns", FP8_PRECOMPUTED_SCALES)
    if not converters:
        return {"job.precision": precision}
    precisions = {
        ("tensorwise", True): "fp8_torchao", ("tensorwise", False): "fp8_torchao", ("rowwise", False): "fp8_torchao_rowwise",
    }  # fmt: skip
    if (recipe, gathered) == ("tensorwise", False):
        reader.notes.append(
            f"{FP8_ALL_GATHER} is false: FSDP gathers bf16 weights, which are priced as gathered in fp8"
        )
    has_experts = "model.num_experts" in read_flavor(MODELS_FILE, reader).fields
    required = {LINEAR_CONVERTER, EXPERTS_CONVERTER} if has_experts else {LINEAR_CONVERTER}
    if set(converters) != required or (recipe, gathered) not in precisions:
        raise InputError(
            f"{CONVERTERS}: found {', '.join(converters)} (recipe {recipe}, {FP8_ALL_GATHER} {str(gathered).lower()}), "
            f"which no recipe here is; {LINEAR_CONVERTER} (with {EXPERTS_CONVERTER} where there are experts), tensorwise, or "
            "rowwise without gathers in float8, is what can be read"
        )
    return {"job.precision": precisions[recipe, gathered]}


TOML_MAPPINGS: tuple[OptionMapping, ...] = (
    map_stages(MODELS_FILE, "output"),
    OptionMapping(lambda launch: {}, lambda reader: {"layout.sequence_parallel": reader.get_degree(TP) > 1}),
    OptionMapping(lambda launch: {"parallelism.enable_async_tensor_parallel": launch.layout.async_tp},
          lambda reader: {"layout.async_tp": bool(reader.get("parallelism.enable_async_tensor_parallel", False))
                         and reader.get_degree(TP) > 1}),
    OptionMapping(_context_options, _read_context),
    OptionMapping(lambda launch: {EXPERT_TP: launch.layout.expert_tp} if launch.layout.ep > 1 else {}, _read_experts),
    OptionMapping(_recompute_options, _read_recompute),
    OptionMapping(_precision_options, _read_precision),
    map_names("job.optimizer", "optimizer.name", {"adamw": "AdamW"}, "AdamW"),
    add_options("job.config_file", "parallelism.disable_loss_parallel", "parallelism.expert_parallel_comm_backend",
           to_options=lambda launch: {}),
)  # fmt: skip
TOML_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        lambda launch: not launch.model.num_predict_layers,
        lambda launch: f"{TITLE} has no multi-token prediction; num_predict_layers=0 is required",
    ),
    Requirement(
        lambda launch: flavor_facts(MODELS_FILE, launch.model).get("pipelines", True) or launch.layout.pp == 1,
        lambda launch: f"{TITLE} has no pipeline of {launch.model.name}; pp=1 is required",
    ),
    Requirement(
        lambda launch: flavor_facts(MODELS_FILE, launch.model).get("splits_sequence", True) or launch.layout.cp == 1,
        lambda launch: f"{TITLE} has no context parallelism of {launch.model.name}; cp=1 is required",
    ),
    Requirement(
        lambda launch: launch.layout.fsdp * launch.layout.cp > 1 or launch.layout.tp * launch.layout.pp == 1,
        lambda launch: f"{TITLE} replicates weights, and mixes precisions, under tensor and pipeline parallelism with FSDP "
        "alone; fsdp or cp above 1 is required",
    ),
)  # fmt: skip


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    command = torchrun_command(launch.machines, "-m torchtitan.train")
    text = (
        f"#!/bin/bash\n# Starts on each node, with {TITLE} installed.\nset -euo pipefail\n\n{command} \\\n"
        f'  --job.config_file "${{RUN_DIR:-$PWD}}/{CONFIG_FILE}" \\\n'
        '  --model.hf_assets_path "${HF_ASSETS:?a folder with the tokenizer}" \\\n'
        '  --optimizer.lr "${LR:?a learning rate}"\n'
    )
    return {CONFIG_FILE: f"# {launch.model.name} for {TITLE}\n{format_toml_options(options)}", SCRIPT: text}


def _read_files(files: LaunchFiles) -> Options:
    """Return the options of the TOML file, with those of the command over them, or of an experiment of Primus."""
    if (experiment := read_experiment(files, "torchtitan")) is not None:
        return framework_options(experiment, OPTIONS_FILE)
    options: dict[str, Any] = {}
    tables = {name: text for name, text in files.items() if name.endswith(".toml")}
    scripts = [(name, text) for name, text in files.items() if name not in tables]
    if len(tables) != 1 or len(scripts) > 1:
        raise InputError(f"{NAME}: found {', '.join(files)}; one TOML file, and at most one script, are required")
    for name, text in tables.items():
        options |= parse_toml_options(text, name)
    for name, text in scripts:
        options |= parse_tyro(training_command(text, name).arguments, option_table(OPTIONS_FILE))
    renamed = {EARLIER_OPTIONS[name]: value for name, value in options.items() if name in EARLIER_OPTIONS}
    options = renamed | {name: value for name, value in options.items() if name not in EARLIER_OPTIONS}
    return {name: value for name, value in options.items() if value is not None}


def _notes(launch: Launch) -> Iterator[str]:
    yield "learning rate, data and its tokenizer are yours: set LR, HF_ASSETS and training.dataset"
    if launch.model.kv_lora_rank:
        yield "norms of latents have the smallest epsilon of their dtype, whatever the model has (deepseek_v3/model/model.py)"
    if launch.model.num_experts and launch.layout.ep == 1 and launch.layout.tp > 1:
        yield "without expert parallelism each expert is split as its layer is"


TARGET = Target(
    name=NAME, title="torchtitan", version="0.2.2", source="https://pypi.org/project/torchtitan/0.2.2/, config/job_config.py",
    stack="torchtitan", options_file=OPTIONS_FILE, mappings=(map_flavor(MODELS_FILE), *SHARED_MAPPINGS, *TOML_MAPPINGS),
    requirements=(require_flavor(MODELS_FILE, TITLE), *TOML_REQUIREMENTS),
    write=_write_files, read=_read_files, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
)  # fmt: skip
