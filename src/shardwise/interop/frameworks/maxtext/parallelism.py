"""MaxText's options for a layout: mesh axes, pipeline stages, recompute and offload, and the batch.

Degrees are those within a slice (ici_*) and between slices (dcn_*). Source of names, types and defaults: MaxText at e591f30
(2026-08-22), src/maxtext/configs/base.yml (mesh_axes, logical_axis_rules, parallelism) and types.py; utils/max_utils.py,
fill_unspecified_mesh_axes; requirements: layers/pipeline.py, layers/nnx_decoders.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from shardwise.interop.frameworks.maxtext.model_options import (
    BASE_OPTIONS,
    MODEL_MAPPINGS,
    layers_per_block,
    num_blocks,
)
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.target import OptionMapping, OptionReader
from shardwise.interop.text_formats.option_tables import Options
from shardwise.values import InputError

AXES = ("data", "fsdp", "tensor", "tensor_sequence", "context", "pipeline", "expert")  # readable ones
UNREADABLE_AXES = (
    "diloco", "fsdp_transpose", "sequence", "context_usp_ulysses", "context_autoregressive", "autoregressive",
)  # fmt: skip
OUTERMOST = ("pp", "dp", "fsdp", "cp", "tp")  # default order in which axes span slices
INFERRED = -1
DEFAULTS = {"dcn_data": INFERRED, "ici_fsdp": INFERRED}


def num_slices(machines: Machines) -> int:
    """Return how many groups of devices ICI joins: slices of TPUs; on GPUs, hosts."""
    return machines.num_pods if machines.chip.startswith("tpu") else machines.num_nodes


def dcn_degrees(launch: Launch) -> Mapping[str, int]:
    """Return how many slices each axis of a layout spans, assigned from the outermost axis of its placement inwards."""
    layout, slices_left = launch.layout, num_slices(launch.machines)
    axes = tuple(reversed(layout.placement.axes)) if layout.placement else OUTERMOST
    # Each axis, outermost first, spans as many of the remaining slices as its degree has in common with them.
    degrees = {}
    for axis in axes:
        degrees[axis] = math.gcd(getattr(layout, axis), slices_left)
        slices_left //= degrees[axis]
    return degrees


def spans_slices(launch: Launch) -> bool:
    """Return whether the axes divide evenly over the slices."""
    return math.prod(dcn_degrees(launch).values()) == num_slices(launch.machines)


def mesh_options(launch: Launch) -> Options:
    """Return ICI and DCN degrees. Optimizer shards (ZeRO-1) are the data axis, weight shards (ZeRO-3) fsdp and expert."""
    layout, outer = launch.layout, dcn_degrees(launch)
    inner = {axis: getattr(layout, axis) // outer[axis] for axis in outer}
    zero_1 = layout.zero_stage == 1
    ici, dcn = (
        {"pipeline": degrees["pp"], "data": degrees["fsdp"] if zero_1 else degrees["dp"],
         "fsdp": 1 if zero_1 else degrees["fsdp"], "context": degrees["cp"], "tensor": degrees["tp"]}
        for degrees in (inner, outer)
    )  # fmt: skip
    # MaxText's expert axis is separate from fsdp: the expert degree is taken out of fsdp, within slices first, then between them.
    ici["expert"] = math.gcd(layout.ep, ici["fsdp"])
    dcn["expert"] = layout.ep // ici["expert"]
    ici["fsdp"] //= ici["expert"]
    if dcn["fsdp"] % dcn["expert"] == 0:
        dcn["fsdp"] //= dcn["expert"]
    degrees_by_option = {
        f"{network}_{axis}_parallelism": degree
        for network, degrees in (("ici", ici), ("dcn", dcn))
        for axis, degree in degrees.items()
    }
    defaults = {f"{name}_parallelism": value for name, value in DEFAULTS.items()}
    written = {name: degree for name, degree in degrees_by_option.items() if degree > 1 or name in defaults}
    return {**written, **({"shard_optimizer_over_data": True} if zero_1 else {})}


def read_mesh(reader: OptionReader) -> Mapping[str, Any]:
    """Return degrees, with those that MaxText infers (-1). Raises `InputError` for axes that no layout has."""
    _refuse_unreadable_axes(reader)
    degrees = _read_degrees(reader)
    total = {axis: degrees["ici", axis] * degrees["dcn", axis] for axis in AXES}
    data_degree, fsdp = total["data"], total["fsdp"] * total["expert"]
    optimizer_over_data = reader.get("shard_optimizer_over_data", False)
    tensor = total["tensor"] * total["tensor_sequence"]
    weights = fsdp * total["context"] > 1
    if optimizer_over_data and weights and data_degree > 1:
        raise InputError(
            f"shard_optimizer_over_data: found true with data parallelism of {data_degree} beside weights that are sharded; "
            "false can be read"
        )
    zero_1 = optimizer_over_data and data_degree > 1
    return {
        "layout.dp": 1 if zero_1 else data_degree, "layout.fsdp": data_degree if zero_1 else fsdp,
        "layout.zero_stage": 3 if weights else int(zero_1),
        "layout.tp": tensor, "layout.cp": total["context"], "layout.pp": total["pipeline"], "layout.ep": total["expert"],
        "layout.sequence_parallel": tensor > 1, "layout.async_tp": tensor > 1,
    }  # fmt: skip


def _refuse_unreadable_axes(reader: OptionReader) -> None:
    problems = [
        f"{name}: found {reader.get(name)}; 1 is what can be read"
        for axis in UNREADABLE_AXES
        for network in ("ici", "dcn")
        if reader.get(name := f"{network}_{axis}_parallelism", 1) != 1
    ]
    if problems:
        raise InputError(*problems)


def _read_degrees(reader: OptionReader) -> dict[tuple[str, str], int]:
    """Return every degree by (network, axis); one per network may be inferred from the slices, or the devices of each."""
    degrees = {(network, axis): reader.get(f"{network}_{axis}_parallelism", DEFAULTS.get(f"{network}_{axis}", 1))
             for network in ("ici", "dcn") for axis in AXES}  # fmt: skip
    devices = reader.machines.num_devices
    ici = math.prod(degree for (network, _), degree in degrees.items() if network == "ici")
    # If the number of slices is unknown, the degrees within a slice tell it.
    slices = num_slices(reader.machines) if ici < 0 else max(devices // max(ici, 1), 1)
    for network, product in (("dcn", slices), ("ici", devices // slices)):
        missing = [name for name, degree in degrees.items() if name[0] == network and degree == INFERRED]
        explicit = [degree for name, degree in degrees.items() if name[0] == network and degree != INFERRED]
        explicit_product = math.prod(explicit)
        if len(missing) > 1 or min(explicit) < 1:
            raise InputError(
                f"{network}_*_parallelism: found degrees below 1; whole numbers, and -1 once, are required"
            )
        if missing and product % explicit_product:
            raise InputError(
                f"{network}_{missing[0][1]}_parallelism: the others take {explicit_product} together, which do not divide "
                f"{product}; give the cluster of the launch"
            )
        degrees |= dict.fromkeys(missing, product // explicit_product)
    num_used = math.prod(degrees.values())
    if num_used != devices:
        raise InputError(
            f"ici_* and dcn_*: the degrees take {num_used} devices together, and there are {devices}; give its cluster"
        )
    return degrees


# max_target_length, steps and per_device_batch_size of base.yml.
DEFAULT_LENGTH, DEFAULT_STEPS, DEFAULT_BATCH = 2048, 150_001, 12.0
# Policies by (recompute, whether activations are offloaded). Every block is a jax.checkpoint, so no policy recomputes nothing.
RECOMPUTE_POLICIES = {
    ("full", False): "full",
    ("selective", False): "minimal_with_context",
    ("selective", True): "minimal_offloaded",
    ("full", True): "custom",
}
EQUIVALENT_POLICIES = {"minimal": "minimal_with_context", "minimal_flash": "minimal_with_context", "none": "full"}
OFFLOADS = {(False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"}
CP_STRATEGIES = {"all_gather": ("all_gather", True), "zigzag": ("ring", True), "ulysses": ("ulysses", False)}
SPLASH_OPTIONS = {"attention": "flash", "use_tokamax_splash": True}  # rings and head exchanges need them on TPUs


def _recompute_options(launch: Launch) -> Options:
    layout = launch.layout
    policy = RECOMPUTE_POLICIES.get((layout.recompute, layout.offloads_activations))
    return {
        **({"remat_policy": policy} if policy else {}), **({"decoder_layer_input": "offload"} if policy == "custom" else {}),
        **({"optimizer_memory_host_offload": True} if layout.offloads_optimizer else {}),
    }  # fmt: skip


def _read_recompute(reader: OptionReader) -> Mapping[str, Any]:
    policy, layer_input = reader.get("remat_policy", "full"), reader.get("decoder_layer_input", "device")
    optimizer = bool(reader.get("optimizer_memory_host_offload", False))
    if policy == "custom" and layer_input == "device":
        policy = "full"
    choices = {theirs: ours for ours, theirs in RECOMPUTE_POLICIES.items()}
    policy = EQUIVALENT_POLICIES.get(policy, policy)
    if policy not in choices:
        raise InputError(
            f"remat_policy: found {policy!r}; one of {', '.join((*choices, *EQUIVALENT_POLICIES))} is what can be read"
        )
    recompute, activations = choices[policy]
    return {"layout.recompute": recompute, "layout.offload": OFFLOADS[optimizer, activations]}


def _context_options(hardware: str, launch: Launch) -> Options:
    layout = launch.layout
    if layout.cp == 1 or layout.cp_variant not in CP_STRATEGIES:
        return {}
    strategy, balanced = CP_STRATEGIES[layout.cp_variant]
    kernels = SPLASH_OPTIONS if hardware == "tpu" and strategy != "all_gather" else {}
    return {"context_parallel_strategy": strategy, "context_parallel_load_balance": balanced, **kernels}


def _read_context(reader: OptionReader) -> Mapping[str, Any]:
    strategy = str(reader.get("context_parallel_strategy", "all_gather")).lower()
    balanced = reader.get("context_parallel_load_balance", True)
    if read_mesh(reader)["layout.cp"] == 1:
        return {}
    variants = {theirs: ours for ours, theirs in CP_STRATEGIES.items()}
    variants |= {("ring", False): "ring", ("all_gather", False): "all_gather"}
    if (strategy, balanced) not in variants:
        raise InputError(
            f"context_parallel_strategy: found {strategy!r} with context_parallel_load_balance = {balanced}; one of all_gather, "
            "ring, ulysses (without balance) is what can be read"
        )
    return {"layout.cp_variant": variants[strategy, balanced]}


def _batch_options(launch: Launch) -> Options:
    """Return the batch. A pipeline splits one batch into micro-batches; without one they are steps of accumulation."""
    job, count = launch.job, launch.num_micro_batches
    piped = launch.layout.pp > 1
    sequences = job.num_seqs if piped else launch.seqs_at_once
    steps = {"steps": launch.num_steps} if launch.num_steps else {}
    micro_batches = (
        {"num_pipeline_microbatches": count} if piped else {"gradient_accumulation_steps": count} if count > 1 else {}
    )
    per_device = sequences / launch.machines.num_devices
    return {"max_target_length": job.seq_len, "per_device_batch_size": per_device, **micro_batches, **steps}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    mesh = read_mesh(reader)
    replicas, pp = mesh["layout.dp"] * mesh["layout.fsdp"], mesh["layout.pp"]
    accumulated = reader.get("gradient_accumulation_steps", 1)
    micro_batches = reader.get("num_pipeline_microbatches", -1)
    micro_batches = (pp if micro_batches == -1 else micro_batches) if pp > 1 else 1
    length, steps = reader.get("max_target_length", DEFAULT_LENGTH), reader.get("steps", DEFAULT_STEPS)
    concurrent_seqs = _seqs_at_once(reader, replicas, micro_batches)
    if min(accumulated, length) < 1:
        raise InputError(
            f"gradient_accumulation_steps, max_target_length: found {accumulated} and {length}; at least 1 is required"
        )
    if pp > 1 and accumulated > 1:
        raise InputError(f"gradient_accumulation_steps: found {accumulated} beside a pipeline; 1 is what can be read")
    seqs = concurrent_seqs * accumulated
    return {
        "job.seq_len": length, "job.global_batch_seqs": seqs,
        "layout.micro_batch_seqs": concurrent_seqs // (micro_batches * replicas),
        **({"job.tokens": float(steps * seqs * length)} if steps > 0 and "steps" in reader else {}),
    }  # fmt: skip


def _seqs_at_once(reader: OptionReader, replicas: int, micro_batches: int) -> int:
    """Return the sequences that all devices take at once. Raises `InputError` unless they fill whole micro-batches."""
    devices = reader.machines.num_devices
    seqs: float = reader.get("per_device_batch_size", DEFAULT_BATCH) * devices
    if seqs != round(seqs) or seqs < 1 or micro_batches < 1 or round(seqs) % (micro_batches * replicas):
        raise InputError(
            f"per_device_batch_size: found {seqs / devices:g}, {seqs:g} sequences on {devices} devices; a multiple of "
            f"{replicas} replicas × {micro_batches} micro-batches is required"
        )
    return round(seqs)


def _stage_options(launch: Launch) -> Options:
    layout = launch.layout
    if layout.pp == 1:
        return {}
    repeats = layout.num_virtual_stages
    layers_per_stage = num_blocks(launch.model) // (layout.pp * repeats)
    return {"num_layers_per_pipeline_stage": layers_per_stage, "num_pipeline_repeats": repeats}


def _read_stages(reader: OptionReader) -> Mapping[str, Any]:
    pp, layers_per_stage = read_mesh(reader)["layout.pp"], reader.get("num_layers_per_pipeline_stage", 1)
    repeats, layers = reader.get("num_pipeline_repeats", -1), MODEL_MAPPINGS[0].from_options(reader)["model.num_layers"]
    if pp == 1:
        return {"layout.schedule": "none"}
    blocks = layers // layers_per_block(reader.get("decoder_block", BASE_OPTIONS["decoder_block"]))
    repeats = blocks // (pp * layers_per_stage) if repeats == -1 and layers_per_stage > 0 else repeats
    if (
        layers_per_stage < 1
        or repeats * pp * layers_per_stage != blocks
        or reader.get("pipeline_parallel_layers", -1) not in (-1, blocks)
    ):
        raise InputError(
            f"num_layers_per_pipeline_stage: found {layers_per_stage} × {repeats} repeats on {pp} stages; {blocks} layers "
            "in all are required"
        )
    schedule = "looped_bfs" if repeats > 1 else "afab"
    stages = (layers // (pp * repeats),) * (pp * repeats)
    return {"layout.num_virtual_stages": repeats, "layout.schedule": schedule, "layout.stages": stages}


def layout_mappings(hardware: str) -> tuple[OptionMapping, ...]:
    """Return the mappings of a layout and its batch; `hardware` is tpu or gpu."""
    return (
        OptionMapping(mesh_options, read_mesh),
        OptionMapping(_batch_options, _read_batch),
        OptionMapping(_stage_options, _read_stages),
        OptionMapping(_recompute_options, _read_recompute),
        OptionMapping(partial(_context_options, hardware), _read_context),
    )
