"""How the keys of a recipe of NeMo Automodel say a layout.

Source of names and types: nemo-automodel 0.7.0, components/distributed/{config,mesh}.py, distributed/pipelining.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options, flag, named
from shardwise.export.launch import Launch

OWN = "distributed"
PIPELINE = f"{OWN}.pipeline"
SCHEDULES = {"1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS"}
CHECKPOINTING = {"none": False, "full": True, "alternate": "selective"}


def _replicas(launch: Launch) -> Options:
    """DDP has no shards; FSDP2 keeps gathered weights after the forward pass (ZeRO-2) or not."""
    layout = launch.layout
    replicas = layout.dp * layout.fsdp
    if not layout.zero_stage and replicas > 1:
        return {"distributed.strategy": "ddp"}
    copies = {"distributed.dp_replicate_size": layout.dp} if layout.dp > 1 else {}
    kept = {"distributed.reshard_after_forward": layout.zero_stage == 3} if layout.zero_stage else {}
    return {"distributed.strategy": "fsdp2", "distributed.dp_size": replicas, **copies, **kept}


def number(given: Given, name: str, usual: int = 1) -> int:
    """A degree; nothing, and "none", are the usual one."""
    found = given.get(name)
    if found is None or (isinstance(found, str) and found.lower() in ("none", "null")):
        return usual
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"{name}: found {found!r}; a whole number of at least 1 is required")
    return found


def all_replicas(given: Given) -> int:
    """Groups of devices with sequences of their own. Raises `InputError` for degrees that do not divide the cluster."""
    split = 1
    for axis in ("tp", "pp", "cp"):
        split *= number(given, f"{OWN}.{axis}_size")
    if given.machines.num_devices % split:
        raise InputError(
            f"tp_size·pp_size·cp_size = {split} does not divide {given.machines.num_devices} devices; give the launch's cluster"
        )
    return number(given, f"{OWN}.dp_size", given.machines.num_devices // split)


def _heard_replicas(given: Given) -> Mapping[str, Any]:
    replicas, strategy = all_replicas(given), str(given.get(f"{OWN}.strategy", "fsdp2")).lower()
    copies, cp = number(given, f"{OWN}.dp_replicate_size"), number(given, f"{OWN}.cp_size")
    if strategy not in ("fsdp2", "ddp") or replicas % copies:
        raise InputError(
            f"{OWN}.strategy: found {strategy!r} with {replicas} replicas in {copies} copies; fsdp2 or ddp, and a divisor, are "
            "what can be read"
        )
    reshards = given.get(f"{OWN}.reshard_after_forward")
    if strategy == "ddp" or replicas * cp == copies:
        return {"layout.dp": replicas, "layout.zero_stage": 0}
    kept = number(given, f"{OWN}.pp_size") > 1 if reshards is None else not reshards
    return {"layout.dp": copies, "layout.fsdp": replicas // copies, "layout.zero_stage": 2 if kept else 3}


def _stages(launch: Launch) -> Options:
    layout = launch.layout
    if layout.pp == 1:
        return {}
    stages = layout.pp * layout.num_virtual_stages
    schedule = {f"{PIPELINE}.pp_schedule": SCHEDULES[layout.schedule]} if layout.schedule in SCHEDULES else {}
    return {**schedule, f"{PIPELINE}.pp_microbatch_size": layout.micro_batch_seqs,
            f"{PIPELINE}.layers_per_stage": -(-launch.model.num_layers // stages),
            f"{PIPELINE}.round_virtual_stages_to_pp_multiple": "up"}  # fmt: skip


def _heard_stages(given: Given) -> Mapping[str, Any]:
    """Layers as `generate_hf_model_fqn_per_model_part` deals them out: those left over go to the first stages, one to each."""
    ranks = number(given, f"{OWN}.pp_size")
    schedules = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    name = str(given.get(f"{PIPELINE}.pp_schedule", "1f1b")).replace("_", "").lower()
    given.get(f"{PIPELINE}.pp_microbatch_size")
    if ranks == 1:
        return {"layout.schedule": "none"}
    if name not in schedules or given.model is None:
        raise InputError(
            f"{PIPELINE}.pp_schedule: found {name!r}; one of {', '.join(SCHEDULES.values())} is what can be read"
        )
    ours = schedules[name]
    stages = _num_stages(given, given.model.num_layers, ranks, 1 if ours in ("1f1b", "afab") else 2)
    even, more = divmod(given.model.num_layers, stages)
    return {"layout.schedule": ours, "layout.num_virtual_stages": stages // ranks,
            "layout.stages": tuple(even + (i < more) for i in range(stages))}  # fmt: skip


def _num_stages(given: Given, layers: int, ranks: int, usual: int) -> int:
    """Stages of so many layers each, or the usual number on each rank, rounded as the recipe says.

    Raises `InputError` for a number that is not a multiple of the ranks.
    """
    per, rounds = (
        given.get(f"{PIPELINE}.layers_per_stage"),
        given.get(f"{PIPELINE}.round_virtual_stages_to_pp_multiple"),
    )
    stages: int = -(-layers // per) if per else ranks * usual
    if stages % ranks and rounds in ("up", "down"):
        stages += -(stages % ranks) + (ranks if rounds == "up" else 0)
    if stages % ranks or not 0 < stages <= layers:
        raise InputError(
            f"{PIPELINE}.layers_per_stage: found {per}: {stages} stages of {layers} layers; a multiple of {ranks} is required"
        )
    return stages


def _heard_experts(given: Given) -> Mapping[str, Any]:
    """Experts are whole: they lie over the ranks of tensor parallelism too."""
    ep = number(given, f"{OWN}.ep_size")
    return {"layout.ep": ep, "layout.etp": 1 if ep > 1 and number(given, f"{OWN}.tp_size") > 1 else None}


def _degree(axis: str) -> Field:
    """A degree, which is said where it is more than one."""
    name = f"{OWN}.{axis}_size"

    def say(launch: Launch) -> Options:
        degree = getattr(launch.layout, axis)
        return {name: degree} if degree > 1 else {}

    return Field(say, lambda given: {f"layout.{axis}": number(given, name)})


LAYOUT: tuple[Field, ...] = (
    Field(_replicas, _heard_replicas),
    *(_degree(axis) for axis in ("tp", "cp", "pp")),
    Field(lambda launch: {f"{OWN}.ep_size": launch.layout.ep} if launch.layout.ep > 1 else {}, _heard_experts),
    flag("layout.sequence_parallel", f"{OWN}.sequence_parallel"),
    flag("layout.async_tp", f"{OWN}.enable_async_tensor_parallel"),
    Field(lambda launch: {}, lambda given: {"layout.cp_variant": "all_gather"}),
    named("layout.recompute", f"{OWN}.activation_checkpointing", CHECKPOINTING, False),
    Field(_stages, _heard_stages),
)  # fmt: skip
