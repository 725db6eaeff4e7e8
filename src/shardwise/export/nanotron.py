"""nanotron: a YAML of its dataclasses, and a script that starts run_train.py with it.

Source of names, types and defaults: nanotron 0.4, config/config.py and parallelism_config.py; what it asks of them:
models/llama.py, models/starcoder2.py, parallel/context.py and parallel/pipeline_parallel/engine.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import InputError
from shardwise.export.field import Options, beside
from shardwise.export.formats.trees import dotted
from shardwise.export.formats.yaml_text import only_yaml, yaml_text, yaml_tree
from shardwise.export.launch import Launch
from shardwise.export.launchers import torchrun
from shardwise.export.nanotron_layout import BATCH_PARTS, LAYOUT, STEPS
from shardwise.export.nanotron_model import MODEL, is_starcoder
from shardwise.export.target import Files, Need, Target, option_table, require_kinds
from shardwise.optimizer.table import optimizer_named

FILLED = ("1f1b",)  # schedules that ask for as many micro-batches as fill the pipeline but for one (engine.py)
CONFIG, SCRIPT = "config.yaml", "launch.sh"
# What a configuration must have and no plan says. Source of the values: examples/config_tiny_llama.yaml of the repository.
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
    fields=(
        *MODEL,
        *LAYOUT,
        beside(
            *YOURS, *(f"optimizer.{name}" for name in ("adam_beta1", "adam_beta2", "adam_eps", "weight_decay")), say=_yours
        ),
    ),
    needs=(
        Need(
            lambda launch: launch.job.num_seqs % (launch.layout.dp * launch.layout.fsdp * launch.layout.micro_batch_seqs) == 0,
            lambda launch: f"a batch of {launch.job.num_seqs} sequences is not a multiple of micro_batch_size × dp = "
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
