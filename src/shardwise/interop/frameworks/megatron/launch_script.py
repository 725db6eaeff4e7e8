"""Megatron-LM: a script that starts pretrain_gpt.py with its arguments.

Source of names and types: Megatron-LM at d98e8a64 (2026-08-22, Megatron-Core 0.20.0), the parser of
megatron/training/arguments.py; what it asks of them: validate_args there and TransformerConfig.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.megatron.model_options import MODEL_MAPPINGS
from shardwise.interop.frameworks.megatron.parallelism import LAYOUT_MAPPINGS
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import torchrun_command
from shardwise.interop.launches.target import (
    README_FILE,
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Options,
    Requirement,
    Target,
    add_options,
    map_names,
    map_required,
    option_table,
)
from shardwise.interop.text_formats.command_flags import format_flags, parse_flags
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.model.recompute_policies import MODULES, parse_modules
from shardwise.values.errors import InputError

SCRIPT = "launch.sh"
PRECISIONS: Mapping[str, Options] = {
    "bf16": {"bf16": True, "grad-reduce-in-bf16": True},
    "bf16_fp32_main_gradients": {"bf16": True},
    "bf16_bf16_moments": {"bf16": True, "grad-reduce-in-bf16": True, "use-precision-aware-optimizer": True,
                          "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"},
    "fp8_delayed": {"bf16": True, "grad-reduce-in-bf16": True, "fp8-format": "hybrid", "fp8-recipe": "delayed"},
    "fp8_current": {"bf16": True, "grad-reduce-in-bf16": True, "fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "mxfp8": {"bf16": True, "grad-reduce-in-bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "nvfp4": {"bf16": True, "grad-reduce-in-bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
    "fp16_fp32_update": {"fp16": True},
    "fp32": {},
}  # fmt: skip
DEFAULT_RECIPES = {
    "fp8-format": ("fp8-recipe", "delayed"),
    "fp4-format": ("fp4-recipe", "nvfp4"),
}  # of a format, and the usual one
# What tells one precision from another; the precision-aware optimizer alone changes no format, and offloading needs it too.
NUMBER_FORMATS = sorted(
    {name for options in PRECISIONS.values() for name in options} - {"use-precision-aware-optimizer"}
)


def _precision_options(launch: Launch) -> Options:
    return PRECISIONS.get(launch.job.precision, {})


def _read_precision(given: OptionReader) -> Mapping[str, Any]:
    """The precision whose formats these are; with products in another format the one that has their recipe."""
    said = {name: given.get(name) for name in NUMBER_FORMATS if given.get(name, False) not in (False, "fp32")}
    given.get("use-precision-aware-optimizer")
    for name, (recipe, usual) in DEFAULT_RECIPES.items():
        said |= {recipe: said.get(recipe, usual)} if name in said else {}
    told = {
        name: {key: options[key] for key in options if key in NUMBER_FORMATS} for name, options in PRECISIONS.items()
    }
    exact = next((name for name, options in told.items() if options == said), None)
    asked = [recipe for name, (recipe, _) in DEFAULT_RECIPES.items() if name in said]
    alike = next((name for name, options in told.items() if asked and options.get(asked[0]) == said[asked[0]]), None)
    if asked and not alike:
        known = sorted({options[asked[0]] for options in told.values() if asked[0] in options})
        raise InputError(f"{asked[0]}: found {said[asked[0]]!r}; one of {', '.join(known)} is what can be read")
    found = exact or alike or ("fp16_fp32_update" if "fp16" in said else "bf16_fp32_main_gradients")
    if not exact:
        words = ", ".join(name if value is True else f"{name}={value}" for name, value in said.items())
        given.notes.append(f"number formats {words} are priced as {found}")
    return {"job.precision": found}


def _sample_options(launch: Launch) -> Options:
    tokens = launch.job.tokens
    return {"train-samples": round(tokens / launch.job.seq_len)} if tokens else {}


def _read_tokens(given: OptionReader) -> Mapping[str, Any]:
    samples = given.get("train-samples")
    if samples is None and given.get("train-iters"):
        samples = given.get("train-iters") * given.require("global-batch-size")
    return {"job.tokens": float(samples * given.require("seq-length"))} if samples else {}


DROPOUTS = ("hidden-dropout", "attention-dropout")
JOB_MAPPINGS: tuple[OptionMapping, ...] = (
    map_required("job.seq_len", "seq-length"),
    map_required("layout.micro_batch_seqs", "micro-batch-size"),
    map_required("job.global_batch_seqs", "global-batch-size"),
    OptionMapping(_precision_options, _read_precision),
    map_names("job.loss", "cross-entropy-loss-fusion", {"fused": True, "unfused": False}, False),
    add_options("cross-entropy-fusion-impl", say=lambda launch: {}),
    map_names("job.optimizer", "optimizer", {"adamw": "adam", "lion": "lion"}, "adam"),
    OptionMapping(_sample_options, _read_tokens),
    # Plans have no dropout; Megatron-LM's own default is 0.1 (megatron/training/arguments.py, d98e8a64).
    add_options(*DROPOUTS, say=lambda launch: dict.fromkeys(DROPOUTS, 0.0)),
)
# What no plan says: data, its tokenizer, learning rate, its schedule, logs, checkpoints. The script asks for the first three.
USER_ARGUMENTS = ('--data-path "${DATA_PATH:?a prefix of indexed data}"', '--tokenizer-type HuggingFaceTokenizer',
         '--tokenizer-model "${TOKENIZER:?a tokenizer}"', '--lr "${LR:?a learning rate}"')  # fmt: skip


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    words = [" ".join(one) for one in format_flags(options)]
    arguments = "\n".join(f"  {one}" for one in (*words, *USER_ARGUMENTS))
    text = (
        "#!/bin/bash\n# Starts on each node; MEGATRON is a checkout of Megatron-LM.\nset -euo pipefail\n"
        f"export CUDA_DEVICE_MAX_CONNECTIONS={1 if launch.layout.zero_stage < 2 else 32}\n\nARGS=(\n{arguments}\n)\n\n"
        f'{torchrun_command(launch.machines, chr(34) + "${MEGATRON:?}/pretrain_gpt.py" + chr(34))} "${{ARGS[@]}}" "$@"\n'
    )
    return {SCRIPT: text}


def _read_files(files: LaunchFiles) -> Options:
    """The options of a script; what it sources may follow it, and is read as one text with it."""
    own = {name: text for name, text in files.items() if name != README_FILE}
    return parse_flags(training_command("\n".join(own.values()), ", ".join(own)).arguments, option_table("megatron"))


def _missing_modules(launch: Launch) -> list[str]:
    """Modules to run again that a model has none of: TransformerConfig refuses them, or they do nothing."""
    return [name for name in parse_modules(launch.layout.recompute) if not MODULES[name].applies_to(launch.model)]


def _notes(launch: Launch) -> Iterator[str]:
    yield "data, tokenizer and learning rate are yours: set DATA_PATH, TOKENIZER and LR; its schedule, logs and checkpoints too"
    if not launch.job.tokens:
        yield f"the length of the run is yours: bash {SCRIPT} --train-iters N, or plan with --tokens"
    if "core_attn" in parse_modules(launch.layout.recompute):
        yield "recomputation of core_attn frees nothing of fused attention, and runs it twice"


TARGET = Target(
    name="megatron", title="Megatron-LM", version="core 0.20.0 (d98e8a64)",
    source="https://github.com/NVIDIA/Megatron-LM, megatron/training/arguments.py", stack="megatron", options_file="megatron",
    model_mappings=MODEL_MAPPINGS, mappings=(*LAYOUT_MAPPINGS, *JOB_MAPPINGS),
    requirements=(
        Requirement(
            lambda launch: launch.job.num_seqs % (launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs) == 0,
            lambda launch: f"global-batch-size = {launch.job.num_seqs} is not a multiple of micro-batch-size × replicas = "
            f"{launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs}",
        ),
        Requirement(
            lambda launch: not (launch.model.num_experts and launch.layout.tp > 1) or launch.layout.sequence_parallel,
            lambda launch: "experts beside tensor parallelism require sequence parallelism; set sequence_parallel=true",
        ),
        Requirement(
            lambda launch: not launch.layout.recompute_layers or launch.layout.recompute == "full",
            lambda launch: f"recompute_layers of recompute={launch.layout.recompute}: modules are those of every layer; leave "
            "recompute_layers out, or set recompute=full",
        ),
        Requirement(
            lambda launch: not _missing_modules(launch),
            lambda launch: f"{launch.model.name} has nothing for recompute={'+'.join(_missing_modules(launch))}; leave it out",
        ),
        Requirement(
            lambda launch: launch.layout.zero_stage > 0
            or not (launch.layout.offload == "optimizer" or launch.job.precision == "bf16_bf16_moments"),
            lambda launch: "an optimizer on the host, or with bf16 moments, is a distributed one; set a zero_stage of at least 1",
        ),
        Requirement(
            lambda launch: "experts" not in launch.model.bias or launch.layout.expert_tp == 1,
            lambda launch: f"experts of {launch.model.name} have biases, found etp = {launch.layout.expert_tp}; set etp=1",
        ),
    ),
    write=_write_files, read=_read_files, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
)  # fmt: skip
