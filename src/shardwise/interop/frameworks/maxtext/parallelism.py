"""How MaxText's options express a layout: mesh axes, pipeline stages, recompute and offload, and the batch.

Degrees are those within a slice (ici_*) and between slices (dcn_*). Source of names, types and defaults: MaxText at e591f30
(2026-08-22), src/maxtext/configs/base.yml (mesh_axes, logical_axis_rules, parallelism) and types.py; utils/max_utils.py,
fill_unspecified_mesh_axes; what it requires: layers/pipeline.py, layers/nnx_decoders.py.
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
from shardwise.interop.launches.target import OptionMapping, OptionReader, Options
from shardwise.values.errors import InputError

AXES = ("data", "fsdp", "tensor", "tensor_sequence", "context", "pipeline", "expert")  # those that can be read
UNREADABLE_AXES = (
    "diloco",
    "fsdp_transpose",
    "sequence",
    "context_usp_ulysses",
    "context_autoregressive",
    "autoregressive",
)
OUTERMOST = ("pp", "dp", "fsdp", "cp", "tp")  # axes of layouts as they take slices; then what is left is within one
INFERRED = -1
DEFAULTS = {"dcn_data": INFERRED, "ici_fsdp": INFERRED}


def num_slices(machines: Machines) -> int:
    """Parts of the devices that ICI joins: slices of TPUs; of GPUs what shares a host."""
    return machines.num_pods if machines.chip.startswith("tpu") else machines.num_nodes


def dcn_degrees(launch: Launch) -> Mapping[str, int]:
    """How many slices each axis of a layout spans, the outermost axes of its placement first."""
    layout, left = launch.layout, num_slices(launch.machines)
    axes = tuple(reversed(layout.placement.axes)) if layout.placement else OUTERMOST
    found = {}
    for axis in axes:
        found[axis] = math.gcd(getattr(layout, axis), left)
        left //= found[axis]
    return found


def spans_slices(launch: Launch) -> bool:
    """Whether the axes come out even over the slices."""
    return math.prod(dcn_degrees(launch).values()) == num_slices(launch.machines)


def mesh_options(launch: Launch) -> Options:
    """Shards of the optimizer (ZeRO-1) are the data axis, those of weights (ZeRO-3) the fsdp axis, of which experts take."""
    layout, outer = launch.layout, dcn_degrees(launch)
    inner = {axis: getattr(layout, axis) // outer[axis] for axis in outer}
    zero_1 = layout.zero_stage == 1
    ici, dcn = (
        {"pipeline": by["pp"], "data": by["fsdp"] if zero_1 else by["dp"], "fsdp": 1 if zero_1 else by["fsdp"],
         "context": by["cp"], "tensor": by["tp"]}
        for by in (inner, outer)
    )  # fmt: skip
    ici["expert"] = math.gcd(layout.ep, ici["fsdp"])
    dcn["expert"] = layout.ep // ici["expert"]
    ici["fsdp"] //= ici["expert"]
    if dcn["fsdp"] % dcn["expert"] == 0:
        dcn["fsdp"] //= dcn["expert"]
    said = {
        f"{where}_{axis}_parallelism": degree
        for where, by in (("ici", ici), ("dcn", dcn))
        for axis, degree in by.items()
    }
    usual = {f"{name}_parallelism": value for name, value in DEFAULTS.items()}
    shown = {name: degree for name, degree in said.items() if degree > 1 or name in usual}
    return {**shown, **({"shard_optimizer_over_data": True} if zero_1 else {})}


def read_mesh(given: OptionReader) -> Mapping[str, Any]:
    """Degrees with those that MaxText infers (-1). Raises `InputError` for axes that no layout has."""
    _refuse_unreadable_axes(given)
    degrees = _read_degrees(given)
    total = {axis: degrees["ici", axis] * degrees["dcn", axis] for axis in AXES}
    data, fsdp, over_data = (
        total["data"],
        total["fsdp"] * total["expert"],
        given.get("shard_optimizer_over_data", False),
    )
    tensor = total["tensor"] * total["tensor_sequence"]
    weights = fsdp * total["context"] > 1
    if over_data and weights and data > 1:
        raise InputError(
            f"shard_optimizer_over_data: found true with data parallelism of {data} beside weights that are sharded; false can "
            "be read"
        )
    zero_1 = over_data and data > 1
    return {
        "layout.dp": 1 if zero_1 else data, "layout.fsdp": data if zero_1 else fsdp,
        "layout.zero_stage": 3 if weights else int(zero_1),
        "layout.tp": tensor, "layout.cp": total["context"], "layout.pp": total["pipeline"], "layout.ep": total["expert"],
        "layout.sequence_parallel": tensor > 1, "layout.async_tp": tensor > 1,
    }  # fmt: skip


def _refuse_unreadable_axes(given: OptionReader) -> None:
    wrong = [
        f"{name}: found {given.get(name)}; 1 is what can be read"
        for axis in UNREADABLE_AXES
        for where in ("ici", "dcn")
        if given.get(name := f"{where}_{axis}_parallelism", 1) != 1
    ]
    if wrong:
        raise InputError(*wrong)


def _read_degrees(given: OptionReader) -> dict[tuple[str, str], int]:
    """Every degree; one of each kind may be inferred from the slices and the devices of each."""
    found = {(where, axis): given.get(f"{where}_{axis}_parallelism", DEFAULTS.get(f"{where}_{axis}", 1))
             for where in ("ici", "dcn") for axis in AXES}  # fmt: skip
    devices = given.machines.num_devices
    ici = math.prod(degree for (where, _), degree in found.items() if where == "ici")
    # Of machines whose slices are unknown, these are what the degrees within one leave.
    parts = num_slices(given.machines) if ici < 0 else max(devices // max(ici, 1), 1)
    for where, product in (("dcn", parts), ("ici", devices // parts)):
        missing = [name for name, degree in found.items() if name[0] == where and degree == INFERRED]
        told = [degree for name, degree in found.items() if name[0] == where and degree != INFERRED]
        known = math.prod(told)
        if len(missing) > 1 or min(told) < 1:
            raise InputError(f"{where}_*_parallelism: found degrees below 1; whole numbers, and -1 once, are required")
        if missing and product % known:
            raise InputError(
                f"{where}_{missing[0][1]}_parallelism: the others take {known} together, which do not divide {product}; give the "
                "cluster of the launch"
            )
        found |= dict.fromkeys(missing, product // known)
    taken = math.prod(found.values())
    if taken != devices:
        raise InputError(
            f"ici_* and dcn_*: the degrees take {taken} devices together, and there are {devices}; give its cluster"
        )
    return found


DEFAULT_LENGTH, DEFAULT_STEPS, DEFAULT_BATCH = (
    2048,
    150_001,
    12.0,
)  # of base.yml: max_target_length, steps, per_device_batch_size
# Policies by what is kept and where it waits; every block is a jax.checkpoint, so that there is none that runs nothing again.
REMAT_POLICIES = {("full", False): "full", ("selective", False): "minimal_with_context", ("selective", True): "minimal_offloaded",
            ("full", True): "custom"}  # fmt: skip
EQUIVALENT_POLICIES = {"minimal": "minimal_with_context", "minimal_flash": "minimal_with_context", "none": "full"}
OFFLOADS = {(False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"}
CP_STRATEGIES = {"all_gather": ("all_gather", True), "zigzag": ("ring", True), "ulysses": ("ulysses", False)}
SPLASH_OPTIONS = {
    "attention": "flash",
    "use_tokamax_splash": True,
}  # which rings and exchanges of heads ask for on TPUs


def _recompute_options(launch: Launch) -> Options:
    layout = launch.layout
    policy = REMAT_POLICIES.get((layout.recompute, layout.offloads_activations))
    return {
        **({"remat_policy": policy} if policy else {}), **({"decoder_layer_input": "offload"} if policy == "custom" else {}),
        **({"optimizer_memory_host_offload": True} if layout.offloads_optimizer else {}),
    }  # fmt: skip


def _read_recompute(given: OptionReader) -> Mapping[str, Any]:
    policy, of_input = given.get("remat_policy", "full"), given.get("decoder_layer_input", "device")
    optimizer = bool(given.get("optimizer_memory_host_offload", False))
    if policy == "custom" and of_input == "device":
        policy = "full"
    kinds = {theirs: ours for ours, theirs in REMAT_POLICIES.items()}
    policy = EQUIVALENT_POLICIES.get(policy, policy)
    if policy not in kinds:
        raise InputError(
            f"remat_policy: found {policy!r}; one of {', '.join((*kinds, *EQUIVALENT_POLICIES))} is what can be read"
        )
    recompute, activations = kinds[policy]
    return {"layout.recompute": recompute, "layout.offload": OFFLOADS[optimizer, activations]}


def _context_options(hardware: str, launch: Launch) -> Options:
    layout = launch.layout
    if layout.cp == 1 or layout.cp_variant not in CP_STRATEGIES:
        return {}
    strategy, balanced = CP_STRATEGIES[layout.cp_variant]
    own = SPLASH_OPTIONS if hardware == "tpu" and strategy != "all_gather" else {}
    return {"context_parallel_strategy": strategy, "context_parallel_load_balance": balanced, **own}


def _read_context(given: OptionReader) -> Mapping[str, Any]:
    strategy = str(given.get("context_parallel_strategy", "all_gather")).lower()
    balanced = given.get("context_parallel_load_balance", True)
    if read_mesh(given)["layout.cp"] == 1:
        return {}
    kinds = {theirs: ours for ours, theirs in CP_STRATEGIES.items()} | {
        ("ring", False): "ring",
        ("all_gather", False): "all_gather",
    }
    if (strategy, balanced) not in kinds:
        raise InputError(
            f"context_parallel_strategy: found {strategy!r} with context_parallel_load_balance = {balanced}; one of all_gather, "
            "ring, ulysses (without balance) is what can be read"
        )
    return {"layout.cp_variant": kinds[strategy, balanced]}


def _batch_options(launch: Launch) -> Options:
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


def _read_batch(given: OptionReader) -> Mapping[str, Any]:
    mesh = read_mesh(given)
    replicas, pp = mesh["layout.dp"] * mesh["layout.fsdp"], mesh["layout.pp"]
    accumulated, parts = given.get("gradient_accumulation_steps", 1), given.get("num_pipeline_microbatches", -1)
    parts = (pp if parts == -1 else parts) if pp > 1 else 1
    length, steps = given.get("max_target_length", DEFAULT_LENGTH), given.get("steps", DEFAULT_STEPS)
    at_once = _seqs_at_once(given, replicas, parts)
    if min(accumulated, length) < 1:
        raise InputError(
            f"gradient_accumulation_steps, max_target_length: found {accumulated} and {length}; at least 1 is required"
        )
    if pp > 1 and accumulated > 1:
        raise InputError(f"gradient_accumulation_steps: found {accumulated} beside a pipeline; 1 is what can be read")
    seqs = at_once * accumulated
    return {
        "job.seq_len": length, "job.global_batch_seqs": seqs, "layout.micro_batch_seqs": at_once // (parts * replicas),
        **({"job.tokens": float(steps * seqs * length)} if steps > 0 and "steps" in given else {}),
    }  # fmt: skip


def _seqs_at_once(given: OptionReader, replicas: int, parts: int) -> int:
    """Sequences that all devices take at once, as micro-batches of each replica. Raises `InputError` for a part of one."""
    devices = given.machines.num_devices
    found: float = given.get("per_device_batch_size", DEFAULT_BATCH) * devices
    if found != round(found) or found < 1 or parts < 1 or round(found) % (parts * replicas):
        raise InputError(
            f"per_device_batch_size: found {found / devices:g}, {found:g} sequences on {devices} devices; a multiple of "
            f"{replicas} replicas × {parts} micro-batches is required"
        )
    return round(found)


def _stage_options(launch: Launch) -> Options:
    layout = launch.layout
    if layout.pp == 1:
        return {}
    repeats = layout.num_virtual_stages
    return {
        "num_layers_per_pipeline_stage": num_blocks(launch.model) // (layout.pp * repeats),
        "num_pipeline_repeats": repeats,
    }


def _read_stages(given: OptionReader) -> Mapping[str, Any]:
    pp, per = read_mesh(given)["layout.pp"], given.get("num_layers_per_pipeline_stage", 1)
    repeats, layers = given.get("num_pipeline_repeats", -1), MODEL_MAPPINGS[0].from_options(given)["model.num_layers"]
    if pp == 1:
        return {"layout.schedule": "none"}
    blocks = layers // layers_per_block(given.get("decoder_block", BASE_OPTIONS["decoder_block"]))
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


def layout_mappings(hardware: str) -> tuple[OptionMapping, ...]:
    """The fields of a launch on TPUs or on GPUs."""
    return (
        OptionMapping(mesh_options, read_mesh),
        OptionMapping(_batch_options, _read_batch),
        OptionMapping(_stage_options, _read_stages),
        OptionMapping(_recompute_options, _read_recompute),
        OptionMapping(partial(_context_options, hardware), _read_context),
    )


def num_micro_batches(launch: Launch) -> int:
    """Micro-batches of a replica in a step."""
    layout = launch.layout
    return launch.job.num_seqs // (layout.num_replicas * layout.micro_batch_seqs)
