"""Accelerate's configuration of degrees: FSDP of either version, and the sizes of ParallelismConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options
from shardwise.export.launch import Launch
from shardwise.export.scripts import is_true, whole
from shardwise.names import unknown

NODE = "num_processes"
KIND, VERSION, RESHARD = "distributed_type", "fsdp_config.fsdp_version", "fsdp_config.fsdp_reshard_after_forward"
STRATEGY = "fsdp_config.fsdp_sharding_strategy"
SIZE = "parallelism_config.parallelism_config_{}_size"
ROTATE = "parallelism_config.parallelism_config_cp_comm_strategy"
AXES = {"dp_replicate": "dp", "dp_shard": "fsdp", "cp": "cp", "tp": "tp"}  # theirs: ours
VARIANTS = {
    "all_gather": "allgather",
    "zigzag": "alltoall",
}  # as torch's set_rotate_method; both have a piece from either end
# Strategies of the first version in the order of their numbers, from 1: ZeRO stage, and whether nodes have whole replicas.
# Source: utils/constants.py, FSDP_SHARDING_STRATEGY.
STRATEGIES = {"FULL_SHARD": (3, False), "SHARD_GRAD_OP": (2, False), "NO_SHARD": (0, False), "HYBRID_SHARD": (3, True),
              "HYBRID_SHARD_ZERO2": (2, True)}  # fmt: skip


def _say(launch: Launch) -> Options:
    """Plain replicas are DDP, and tensor parallelism alone needs no FSDP."""
    layout = launch.layout
    sizes = {SIZE.format(theirs): getattr(layout, ours) for theirs, ours in AXES.items()}
    if not layout.zero_stage:
        return {KIND: "MULTI_GPU"} if layout.tp == 1 else {KIND: "MULTI_GPU", **sizes}
    rotated = {ROTATE: VARIANTS[layout.cp_variant]} if layout.cp > 1 and layout.cp_variant in VARIANTS else {}
    return {KIND: "FSDP", VERSION: 2, RESHARD: layout.zero_stage == 3, **sizes, **rotated}


def degree(given: Given, axis: str) -> int:
    """A size of ParallelismConfig."""
    return whole(given, SIZE.format(axis)) or 1


def replicas_of(given: Given) -> int:
    """Groups of processes with sequences of their own. Raises `InputError` for sizes that are not those of the cluster."""
    devices, processes = given.machines.num_devices, given.get(NODE)
    if processes not in (None, -1, devices):
        raise InputError(
            f"{NODE}: found {processes!r} on a cluster of {devices} devices; give the cluster of the launch"
        )
    if degree(given, "sp") > 1:
        raise InputError(
            "parallelism_config_sp_size: Ulysses is DeepSpeed's; a launch with FSDP, or a ds_config.json, is required"
        )
    sizes = {axis: degree(given, axis) for axis in AXES}
    within = sizes["tp"] * sizes["cp"]
    whole = within * sizes["dp_replicate"] * sizes["dp_shard"]
    if whole not in (1, devices):
        words = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise InputError(
            f"parallelism_config: found {words} = {whole} on {devices} devices; their product is required to be that"
        )
    return devices // within


def _hear(given: Given) -> Mapping[str, Any]:
    replicas, kind = replicas_of(given), given.get(KIND)
    if kind not in ("FSDP", "MULTI_GPU", "NO"):
        raise InputError(
            f"{KIND}: found {kind!r}; FSDP or MULTI_GPU is what can be read (of DEEPSPEED its ds_config.json)"
        )
    tp, cp = degree(given, "tp"), degree(given, "cp")
    rotated = given.get(ROTATE, VARIANTS["all_gather"])
    back = {theirs: ours for ours, theirs in VARIANTS.items()}
    if rotated not in back:
        raise InputError(f"parallelism_config_cp_comm_strategy: {unknown(str(rotated), back)}")
    stage, whole_nodes = _strategy(given) if kind == "FSDP" else (0, False)
    dp = _replicated(given, replicas, whole_nodes) if stage else replicas
    alone = replicas * cp == 1
    if stage and not alone and cp * replicas == dp:
        raise InputError(
            "FSDP has nothing to shard over: dp_shard and cp are 1; set distributed_type MULTI_GPU, or a dp_shard_size"
        )
    return {
        "layout.tp": tp, "layout.cp": cp, **({"layout.cp_variant": back[rotated]} if cp > 1 else {}), "layout.dp": dp,
        "layout.fsdp": replicas // dp, "layout.zero_stage": 0 if alone else stage, "layout.sequence_parallel": False,
    }  # fmt: skip


def _replicated(given: Given, replicas: int, whole_nodes: bool) -> int:
    """Copies of the shards: as ParallelismConfig has it, or one on each node."""
    return given.machines.num_nodes if whole_nodes else min(degree(given, "dp_replicate"), replicas)


def _strategy(given: Given) -> tuple[int, bool]:
    """Stage of ZeRO, and whether each node has a replica."""
    version, reshard, strategy = given.get(VERSION, 1), given.get(RESHARD, True), given.get(STRATEGY, "FULL_SHARD")
    if str(version) == "2":
        return (3 if is_true(reshard) else 2), False
    names = list(STRATEGIES)
    text = str(strategy).upper()
    name = names[int(text) - 1] if text in ("1", "2", "3", "4", "5") else text
    if name not in STRATEGIES:
        raise InputError(f"fsdp_sharding_strategy: {unknown(name, names)}")
    return STRATEGIES[name]


SHARDING = (Field(_say, _hear),)
