"""How MaxText's options say the axes of a layout, what runs again and where it waits, and the batch.

Source of names, types and defaults: MaxText at e591f30 (2026-08-22), src/maxtext/configs/base.yml and types.py; what it asks:
layers/pipeline.py, layers/nnx_decoders.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options
from shardwise.export.launch import Launch
from shardwise.export.maxtext_mesh import hear_mesh, say_mesh
from shardwise.export.maxtext_model import BASE, MODEL, layers_of, num_blocks
from shardwise.export.maxtext_needs import num_micro_batches

LENGTH, STEPS, BATCH = 2048, 150_001, 12.0  # of base.yml: max_target_length, steps, per_device_batch_size
# Policies by what is kept and where it waits; every block is a jax.checkpoint, so that there is none that runs nothing again.
POLICIES = {("full", False): "full", ("selective", False): "minimal_with_context", ("selective", True): "minimal_offloaded",
            ("full", True): "custom"}  # fmt: skip
ALIKE = {"minimal": "minimal_with_context", "minimal_flash": "minimal_with_context", "none": "full"}
OFFLOADS = {(False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"}
STRATEGIES = {"all_gather": ("all_gather", True), "zigzag": ("ring", True), "ulysses": ("ulysses", False)}
SPLASH = {"attention": "flash", "use_tokamax_splash": True}  # which rings and exchanges of heads ask for on TPUs


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
    accumulated, parts = given.get("gradient_accumulation_steps", 1), given.get("num_pipeline_microbatches", -1)
    parts = (pp if parts == -1 else parts) if pp > 1 else 1
    length, steps = given.get("max_target_length", LENGTH), given.get("steps", STEPS)
    at_once = _at_once(given, replicas, parts)
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


def _at_once(given: Given, replicas: int, parts: int) -> int:
    """Sequences that all devices take at once, as micro-batches of each replica. Raises `InputError` for a part of one."""
    devices = given.machines.num_devices
    found: float = given.get("per_device_batch_size", BATCH) * devices
    if found != round(found) or found < 1 or parts < 1 or round(found) % (parts * replicas):
        raise InputError(
            f"per_device_batch_size: found {found / devices:g}, {found:g} sequences on {devices} devices; a multiple of "
            f"{replicas} replicas × {parts} micro-batches is required"
        )
    return round(found)


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


def layout_fields(hardware: str) -> tuple[Field, ...]:
    """The fields of a launch on TPUs or on GPUs."""
    return (
        Field(say_mesh, hear_mesh),
        Field(_batch, _heard_batch),
        Field(_stages, _heard_stages),
        Field(_recompute, _heard_recompute),
        Field(partial(_context, hardware), _heard_context),
    )
