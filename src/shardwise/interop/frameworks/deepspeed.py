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
    LENGTH_MAPPING,
    PORT,
    SCRIPT_PREFIX,
    STEPS_MAPPING,
    TRAINING_SCRIPT,
    argument_lines,
    config_files,
    drop_script_options,
    get_count,
    is_true,
    read_optimizer,
    read_script_options,
    read_tokens,
)
from shardwise.interop.launches.target import (
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Options,
    Requirement,
    Target,
    add_options,
    option_table,
)
from shardwise.interop.text_formats.config_trees import flatten, format_json, normalize_values, parse_json
from shardwise.values.errors import InputError, describe_unknown, raise_problems


class GradientDtypes(NamedTuple):
    """Dtypes of weights, of gradients as they are reduced and as they add up.

    `keeps_weight_gradients`: gradients in the dtype of the weights are kept beside the sums.
    """

    weights: str
    reduced: str
    accumulated: str
    keeps_weight_gradients: bool = False


# ZeRO-1 with sums in fp32 has an optimizer of its own (BF16_Optimizer), which keeps both copies of the gradients until the step,
# unless it is set to add each up at once; other stages keep the sums alone.
PRECISIONS: Mapping[str, GradientDtypes] = {
    "bf16": GradientDtypes("bf16", "bf16", "bf16"),
    "bf16_fp32_reduction": GradientDtypes("bf16", "fp32", "bf16"),
    "bf16_fp32_gradients": GradientDtypes("bf16", "fp32", "fp32", keeps_weight_gradients=True),
    "bf16_fp32_main_gradients": GradientDtypes("bf16", "fp32", "fp32"),
    "fp16_fp32_update": GradientDtypes("fp16", "fp16", "fp16"),
    "fp32": GradientDtypes("fp32", "fp32", "fp32"),
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


def refuse_unpriced(given: OptionReader) -> Mapping[str, Any]:
    """No parts. Raises `InputError` for options that no plan says and whose cost is not known."""
    found = {
        name: given.get(name) for name, harmless in UNPRICED.items() if given.get(name, harmless[0]) not in harmless
    }
    found |= {name: given.get(name) for name in given.options if name.startswith("zero_optimization.zenflow.")}
    raise_problems(
        [
            f"{name}: found {value!r}, whose cost is not known and which no layout says; leave it out"
            for name, value in found.items()
        ]
    )
    return {}


def _reduction_option(launch: Launch) -> tuple[str, str | None]:
    """The option that says what gradients are reduced in, and its default: another one with Ulysses."""
    if launch.layout.cp > 1:
        return "seq_parallel_communication_data_type", "fp32"
    return "communication_data_type", None


def _precision_options(launch: Launch) -> Options:
    formats = PRECISIONS.get(launch.job.precision)
    if formats is None:
        return {}
    option, usual = _reduction_option(launch)
    options: dict[str, Any] = {} if formats.weights == "fp32" else {f"{formats.weights}.enabled": True}
    if formats.reduced != (usual or formats.weights):
        options[option] = formats.reduced
    if formats.accumulated != formats.weights:
        options["data_types.grad_accum_dtype"] = formats.accumulated
        if (
            _keeps_both_gradients(launch.layout.zero_stage, launch.layout.offloads_optimizer)
            and not formats.keeps_weight_gradients
        ):
            options["bf16.immediate_grad_update"] = True
    return options


def _keeps_both_gradients(stage: int, offloaded: bool) -> bool:
    return stage == 1 and not offloaded


def accumulates_in_weight_dtype(precision: str) -> bool:
    """Whether gradients add up in the format of the weights; so it is for a precision that DeepSpeed does not have."""
    formats = PRECISIONS.get(precision)
    return formats is None or formats.accumulated == formats.weights


def is_enabled(given: OptionReader, name: str) -> bool:
    """Whether a format is; bfloat16 is an old name."""
    given.get(SCRIPT_PREFIX + name)  # what "auto" stands for
    return is_true(given.get(f"{name}.enabled", given.get("bfloat16.enabled", False) if name == "bf16" else False))


def _read_precision(given: OptionReader) -> Mapping[str, Any]:
    chosen = [name for name in ("bf16", "fp16") if is_enabled(given, name)]
    if len(chosen) > 1:
        raise InputError("bf16.enabled, fp16.enabled: both are true; one format is required")
    weights = chosen[0] if chosen else "fp32"
    parallel = given.get("sequence_parallel_size", 1) > 1
    option, usual = (
        ("seq_parallel_communication_data_type", "fp32") if parallel else ("communication_data_type", weights)
    )
    reduced, added = (
        _read_dtype(given, name, alone) for name, alone in ((option, usual), ("data_types.grad_accum_dtype", weights))
    )
    own = _keeps_both_gradients(given.get("zero_optimization.stage", 0), offloads_optimizer(given))
    at_once = is_true(given.get("bf16.immediate_grad_update", False))
    found = GradientDtypes(weights, reduced, added, keeps_weight_gradients=own and added != weights and not at_once)
    name = next((name for name, formats in PRECISIONS.items() if formats == found), None)
    if name is None:
        raise InputError(
            f"number formats: found {weights} weights, gradients reduced in {reduced} and added up in {added}, which no recipe "
            f"has; set {option} and data_types.grad_accum_dtype to the same, or leave them out"
        )
    return {"job.precision": name}


def _read_dtype(given: OptionReader, option: str, usual: str) -> str:
    value = given.get(option) or usual
    found = next((name for name, spelt in DTYPE_NAMES.items() if value in spelt), None)
    if found is None:
        raise InputError(f"{option}: found {value!r}; one of {', '.join(DTYPE_NAMES)} is required")
    return found


def offloads_optimizer(given: OptionReader) -> bool:
    """Whether moments and master weights rest on the host. Raises `InputError` for those that rest on a disk."""
    device = given.get("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        raise InputError(
            f"zero_optimization.offload_optimizer.device: found {device!r}; none or cpu is what can be read"
        )
    return device == "cpu" or is_true(given.get("zero_optimization.cpu_offload", False))


PRECISION_MAPPING = OptionMapping(_precision_options, _read_precision)
UNPRICED_MAPPING = OptionMapping(lambda launch: {}, refuse_unpriced)

STAGE, TP, CP = "zero_optimization.stage", "tensor_parallel.autotp_size", "sequence_parallel_size"
BATCH, MICRO_BATCH, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Arguments of the training script that "auto" stands for. Source: transformers, integrations/deepspeed.py.
AUTO_ARGUMENTS = {MICRO_BATCH: "per_device_train_batch_size", ACCUMULATION: "gradient_accumulation_steps", "bf16.enabled": "bf16",
             "fp16.enabled": "fp16"}  # fmt: skip
OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion"}
RECOMPUTE = "activation_checkpointing"


def _get_degree(given: OptionReader, option: str) -> int:
    """A degree: 0 is none, as none said is."""
    return 1 if given.get(option) == 0 else get_count(given, option) or 1


def _read_replicas(given: OptionReader) -> int:
    """Groups of devices with sequences of their own: what tensor and sequence parallelism leave."""
    within = _get_degree(given, TP) * _get_degree(given, CP)
    if given.machines.num_devices % within:
        raise InputError(
            f"{TP}, {CP}: they take {within} devices together, which do not divide {given.machines.num_devices}; give the "
            "cluster of the launch"
        )
    return given.machines.num_devices // within


def _read_zero(given: OptionReader) -> Mapping[str, Any]:
    stage, replicas = given.get(STAGE, 0), _read_replicas(given)
    stage = stage if replicas * _get_degree(given, CP) > 1 else 0  # one device has nothing to share
    degrees = {"layout.fsdp": replicas} if stage else {"layout.dp": replicas}
    return {**degrees, "layout.zero_stage": stage}


def _expert_options(launch: Launch) -> Options:
    """Whole experts on each device; `expert_tensor_parallel_size` may be nothing but 1."""
    return (
        {"expert_parallel.enabled": True, "expert_parallel.autoep_size": launch.layout.ep}
        if launch.layout.ep > 1
        else {}
    )


def _read_experts(given: OptionReader) -> Mapping[str, Any]:
    ep = (
        _get_degree(given, "expert_parallel.autoep_size") if is_true(given.get("expert_parallel.enabled", False)) else 1
    )
    return {"layout.ep": ep, "layout.etp": 1 if ep > 1 and _get_degree(given, TP) > 1 else None}


def _batch_options(launch: Launch) -> Options:
    layout, seqs = launch.layout, launch.job.num_seqs
    return {
        BATCH: seqs,
        MICRO_BATCH: layout.micro_batch_seqs,
        ACCUMULATION: seqs // (layout.micro_batch_seqs * layout.num_replicas),
    }


def _read_batch(given: OptionReader) -> Mapping[str, Any]:
    """DeepSpeed takes what is missing of batch = micro-batch × accumulation × replicas from the others."""
    replicas, batch = _read_replicas(given), _batch_count(given, BATCH)
    micro, steps = (_batch_count(given, option) for option in (MICRO_BATCH, ACCUMULATION))
    if not micro:
        micro, batch = (
            given.user_fields.get("layout.micro_batch_seqs"),
            batch or given.user_fields.get("job.global_batch_seqs"),
        )
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
    seq_len = LENGTH_MAPPING.from_options(given).get("job.seq_len", given.user_fields.get("job.seq_len"))
    return {"layout.micro_batch_seqs": micro, "job.global_batch_seqs": seqs, **read_tokens(given, seqs, seq_len)}


def _batch_count(given: OptionReader, option: str) -> int | None:
    """A part of the batch, which the training script may say where the configuration does not: None where neither does."""
    argument = get_count(given, SCRIPT_PREFIX + AUTO_ARGUMENTS[option]) if option in AUTO_ARGUMENTS else None
    return get_count(given, option, argument)


def _recompute_options(launch: Launch) -> Options:
    full = {f"{SCRIPT_PREFIX}gradient_checkpointing": True} if launch.layout.recompute == "full" else {}
    return full | ({f"{RECOMPUTE}.cpu_checkpointing": True} if launch.layout.offloads_activations else {})


def _read_recompute(given: OptionReader) -> Mapping[str, Any]:
    """The configuration says how checkpoints rest, and the script that there are any."""
    on_host = is_true(given.get(f"{RECOMPUTE}.cpu_checkpointing", False))
    split = is_true(given.get(f"{RECOMPUTE}.partition_activations", False))
    if split and _get_degree(given, TP) > 1:
        raise InputError(
            f"{RECOMPUTE}.partition_activations: splits what is kept over tensor parallelism; set it to false"
        )
    said = any(is_true(given.get(f"{SCRIPT_PREFIX}{name}", False)) for name in ("gradient_checkpointing", RECOMPUTE))
    host = (offloads_optimizer(given), on_host)
    named = {(False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"}
    return {"layout.recompute": "full" if said or on_host or split else "none", "layout.offload": named[host]}


def _read_optimizer(given: OptionReader) -> Mapping[str, Any]:
    """Without one in the configuration the training script has its own."""
    if "optimizer.type" not in given:
        return read_optimizer(given)
    name = str(given.get("optimizer.type")).lower()
    names = {**{theirs.lower(): ours for ours, theirs in OPTIMIZERS.items()}, "adam": "adamw"}
    if name not in names:
        raise InputError(f"optimizer.type: {describe_unknown(name, names)}")
    return {"job.optimizer": names[name]}


MAPPINGS: tuple[OptionMapping, ...] = (
    OptionMapping(_batch_options, _read_batch),
    OptionMapping(lambda launch: {STAGE: launch.layout.zero_stage}, _read_zero),
    add_options("zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients",
           say=lambda launch: {"zero_optimization.overlap_comm": True, "zero_optimization.contiguous_gradients": True}
           if launch.layout.zero_stage else {}),
    OptionMapping(
        lambda launch: {"zero_optimization.offload_optimizer.device": "cpu"} if launch.layout.offloads_optimizer else {},
        lambda given: {},
    ),
    OptionMapping(lambda launch: {TP: launch.layout.tp} if launch.layout.tp > 1 else {},
          lambda given: {"layout.tp": _get_degree(given, TP), "layout.sequence_parallel": False}),
    OptionMapping(lambda launch: {CP: launch.layout.cp} if launch.layout.cp > 1 else {},
          lambda given: {"layout.cp": (cp := _get_degree(given, CP)), **({"layout.cp_variant": "ulysses"} if cp > 1 else {})}),
    OptionMapping(_expert_options, _read_experts),
    PRECISION_MAPPING,
    OptionMapping(
        lambda launch: {"optimizer.type": OPTIMIZERS[launch.job.optimizer]} if launch.job.optimizer in OPTIMIZERS else {},
        _read_optimizer,
    ),
    OptionMapping(_recompute_options, _read_recompute),
    LENGTH_MAPPING, STEPS_MAPPING, UNPRICED_MAPPING,
)  # fmt: skip

CONFIG, SCRIPT = "ds_config.json", "launch.sh"


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
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
        f'deepspeed {where}--num_gpus {machines.devices_per_node} {TRAINING_SCRIPT} "${{ARGS[@]}}"\n'
    )
    return {CONFIG: format_json(drop_script_options(options)), SCRIPT: script}


def _read_files(files: LaunchFiles) -> Options:
    own = config_files(files)
    if len(own) != 1 or not next(iter(own)).lower().endswith(".json"):
        raise InputError(
            f"DeepSpeed: found {', '.join(files)}; one ds_config.json, and the script that starts it, is required"
        )
    ((name, text),) = own.items()
    known = option_table("deepspeed")
    options = normalize_values(
        {**flatten(parse_json(text, name), known), **read_script_options(files, "deepspeed")[1]}, known
    )
    return {
        option: said for option, value in options.items() if (said := _resolve_auto(option, value, options)) is not None
    }


def _resolve_auto(option: str, value: Any, options: Options) -> Any:
    """What "auto" stands for: an argument of the training script, where it has one for it; None where it has not."""
    if value != "auto" or option.startswith(SCRIPT_PREFIX):
        return value
    return options.get(SCRIPT_PREFIX + AUTO_ARGUMENTS[option]) if option in AUTO_ARGUMENTS else None


def _notes(launch: Launch) -> Iterator[str]:
    yield "the model, its data and the learning rate (optimizer.params.lr) are yours: TRAIN_DIR is the training script's folder"
    yield "the script is taken to have the arguments of transformers' TrainingArguments, and --block_size for a sequence's length"
    if launch.layout.cp > 1:
        yield "Ulysses: the script registers it with the model (UlyssesSPAttentionHF.register_with_transformers)"
    if launch.layout.offloads_activations:
        yield "activations rest on the host where the model runs its layers by deepspeed.checkpointing.checkpoint"


def _divides_heads(launch: Launch) -> bool:
    model, tp = launch.model, launch.layout.tp
    return bool(model.kv_lora_rank) or model.num_kv_heads % tp == 0


REQUIREMENTS = (
    Requirement(lambda launch: launch.layout.pp == 1,
         lambda launch: f"pp = {launch.layout.pp}: a pipeline of DeepSpeed is code (PipelineModule) and no option; set pp=1"),
    Requirement(lambda launch: not launch.layout.zero_stage or launch.layout.dp == 1,
         lambda launch: f"dp = {launch.layout.dp}: ZeRO shards over all replicas, as 0.19 has no MiCS any more; set dp=1 and "
         "fsdp to all of them"),
    Requirement(lambda launch: launch.layout.tp == 1 or launch.layout.cp == 1,
         lambda launch: "tensor parallelism (AutoTP) and Ulysses exclude each other; set tp=1 or cp=1"),
    Requirement(_divides_heads,
         lambda launch: f"tp = {launch.layout.tp} for {launch.model.num_kv_heads} key-value heads: AutoTP leaves devices without "
         "heads; a tp that divides them is required"),
    Requirement(lambda launch: launch.job.num_seqs % (launch.layout.num_replicas * launch.layout.micro_batch_seqs) == 0,
         lambda launch: f"{BATCH} = {launch.job.num_seqs} is not a multiple of micro-batch × replicas = "
         f"{launch.layout.num_replicas * launch.layout.micro_batch_seqs}"),
    Requirement(lambda launch: not launch.layout.offloads_optimizer or launch.layout.zero_stage > 0,
         lambda launch: "offload_optimizer is a part of ZeRO; set a zero_stage of 1 to 3, or offload=none"),
    Requirement(lambda launch: not launch.layout.offloads_activations or launch.layout.recompute == "full",
         lambda launch: "cpu_checkpointing moves checkpoints; set recompute=full, or leave activations where they are"),
    Requirement(lambda launch: launch.layout.zero_stage > 0 or accumulates_in_weight_dtype(launch.job.precision),
         lambda launch: "without ZeRO gradients add up in the format of the weights; set precision=bf16, or a zero_stage"),
    Requirement(lambda launch: launch.layout.ep == 1 or launch.layout.cp == 1 or launch.layout.zero_stage < 3,
         lambda launch: "expert parallelism (AutoEP) with ZeRO-3 excludes Ulysses; set cp=1 or zero_stage=2"),
)  # fmt: skip
TARGET = Target(
    name="deepspeed", title="DeepSpeed", version="0.19.8", source="https://github.com/deepspeedai/DeepSpeed, deepspeed/runtime",
    stack="deepspeed", options_file="deepspeed", mappings=MAPPINGS, requirements=REQUIREMENTS,
    write=_write_files, read=_read_files, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
    includes_model=False, order=("tp", "cp", "fsdp", "dp", "pp"),
)  # fmt: skip
