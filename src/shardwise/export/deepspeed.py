"""DeepSpeed: a ds_config.json, and a script that starts the user's own training script with it.

Source of names and types: DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py,
module_inject/auto_ep_config.py; what it asks of them: runtime/engine.py and module_inject/auto_ep_folding.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import InputError
from shardwise.export.deepspeed_formats import adds_as_it_rests
from shardwise.export.deepspeed_layout import ARGUMENTS, BATCH, FIELDS
from shardwise.export.field import Options
from shardwise.export.formats.trees import dotted, json_text, json_tree, spelt
from shardwise.export.launch import Launch
from shardwise.export.launchers import PORT
from shardwise.export.scripts import PREFIX, TRAIN, argument_lines, configurations, script_options, without_arguments
from shardwise.export.target import Files, Need, Target, option_table

CONFIG, SCRIPT = "ds_config.json", "launch.sh"


def _write(options: Options, launch: Launch) -> Files:
    machines = launch.machines
    several = machines.num_nodes > 1
    hosts = (
        'HOSTFILE="${HOSTFILE:-$(mktemp)}"\n'
        f'[ -s "$HOSTFILE" ] || scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots={machines.devices_per_node}/" '
        '> "$HOSTFILE"\n'
    ) if several else ""  # fmt: skip
    where = (
        f'--hostfile "$HOSTFILE" --num_nodes {machines.num_nodes} --no_ssh --node_rank "${{NODE_RANK:-${{SLURM_NODEID:?}}}}" '
        f'--master_addr "${{HEAD_NODE:?the first node}}" --master_port {PORT} '
    ) if several else ""  # fmt: skip
    script = (
        "#!/bin/bash\n# Starts on each node, beside ds_config.json; HOSTFILE has a line for each node: name slots=devices.\n"
        f"set -euo pipefail\n{hosts}\n{argument_lines(options, f'--deepspeed {CONFIG}')}\n\n"
        f'deepspeed {where}--num_gpus {machines.devices_per_node} {TRAIN} "${{ARGS[@]}}"\n'
    )
    return {CONFIG: json_text(without_arguments(options)), SCRIPT: script}


def _read(files: Files) -> Options:
    own = configurations(files)
    if len(own) != 1 or not next(iter(own)).lower().endswith(".json"):
        raise InputError(
            f"DeepSpeed: found {', '.join(files)}; one ds_config.json, and the script that starts it, is required"
        )
    ((name, text),) = own.items()
    known = option_table("deepspeed")
    options = spelt({**dotted(json_tree(text, name), known), **script_options(files, "deepspeed")[1]}, known)
    return {option: said for option, value in options.items() if (said := _decided(option, value, options)) is not None}


def _decided(option: str, value: Any, options: Options) -> Any:
    """What "auto" stands for: an argument of the training script, where it has one for it; None where it has not."""
    if value != "auto" or option.startswith(PREFIX):
        return value
    return options.get(PREFIX + ARGUMENTS[option]) if option in ARGUMENTS else None


def _notes(launch: Launch) -> Iterator[str]:
    yield "the model, its data and the learning rate (optimizer.params.lr) are yours: TRAIN_DIR is the training script's folder"
    yield "the script is taken to have the arguments of transformers' TrainingArguments, and --block_size for a sequence's length"
    if launch.layout.cp > 1:
        yield "Ulysses: the script registers it with the model (UlyssesSPAttentionHF.register_with_transformers)"
    if launch.layout.offloads_activations:
        yield "activations rest on the host where the model runs its layers by deepspeed.checkpointing.checkpoint"


def _splits_heads(launch: Launch) -> bool:
    model, tp = launch.model, launch.layout.tp
    return bool(model.kv_lora_rank) or model.num_kv_heads % tp == 0


NEEDS = (
    Need(lambda launch: launch.layout.pp == 1,
         lambda launch: f"pp = {launch.layout.pp}: a pipeline of DeepSpeed is code (PipelineModule) and no option; set pp=1"),
    Need(lambda launch: not launch.layout.zero_stage or launch.layout.dp == 1,
         lambda launch: f"dp = {launch.layout.dp}: ZeRO shards over all replicas, as 0.19 has no MiCS any more; set dp=1 and "
         "fsdp to all of them"),
    Need(lambda launch: launch.layout.tp == 1 or launch.layout.cp == 1,
         lambda launch: "tensor parallelism (AutoTP) and Ulysses exclude each other; set tp=1 or cp=1"),
    Need(_splits_heads,
         lambda launch: f"tp = {launch.layout.tp} for {launch.model.num_kv_heads} key-value heads: AutoTP leaves devices without "
         "heads; a tp that divides them is required"),
    Need(lambda launch: launch.job.num_seqs % (launch.layout.num_replicas * launch.layout.micro_batch_seqs) == 0,
         lambda launch: f"{BATCH} = {launch.job.num_seqs} is not a multiple of micro-batch × replicas = "
         f"{launch.layout.num_replicas * launch.layout.micro_batch_seqs}"),
    Need(lambda launch: not launch.layout.offloads_optimizer or launch.layout.zero_stage > 0,
         lambda launch: "offload_optimizer is a part of ZeRO; set a zero_stage of 1 to 3, or offload=none"),
    Need(lambda launch: not launch.layout.offloads_activations or launch.layout.recompute == "full",
         lambda launch: "cpu_checkpointing moves checkpoints; set recompute=full, or leave activations where they are"),
    Need(lambda launch: launch.layout.zero_stage > 0 or adds_as_it_rests(launch.job.precision),
         lambda launch: "without ZeRO gradients add up in the format of the weights; set precision=bf16, or a zero_stage"),
    Need(lambda launch: launch.layout.ep == 1 or launch.layout.cp == 1 or launch.layout.zero_stage < 3,
         lambda launch: "expert parallelism (AutoEP) with ZeRO-3 excludes Ulysses; set cp=1 or zero_stage=2"),
)  # fmt: skip
TARGET = Target(
    name="deepspeed", title="DeepSpeed", version="0.19.8", source="https://github.com/deepspeedai/DeepSpeed, deepspeed/runtime",
    stack="deepspeed", table="deepspeed", fields=FIELDS, needs=NEEDS, write=_write, read=_read,
    command=lambda launch: f"bash {SCRIPT}", notes=_notes, says_model=False, order=("tp", "cp", "fsdp", "dp", "pp"),
)  # fmt: skip
