"""Megatron-LM: a script that starts pretrain_gpt.py with its arguments.

Source of names and types: Megatron-LM at d98e8a64 (2026-08-22, Megatron-Core 0.20.0), the parser of
megatron/training/arguments.py; requirements: validate_args there and TransformerConfig.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.megatron.model_options import MODEL_MAPPINGS
from shardwise.interop.frameworks.megatron.parallelism import LAYOUT_MAPPINGS, read_num_replicas
from shardwise.interop.frameworks.megatron.test_cases import read_test_case
from shardwise.interop.frameworks.primus import megatron_arguments, read_experiment
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import torchrun_command
from shardwise.interop.launches.target import (
    README_FILE,
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Requirement,
    Target,
    add_options,
    map_names,
    map_required,
)
from shardwise.interop.text_formats.command_flags import format_flags, parse_flags
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.model.recompute_policies import MODULES, parse_modules
from shardwise.values import InputError, describe_unknown
from shardwise.values.input_texts import parse_integer

SCRIPT = "launch.sh"
PRECISIONS: Mapping[str, Options] = {
    "bf16": {"bf16": True, "grad-reduce-in-bf16": True},
    "bf16_fp32_main_gradients": {"bf16": True},
    "bf16_bf16_moments": {"bf16": True, "grad-reduce-in-bf16": True, "use-precision-aware-optimizer": True,
                          "exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"},
    "fp8_delayed": {"bf16": True, "grad-reduce-in-bf16": True, "fp8-format": "hybrid", "fp8-recipe": "delayed"},
    "fp8_current": {"bf16": True, "grad-reduce-in-bf16": True, "fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
    "fp8_blockwise": {"bf16": True, "grad-reduce-in-bf16": True, "fp8-format": "e4m3", "fp8-recipe": "blockwise"},
    "mxfp8": {"bf16": True, "grad-reduce-in-bf16": True, "fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
    "nvfp4": {"bf16": True, "grad-reduce-in-bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
    "fp16_fp32_update": {"fp16": True},
    "fp32": {},
}  # fmt: skip
OPTIMIZERS = {
    "adam": "adamw",
    "lion": "lion",
    "muon": "muon",
    "dist_muon": "muon",
    "sgd": "sgd",
}  # by Megatron-LM's name
# Programs of the repository that train or run something else.
_OTHER_PROGRAM = re.compile(
    r"pretrain_(bert|t5|ict|realm|retro|vision|mamba|hybrid|vlm)|generat|evaluat|zeroshot|eval_|server|embedding"
)
_LAST_STEP = re.compile(r":\s*(\d{1,9})\s*$")
# The recipe option of a matmul format, and its default.
DEFAULT_RECIPES = {"fp8-format": ("fp8-recipe", "delayed"), "fp4-format": ("fp4-recipe", "nvfp4")}
# Options that tell precisions apart. The precision-aware optimizer does not: alone it changes no dtype, and offloading needs it.
NUMBER_FORMATS = sorted(
    {name for options in PRECISIONS.values() for name in options} - {"use-precision-aware-optimizer"}
)


def _precision_options(launch: Launch) -> Options:
    return PRECISIONS.get(launch.job.precision, {})


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    """Return the precision with these dtypes; if matmuls have their own format, the one with the same recipe for it."""
    formats = {name: reader.get(name) for name in NUMBER_FORMATS if reader.get(name, False) not in (False, "fp32")}
    reader.acknowledge("use-precision-aware-optimizer")
    for name, (recipe, default) in DEFAULT_RECIPES.items():
        formats |= {recipe: formats.get(recipe, default)} if name in formats else {}
    formats_by_precision = {
        name: {key: options[key] for key in options if key in NUMBER_FORMATS} for name, options in PRECISIONS.items()
    }
    exact = next((name for name, options in formats_by_precision.items() if options == formats), None)
    matmul_recipe = next((recipe for name, (recipe, _) in DEFAULT_RECIPES.items() if name in formats), None)
    same_recipe = None
    if matmul_recipe:
        readable: dict[Any, str] = {}  # the first precision with each value of this option
        for name, options in formats_by_precision.items():
            if matmul_recipe in options:
                readable.setdefault(options[matmul_recipe], name)
        same_recipe = readable.get(formats[matmul_recipe])
        if same_recipe is None:
            listed = ", ".join(sorted(readable))
            raise InputError(f"{matmul_recipe}: found {formats[matmul_recipe]!r}; one of {listed} is what can be read")
    precision = exact or same_recipe or ("fp16_fp32_update" if "fp16" in formats else "bf16_fp32_main_gradients")
    if not exact:
        listed = ", ".join(name if value is True else f"{name}={value}" for name, value in formats.items())
        reader.notes.append(f"number formats {listed} are priced as {precision}")
    return {"job.precision": precision}


def _sample_options(launch: Launch) -> Options:
    tokens = launch.job.tokens
    return {"train-samples": round(tokens / launch.job.seq_len)} if tokens else {}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    """Return the batch, by default one micro-batch of each replica. Of a batch that grows, it is the last one.

    Source of the default: validate_args (megatron/training/arguments.py).
    """
    schedule, ramp = reader.get("step-batch-size-schedule"), reader.get("rampup-batch-size")
    seqs = reader.get("global-batch-size")
    if schedule:
        match = _LAST_STEP.search(str(schedule))
        if match is None:
            raise InputError(
                f"step-batch-size-schedule: found {str(schedule)[:80]!r}; steps such as 0:384 200B:768 are required"
            )
        seqs = parse_integer(match[1])
    if schedule or ramp:
        reader.notes.append("the batch grows during the run: this is its last size")
    return {"job.global_batch_seqs": seqs or reader.require("micro-batch-size") * read_num_replicas(reader)}


def _read_tokens(reader: OptionReader) -> Mapping[str, Any]:
    samples = reader.get("train-samples")
    if samples is None and reader.get("train-iters"):
        samples = reader.get("train-iters") * _read_batch(reader)["job.global_batch_seqs"]
    return {"job.tokens": float(samples * reader.require("seq-length"))} if samples else {}


def _read_optimizer(reader: OptionReader) -> Mapping[str, Any]:
    name = reader.get("optimizer", "adam")
    if name not in OPTIMIZERS:
        raise InputError(f"optimizer: {describe_unknown(str(name), OPTIMIZERS)}")
    if name == "dist_muon" and reader.get("use-distributed-optimizer", False):
        reader.notes.append(
            "the state of dist_muon is dealt out by layers, and is priced as if each were split evenly (ZeRO-1)"
        )
    return {"job.optimizer": OPTIMIZERS[name]}


DROPOUTS = ("hidden-dropout", "attention-dropout")
JOB_MAPPINGS: tuple[OptionMapping, ...] = (
    map_required("job.seq_len", "seq-length"),
    map_required("layout.micro_batch_seqs", "micro-batch-size"),
    OptionMapping(lambda launch: {"global-batch-size": launch.job.num_seqs}, _read_batch),
    OptionMapping(_precision_options, _read_precision),
    map_names("job.loss", "cross-entropy-loss-fusion", {"fused": True, "unfused": False}, False),
    add_options("cross-entropy-fusion-impl", to_options=lambda launch: {}),
    OptionMapping(
        lambda launch: {"optimizer": "lion"} if launch.job.optimizer == "lion" else {},  # adam is the default
        _read_optimizer,
    ),
    OptionMapping(_sample_options, _read_tokens),
    # Plans have no dropout; Megatron-LM's own default is 0.1 (megatron/training/arguments.py, d98e8a64).
    add_options(*DROPOUTS, to_options=lambda launch: dict.fromkeys(DROPOUTS, 0.0)),
)
# No plan has data, tokenizer, learning rate and its schedule, logs or checkpoints. The script asks for the first three.
USER_ARGUMENTS = ('--data-path "${DATA_PATH:?a prefix of indexed data}"', '--tokenizer-type HuggingFaceTokenizer',
         '--tokenizer-model "${TOKENIZER:?a tokenizer}"', '--lr "${LR:?a learning rate}"')  # fmt: skip


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    flags = [" ".join(flag) for flag in format_flags(options)]
    arguments = "\n".join(f"  {line}" for line in (*flags, *USER_ARGUMENTS))
    text = (
        "#!/bin/bash\n# Starts on each node; MEGATRON is a checkout of Megatron-LM.\nset -euo pipefail\n"
        f"export CUDA_DEVICE_MAX_CONNECTIONS={1 if launch.layout.zero_stage < 2 else 32}\n\nARGS=(\n{arguments}\n)\n\n"
        f'{torchrun_command(launch.machines, chr(34) + "${MEGATRON:?}/pretrain_gpt.py" + chr(34))} "${{ARGS[@]}}" "$@"\n'
    )
    return {SCRIPT: text}


def _read_files(files: LaunchFiles) -> Options:
    """Return the options of a script, of a test case of Megatron's repository, or of an experiment of Primus.

    Further files (that a script sources) are appended and read as one text.
    """
    if (experiment := read_experiment(files, "megatron")) is not None:
        return megatron_arguments(experiment)
    if (arguments := read_test_case(files)) is not None:
        return arguments
    scripts = {name: text for name, text in files.items() if name != README_FILE}
    command = training_command("\n".join(scripts.values()), ", ".join(scripts))
    program = command.launcher[-1].rpartition("/")[2] if command.launcher else ""
    if _OTHER_PROGRAM.search(program):
        raise InputError(
            f"{', '.join(scripts)}: {program} is no training of a decoder; pretrain_gpt.py is what can be read"
        )
    return parse_flags(command.arguments, option_table("megatron"))


def _missing_modules(launch: Launch) -> list[str]:
    """Return modules to recompute that the model lacks: TransformerConfig refuses them, or they do nothing."""
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
            lambda launch: not _missing_modules(launch),
            lambda launch: f"{launch.model.name} has nothing for recompute={'+'.join(_missing_modules(launch))}; leave it out",
        ),
    ),
    write=_write_files, read=_read_files, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
)  # fmt: skip
