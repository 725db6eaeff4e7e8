"""DeepSpeed: a ds_config.json, and a script that starts the user's own training script with it.

Source of names and types: DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py,
module_inject/auto_ep_config.py; of number formats: runtime/engine.py (get_data_types, communication_data_type,
_do_optimizer_sanity_check); what it requires: runtime/engine.py and module_inject/auto_ep_folding.py.

Options that change what a step costs and that no plan expresses are refused (`UNPRICED`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import (
    LENGTH,
    PORT,
    PREFIX,
    STEPS,
    TRAIN,
    argument_lines,
    configurations,
    heard_optimizer,
    heard_tokens,
    is_true,
    script_options,
    whole,
    without_arguments,
)
from shardwise.interop.launches.target import Field, Files, Given, Need, Options, Target, beside, option_table
from shardwise.interop.text_formats.config_trees import dotted, json_text, json_tree, spelt
from shardwise.values.errors import InputError, require, unknown


class Formats(NamedTuple):
    """Of weights, of gradients as they are reduced and as they add up; `kept`: the weights' own gradients stay beside sums."""

    weights: str
    reduced: str
    added: str
    kept: bool = False


# ZeRO-1 with sums in fp32 has an optimizer of its own (BF16_Optimizer), which keeps both copies of the gradients until the step,
# unless it is set to add each up at once; other stages keep the sums alone.
PRECISIONS: Mapping[str, Formats] = {
    "bf16": Formats("bf16", "bf16", "bf16"),
    "bf16_fp32_reduction": Formats("bf16", "fp32", "bf16"),
    "bf16_fp32_gradients": Formats("bf16", "fp32", "fp32", kept=True),
    "bf16_fp32_main_gradients": Formats("bf16", "fp32", "fp32"),
    "fp16_fp32_update": Formats("fp16", "fp16", "fp16"),
    "fp32": Formats("fp32", "fp32", "fp32"),
}
DTYPE_NAMES = {
    "fp32": ("fp32", "float32"),
    "bf16": ("bf16", "bfp16", "bfloat16"),
    "fp16": ("fp16", "half", "float16"),
}  # DtypeEnum's
# Options that change what a step takes and holds and that no plan says, with the values that leave it as it is.
UNPRICED: Mapping[str, tuple[Any, ...]] = {
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.cpu_offload_param": (False,),
    "zero_optimization.offload_optimizer.ratio": (1, 1.0),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.mics_shard_size": (-1,),
    "torch_autocast.enabled": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
    "compile.deepcompile": (False,),
    "hybrid_engine.enabled": (False,),
}


def require_priced(given: Given) -> Mapping[str, Any]:
    """No parts. Raises `InputError` for options that no plan says and whose cost is not known."""
    found = {
        name: given.get(name) for name, harmless in UNPRICED.items() if given.get(name, harmless[0]) not in harmless
    }
    found |= {name: given.get(name) for name in given.options if name.startswith("zero_optimization.zenflow.")}
    require(
        [
            f"{name}: found {value!r}, whose cost is not known and which no layout says; leave it out"
            for name, value in found.items()
        ]
    )
    return {}


def _reduction(launch: Launch) -> tuple[str, str | None]:
    """The option that says what gradients are reduced in, and its default: another one with Ulysses."""
    if launch.layout.cp > 1:
        return "seq_parallel_communication_data_type", "fp32"
    return "communication_data_type", None


def _precision_options(launch: Launch) -> Options:
    formats = PRECISIONS.get(launch.job.precision)
    if formats is None:
        return {}
    option, usual = _reduction(launch)
    options: dict[str, Any] = {} if formats.weights == "fp32" else {f"{formats.weights}.enabled": True}
    if formats.reduced != (usual or formats.weights):
        options[option] = formats.reduced
    if formats.added != formats.weights:
        options["data_types.grad_accum_dtype"] = formats.added
        if _keeps_both(launch.layout.zero_stage, launch.layout.offloads_optimizer) and not formats.kept:
            options["bf16.immediate_grad_update"] = True
    return options


def _keeps_both(stage: int, offloaded: bool) -> bool:
    return stage == 1 and not offloaded


def adds_as_it_rests(precision: str) -> bool:
    """Whether gradients add up in the format of the weights; so it is for a precision that DeepSpeed does not have."""
    formats = PRECISIONS.get(precision)
    return formats is None or formats.added == formats.weights


def enabled(given: Given, name: str) -> bool:
    """Whether a format is; bfloat16 is an old name."""
    given.get(PREFIX + name)  # what "auto" stands for
    return is_true(given.get(f"{name}.enabled", given.get("bfloat16.enabled", False) if name == "bf16" else False))


def _read_precision(given: Given) -> Mapping[str, Any]:
    chosen = [name for name in ("bf16", "fp16") if enabled(given, name)]
    if len(chosen) > 1:
        raise InputError("bf16.enabled, fp16.enabled: both are true; one format is required")
    weights = chosen[0] if chosen else "fp32"
    parallel = given.get("sequence_parallel_size", 1) > 1
    option, usual = (
        ("seq_parallel_communication_data_type", "fp32") if parallel else ("communication_data_type", weights)
    )
    reduced, added = (
        _format(given, name, alone) for name, alone in ((option, usual), ("data_types.grad_accum_dtype", weights))
    )
    own = _keeps_both(given.get("zero_optimization.stage", 0), offloads_optimizer(given))
    at_once = is_true(given.get("bf16.immediate_grad_update", False))
    found = Formats(weights, reduced, added, kept=own and added != weights and not at_once)
    name = next((name for name, formats in PRECISIONS.items() if formats == found), None)
    if name is None:
        raise InputError(
            f"number formats: found {weights} weights, gradients reduced in {reduced} and added up in {added}, which no recipe "
            f"has; set {option} and data_types.grad_accum_dtype to the same, or leave them out"
        )
    return {"job.precision": name}


def _format(given: Given, option: str, usual: str) -> str:
    value = given.get(option) or usual
    found = next((name for name, spelt in DTYPE_NAMES.items() if value in spelt), None)
    if found is None:
        raise InputError(f"{option}: found {value!r}; one of {', '.join(DTYPE_NAMES)} is required")
    return found


def offloads_optimizer(given: Given) -> bool:
    """Whether moments and master weights rest on the host. Raises `InputError` for those that rest on a disk."""
    device = given.get("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        raise InputError(
            f"zero_optimization.offload_optimizer.device: found {device!r}; none or cpu is what can be read"
        )
    return device == "cpu" or is_true(given.get("zero_optimization.cpu_offload", False))


FORMATS = Field(_precision_options, _read_precision)
PRICED = Field(lambda launch: {}, require_priced)

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
