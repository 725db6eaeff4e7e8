"""MaxText: a YAML over its base.yml, and what starts it: on TPUs a workload of XPK, on GPUs a process for each node.

Source of names, types and defaults: MaxText at e591f30 (2026-08-22), src/maxtext/configs/base.yml and types.py; what it asks:
set_derived_and_validate_values of types.py, layers/pipeline.py, layers/nnx_decoders.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options, beside, named
from shardwise.export.formats.assignments import assigned
from shardwise.export.formats.trees import dotted
from shardwise.export.formats.yaml_text import only_yaml, yaml_text, yaml_tree
from shardwise.export.launch import Launch
from shardwise.export.launchers import PORT
from shardwise.export.maxtext_mesh import hear_mesh, say_mesh, slices
from shardwise.export.maxtext_model import BASE, MODEL, layers_of, named_model, num_blocks, with_model
from shardwise.export.maxtext_needs import NEEDS, num_micro_batches
from shardwise.export.target import Files, Target, option_table, require_kinds

CONFIG, SCRIPT = "config.yml", "launch.sh"
PROGRAM = "maxtext.trainers.pre_train.train"
LENGTH, STEPS, BATCH = 2048, 150_001, 12.0  # of base.yml: max_target_length, steps, per_device_batch_size
FORMATS = ("dtype", "weight_dtype", "quantization")
USUAL_FORMATS = {"dtype": "bfloat16", "weight_dtype": "float32", "quantization": ""}
PRECISIONS: Mapping[str, Mapping[str, Options]] = {
    "tpu": {"bf16": {}, "fp32": {"dtype": "float32"}, "int8_aqt": {"quantization": "int8"}},
    "gpu": {
        "bf16": {}, "fp32": {"dtype": "float32"}, "fp8_delayed": {"quantization": "fp8"},
        "fp8_current": {"quantization": "te_fp8_currentscaling"}, "mxfp8": {"quantization": "te_mxfp8"},
    },
}  # fmt: skip
# Policies by what is kept and where it waits; every block is a jax.checkpoint, so that there is none that runs nothing again.
POLICIES = {("full", False): "full", ("selective", False): "minimal_with_context", ("selective", True): "minimal_offloaded",
            ("full", True): "custom"}  # fmt: skip
ALIKE = {"minimal": "minimal_with_context", "minimal_flash": "minimal_with_context", "none": "full"}
OFFLOADS = {(False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"}
STRATEGIES = {"all_gather": ("all_gather", True), "zigzag": ("ring", True), "ulysses": ("ulysses", False)}
SPLASH = {"attention": "flash", "use_tokamax_splash": True}  # which rings and exchanges of heads ask for on TPUs
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


def _recompute(launch: Launch) -> Options:
    layout = launch.layout
    policy = POLICIES.get((layout.recompute, layout.offloads_activations))
    return {
        **({"remat_policy": policy} if policy else {}), **({"decoder_layer_input": "offload"} if policy == "custom" else {}),
        **({"optimizer_memory_host_offload": True} if layout.offloads_optimizer else {}),
    }  # fmt: skip


def _heard_recompute(given: Given) -> Mapping[str, Any]:
    policy, of_input = given.get("remat_policy", "full"), given.get("decoder_layer_input", "device")
    optimizer = bool(given.get("optimizer_memory_host_offload", False))
    if policy == "custom" and of_input == "device":
        policy = "full"
    kinds = {theirs: ours for ours, theirs in POLICIES.items()}
    policy = ALIKE.get(policy, policy)
    if policy not in kinds:
        raise InputError(f"remat_policy: found {policy!r}; one of {', '.join((*kinds, *ALIKE))} is what can be read")
    recompute, activations = kinds[policy]
    return {"layout.recompute": recompute, "layout.offload": OFFLOADS[optimizer, activations]}


def _context(hardware: str, launch: Launch) -> Options:
    layout = launch.layout
    if layout.cp == 1 or layout.cp_variant not in STRATEGIES:
        return {}
    strategy, balanced = STRATEGIES[layout.cp_variant]
    own = SPLASH if hardware == "tpu" and strategy != "all_gather" else {}
    return {"context_parallel_strategy": strategy, "context_parallel_load_balance": balanced, **own}


def _heard_context(given: Given) -> Mapping[str, Any]:
    strategy = str(given.get("context_parallel_strategy", "all_gather")).lower()
    balanced = given.get("context_parallel_load_balance", True)
    if hear_mesh(given)["layout.cp"] == 1:
        return {}
    kinds = {theirs: ours for ours, theirs in STRATEGIES.items()} | {
        ("ring", False): "ring",
        ("all_gather", False): "all_gather",
    }
    if (strategy, balanced) not in kinds:
        raise InputError(
            f"context_parallel_strategy: found {strategy!r} with context_parallel_load_balance = {balanced}; one of all_gather, "
            "ring, ulysses (without balance) is what can be read"
        )
    return {"layout.cp_variant": kinds[strategy, balanced]}


def _batch(launch: Launch) -> Options:
    """Micro-batches of a pipeline are parts of one batch; without one they are steps of accumulation."""
    layout, job, count = launch.layout, launch.job, num_micro_batches(launch)
    piped = layout.pp > 1
    sequences = job.num_seqs if piped else layout.micro_batch_seqs * layout.num_replicas
    steps = {"steps": max(round(job.tokens / job.global_batch_tokens), 1)} if job.tokens else {}
    parts = (
        {"num_pipeline_microbatches": count} if piped else {"gradient_accumulation_steps": count} if count > 1 else {}
    )
    return {
        "max_target_length": job.seq_len,
        "per_device_batch_size": sequences / launch.machines.num_devices,
        **parts,
        **steps,
    }


def _heard_batch(given: Given) -> Mapping[str, Any]:
    mesh = hear_mesh(given)
    replicas, pp = mesh["layout.dp"] * mesh["layout.fsdp"], mesh["layout.pp"]
    accumulated, steps = given.get("gradient_accumulation_steps", 1), given.get("steps", STEPS)
    at_once = given.get("per_device_batch_size", BATCH) * given.machines.num_devices
    parts = given.get("num_pipeline_microbatches", -1)
    parts = (pp if parts == -1 else parts) if pp > 1 else 1
    length = given.get("max_target_length", LENGTH)
    if (
        at_once != round(at_once)
        or at_once < 1
        or min(accumulated, parts, length) < 1
        or round(at_once) % (parts * replicas)
    ):
        raise InputError(
            f"per_device_batch_size: found {at_once / given.machines.num_devices:g}, {at_once:g} sequences on "
            f"{given.machines.num_devices} devices; a multiple of {replicas} replicas × {parts} micro-batches is required"
        )
    if pp > 1 and accumulated > 1:
        raise InputError(f"gradient_accumulation_steps: found {accumulated} beside a pipeline; 1 is what can be read")
    seqs = round(at_once) * accumulated
    return {
        "job.seq_len": length, "job.global_batch_seqs": seqs, "layout.micro_batch_seqs": round(at_once) // (parts * replicas),
        **({"job.tokens": float(steps * seqs * length)} if steps > 0 and "steps" in given else {}),
    }  # fmt: skip


def _stages(launch: Launch) -> Options:
    layout = launch.layout
    if layout.pp == 1:
        return {}
    repeats = layout.num_virtual_stages
    return {
        "num_layers_per_pipeline_stage": num_blocks(launch.model) // (layout.pp * repeats),
        "num_pipeline_repeats": repeats,
    }


def _heard_stages(given: Given) -> Mapping[str, Any]:
    pp, per = hear_mesh(given)["layout.pp"], given.get("num_layers_per_pipeline_stage", 1)
    repeats, layers = given.get("num_pipeline_repeats", -1), MODEL[0].hear(given)["model.num_layers"]
    if pp == 1:
        return {"layout.schedule": "none"}
    blocks = layers // layers_of(given.get("decoder_block", BASE["decoder_block"]))
    repeats = blocks // (pp * per) if repeats == -1 and per > 0 else repeats
    if per < 1 or repeats * pp * per != blocks or given.get("pipeline_parallel_layers", -1) not in (-1, blocks):
        raise InputError(
            f"num_layers_per_pipeline_stage: found {per} × {repeats} repeats on {pp} stages; {blocks} layers in all are required"
        )
    schedule = "looped_bfs" if repeats > 1 else "afab"
    return {
        "layout.num_virtual_stages": repeats,
        "layout.schedule": schedule,
        "layout.stages": (layers // (pp * repeats),) * (pp * repeats),
    }


def _fields(hardware: str) -> tuple[Field, ...]:
    return (
        *MODEL,
        Field(say_mesh, hear_mesh),
        Field(_batch, _heard_batch),
        Field(_stages, _heard_stages),
        Field(_recompute, _heard_recompute),
        Field(partial(_context, hardware), _heard_context),
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
