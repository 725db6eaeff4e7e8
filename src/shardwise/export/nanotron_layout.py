"""How nanotron's configuration says degrees, stages, formats and the batch.

Source of names, types and defaults: nanotron 0.4, config/config.py and parallelism_config.py; models/llama.py; helpers.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options, same
from shardwise.export.launch import Launch
from shardwise.export.nanotron_model import MODEL, stages_dealt
from shardwise.model.architecture import Architecture

BATCH_PARTS = (
    "tokens.micro_batch_size",
    "tokens.batch_accumulation_per_replica",
    "parallelism.dp",
    "tokens.sequence_length",
)
# Weights in bfloat16 with fp32 gradients and master copies that micro-batches add to (optim/gradient_accumulator.py), or all in
# fp32. Weights in bfloat16 alone would have moments in bfloat16, as no recipe here has.
PRECISIONS: Mapping[str, Options] = {
    "bf16_fp32_gradients": {"model.dtype": "bfloat16", "optimizer.accumulate_grad_in_fp32": True},
    "fp32": {"model.dtype": "float32", "optimizer.accumulate_grad_in_fp32": False},
}
STEPS = 15  # of examples/config_tiny_llama.yaml of the repository, where a plan says no length of the run


def _replicas(launch: Launch) -> Options:
    layout = launch.layout
    return {"parallelism.dp": layout.dp * layout.fsdp, "optimizer.zero_stage": layout.zero_stage}


def _heard_replicas(given: Given) -> Mapping[str, Any]:
    """Every stage above 0 is ZeRO-1 (helpers.py, init_optimizer_and_grad_accumulator: zero_stage > 0)."""
    replicas, stage = given.get("parallelism.dp"), given.get("optimizer.zero_stage", 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"optimizer.zero_stage: found {stage}; 0 or 1 is required")
    sharded = stage > 0 and replicas > 1
    return {
        "layout.dp": 1 if sharded else replicas,
        "layout.fsdp": replicas if sharded else 1,
        "layout.zero_stage": int(sharded),
    }


def _modes(launch: Launch) -> Options:
    layout = launch.layout
    return {
        "parallelism.tp_mode": "REDUCE_SCATTER" if layout.sequence_parallel else "ALL_REDUCE",
        "parallelism.tp_linear_async_communication": layout.async_tp,
    }


def _heard_modes(given: Given) -> Mapping[str, Any]:
    """Tensor parallelism that there is none of splits nothing; in pieces it runs beside products where it splits sequences."""
    parallel = given.get("parallelism.tp_mode", "ALL_REDUCE") == "REDUCE_SCATTER" and given.get("parallelism.tp") > 1
    in_pieces = bool(given.get("parallelism.tp_linear_async_communication", False))
    return {"layout.sequence_parallel": parallel, "layout.async_tp": parallel and in_pieces}


def _heard_stages(given: Given) -> Mapping[str, Any]:
    pp, schedule = given.get("parallelism.pp"), given.get("parallelism.pp_engine", "afab")
    if pp == 1:
        return {"layout.schedule": "none"}
    parts: dict[str, Any] = {"name": "model"}
    for field in MODEL:
        parts |= {
            name.removeprefix("model."): value for name, value in field.hear(given).items() if name.startswith("model.")
        }
    return {"layout.schedule": schedule, "layout.stages": stages_dealt(Architecture(**parts), pp)}


def _precision(launch: Launch) -> Options:
    name = launch.job.precision
    return PRECISIONS.get(name, PRECISIONS["bf16_fp32_gradients"])


def _heard_precision(given: Given) -> Mapping[str, Any]:
    dtype = given.get("model.dtype", "bfloat16")
    in_fp32 = given.get("optimizer.accumulate_grad_in_fp32", False)
    said = {"model.dtype": dtype, "optimizer.accumulate_grad_in_fp32": in_fp32}
    found = next((name for name, options in PRECISIONS.items() if options == said), None)
    if found is None:
        raise InputError(
            f"model.dtype: found {dtype} with accumulate_grad_in_fp32 = {str(in_fp32).lower()}, which no precision here is; "
            "bfloat16 with true, or float32 with false, is what can be read"
        )
    return {"job.precision": found}


def _batch(launch: Launch) -> Options:
    layout, job = launch.layout, launch.job
    sequences = layout.dp * layout.fsdp * layout.micro_batch_seqs
    steps = round(job.tokens / job.global_batch_tokens) if job.tokens else STEPS
    return {
        "tokens.sequence_length": job.seq_len, "tokens.micro_batch_size": layout.micro_batch_seqs,
        "tokens.batch_accumulation_per_replica": job.num_seqs // sequences, "tokens.train_steps": max(steps, 1),
    }  # fmt: skip


def _heard_batch(given: Given) -> Mapping[str, Any]:
    micro, accumulated, replicas, length = (given.get(name) for name in BATCH_PARTS)
    seqs, steps = micro * accumulated * replicas, given.get("tokens.train_steps")
    return {
        "job.seq_len": length, "job.global_batch_seqs": seqs, "layout.micro_batch_seqs": micro,
        **({"job.tokens": float(steps * seqs * length)} if steps else {}),
    }  # fmt: skip


def _heard_experts(given: Given) -> Mapping[str, Any]:
    degree = given.get("parallelism.expert_parallel_size", 1)
    if degree != 1:
        raise InputError(
            f"parallelism.expert_parallel_size: found {degree}; 1 is what can be read: no model of nanotron 0.4 has experts"
        )
    return {}


LAYOUT: tuple[Field, ...] = (
    Field(_replicas, _heard_replicas),
    same("layout.tp", "parallelism.tp"),
    same("layout.pp", "parallelism.pp"),
    Field(
        lambda launch: {"parallelism.pp_engine": launch.layout.schedule if launch.layout.pp > 1 else "1f1b"},
        _heard_stages,
    ),
    Field(_modes, _heard_modes),
    Field(lambda launch: {"parallelism.expert_parallel_size": 1}, _heard_experts),
    Field(_batch, _heard_batch),
    Field(_precision, _heard_precision),
    Field(
        lambda launch: {}, lambda given: {"job.loss": "unfused"}
    ),  # logits in fp32, their softmax kept (models/llama.py)
)
