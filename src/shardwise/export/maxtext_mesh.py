"""The axes of MaxText's mesh: degrees within a slice (ici_*) and between slices (dcn_*), of layouts and back.

Source: MaxText at e591f30 (2026-08-22), src/maxtext/configs/base.yml: mesh_axes, logical_axis_rules and parallelism;
utils/max_utils.py, fill_unspecified_mesh_axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Given, Options
from shardwise.export.launch import Launch, Machines

AXES = ("data", "fsdp", "tensor", "tensor_sequence", "context", "pipeline", "expert")  # those that can be read
OTHERS = ("diloco", "fsdp_transpose", "sequence", "context_usp_ulysses", "context_autoregressive", "autoregressive")
OUTERMOST = ("pp", "dp", "fsdp", "cp", "tp")  # axes of layouts as they take slices; then what is left is within one
INFERRED = -1
DEFAULTS = {"dcn_data": INFERRED, "ici_fsdp": INFERRED}


def slices(machines: Machines) -> int:
    """Parts of the devices that ICI joins: slices of TPUs; of GPUs what shares a host."""
    return machines.num_pods if machines.chip.startswith("tpu") else machines.num_nodes


def between(launch: Launch) -> Mapping[str, int]:
    """How many slices each axis of a layout spans, the outermost axes of its placement first."""
    layout, left = launch.layout, slices(launch.machines)
    axes = tuple(reversed(layout.placement.axes)) if layout.placement else OUTERMOST
    found = {}
    for axis in axes:
        found[axis] = math.gcd(getattr(layout, axis), left)
        left //= found[axis]
    return found


def spans_slices(launch: Launch) -> bool:
    """Whether the axes come out even over the slices."""
    return math.prod(between(launch).values()) == slices(launch.machines)


def say_mesh(launch: Launch) -> Options:
    """Shards of the optimizer (ZeRO-1) are the data axis, those of weights (ZeRO-3) the fsdp axis, of which experts take."""
    layout, outer = launch.layout, between(launch)
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


def hear_mesh(given: Given) -> Mapping[str, Any]:
    """Degrees with those that MaxText infers (-1). Raises `InputError` for axes that no layout has."""
    _refuse_others(given)
    degrees = _degrees(given)
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


def _refuse_others(given: Given) -> None:
    wrong = [
        f"{name}: found {given.get(name)}; 1 is what can be read"
        for axis in OTHERS
        for where in ("ici", "dcn")
        if given.get(name := f"{where}_{axis}_parallelism", 1) != 1
    ]
    if wrong:
        raise InputError(*wrong)


def _degrees(given: Given) -> dict[tuple[str, str], int]:
    """Every degree; one of each kind may be inferred from the slices and the devices of each."""
    found = {(where, axis): given.get(f"{where}_{axis}_parallelism", DEFAULTS.get(f"{where}_{axis}", 1))
             for where in ("ici", "dcn") for axis in AXES}  # fmt: skip
    devices = given.machines.num_devices
    ici = math.prod(degree for (where, _), degree in found.items() if where == "ici")
    # Of machines whose slices are unknown, these are what the degrees within one leave.
    parts = slices(given.machines) if ici < 0 else max(devices // max(ici, 1), 1)
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
