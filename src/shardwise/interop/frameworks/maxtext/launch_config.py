"""MaxText: a YAML over its base.yml, and what starts it: on TPUs a workload of XPK, on GPUs a process for each node.

Source of names, types and defaults: MaxText at e591f30 (2026-08-22), src/maxtext/configs/base.yml and types.py; what it requires
of a launch beside the abilities of its stacks: set_derived_and_validate_values of types.py, logical_axis_rules of base.yml,
layers/pipeline.py, layers/nnx_decoders.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from shardwise.interop.frameworks.maxtext.model_options import MODEL, block_of, named_model, num_blocks, with_model
from shardwise.interop.frameworks.maxtext.parallelism import (
    STEPS,
    layout_fields,
    num_micro_batches,
    say_mesh,
    slices,
    spans_slices,
)
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import PORT
from shardwise.interop.launches.target import (
    Field,
    Files,
    Given,
    Need,
    Options,
    Target,
    beside,
    named,
    option_table,
    require_kinds,
)
from shardwise.interop.text_formats.command_flags import assigned
from shardwise.interop.text_formats.config_trees import dotted, only_yaml, yaml_text, yaml_tree
from shardwise.layout.context_parallel import variant_of
from shardwise.values.errors import InputError

AT_ONCE = ("fp8_delayed",)  # precisions whose scales gradient accumulation does not carry on


def _rings(launch: Launch) -> bool:
    return launch.layout.cp > 1 and variant_of(launch.layout.cp_variant).ring


def _exchanges(launch: Launch) -> bool:
    return launch.layout.cp > 1 and variant_of(launch.layout.cp_variant).exchanges_heads


def _mesh_devices(launch: Launch) -> int:
    return math.prod(degree for name, degree in say_mesh(launch).items() if name.endswith("_parallelism"))


COMMON = (
    Need(
        lambda launch: spans_slices(launch) and _mesh_devices(launch) == launch.machines.num_devices,
        lambda launch: f"the axes of {launch.layout} do not divide evenly over the {slices(launch.machines)} slices",
    ),
    Need(
        lambda launch: launch.job.num_seqs % (launch.layout.num_replicas * launch.layout.micro_batch_seqs) == 0,
        lambda launch: (
            f"a batch of {launch.job.num_seqs} sequences is not a multiple of micro_batch_seqs × replicas = "
            f"{launch.layout.num_replicas * launch.layout.micro_batch_seqs}"
        ),
    ),
    Need(
        lambda launch: launch.layout.zero_stage != 1 or launch.layout.dp == 1,
        lambda launch: (
            f"shard_optimizer_over_data is of all replicas, found dp = {launch.layout.dp} beside fsdp = "
            f"{launch.layout.fsdp}; set dp=1"
        ),
    ),
    Need(
        lambda launch: launch.layout.pp == 1 or num_micro_batches(launch) % launch.layout.pp == 0,
        lambda launch: (
            f"the {num_micro_batches(launch)} micro-batches of a pipeline are not a multiple of its {launch.layout.pp} stages"
        ),
    ),
    Need(
        lambda launch: (
            launch.layout.pp == 1
            or num_blocks(launch.model) % (launch.layout.pp * launch.layout.num_virtual_stages) == 0
        ),
        lambda launch: (
            f"the {num_blocks(launch.model)} decoder layers of {block_of(launch.model)} do not divide evenly over "
            f"{launch.layout.pp * launch.layout.num_virtual_stages} stages; set pp=1, or a divisor of {num_blocks(launch.model)}"
        ),
    ),
    Need(
        lambda launch: launch.layout.pp == 1 or not launch.model.num_dense_layers,
        lambda launch: (
            f"the {launch.model.num_dense_layers} leading dense layers are outside of the pipeline; set pp=1"
        ),
    ),
    Need(
        lambda launch: not (launch.model.sinks and (_rings(launch) or _exchanges(launch))),
        lambda launch: "attention with sinks goes neither in rings nor by exchanging heads; set cp_variant=all_gather",
    ),
    Need(
        lambda launch: not _rings(launch) or launch.model.sliding_window is None,
        lambda launch: "attention with windows does not go in rings; set cp_variant=all_gather",
    ),
)
OF_TPU = (
    Need(
        lambda launch: not _rings(launch) or launch.job.seq_len % launch.layout.cp**2 == 0,
        lambda launch: f"a ring asks for sequences that cp² = {launch.layout.cp**2} divides, found {launch.job.seq_len}",
    ),
    Need(
        lambda launch: not _rings(launch) or not launch.model.num_predict_layers,
        lambda launch: "a balanced ring does not go with multi-token prediction; set cp_variant=all_gather",
    ),
    Need(
        lambda launch: not _exchanges(launch)
        or (launch.model.kv_lora_rank == 0 and launch.model.sliding_window is None),
        lambda launch: "exchanging heads goes with global attention alone; set cp_variant=all_gather",
    ),
)  # fmt: skip
OF_GPU = (
    Need(
        lambda launch: not _exchanges(launch),
        lambda launch: "MaxText exchanges heads on TPUs alone; set cp_variant=all_gather or zigzag",
    ),
    Need(
        lambda launch: launch.job.precision not in AT_ONCE or launch.layout.pp > 1 or num_micro_batches(launch) == 1,
        lambda launch: (
            "fp8 with delayed scaling does not go with gradient accumulation; take a larger micro-batch or fp8_current"
        ),
    ),
)
NEEDS: Mapping[str, tuple[Need, ...]] = {"tpu": (*COMMON, *OF_TPU), "gpu": (*COMMON, *OF_GPU)}

CONFIG, SCRIPT = "config.yml", "launch.sh"
PROGRAM = "maxtext.trainers.pre_train.train"
USUAL_FORMATS = {"dtype": "bfloat16", "weight_dtype": "float32", "quantization": ""}
PRECISIONS: Mapping[str, Mapping[str, Options]] = {
    "tpu": {"bf16": {}, "fp32": {"dtype": "float32"}, "int8_aqt": {"quantization": "int8"}},
    "gpu": {
        "bf16": {}, "fp32": {"dtype": "float32"}, "fp8_delayed": {"quantization": "fp8"},
        "fp8_current": {"quantization": "te_fp8_currentscaling"}, "mxfp8": {"quantization": "te_mxfp8"},
    },
}  # fmt: skip
# Chips as XPK names them, and how much each counts in the number of a slice's type: of v4, v5p and v7x its two cores. Source:
# docs/run_maxtext/run_maxtext_via_xpk.md; utils/accelerator_to_spec_map.py.
XPK = {
    "tpu-v4": ("v4", 2),
    "tpu-v5e": ("v5litepod", 1),
    "tpu-v5p": ("v5p", 2),
    "tpu-v6e": ("v6e", 1),
    "tpu-v7x": ("tpu7x", 2),
}


def _precision(hardware: str, launch: Launch) -> Options:
    name = launch.job.precision
    return PRECISIONS[hardware].get(name, {})


def _heard_precision(hardware: str, given: Given) -> Mapping[str, Any]:
    said = {name: given.get(name, usual) for name, usual in USUAL_FORMATS.items()}
    if said["quantization"] == "te_fp8_delayedscaling":
        said["quantization"] = "fp8"  # one scale for a tensor, from earlier steps, as flax has it
    of = PRECISIONS[hardware]
    found = next((name for name, options in of.items() if {**USUAL_FORMATS, **options} == said), None)
    if found is None:
        raise InputError(
            f"{', '.join(f'{name} {value}' for name, value in said.items() if value)}: no precision here; one of "
            + "; ".join(f"{name} ({_words({**USUAL_FORMATS, **options})})" for name, options in of.items())
        )
    return {"job.precision": found}


def _words(options: Options) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items() if value)


def _fields(hardware: str) -> tuple[Field, ...]:
    return (
        *MODEL,
        *layout_fields(hardware),
        Field(partial(_precision, hardware), partial(_heard_precision, hardware)),
        Field(lambda launch: {}, lambda given: {"job.loss": "streamed"}),
        named("job.optimizer", "opt_type", {"adamw": "adamw"}, "adamw"),
        beside("hardware", "run_name", "base_config", "dataset_type", "enable_checkpointing", "attention", "use_tokamax_splash",
               "model_name", "global_parameter_scale", "packing", say=partial(_beside, hardware)),
    )  # fmt: skip


def _beside(hardware: str, launch: Launch) -> Options:
    """What a run has that no plan says: synthetic data until somebody names others."""
    kernels = {"attention": "flash"} if hardware == "tpu" else {"attention": "cudnn_flash_te", "packing": False}
    return {
        "hardware": hardware,
        "run_name": launch.model.name,
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        **kernels,
    }


def _write(hardware: str, options: Options, launch: Launch) -> Files:
    text = yaml_text({"base_config": "base.yml", **named_model(options)})
    return {CONFIG: text, SCRIPT: _script(hardware, launch)}


def _script(hardware: str, launch: Launch) -> str:
    machines, parts = launch.machines, slices(launch.machines)
    head = "#!/bin/bash\n# {}.\nset -euo pipefail\n"
    if hardware == "gpu":
        return (
            head.format("Starts on each node; MAXTEXT is a checkout of MaxText")
            + f'export JAX_COORDINATOR_IP="${{HEAD_NODE:-localhost}}" JAX_COORDINATOR_PORT={PORT}\n'
            f'export NNODES={machines.num_nodes} NODE_RANK="${{SLURM_NODEID:-0}}"\n'
            f'CONFIG="$(cd "$(dirname "$0")" && pwd)/{CONFIG}"\ncd "${{MAXTEXT:?}}"\n'
            f'python3 -m {PROGRAM} "$CONFIG" base_output_directory="${{OUTPUT:?a folder or bucket}}"\n'
        )
    name, counted = XPK.get(machines.chip, (machines.chip, 1))
    return head.format("A workload of XPK on GKE, whose image has this folder's config.yml") + " \\\n  ".join((
        'xpk workload create --cluster "${CLUSTER:?}" --workload "${RUN_NAME:?}"',
        '--base-docker-image "${IMAGE:-maxtext_base_image}"',
        f"--tpu-type {name}-{machines.num_devices // parts * counted} --num-slices {parts}",
        f'--command "python3 -m {PROGRAM} ${{CONFIG:-src/maxtext/configs/{CONFIG}}} '
        'base_output_directory=${OUTPUT:?a bucket}"\n',
    ))  # fmt: skip


def _read(hardware: str, files: Files) -> Options:
    table = option_table("maxtext")
    scripts = [
        (name, text)
        for name, text in files.items()
        if PROGRAM.rpartition(".")[0] in text and not name.endswith((".yml", ".yaml"))
    ]
    if any(name.endswith((".yml", ".yaml")) for name in files) or not scripts:
        name, text = only_yaml(files, f"MaxText's {CONFIG}, or a script that starts it,")
        found = dotted(yaml_tree(text, name), table)
    else:
        found = assigned(scripts[0][1], PROGRAM.rpartition(".")[0], scripts[0][0])
    found = {name: None if value == "None" else value for name, value in found.items()}
    found = {name: value for name, value in found.items() if value is not None or name not in table}
    require_kinds(found, table)
    on = str(found.get("hardware", "tpu")).removesuffix("_multiprocess")
    if on != hardware:
        raise InputError(
            f"hardware: found {on}; {hardware} is what this target is for, maxtext for tpu and maxtext-gpu for gpu"
        )
    return {"opt_type": "adamw", **with_model(found)} if found.get("opt_type") == "adam_pax" else with_model(found)


def _notes(launch: Launch) -> Iterator[str]:
    yield f"dataset_type is synthetic: name your data, tokenizer and learning rate in {CONFIG}, and set OUTPUT"
    if not launch.job.tokens:
        yield f"steps is that of base.yml, {STEPS:,}: the plan says no length of the run"


def _target(name: str, hardware: str) -> Target:
    return Target(
        name=name, title="MaxText" if hardware == "tpu" else "MaxText on GPUs", version="e591f30 (2026-08-22)",
        source="https://github.com/AI-Hypercomputer/maxtext, src/maxtext/configs", stack=name, table="maxtext",
        fields=_fields(hardware), needs=NEEDS[hardware], write=partial(_write, hardware), read=partial(_read, hardware),
        command=lambda launch: f"bash {SCRIPT}", notes=_notes, slurm=hardware == "gpu",
    )  # fmt: skip


TPU, GPU = _target("maxtext", "tpu"), _target("maxtext-gpu", "gpu")
