"""torchtitan 0.3.0: a function of its config registry with tyro flags, or a function of its own for what no flag sets.

Source of names and types: the wheel of torchtitan 0.3.0: config/manager.py (--module, --config, flags), config/configs.py,
trainer.py, distributed/activation_checkpoint.py, models/*/config_registry.py. It no longer reads TOML; `launch_toml` is for
releases that do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.torchtitan.config_registry import (
    RUN_MODULE,
    changed_flags,
    config_file_text,
    evaluate_config,
    nearest_config,
    parse_config_module,
    registered_options,
    registry_package,
)
from shardwise.interop.frameworks.torchtitan.models import flavor_facts, map_flavor, read_flavor, require_flavor
from shardwise.interop.frameworks.torchtitan.parallelism import (
    CP,
    EP,
    LOAD_BALANCER,
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
from shardwise.interop.text_formats.command_flags import format_tyro, parse_tyro
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.values import InputError

NAME, TITLE, MODELS_FILE = "torchtitan", "torchtitan 0.3.0", "torchtitan_models"
SCRIPT, SUBCOMMANDS = "launch.sh", ("activation_checkpoint",)
PROGRAM = re.compile(r"-m\s+torchtitan\.train\b|torchtitan/train\.py\b")
RECOMPUTE_MODES = {"none": "none", "alternate": "selective", "full": "full"}
SEQUENCE_PARALLEL, ASYNC_TP = "parallelism.enable_sequence_parallel", "compile.enable_async_tensor_parallel"
NO_CUDA_GRAPHS, CONVERTERS, ATTENTION_BACKEND = "training.disable_cuda_graphs", "model.converters", "model.attn_backend"
LINEAR_CONVERTER, EXPERTS_CONVERTER = "Float8LinearConverter", "Float8GroupedExpertsConverter"
FP8_EXCLUDED = {False: ["lm_head"], True: ["lm_head", "router.gate"]}  # layers not in float8, without and with experts


def _read_sequence_parallel(reader: OptionReader) -> Mapping[str, Any]:
    return {"layout.sequence_parallel": bool(reader.get(SEQUENCE_PARALLEL, True)) and reader.get_degree(TP) > 1}


def _read_async_tp(reader: OptionReader) -> Mapping[str, Any]:
    """Return whether collectives are split: by the compiler, which must be enabled, or by GEMM kernels made for it."""
    requested, fused = bool(reader.get(ASYNC_TP, False)), reader.get("model.tp_gemm_backend", "default") == "dist_gemm"
    if requested and not (
        reader.get("compile.enable", False) and "model" in reader.get("compile.components", ["model"])
    ):
        raise InputError(
            f"{ASYNC_TP}: found true without a compiled model; compile.enable with model among its components is required"
        )
    return {"layout.async_tp": (requested or fused) and reader.get_degree(TP) > 1}


def _read_context(reader: OptionReader) -> Mapping[str, Any]:
    """Return the variant: keys and values are gathered, whatever balances causal work."""
    balancer = reader.get(LOAD_BALANCER, "headtail")
    reader.acknowledge("parallelism.context_parallel_ptrr_mask_key")
    if reader.get_degree(CP) == 1:
        return {}
    if balancer not in ("headtail", "ptrr"):
        raise InputError(
            f"{LOAD_BALANCER}: found {balancer}, with which causal work is uneven; headtail or ptrr is what can be read"
        )
    return {"layout.cp_variant": "all_gather"}


def _precision_options(launch: Launch) -> Options:
    if launch.job.precision != "fp8_torchao_rowwise":
        return dtype_options(launch)
    experts = launch.model.num_experts > 0
    return {
        **dtype_options(launch), CONVERTERS: [LINEAR_CONVERTER, *([EXPERTS_CONVERTER] if experts else [])],
        f"{LINEAR_CONVERTER}.recipe_name": "rowwise",
        f"{LINEAR_CONVERTER}.filter_fqns": FP8_EXCLUDED[experts],
    }  # fmt: skip


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    precision, recipe = read_dtypes(reader), reader.get(f"{LINEAR_CONVERTER}.recipe_name", "rowwise")
    converters = [str(converter) for converter in reader.get(CONVERTERS) or []]
    reader.acknowledge(f"{LINEAR_CONVERTER}.filter_fqns")
    if not converters:
        return {"job.precision": precision}
    has_experts = "model.num_experts" in read_flavor(MODELS_FILE, reader).fields
    required = {LINEAR_CONVERTER, EXPERTS_CONVERTER} if has_experts else {LINEAR_CONVERTER}
    if set(converters) != required or recipe != "rowwise":
        raise InputError(
            f"{CONVERTERS}: found {', '.join(converters)} (recipe {recipe}), which no recipe here is; {LINEAR_CONVERTER} of "
            f"recipe rowwise, with {EXPERTS_CONVERTER} where there are experts, is what can be read"
        )
    return {"job.precision": "fp8_torchao_rowwise"}


def _graph_options(launch: Launch) -> Options:
    """Return whether CUDA graphs are off: neither a pipeline nor a token dispatcher that waits for the host can use them."""
    return {NO_CUDA_GRAPHS: launch.layout.pp > 1 or launch.layout.ep > 1}


def _needs_flex_attention(launch: Launch) -> bool:
    """Return whether a model's attention must differ from its flavor's: context parallelism needs FlexAttention."""
    return launch.layout.cp > 1 and flavor_facts(MODELS_FILE, launch.model).get("attention", "flex") != "flex"


FLAG_MAPPINGS: tuple[OptionMapping, ...] = (
    map_stages(MODELS_FILE, "lm_head"),
    OptionMapping(
        lambda launch: {SEQUENCE_PARALLEL: launch.layout.sequence_parallel or launch.layout.tp == 1}, _read_sequence_parallel
    ),
    OptionMapping(lambda launch: {ASYNC_TP: launch.layout.async_tp}, _read_async_tp),
    OptionMapping(lambda launch: {LOAD_BALANCER: "headtail"} if launch.layout.cp > 1 else {}, _read_context),
    OptionMapping(
        lambda launch: {},
        lambda reader: {"layout.etp": 1 if reader.get_degree(EP) > 1 and reader.get_degree(TP) > 1 else None},
    ),
    map_names("layout.recompute", "activation_checkpoint", RECOMPUTE_MODES),
    OptionMapping(_precision_options, _read_precision),
    add_options(NO_CUDA_GRAPHS, to_options=_graph_options),
    add_options(
        ATTENTION_BACKEND, "model.moe_comm_backend",
        to_options=lambda launch: {ATTENTION_BACKEND: "flex"} if _needs_flex_attention(launch) else {},
    ),
    OptionMapping(
        lambda launch: {"model.num_mtp_layers": launch.model.num_predict_layers, "loss": "MTPLoss"}
        if launch.model.num_predict_layers else {},
        lambda reader: {"model.num_predict_layers": reader.get("model.num_mtp_layers", 0)},
    ),
    OptionMapping(
        lambda launch: {} if launch.model.num_predict_layers
        else {"loss": "CrossEntropyLoss" if launch.job.loss == "unfused" else "ChunkedLossWrapper"},
        lambda reader: {"job.loss": "chunked" if reader.get("loss") == "ChunkedLossWrapper" else "unfused"},
    ),
    map_names("job.optimizer", "optimizer", {"adamw": "default_adamw"}, "default_adamw"),
)  # fmt: skip


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    base = nearest_config(options)
    config_text = config_file_text(options, base)
    module, config = (RUN_MODULE, "run") if config_text else (base.module, base.name)
    flags = [f"--module {module}", f"--config {config}", '--hf_assets_path "${HF_ASSETS:?a folder with the tokenizer}"',
             *format_tyro(changed_flags(options, base), SUBCOMMANDS)]  # fmt: skip
    path = 'export PYTHONPATH="${RUN_DIR:-$PWD}${PYTHONPATH:+:$PYTHONPATH}"\n' if config_text else ""
    text = (
        f"#!/bin/bash\n# Starts on each node, with {TITLE} installed.\nset -euo pipefail\n{path}\nARGS=(\n"
        + "\n".join(f"  {flag}" for flag in flags)
        + f'\n)\n\n{torchrun_command(launch.machines, "-m torchtitan.train")} "${{ARGS[@]}}"\n'
    )
    return {SCRIPT: text, **({f"{RUN_MODULE}.py": config_text} if config_text else {})}


def _read_files(files: LaunchFiles) -> Options:
    """Return the options of the function that the command chooses, with the flags over them."""
    scripts = {name: text for name, text in files.items() if not name.endswith(".py")}
    if len(scripts) != 1:
        raise InputError(
            f"{NAME}: found {', '.join(files)}; one launch script, and the Python file of its config, is required"
        )
    (name, text), *_ = scripts.items()
    flags = parse_tyro(training_command(text, name).arguments, option_table(NAME), SUBCOMMANDS)
    module, config = flags.get("module"), flags.get("config")
    if not module or not config:
        raise InputError(f"{NAME}: --module and --config, which choose a function of a config registry, are required")
    file = f"{str(module).rpartition('.')[2]}.py"
    if file in files or f"{module}/config_registry.py" in files:
        base: Options = evaluate_config(parse_config_module(files[file], file), str(config))
    else:
        base = registered_options(str(module).removeprefix("torchtitan.models."), str(config))
    return {name: value for name, value in {**base, **flags}.items() if value is not None}


def _recognizes(files: LaunchFiles) -> bool:
    """Return whether a script starts torchtitan with a function of a config registry."""
    return any(PROGRAM.search(text) and "--module" in text for name, text in files.items() if name.endswith(".sh"))


def _read_registry(files: LaunchFiles, recipe: str) -> Options:
    """Return the options of a function of a config registry, which no command chooses or changes."""
    registries = [(name, text) for name, text in files.items() if name.endswith(".py")]
    if len(registries) != 1:
        raise InputError(f"{NAME}: found {', '.join(files)}; the Python file of a config registry is required")
    (name, text), *_ = registries
    options = evaluate_config(parse_config_module(text, name, registry_package(recipe)), recipe)
    return {option: value for option, value in options.items() if value is not None}


def _notes(launch: Launch) -> Iterator[str]:
    yield "data, learning rate and the rest are those of the function that the launch takes its config from; set HF_ASSETS"
    if launch.job.loss is None:
        yield "the loss is computed for a part of the tokens at a time, as torchtitan 0.3.0 has it: less memory than a whole one"
    yield "documents packed into a sequence do not attend to one another"


TARGET = Target(
    name=NAME, title="torchtitan", version="0.3.0", source="https://pypi.org/project/torchtitan/0.3.0/, torchtitan/config",
    stack="torchtitan", options_file=NAME,
    mappings=(
        map_flavor(MODELS_FILE), *SHARED_MAPPINGS, *FLAG_MAPPINGS, add_options("module", "config", to_options=lambda launch: {}),
    ),
    requirements=(
        require_flavor(MODELS_FILE, TITLE),
        Requirement(
            lambda launch: launch.job.seq_len <= flavor_facts(MODELS_FILE, launch.model).get(
                "max_seq_len", launch.job.seq_len
            ),
            lambda launch: f"seq_len = {launch.job.seq_len} is above the "
            f"{flavor_facts(MODELS_FILE, launch.model)['max_seq_len']} positions that {TITLE} has of {launch.model.name}",
        ),
    ),
    write=_write_files, read=_read_files, read_recipe=_read_registry, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
    recognizes=_recognizes,
)  # fmt: skip
