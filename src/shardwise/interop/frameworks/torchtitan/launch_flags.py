"""torchtitan 0.3.0: a function of its config registry with flags of tyro; a function of its own for what no flag says.

Source of names and types: the wheel of torchtitan 0.3.0: config/manager.py (--module, --config, flags), config/configs.py,
trainer.py, distributed/activation_checkpoint.py, models/*/config_registry.py. It reads no TOML any more; see
`torchtitan_toml` for what does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.torchtitan.config_registry import (
    MODULE,
    base_of,
    changed,
    file_text,
    options_of,
    parsed,
    registered_options,
)
from shardwise.interop.frameworks.torchtitan.models import facts_of, flavor_field, heard_flavor, known_model
from shardwise.interop.frameworks.torchtitan.parallelism import (
    BALANCER,
    CP,
    ENOUGH_MICRO_BATCHES,
    EP,
    NEEDS,
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
from shardwise.interop.text_formats.command_flags import tyro_options, tyro_words
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.values.errors import InputError

NAME, TITLE, MODELS = "torchtitan", "torchtitan 0.3.0", "torchtitan_models"
SCRIPT, SUBCOMMANDS = "launch.sh", ("activation_checkpoint",)
RECOMPUTE = {"none": "none", "alternate": "selective", "full": "full"}
SEQUENCE, ASYNC = "parallelism.enable_sequence_parallel", "compile.enable_async_tensor_parallel"
GRAPHS, CONVERTERS, BACKEND = "training.disable_cuda_graphs", "model.converters", "model.attn_backend"
LINEAR, GROUPED = "Float8LinearConverter", "Float8GroupedExpertsConverter"
KEPT = {
    False: ["lm_head"],
    True: ["lm_head", "router.gate"],
}  # what a recipe of float8 leaves out, without and with experts


def _heard_sequence(given: Given) -> Mapping[str, Any]:
    return {"layout.sequence_parallel": bool(given.get(SEQUENCE, True)) and degree(given, TP) > 1}


def _heard_async(given: Given) -> Mapping[str, Any]:
    """Collectives in pieces: by the compiler, which has to compile then, or by products of their own."""
    wanted, fused = bool(given.get(ASYNC, False)), given.get("model.tp_gemm_backend", "default") == "dist_gemm"
    if wanted and not (given.get("compile.enable", False) and "model" in given.get("compile.components", ["model"])):
        raise InputError(
            f"{ASYNC}: found true without a compiled model; compile.enable with model among its components is required"
        )
    return {"layout.async_tp": (wanted or fused) and degree(given, TP) > 1}


def _heard_context(given: Given) -> Mapping[str, Any]:
    """Keys and values are gathered, whatever balances causal work."""
    balancer = given.get(BALANCER, "headtail")
    given.get("parallelism.context_parallel_ptrr_mask_key")
    if degree(given, CP) == 1:
        return {}
    if balancer not in ("headtail", "ptrr"):
        raise InputError(
            f"{BALANCER}: found {balancer}, with which causal work is uneven; headtail or ptrr is what can be read"
        )
    return {"layout.cp_variant": "all_gather"}


def _precision(launch: Launch) -> Options:
    if launch.job.precision != "fp8_torchao_rowwise":
        return formats(launch)
    experts = launch.model.num_experts > 0
    return {
        **formats(launch), CONVERTERS: [LINEAR, *([GROUPED] if experts else [])], f"{LINEAR}.recipe_name": "rowwise",
        f"{LINEAR}.filter_fqns": KEPT[experts],
    }  # fmt: skip


def _heard_precision(given: Given) -> Mapping[str, Any]:
    found, recipe = heard_formats(given), given.get(f"{LINEAR}.recipe_name", "rowwise")
    used = [str(one) for one in given.get(CONVERTERS) or []]
    given.get(f"{LINEAR}.filter_fqns")
    if not used:
        return {"job.precision": found}
    whole = {LINEAR, GROUPED} if "model.num_experts" in heard_flavor(MODELS, given).parts else {LINEAR}
    if set(used) != whole or recipe != "rowwise":
        raise InputError(
            f"{CONVERTERS}: found {', '.join(used)} (recipe {recipe}), which no recipe here is; {LINEAR} of recipe rowwise, with "
            f"{GROUPED} where there are experts, is what can be read"
        )
    return {"job.precision": "fp8_torchao_rowwise"}


def _graphs(launch: Launch) -> Options:
    """CUDA graphs, which the release has by default, take no pipeline, and no dispatcher of tokens that waits for the host."""
    return {GRAPHS: launch.layout.pp > 1 or launch.layout.ep > 1}


def _flex(launch: Launch) -> bool:
    """Whether a model's attention has to be another than its flavour's: sequences are split under FlexAttention alone."""
    return launch.layout.cp > 1 and facts_of(MODELS, launch.model).get("attention", "flex") != "flex"


OWN: tuple[Field, ...] = (
    stage_field(MODELS, "lm_head"),
    Field(lambda launch: {SEQUENCE: launch.layout.sequence_parallel or launch.layout.tp == 1}, _heard_sequence),
    Field(lambda launch: {ASYNC: launch.layout.async_tp}, _heard_async),
    Field(lambda launch: {BALANCER: "headtail"} if launch.layout.cp > 1 else {}, _heard_context),
    Field(lambda launch: {}, lambda given: {"layout.etp": 1 if degree(given, EP) > 1 and degree(given, TP) > 1 else None}),
    named("layout.recompute", "activation_checkpoint", RECOMPUTE),
    Field(_precision, _heard_precision),
    beside(GRAPHS, say=_graphs),
    beside(BACKEND, "model.moe_comm_backend", say=lambda launch: {BACKEND: "flex"} if _flex(launch) else {}),
    Field(
        lambda launch: {"model.num_mtp_layers": launch.model.num_predict_layers, "loss": "MTPLoss"}
        if launch.model.num_predict_layers else {},
        lambda given: {"model.num_predict_layers": given.get("model.num_mtp_layers", 0)},
    ),
    Field(
        lambda launch: {} if launch.model.num_predict_layers
        else {"loss": "CrossEntropyLoss" if launch.job.loss == "unfused" else "ChunkedLossWrapper"},
        lambda given: {"job.loss": "chunked" if given.get("loss") == "ChunkedLossWrapper" else "unfused"},
    ),
    named("job.optimizer", "optimizer", {"adamw": "default_adamw"}, "default_adamw"),
)  # fmt: skip


def _write(options: Options, launch: Launch) -> Files:
    base = base_of(options)
    own = file_text(options, base)
    module, config = (MODULE, "run") if own else (base.module, base.name)
    flags = [f"--module {module}", f"--config {config}", '--hf_assets_path "${HF_ASSETS:?a folder with the tokenizer}"',
             *tyro_words(changed(options, base), SUBCOMMANDS)]  # fmt: skip
    path = 'export PYTHONPATH="${RUN_DIR:-$PWD}${PYTHONPATH:+:$PYTHONPATH}"\n' if own else ""
    text = (
        f"#!/bin/bash\n# Starts on each node, with {TITLE} installed.\nset -euo pipefail\n{path}\nARGS=(\n"
        + "\n".join(f"  {one}" for one in flags)
        + f'\n)\n\n{torchrun(launch.machines, "-m torchtitan.train")} "${{ARGS[@]}}"\n'
    )
    return {SCRIPT: text, **({f"{MODULE}.py": own} if own else {})}


def _read(files: Files) -> Options:
    """The options of the function that a command chooses, and the flags over them."""
    scripts = {name: text for name, text in files.items() if not name.endswith(".py")}
    if len(scripts) != 1:
        raise InputError(
            f"{NAME}: found {', '.join(files)}; one launch script, and the Python file of its config, is required"
        )
    (name, text), *_ = scripts.items()
    flags = tyro_options(training_command(text, name).arguments, option_table(NAME), SUBCOMMANDS)
    module, config = flags.get("module"), flags.get("config")
    if not module or not config:
        raise InputError(f"{NAME}: --module and --config, which choose a function of a config registry, are required")
    file = f"{str(module).rpartition('.')[2]}.py"
    if file in files or f"{module}/config_registry.py" in files:
        base: Options = options_of(parsed(files[file], file), str(config))
    else:
        base = registered_options(str(module).removeprefix("torchtitan.models."), str(config))
    return {name: value for name, value in {**base, **flags}.items() if value is not None}


def _notes(launch: Launch) -> Iterator[str]:
    yield "data, learning rate and the rest are those of the function that the launch takes its config from; set HF_ASSETS"
    if launch.job.loss is None:
        yield "the loss is computed for a part of the tokens at a time, as torchtitan 0.3.0 has it: less memory than a whole one"
    yield "documents packed into a sequence do not attend to one another"


TARGET = Target(
    name=NAME, title="torchtitan", version="0.3.0", source="https://pypi.org/project/torchtitan/0.3.0/, torchtitan/config",
    stack="torchtitan", table=NAME,
    fields=(flavor_field(MODELS), *SHARED, *OWN, beside("module", "config", say=lambda launch: {})),
    needs=(
        known_model(MODELS, TITLE),
        *NEEDS,
        ENOUGH_MICRO_BATCHES,
        Need(
            lambda launch: launch.job.seq_len <= facts_of(MODELS, launch.model).get("max_seq_len", launch.job.seq_len),
            lambda launch: f"seq_len = {launch.job.seq_len} is above the {facts_of(MODELS, launch.model)['max_seq_len']} "
            f"positions that {TITLE} has of {launch.model.name}",
        ),
        Need(
            lambda launch: not launch.model.num_predict_layers or launch.layout.pp == launch.layout.cp == 1,
            lambda launch: f"{TITLE} has multi-token prediction without pipeline and context parallelism; pp=1 cp=1 is required",
        ),
    ),
    write=_write, read=_read, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
    order=("tp", "cp", "fsdp", "dp", "pp"),
)  # fmt: skip
