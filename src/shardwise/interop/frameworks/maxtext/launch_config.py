"""MaxText: a YAML over its base.yml, and a script that starts it: an XPK workload on TPUs, one process per node on GPUs.

Source of names, types and defaults: MaxText at e591f30 (2026-08-22), src/maxtext/configs/base.yml and types.py; requirements
beyond the abilities of its stacks: set_derived_and_validate_values of types.py, logical_axis_rules of base.yml,
layers/pipeline.py, layers/nnx_decoders.py.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from shardwise.hardware import SLICE_NAMES
from shardwise.interop.frameworks.maxtext.model_options import (
    BASE_OPTIONS,
    MODEL_MAPPINGS,
    PATTERN_BLOCKS,
    decoder_block,
    expand_name,
    is_named_deepseek_v3,
    num_blocks,
    shorten_to_name,
)
from shardwise.interop.frameworks.maxtext.parallelism import (
    DEFAULT_STEPS,
    layout_mappings,
    mesh_options,
    num_slices,
    spans_slices,
)
from shardwise.interop.frameworks.primus import framework_options, read_experiment
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import PORT
from shardwise.interop.launches.target import (
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Requirement,
    Target,
    add_options,
    map_names,
)
from shardwise.interop.text_formats.command_flags import find_assignments, parse_assignments
from shardwise.interop.text_formats.config_trees import find_yaml, flatten, format_yaml, parse_yaml
from shardwise.interop.text_formats.option_tables import Options, option_table, require_types
from shardwise.model import SIGMOID
from shardwise.values import InputError, raise_problems


def _mesh_devices(launch: Launch) -> int:
    return math.prod(degree for name, degree in mesh_options(launch).items() if name.endswith("_parallelism"))


REQUIREMENTS = (
    Requirement(
        lambda launch: spans_slices(launch) and _mesh_devices(launch) == launch.machines.num_devices,
        lambda launch: f"the axes of {launch.layout} do not divide evenly over the {num_slices(launch.machines)} slices",
    ),
    Requirement(
        lambda launch: launch.layout.pp == 1
        or num_blocks(launch.model) % (launch.layout.pp * launch.layout.num_virtual_stages) == 0,
        lambda launch: f"the {num_blocks(launch.model)} decoder layers of {decoder_block(launch.model)} do not divide "
        f"evenly over {launch.layout.pp * launch.layout.num_virtual_stages} stages; set pp=1, or a divisor of "
        f"{num_blocks(launch.model)}",
    ),
    Requirement(
        lambda launch: (cycle := PATTERN_BLOCKS.get(decoder_block(launch.model))) is None
        or (launch.model.sliding_window is not None and launch.model.global_every == cycle),
        lambda launch: f"the block of MaxText with the norms of {launch.model.name}, {decoder_block(launch.model)}, has windows "
        f"on {PATTERN_BLOCKS[decoder_block(launch.model)] - 1} layers of {PATTERN_BLOCKS[decoder_block(launch.model)]}; take a "
        "model with them",
        reads_model=True,
    ),
    Requirement(
        lambda launch: launch.layout.pp == 1 or decoder_block(launch.model) not in PATTERN_BLOCKS,
        lambda launch: f"stages of a pipeline have one kind of layer, and {decoder_block(launch.model)} has two; set pp=1",
    ),
)  # fmt: skip

CONFIG, SCRIPT = "config.yml", "launch.sh"
FREE_NAMES = ("run_name", "base_config", "dataset_type")  # texts that change nothing
PROGRAM = "maxtext.trainers.pre_train.train"
DEFAULT_DTYPES = {"dtype": "bfloat16", "weight_dtype": "float32", "quantization": ""}
_BF16_OR_FP32: Mapping[str, Options] = {
    "bf16": {}, "bf16_bf16_state": {"weight_dtype": "bfloat16"}, "fp32": {"dtype": "float32"},
}  # fmt: skip
PRECISIONS: Mapping[str, Mapping[str, Options]] = {
    "tpu": {**_BF16_OR_FP32, "int8_aqt": {"quantization": "int8"}},
    "gpu": {
        **_BF16_OR_FP32, "fp8_delayed": {"quantization": "fp8"}, "fp8_current": {"quantization": "te_fp8_currentscaling"},
        "mxfp8": {"quantization": "te_mxfp8"},
    },
}  # fmt: skip


def _precision_options(hardware: str, launch: Launch) -> Options:
    name = launch.job.precision
    return PRECISIONS[hardware].get(name, {})


def _read_precision(hardware: str, reader: OptionReader) -> Mapping[str, Any]:
    dtypes = {name: reader.get(name, default) for name, default in DEFAULT_DTYPES.items()}
    if dtypes["quantization"] == "te_fp8_delayedscaling":
        dtypes["quantization"] = "fp8"  # one scale per tensor from earlier steps, as in flax
    precisions = PRECISIONS[hardware]
    precision = next((name for name, options in precisions.items() if {**DEFAULT_DTYPES, **options} == dtypes), None)
    if precision is None:
        all_options = {name: {**DEFAULT_DTYPES, **options} for name, options in precisions.items()}
        readable = "; ".join(f"{name} ({_format_options(options)})" for name, options in all_options.items())
        raise InputError(f"{_format_options(dtypes)}: no precision here; one of {readable}")
    return {"job.precision": precision}


def _format_options(options: Options) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value)


# Parts of the tokens whose logits are there at a time: with XLA's 4 bytes for each logit, the byte that a chunked loss counts.
VOCABULARY_TILES = 4


def _loss_options(launch: Launch) -> Options:
    return {"num_vocab_tiling": VOCABULARY_TILES} if launch.job.loss == "chunked" else {}


def _read_loss(reader: OptionReader) -> Mapping[str, Any]:
    return {"job.loss": "chunked" if reader.get("num_vocab_tiling", 1) > 1 else "streamed"}


def _mappings(hardware: str) -> tuple[OptionMapping, ...]:
    return (
        *MODEL_MAPPINGS,
        *layout_mappings(hardware),
        OptionMapping(partial(_precision_options, hardware), partial(_read_precision, hardware)),
        OptionMapping(_loss_options, _read_loss),
        map_names("job.optimizer", "opt_type", {"adamw": "adamw"}, "adamw"),
        add_options("hardware", "run_name", "base_config", "dataset_type", "enable_checkpointing", "attention",
                    "use_tokamax_splash", "model_name", "override_model_config", "global_parameter_scale", "packing",
                    to_options=partial(_run_options, hardware)),
    )  # fmt: skip


def _run_options(hardware: str, launch: Launch) -> Options:
    """Return options that every run needs and no plan has: synthetic data, until the user names other data."""
    kernels = {"attention": "flash"} if hardware == "tpu" else {"attention": "cudnn_flash_te", "packing": False}
    run = {"hardware": hardware, "run_name": launch.model.name, "dataset_type": "synthetic"}
    return {**run, "enable_checkpointing": False, **kernels}


def _write_files(hardware: str, options: Options, launch: Launch) -> LaunchFiles:
    config = dict(shorten_to_name(options))
    overriding: dict[str, Any] = {}
    if config.pop("override_model_config", False):  # counts on the command line alone (model_options.expand_name)
        sizes = {name: config.pop(name) for name in BASE_OPTIONS if name in config}
        overriding = {"override_model_config": True, **sizes}
    overrides = [f"{name}={json.dumps(value, separators=(',', ':'))}" for name, value in overriding.items()]
    text = format_yaml({"base_config": "base.yml", **config})
    return {CONFIG: text, SCRIPT: _script_text(hardware, launch, overrides)}


def _script_text(hardware: str, launch: Launch, overrides: Iterable[str]) -> str:
    machines, slices = launch.machines, num_slices(launch.machines)
    head = "#!/bin/bash\n# {}.\nset -euo pipefail\n"
    if hardware == "gpu":
        return (
            head.format("Starts on each node; MAXTEXT is a checkout of MaxText")
            + f'export JAX_COORDINATOR_IP="${{HEAD_NODE:-localhost}}" JAX_COORDINATOR_PORT={PORT}\n'
            f'export NNODES={machines.num_nodes} NODE_RANK="${{SLURM_NODEID:-0}}"\n'
            f'CONFIG="$(cd "$(dirname "$0")" && pwd)/{CONFIG}"\ncd "${{MAXTEXT:?}}"\n'
            + " ".join((f'python3 -m {PROGRAM} "$CONFIG"', *map(shlex.quote, overrides)))
            + ' base_output_directory="${OUTPUT:?a folder or bucket}"\n'
        )
    name, cores_per_chip = SLICE_NAMES.get(machines.chip, (machines.chip, 1))
    return head.format("A workload of XPK on GKE, whose image has this folder's config.yml") + " \\\n  ".join((
        'xpk workload create --cluster "${CLUSTER:?}" --workload "${RUN_NAME:?}"',
        '--base-docker-image "${IMAGE:-maxtext_base_image}"',
        f"--tpu-type {name}-{machines.num_devices // slices * cores_per_chip} --num-slices {slices}",
        " ".join((f'--command "python3 -m {PROGRAM} ${{CONFIG:-src/maxtext/configs/{CONFIG}}}', *map(shlex.quote, overrides)))
        + ' base_output_directory=${OUTPUT:?a bucket}"\n',
    ))  # fmt: skip


def _read_files(hardware: str, files: LaunchFiles) -> Options:
    table = option_table("maxtext")
    package = PROGRAM.rpartition(".")[0]
    has_yaml = any(name.endswith((".yml", ".yaml")) for name in files)
    scripts = [(name, text) for name, text in files.items() if package in text]
    command: Options = {}
    if (experiment := read_experiment(files, "maxtext")) is not None:
        options = command = framework_options(experiment, "maxtext")
    elif has_yaml or not scripts:
        name, text = find_yaml(files, f"MaxText's {CONFIG}, or a script that starts it,")
        command = find_assignments(scripts[0][1], package, scripts[0][0]) if scripts else {}
        options = {**flatten(parse_yaml(text, name), table), **command}
    else:
        options = command = parse_assignments(scripts[0][1], package, scripts[0][0])
    options = _without_variables(options)
    options = {name: None if value == "None" else value for name, value in options.items()}
    options = {name: value for name, value in options.items() if value is not None or name not in table}
    options = _whole_numbers(options)
    require_types(options, table)
    file_hardware = str(options.get("hardware", "tpu")).removesuffix("_multiprocess")
    if file_hardware != hardware:
        raise InputError(
            f"hardware: found {file_hardware}; {hardware} is what this target is for, maxtext for tpu and maxtext-gpu for gpu"
        )
    options = _whole_numbers(expand_name(options, [name for name in command if name in options]))
    if options.get("opt_type") == "adam_pax":  # Adam as in Pax: the state and the arithmetic of AdamW
        options["opt_type"] = "adamw"
    return options


def _without_variables(options: Options) -> dict[str, Any]:
    """Return options without those whose value is a variable that the script does not set, if these change nothing.

    Raises `InputError` for such options that a plan depends on.
    """
    table = option_table("maxtext")
    unset = {name: value for name, value in options.items() if isinstance(value, str) and "$" in value}
    raise_problems(
        [
            f"{name}: found {value[:60]}, which the script does not set; --env NAME=VALUE gives a variable"
            for name, value in unset.items()
            if name in table and table[name].effect != "none" and name not in FREE_NAMES
        ]
    )
    return {name: value for name, value in options.items() if name not in unset}


def _whole_numbers(options: Options) -> dict[str, Any]:
    """Return options whose whole numbers are ints where MaxText's types are: pydantic takes 8.0 for 8."""
    is_int = {name for name, option in option_table("maxtext").items() if option.kind == "int"}
    return {
        name: int(value) if name in is_int and isinstance(value, float) and value.is_integer() else value
        for name, value in options.items()
    }


def _notes(launch: Launch) -> Iterator[str]:
    yield f"dataset_type is synthetic: name your data, tokenizer and learning rate in {CONFIG}, and set OUTPUT"
    if not launch.job.tokens:
        yield f"steps is that of base.yml, {DEFAULT_STEPS:,}: the plan says no length of the run"
    if launch.model.num_predict_layers:
        yield "modules of multi-token prediction have no final norm of their own: MaxText reads the model's"
    if launch.model.numerics.gating.scores == SIGMOID and launch.model.num_experts and not is_named_deepseek_v3(launch):
        yield (
            "gates include the balance bias: MaxText takes it out for models named deepseek3 alone (layers/moe.py, get_topk)"
        )


def _build_target(name: str, hardware: str) -> Target:
    return Target(
        name=name, title="MaxText" if hardware == "tpu" else "MaxText on GPUs", version="e591f30 (2026-08-22)",
        source="https://github.com/AI-Hypercomputer/maxtext, src/maxtext/configs", stack=name, options_file="maxtext",
        mappings=_mappings(hardware),
        requirements=REQUIREMENTS,
        write=partial(_write_files, hardware), read=partial(_read_files, hardware),
        command=lambda launch: f"bash {SCRIPT}", notes=_notes, slurm=hardware == "gpu",
    )  # fmt: skip


TPU, GPU = _build_target("maxtext", "tpu"), _build_target("maxtext-gpu", "gpu")
