"""nanotron: a YAML of its dataclasses, and a script that starts run_train.py with it.

Source of names, types and defaults: nanotron 0.4, config/config.py and parallelism_config.py; what it asks of them:
models/llama.py, models/starcoder2.py, parallel/context.py and parallel/pipeline_parallel/engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options, beside, same
from shardwise.export.formats.trees import dotted
from shardwise.export.formats.yaml_text import only_yaml, yaml_text, yaml_tree
from shardwise.export.launch import Launch
from shardwise.export.launchers import torchrun
from shardwise.export.nanotron_model import MODEL, is_starcoder, stages_dealt
from shardwise.export.target import Files, Need, Target, option_table, require_kinds
from shardwise.model.architecture import Architecture
from shardwise.optimizer import optimizer_named

FILLED = ("1f1b",)  # schedules that ask for as many micro-batches as fill the pipeline but for one (engine.py)
CONFIG, SCRIPT = "config.yaml", "launch.sh"
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
# What a configuration must have and no plan says. Source of the values: examples/config_tiny_llama.yaml of the repository.
STEPS = 15
YOURS: Options = {
    "general.project": "shardwise", "general.run": "%date_%jobid", "general.seed": 42,
    "model.init_method.std": 0.025, "model.ddp_bucket_cap_mb": 25,
    "optimizer.clip_grad": 1.0, "optimizer.torch_adam_is_fused": True,
    "optimizer.learning_rate_scheduler.learning_rate": 3e-4, "optimizer.learning_rate_scheduler.lr_warmup_steps": 2,
    "optimizer.learning_rate_scheduler.lr_warmup_style": "linear", "optimizer.learning_rate_scheduler.lr_decay_style": "cosine",
    "optimizer.learning_rate_scheduler.min_decay_lr": 1e-5,
    "checkpoints.checkpoints_path": "checkpoints", "checkpoints.checkpoint_interval": 1000,
    "logging.log_level": "info", "logging.log_level_replica": "info",
    "tokenizer": {}, "data.dataset": None, "data.num_loading_workers": 1, "data.seed": 42,
}  # fmt: skip


def _yours(launch: Launch) -> Options:
    adam = optimizer_named("adamw").fields
    return {
        **YOURS, "optimizer.adam_beta1": adam["beta1"].default, "optimizer.adam_beta2": adam["beta2"].default,
        "optimizer.adam_eps": adam["epsilon"].default, "optimizer.weight_decay": adam["weight_decay"].default,
    }  # fmt: skip


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
    beside(
        *YOURS, *(f"optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay")), say=_yours
    ),
)


def _write(options: Options, launch: Launch) -> Files:
    script = (
        "#!/bin/bash\n# Starts on each node; NANOTRON is a checkout of nanotron.\nset -euo pipefail\n"
        "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
        f"{torchrun(launch.machines, chr(34) + '${NANOTRON:?}/run_train.py' + chr(34))} "
        f'--config-file "$(dirname "$0")/{CONFIG}"\n'
    )
    return {CONFIG: yaml_text(options), SCRIPT: script}


def _read(files: Files) -> Options:
    name, text = only_yaml(files, f"one, nanotron's {CONFIG},")
    table = option_table("nanotron")
    found = {
        option: value
        for option, value in dotted(yaml_tree(text, name), table).items()
        if value is not None or option not in table
    }
    mode = found.get("parallelism.tp_mode")
    if isinstance(mode, str):
        found["parallelism.tp_mode"] = mode.upper()  # as nanotron reads it
    require_kinds(found, table)
    _require_counts(found)
    return found


def _require_counts(options: Options) -> None:
    """Raise `InputError` for a launch without its batch and degrees, and for counts below 1."""
    wrong = [
        f"{name}: found {options.get(name, 'nothing')}; a whole number of at least 1 is required"
        for name in (*BATCH_PARTS, "parallelism.tp", "parallelism.pp")
        if options.get(name, 0) < 1
    ]
    if wrong:
        raise InputError(*wrong)


def _notes(launch: Launch) -> Iterator[str]:
    yield (
        f"data, tokenizer, learning rate and checkpoints are yours: set data.dataset, tokenizer, optimizer and checkpoints in "
        f"{CONFIG}; without a dataset run_train.py trains on random tokens"
    )
    if not launch.job.tokens:
        yield f"tokens.train_steps is {STEPS}: the plan says no length of the run"


def _micro_batches(launch: Launch) -> int:
    layout = launch.layout
    return launch.job.num_seqs // (layout.dp * layout.fsdp * layout.micro_batch_seqs)


TARGET = Target(
    name="nanotron", title="nanotron", version="0.4",
    source="https://github.com/huggingface/nanotron, src/nanotron/config", stack="nanotron", table="nanotron",
    fields=(*MODEL, *LAYOUT),
    needs=(
        Need(
            lambda launch: launch.job.num_seqs % (launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs) == 0,
            lambda launch: f"a batch of {launch.job.num_seqs} sequences is no multiple of micro_batch_size × dp = "
            f"{launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs}",
        ),
        Need(
            lambda launch: launch.model.num_kv_heads % launch.layout.tp == 0
            or (is_starcoder(launch.model) and launch.model.num_kv_heads == 1),
            lambda launch: f"tp = {launch.layout.tp} does not divide the {launch.model.num_kv_heads} key-value heads, and "
            "nanotron does not replicate them",
        ),
        Need(
            lambda launch: launch.layout.schedule not in FILLED or _micro_batches(launch) >= launch.layout.pp - 1,
            lambda launch: f"1f1b takes at least {launch.layout.pp - 1} micro-batches of pp = {launch.layout.pp}; there are "
            f"{_micro_batches(launch)}",
        ),
        Need(
            lambda launch: launch.layout.zero_stage == 0 or launch.layout.dp == 1,
            lambda launch: f"ZeRO-1 shards over all replicas, found dp = {launch.layout.dp} beside fsdp = "
            f"{launch.layout.fsdp}; set dp=1",
        ),
    ),
    write=_write, read=_read, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
)  # fmt: skip
