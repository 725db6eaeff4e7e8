"""torchtitan up to 0.2.2: a TOML file, and the command that gives it.

Source of names and types: the wheel of torchtitan 0.2.2: config/job_config.py; what it asks of them: config/manager.py,
distributed/parallel_dims.py, distributed/utils.py, models/*/infra/parallelize.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.torchtitan.models import facts_of, flavor_field, heard_flavor, known_model
from shardwise.interop.frameworks.torchtitan.parallelism import (
    BALANCER,
    CP,
    ENOUGH_MICRO_BATCHES,
    EP,
    NEEDS,
    PP,
    SHARED,
    TP,
    degree,
    formats,
    heard_formats,
    stage_field,
)
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import torchrun
from shardwise.interop.launches.target import Field, Files, Given, Need, Options, Target, beside, named, option_table
from shardwise.interop.text_formats.command_flags import tyro_options
from shardwise.interop.text_formats.config_trees import toml_options, toml_text
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.layout.layers_per_stage import held_layers
from shardwise.values.errors import InputError

NAME, TABLE, MODELS, TITLE = "torchtitan-toml", "torchtitan_toml", "torchtitan_toml_models", "torchtitan 0.2.2"
SCRIPT, FILE = "launch.sh", "run.toml"
ROTATES, ETP = "parallelism.context_parallel_rotate_method", "parallelism.expert_tensor_parallel_degree"
VARIANTS = {"all_gather": "allgather", "zigzag": "alltoall"}
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
CONVERTERS, LINEAR, GROUPED = "model.converters", "quantize.linear.float8", "quantize.grouped_mm.float8"
BEFORE = {
    "float8": LINEAR
}  # names of earlier releases, which files of 0.2.2 still have (train_configs/llama3_405b.toml)
GATHERED, SCALES = f"{LINEAR}.enable_fsdp_float8_all_gather", f"{LINEAR}.precompute_float8_dynamic_scale_for_fsdp"


def _context(launch: Launch) -> Options:
    variant = VARIANTS.get(launch.layout.cp_variant)
    return {BALANCER: "headtail", ROTATES: variant} if launch.layout.cp > 1 and variant else {}


def _heard_context(given: Given) -> Mapping[str, Any]:
    balancer, method = given.get(BALANCER, "headtail"), given.get(ROTATES, "allgather")
    back = {theirs: ours for ours, theirs in VARIANTS.items()}
    if degree(given, CP) == 1:
        return {}
    if balancer not in ("headtail", "ptrr") or method not in back:
        raise InputError(
            f"{ROTATES}: found {method} with {BALANCER} {balancer}; allgather or alltoall with headtail is required"
        )
    return {"layout.cp_variant": back[method]}


def _heard_experts(given: Given) -> Mapping[str, Any]:
    """Experts are whole unless they are split as layers are; without expert parallelism they always are split."""
    tp, etp = degree(given, TP), given.get(ETP, 1)
    if degree(given, EP) == 1 or tp == 1:
        return {"layout.etp": None}
    if etp not in (1, tp):
        raise InputError(f"{ETP}: found {etp}; 1, or tensor_parallel_degree = {tp}, is required")
    return {"layout.etp": 1 if etp == 1 else None}


def _recompute(launch: Launch) -> Options:
    """Whole layers, of each so many that one in `k` runs again, or products and attention kept but for every other product."""
    layout = launch.layout
    match layout.recompute:
        case "none":
            return {MODE: "none"}
        case "alternate" if layout.recompute_layers is None:
            return {MODE: "selective", OPTION: "op"}
        case "full" if layout.recompute_layers is None:
            return {MODE: "full"}
        case "full":
            held, count = held_layers(launch.model, layout), layout.recompute_layers or 1
            every = max(max(held) // count, 1)
            if all(layers // every == count for layers in held):
                return {MODE: "selective", OPTION: str(every)}
    return {MODE: "none"}


def _heard_recompute(given: Given) -> Mapping[str, Any]:
    mode, option = given.get(MODE, "selective"), str(given.get(OPTION, "2"))
    if mode in ("none", "full"):
        return {"layout.recompute": mode}
    if mode == "selective" and option == "op":
        return {"layout.recompute": "alternate"}
    if mode != "selective" or not option.isdecimal() or int(option[:9]) < 1:
        raise InputError(
            f"{MODE}: found {mode} ({OPTION} {option}); none, full, or selective with op or a number, is required"
        )
    layers = heard_flavor(MODELS, given).parts["model.num_layers"] // degree(given, PP) // int(option[:9])
    return {"layout.recompute": "full", "layout.recompute_layers": layers} if layers else {"layout.recompute": "none"}


def _precision(launch: Launch) -> Options:
    recipe, experts = launch.job.precision, launch.model.num_experts > 0
    linear = {**formats(launch), CONVERTERS: [LINEAR], f"{LINEAR}.filter_fqns": ["output"]}
    if recipe == "fp8_torchao" and not experts:
        return {**linear, GATHERED: True, SCALES: True}
    if recipe != "fp8_torchao_rowwise":
        return formats(launch)
    grouped = {CONVERTERS: [LINEAR, GROUPED], f"{GROUPED}.fqns": ["experts"],
               f"{LINEAR}.filter_fqns": ["output", "router.gate"]} if experts else {}  # fmt: skip
    return {**linear, f"{LINEAR}.recipe_name": "rowwise", **grouped}


def _heard_precision(given: Given) -> Mapping[str, Any]:
    found, recipe, gathered = (
        heard_formats(given),
        given.get(f"{LINEAR}.recipe_name", "tensorwise"),
        given.get(GATHERED, False),
    )
    used = [BEFORE.get(str(one), str(one)) for one in given.get(CONVERTERS, [])]
    for name in (f"{LINEAR}.filter_fqns", f"{GROUPED}.fqns", SCALES):
        given.get(name)
    if not used:
        return {"job.precision": found}
    known = {("tensorwise", True): "fp8_torchao", ("rowwise", False): "fp8_torchao_rowwise"}
    whole = {LINEAR, GROUPED} if "model.num_experts" in heard_flavor(MODELS, given).parts else {LINEAR}
    if set(used) != whole or (recipe, gathered) not in known:
        raise InputError(
            f"{CONVERTERS}: found {', '.join(used)} (recipe {recipe}, {GATHERED} {str(gathered).lower()}), which no recipe here "
            f"is; {LINEAR} (with {GROUPED} where there are experts), tensorwise with gathers in float8 or rowwise without, is "
            "what can be read"
        )
    return {"job.precision": known[recipe, gathered]}


OWN: tuple[Field, ...] = (
    stage_field(MODELS, "output"),
    Field(lambda launch: {}, lambda given: {"layout.sequence_parallel": degree(given, TP) > 1}),
    Field(lambda launch: {"parallelism.enable_async_tensor_parallel": launch.layout.async_tp},
          lambda given: {"layout.async_tp": bool(given.get("parallelism.enable_async_tensor_parallel", False))
                         and degree(given, TP) > 1}),
    Field(_context, _heard_context),
    Field(lambda launch: {ETP: launch.layout.expert_tp} if launch.layout.ep > 1 else {}, _heard_experts),
    Field(_recompute, _heard_recompute),
    Field(_precision, _heard_precision),
    named("job.optimizer", "optimizer.name", {"adamw": "AdamW"}, "AdamW"),
    beside("job.config_file", "parallelism.disable_loss_parallel", "parallelism.expert_parallel_comm_backend",
           say=lambda launch: {}),
)  # fmt: skip
OWN_NEEDS: tuple[Need, ...] = (
    Need(
        lambda launch: not launch.model.num_predict_layers,
        lambda launch: f"{TITLE} has no multi-token prediction; num_predict_layers=0 is required",
    ),
    Need(
        lambda launch: facts_of(MODELS, launch.model).get("pipelines", True) or launch.layout.pp == 1,
        lambda launch: f"{TITLE} has no pipeline of {launch.model.name}; pp=1 is required",
    ),
    Need(
        lambda launch: facts_of(MODELS, launch.model).get("splits_sequence", True) or launch.layout.cp == 1,
        lambda launch: f"{TITLE} has no context parallelism of {launch.model.name}; cp=1 is required",
    ),
    Need(
        lambda launch: launch.layout.fsdp * launch.layout.cp > 1 or launch.layout.tp * launch.layout.pp == 1,
        lambda launch: (
            f"{TITLE} replicates weights, and mixes precisions, under tensor and pipeline parallelism with FSDP alone; "
            "fsdp or cp above 1 is required"
        ),
    ),
)


def _write(options: Options, launch: Launch) -> Files:
    starts = torchrun(launch.machines, "-m torchtitan.train")
    text = (
        f"#!/bin/bash\n# Starts on each node, with {TITLE} installed.\nset -euo pipefail\n\n{starts} \\\n"
        f'  --job.config_file "${{RUN_DIR:-$PWD}}/{FILE}" \\\n'
        '  --model.hf_assets_path "${HF_ASSETS:?a folder with the tokenizer}" \\\n'
        '  --optimizer.lr "${LR:?a learning rate}"\n'
    )
    return {FILE: f"# {launch.model.name} for {TITLE}\n{toml_text(options)}", SCRIPT: text}


def _read(files: Files) -> Options:
    """The file, and what the command gives beside it."""
    found: dict[str, Any] = {}
    tables = {name: text for name, text in files.items() if name.endswith(".toml")}
    scripts = [(name, text) for name, text in files.items() if name not in tables]
    if len(tables) != 1 or len(scripts) > 1:
        raise InputError(f"{NAME}: found {', '.join(files)}; one TOML file, and at most one script, are required")
    for name, text in tables.items():
        found |= toml_options(text, name)
    for name, text in scripts:
        found |= tyro_options(training_command(text, name).arguments, option_table(TABLE))
    return {name: value for name, value in found.items() if value is not None}


def _notes(launch: Launch) -> Iterator[str]:
    yield "learning rate, data and its tokenizer are yours: set LR, HF_ASSETS and training.dataset"
    if launch.model.num_experts and launch.layout.ep == 1 and launch.layout.tp > 1:
        yield "without expert parallelism each expert is split as its layer is"


TARGET = Target(
    name=NAME, title="torchtitan", version="0.2.2", source="https://pypi.org/project/torchtitan/0.2.2/, config/job_config.py",
    stack="torchtitan", table=TABLE, fields=(flavor_field(MODELS), *SHARED, *OWN),
    needs=(known_model(MODELS, TITLE), *NEEDS, ENOUGH_MICRO_BATCHES, *OWN_NEEDS),
    write=_write, read=_read, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
    order=("tp", "cp", "fsdp", "dp", "pp"),
)  # fmt: skip
