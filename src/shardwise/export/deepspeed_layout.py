"""How DeepSpeed's configuration, and the arguments of a training script beside it, say a launch.

Source of names and types: DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py,
module_inject/auto_ep_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.deepspeed_formats import FORMATS, PRICED, offloads_optimizer
from shardwise.export.field import Field, Given, Options, beside
from shardwise.export.launch import Launch
from shardwise.export.scripts import LENGTH, PREFIX, STEPS, heard_optimizer, heard_tokens, is_true, whole
from shardwise.names import unknown

STAGE, TP, CP = "zero_optimization.stage", "tensor_parallel.autotp_size", "sequence_parallel_size"
BATCH, MICRO, STEPS_OF = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Arguments of the training script that "auto" stands for. Source: transformers, integrations/deepspeed.py.
ARGUMENTS = {MICRO: "per_device_train_batch_size", STEPS_OF: "gradient_accumulation_steps", "bf16.enabled": "bf16",
             "fp16.enabled": "fp16"}  # fmt: skip
OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion"}
CHECKPOINTING = "activation_checkpointing"


def _count(given: Given, option: str) -> int:
    """A degree: 0 is none, as none said is."""
    return 1 if given.get(option) == 0 else whole(given, option) or 1


def _replicas(given: Given) -> int:
    """Groups of devices with sequences of their own: what tensor and sequence parallelism leave."""
    within = _count(given, TP) * _count(given, CP)
    if given.machines.num_devices % within:
        raise InputError(
            f"{TP}, {CP}: they take {within} devices together, which do not divide {given.machines.num_devices}; give the "
            "cluster of the launch"
        )
    return given.machines.num_devices // within


def _zero(given: Given) -> Mapping[str, Any]:
    stage, replicas = given.get(STAGE, 0), _replicas(given)
    stage = stage if replicas * _count(given, CP) > 1 else 0  # one device has nothing to share
    degrees = {"layout.fsdp": replicas} if stage else {"layout.dp": replicas}
    return {**degrees, "layout.zero_stage": stage}


def _experts(launch: Launch) -> Options:
    """Whole experts on each device; `expert_tensor_parallel_size` may be nothing but 1."""
    return (
        {"expert_parallel.enabled": True, "expert_parallel.autoep_size": launch.layout.ep}
        if launch.layout.ep > 1
        else {}
    )


def _heard_experts(given: Given) -> Mapping[str, Any]:
    ep = _count(given, "expert_parallel.autoep_size") if is_true(given.get("expert_parallel.enabled", False)) else 1
    return {"layout.ep": ep, "layout.etp": 1 if ep > 1 and _count(given, TP) > 1 else None}


def _batch(launch: Launch) -> Options:
    layout, seqs = launch.layout, launch.job.num_seqs
    return {
        BATCH: seqs,
        MICRO: layout.micro_batch_seqs,
        STEPS_OF: seqs // (layout.micro_batch_seqs * layout.num_replicas),
    }


def _heard_batch(given: Given) -> Mapping[str, Any]:
    """DeepSpeed takes what is missing of batch = micro-batch × accumulation × replicas from the others."""
    replicas, batch = _replicas(given), _said(given, BATCH)
    micro, steps = (_said(given, option) for option in (MICRO, STEPS_OF))
    if not micro:
        micro, batch = given.beside.get("layout.micro_batch_seqs"), batch or given.beside.get("job.global_batch_seqs")
        if micro and not batch and not steps:
            return {"layout.micro_batch_seqs": micro}
    if batch and not micro:
        micro = batch // (replicas * (steps or 1))
    elif batch and not steps:
        steps = batch // ((micro or 1) * replicas)
    if not micro:
        return {}
    seqs = micro * (steps or 1) * replicas
    if batch and batch != seqs:
        raise InputError(
            f"{BATCH}: found {batch}; micro-batch × accumulation × replicas = {micro} × {steps or 1} × {replicas} = {seqs} is "
            "required"
        )
    seq_len = LENGTH.hear(given).get("job.seq_len", given.beside.get("job.seq_len"))
    return {"layout.micro_batch_seqs": micro, "job.global_batch_seqs": seqs, **heard_tokens(given, seqs, seq_len)}


def _said(given: Given, option: str) -> int | None:
    """A part of the batch, which the training script may say where the configuration does not: None where neither does."""
    argument = whole(given, PREFIX + ARGUMENTS[option]) if option in ARGUMENTS else None
    return whole(given, option, argument)


def _checkpointing(launch: Launch) -> Options:
    full = {f"{PREFIX}gradient_checkpointing": True} if launch.layout.recompute == "full" else {}
    return full | ({f"{CHECKPOINTING}.cpu_checkpointing": True} if launch.layout.offloads_activations else {})


def _heard_checkpointing(given: Given) -> Mapping[str, Any]:
    """The configuration says how checkpoints rest, and the script that there are any."""
    on_host = is_true(given.get(f"{CHECKPOINTING}.cpu_checkpointing", False))
    split = is_true(given.get(f"{CHECKPOINTING}.partition_activations", False))
    if split and _count(given, TP) > 1:
        raise InputError(
            f"{CHECKPOINTING}.partition_activations: splits what is kept over tensor parallelism; set it to false"
        )
    said = any(is_true(given.get(f"{PREFIX}{name}", False)) for name in ("gradient_checkpointing", CHECKPOINTING))
    host = (offloads_optimizer(given), on_host)
    named = {(False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"}
    return {"layout.recompute": "full" if said or on_host or split else "none", "layout.offload": named[host]}


def _heard_optimizer(given: Given) -> Mapping[str, Any]:
    """Without one in the configuration the training script has its own."""
    if "optimizer.type" not in given:
        return heard_optimizer(given)
    name = str(given.get("optimizer.type")).lower()
    names = {**{theirs.lower(): ours for ours, theirs in OPTIMIZERS.items()}, "adam": "adamw"}
    if name not in names:
        raise InputError(f"optimizer.type: {unknown(name, names)}")
    return {"job.optimizer": names[name]}


FIELDS: tuple[Field, ...] = (
    Field(_batch, _heard_batch),
    Field(lambda launch: {STAGE: launch.layout.zero_stage}, _zero),
    beside("zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients",
           say=lambda launch: {"zero_optimization.overlap_comm": True, "zero_optimization.contiguous_gradients": True}
           if launch.layout.zero_stage else {}),
    Field(lambda launch: {"zero_optimization.offload_optimizer.device": "cpu"} if launch.layout.offloads_optimizer else {},
          lambda given: {}),
    Field(lambda launch: {TP: launch.layout.tp} if launch.layout.tp > 1 else {},
          lambda given: {"layout.tp": _count(given, TP), "layout.sequence_parallel": False}),
    Field(lambda launch: {CP: launch.layout.cp} if launch.layout.cp > 1 else {},
          lambda given: {"layout.cp": (cp := _count(given, CP)), **({"layout.cp_variant": "ulysses"} if cp > 1 else {})}),
    Field(_experts, _heard_experts),
    FORMATS,
    Field(lambda launch: {"optimizer.type": OPTIMIZERS[launch.job.optimizer]} if launch.job.optimizer in OPTIMIZERS else {},
          _heard_optimizer),
    Field(_checkpointing, _heard_checkpointing),
    LENGTH, STEPS, PRICED,
)  # fmt: skip
