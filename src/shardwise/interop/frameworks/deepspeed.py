"""DeepSpeed: a ds_config.json, and a script that starts the user's own training script with it.

Source of names and types: DeepSpeed 0.19.8: runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py,
module_inject/auto_ep_config.py; of dtypes: runtime/engine.py (get_data_types, communication_data_type,
_do_optimizer_sanity_check); requirements: runtime/engine.py and module_inject/auto_ep_folding.py.

Options that change a step's cost and that no plan expresses are refused (`UNPRICED`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.interop.frameworks.trainers.adapter_options import (
    ADAPTER_MAPPING,
    quantization_options,
    script_quantization,
)
from shardwise.interop.frameworks.training_script_models import find_script_model, script_model_name
from shardwise.interop.launches.launch import Launch, plain_replica_fields
from shardwise.interop.launches.launch_scripts import (
    LENGTH_MAPPING,
    PORT,
    SCRIPT_PREFIX,
    STEPS_MAPPING,
    TRAINING_SCRIPT,
    argument_lines,
    config_files,
    drop_script_options,
    is_true,
    read_launcher_and_script_options,
    read_optimizer,
    read_tokens,
)
from shardwise.interop.launches.target import (
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Target,
    add_options,
)
from shardwise.interop.text_formats.config_trees import flatten, format_json, normalize_values, parse_json
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.values import InputError, describe_unknown, raise_problems


class GradientDtypes(NamedTuple):
    """Dtypes of weights, and of gradients as they are reduced and as they accumulate.

    `keeps_weight_gradients`: gradients in the dtype of the weights are kept beside the accumulated ones.
    """

    weights: str
    reduced: str
    accumulated: str
    keeps_weight_gradients: bool = False


# ZeRO-1 with fp32 accumulation has its own optimizer (BF16_Optimizer), which keeps both copies of the gradients until the step
# unless `immediate_grad_update` is set; other stages keep only the accumulated ones.
PRECISIONS: Mapping[str, GradientDtypes] = {
    "bf16": GradientDtypes("bf16", "bf16", "bf16"),
    "bf16_fp32_reduction": GradientDtypes("bf16", "fp32", "bf16"),
    "bf16_fp32_gradients": GradientDtypes("bf16", "fp32", "fp32", keeps_weight_gradients=True),
    "bf16_fp32_main_gradients": GradientDtypes("bf16", "fp32", "fp32"),
    "fp16_fp32_update": GradientDtypes("fp16", "fp16", "fp16"),
    "fp32": GradientDtypes("fp32", "fp32", "fp32"),
}
# Spellings of DtypeEnum.
DTYPE_NAMES = {"fp32": ("fp32", "float32"), "bf16": ("bf16", "bfp16", "bfloat16"), "fp16": ("fp16", "half", "float16")}
# Options that change step time or memory and that no plan expresses, with the values that change nothing.
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


def refuse_unpriced(reader: OptionReader) -> Mapping[str, Any]:
    """Return no fields. Raises `InputError` for options that no plan expresses and whose cost is not known."""
    refused = {
        name: reader.get(name) for name, harmless in UNPRICED.items() if reader.get(name, harmless[0]) not in harmless
    }
    refused |= {name: reader.get(name) for name in reader.options if name.startswith("zero_optimization.zenflow.")}
    fix = "whose cost is not known and which no layout says; leave it out"
    raise_problems([f"{name}: found {value!r}, {fix}" for name, value in refused.items()])
    return {}


def _reduction_option(launch: Launch) -> tuple[str, str | None]:
    """Return the option for the dtype of gradient reductions, and its default; Ulysses has another one."""
    if launch.layout.cp > 1:
        return "seq_parallel_communication_data_type", "fp32"
    return "communication_data_type", None


def _precision_options(launch: Launch) -> Options:
    if quantization := quantization_options(launch.job.precision, SCRIPT_PREFIX, "use_bnb_nested_quant"):
        return {"bf16.enabled": True, **quantization}
    dtypes = PRECISIONS.get(launch.job.precision)
    if dtypes is None:
        return {}
    option, default = _reduction_option(launch)
    options: dict[str, Any] = {} if dtypes.weights == "fp32" else {f"{dtypes.weights}.enabled": True}
    if dtypes.reduced != (default or dtypes.weights):
        options[option] = dtypes.reduced
    if dtypes.accumulated != dtypes.weights:
        options["data_types.grad_accum_dtype"] = dtypes.accumulated
        keeps_both = _keeps_both_gradients(launch.layout.zero_stage, launch.layout.offloads_optimizer)
        if keeps_both and not dtypes.keeps_weight_gradients:
            options["bf16.immediate_grad_update"] = True
    return options


def _keeps_both_gradients(stage: int, offloaded: bool) -> bool:
    return stage == 1 and not offloaded


def is_enabled(reader: OptionReader, name: str) -> bool:
    """Return whether "bf16" or "fp16" is enabled; bfloat16 is an older name of bf16."""
    reader.acknowledge(SCRIPT_PREFIX + name)  # "auto" was replaced by it
    return is_true(reader.get(f"{name}.enabled", reader.get("bfloat16.enabled", False) if name == "bf16" else False))


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    if (quantized := script_quantization(reader)) is not None:
        reader.acknowledge("bf16.enabled", "fp16.enabled")
        return {"job.precision": quantized}
    enabled = [name for name in ("bf16", "fp16") if is_enabled(reader, name)]
    if len(enabled) > 1:
        raise InputError("bf16.enabled, fp16.enabled: both are true; one format is required")
    weights = enabled[0] if enabled else "fp32"
    parallel = reader.get("sequence_parallel_size", 1) > 1
    option, default = "communication_data_type", weights
    if parallel:
        option, default = "seq_parallel_communication_data_type", "fp32"
    reduced = _read_dtype(reader, option, default)
    accumulated = _read_dtype(reader, "data_types.grad_accum_dtype", weights)
    keeps_both = _keeps_both_gradients(reader.get("zero_optimization.stage", 0), offloads_optimizer(reader))
    immediate = is_true(reader.get("bf16.immediate_grad_update", False))
    keeps_weight_gradients = keeps_both and accumulated != weights and not immediate
    dtypes = GradientDtypes(weights, reduced, accumulated, keeps_weight_gradients)
    name = next((name for name, candidate in PRECISIONS.items() if candidate == dtypes), None)
    if name is None:
        raise InputError(
            f"number formats: found {weights} weights, gradients reduced in {reduced} and added up in {accumulated}, which "
            f"no recipe has; set {option} and data_types.grad_accum_dtype to the same, or leave them out"
        )
    return {"job.precision": name}


def _read_dtype(reader: OptionReader, option: str, default: str) -> str:
    value = reader.get(option) or default
    dtype = next((name for name, spellings in DTYPE_NAMES.items() if value in spellings), None)
    if dtype is None:
        raise InputError(f"{option}: found {value!r}; one of {', '.join(DTYPE_NAMES)} is required")
    return dtype


def offloads_optimizer(reader: OptionReader) -> bool:
    """Return whether moments and master weights are on the host. Raises `InputError` for NVMe."""
    device = reader.get("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        raise InputError(
            f"zero_optimization.offload_optimizer.device: found {device!r}; none or cpu is what can be read"
        )
    return device == "cpu" or is_true(reader.get("zero_optimization.cpu_offload", False))


PRECISION_MAPPING = OptionMapping(_precision_options, _read_precision)
UNPRICED_MAPPING = OptionMapping(lambda launch: {}, refuse_unpriced)

STAGE, TP, CP = "zero_optimization.stage", "tensor_parallel.autotp_size", "sequence_parallel_size"
BATCH, MICRO_BATCH, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
# Arguments of the training script that "auto" stands for. Source: transformers, integrations/deepspeed.py.
AUTO_ARGUMENTS = {MICRO_BATCH: "per_device_train_batch_size", ACCUMULATION: "gradient_accumulation_steps", "bf16.enabled": "bf16",
             "fp16.enabled": "fp16"}  # fmt: skip
OPTIMIZERS = {"adamw": "AdamW", "lion": "Lion"}
RECOMPUTE = "activation_checkpointing"
# By whether the optimizer and whether activations are on the host.
OFFLOADS = {(False, False): "none", (True, False): "optimizer", (False, True): "activations", (True, True): "both"}


def _get_degree(reader: OptionReader, option: str) -> int:
    """Return a degree; 0 means 1."""
    return 1 if reader.get(option) == 0 else reader.get_count(option) or 1


def _read_replicas(reader: OptionReader) -> int:
    """Return how many groups of devices have sequences of their own, given tensor and sequence parallelism."""
    model_parallel = _get_degree(reader, TP) * _get_degree(reader, CP)
    if reader.machines.num_devices % model_parallel:
        raise InputError(
            f"{TP}, {CP}: they take {model_parallel} devices together, which do not divide {reader.machines.num_devices}; "
            "give the cluster of the launch"
        )
    return reader.machines.num_devices // model_parallel


def _read_zero(reader: OptionReader) -> Mapping[str, Any]:
    stage, replicas = reader.get(STAGE, 0), _read_replicas(reader)
    stage = stage if replicas * _get_degree(reader, CP) > 1 else 0  # one device has nothing to shard
    if stage:
        return {"layout.fsdp": replicas, "layout.zero_stage": stage}
    experts = _read_experts(reader)
    return plain_replica_fields(replicas, experts["layout.ep"], _get_degree(reader, TP), experts["layout.etp"])


def _expert_options(launch: Launch) -> Options:
    """Return options for whole experts on each device: `expert_tensor_parallel_size` must be 1."""
    ep = launch.layout.ep
    return {"expert_parallel.enabled": True, "expert_parallel.autoep_size": ep} if ep > 1 else {}


def _read_experts(reader: OptionReader) -> Mapping[str, Any]:
    enabled = is_true(reader.get("expert_parallel.enabled", False))
    ep = _get_degree(reader, "expert_parallel.autoep_size") if enabled else 1
    return {"layout.ep": ep, "layout.etp": 1 if ep > 1 and _get_degree(reader, TP) > 1 else None}


def _batch_options(launch: Launch) -> Options:
    micro_batch, accumulation = launch.layout.micro_batch_seqs, launch.num_micro_batches
    return {BATCH: launch.job.num_seqs, MICRO_BATCH: micro_batch, ACCUMULATION: accumulation}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    """Return the batch. DeepSpeed derives what is missing of batch = micro-batch × accumulation × replicas."""
    replicas, batch = _read_replicas(reader), _batch_count(reader, BATCH)
    micro_batch, steps = (_batch_count(reader, option) for option in (MICRO_BATCH, ACCUMULATION))
    if not micro_batch:
        micro_batch = reader.user_fields.get("layout.micro_batch_seqs")
        batch = batch or reader.user_fields.get("job.global_batch_seqs")
        if micro_batch and not batch and not steps:
            return {"layout.micro_batch_seqs": micro_batch}
    if batch and not micro_batch:
        micro_batch = batch // (replicas * (steps or 1))
    elif batch and not steps:
        steps = batch // ((micro_batch or 1) * replicas)
    if not micro_batch:
        return {}
    seqs = micro_batch * (steps or 1) * replicas
    if batch and batch != seqs:
        raise InputError(
            f"{BATCH}: found {batch}; micro-batch × accumulation × replicas = {micro_batch} × {steps or 1} × {replicas} = "
            f"{seqs} is required"
        )
    seq_len = LENGTH_MAPPING.from_options(reader).get("job.seq_len", reader.user_fields.get("job.seq_len"))
    return {"layout.micro_batch_seqs": micro_batch, "job.global_batch_seqs": seqs, **read_tokens(reader, seqs, seq_len)}


def _batch_count(reader: OptionReader, option: str) -> int | None:
    """Return a count of the batch from the configuration, or else from the training script; None if neither has it."""
    argument = reader.get_count(SCRIPT_PREFIX + AUTO_ARGUMENTS[option]) if option in AUTO_ARGUMENTS else None
    return reader.get_count(option, argument)


def _recompute_options(launch: Launch) -> Options:
    full = {f"{SCRIPT_PREFIX}gradient_checkpointing": True} if launch.layout.recompute == "full" else {}
    return full | ({f"{RECOMPUTE}.cpu_checkpointing": True} if launch.layout.offloads_activations else {})


def _read_recompute(reader: OptionReader) -> Mapping[str, Any]:
    """Return recompute and offload: the script enables checkpointing, and the configuration says where checkpoints are kept."""
    on_host = is_true(reader.get(f"{RECOMPUTE}.cpu_checkpointing", False))
    split = is_true(reader.get(f"{RECOMPUTE}.partition_activations", False))
    if split and _get_degree(reader, TP) > 1:
        raise InputError(
            f"{RECOMPUTE}.partition_activations: splits what is kept over tensor parallelism; set it to false"
        )
    arguments = [f"{SCRIPT_PREFIX}{name}" for name in ("gradient_checkpointing", RECOMPUTE)]
    requested = any(is_true(reader.get(argument, False)) for argument in arguments)
    offloaded = (offloads_optimizer(reader), on_host)
    recompute = "full" if requested or on_host or split else "none"
    return {"layout.recompute": recompute, "layout.offload": OFFLOADS[offloaded]}


def _read_optimizer(reader: OptionReader) -> Mapping[str, Any]:
    """Return the configuration's optimizer, or else the training script's."""
    if "optimizer.type" not in reader:
        return read_optimizer(reader)
    name = str(reader.get("optimizer.type")).lower()
    names = {**{theirs.lower(): ours for ours, theirs in OPTIMIZERS.items()}, "adam": "adamw"}
    if name not in names:
        raise InputError(f"optimizer.type: {describe_unknown(name, names)}")
    return {"job.optimizer": names[name]}


MAPPINGS: tuple[OptionMapping, ...] = (
    OptionMapping(_batch_options, _read_batch),
    OptionMapping(lambda launch: {STAGE: launch.layout.zero_stage}, _read_zero),
    add_options("zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients",
           to_options=lambda launch: {"zero_optimization.overlap_comm": True, "zero_optimization.contiguous_gradients": True}
           if launch.layout.zero_stage else {}),
    OptionMapping(
        lambda launch: {"zero_optimization.offload_optimizer.device": "cpu"} if launch.layout.offloads_optimizer else {},
        lambda reader: {},
    ),
    OptionMapping(lambda launch: {TP: launch.layout.tp} if launch.layout.tp > 1 else {},
          lambda reader: {"layout.tp": _get_degree(reader, TP), "layout.sequence_parallel": False}),
    OptionMapping(lambda launch: {CP: launch.layout.cp} if launch.layout.cp > 1 else {},
          lambda reader: {"layout.cp": (cp := _get_degree(reader, CP)), **({"layout.cp_variant": "ulysses"} if cp > 1 else {})}),
    OptionMapping(_expert_options, _read_experts),
    PRECISION_MAPPING,
    OptionMapping(
        lambda launch: {"optimizer.type": OPTIMIZERS[launch.job.optimizer]} if launch.job.optimizer in OPTIMIZERS else {},
        _read_optimizer,
    ),
    OptionMapping(_recompute_options, _read_recompute),
    LENGTH_MAPPING, STEPS_MAPPING, UNPRICED_MAPPING, ADAPTER_MAPPING,
)  # fmt: skip

CONFIG, SCRIPT = "ds_config.json", "launch.sh"


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    machines = launch.machines
    multi_node = machines.num_nodes > 1
    hostfile_lines = (
        'HOSTFILE="${HOSTFILE:-$(mktemp)}"\n'
        f'[ -s "$HOSTFILE" ] || scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/$/ slots={machines.devices_per_node}/" '
        '> "$HOSTFILE"\n'
    ) if multi_node else ""  # fmt: skip
    rendezvous = (
        f'--hostfile "$HOSTFILE" --num_nodes {machines.num_nodes} --no_ssh --node_rank "${{NODE_RANK:-${{SLURM_NODEID:?}}}}" '
        f'--master_addr "${{HEAD_NODE:?the first node}}" --master_port {PORT} '
    ) if multi_node else ""  # fmt: skip
    script = (
        "#!/bin/bash\n# Starts on each node, beside ds_config.json; HOSTFILE has a line for each node: name slots=devices.\n"
        f"set -euo pipefail\n{hostfile_lines}\n{argument_lines(options, f'--deepspeed {CONFIG}')}\n\n"
        f'deepspeed {rendezvous}--num_gpus {machines.devices_per_node} {TRAINING_SCRIPT} "${{ARGS[@]}}"\n'
    )
    return {CONFIG: format_json(drop_script_options(options)), SCRIPT: script}


def _read_files(files: LaunchFiles) -> Options:
    configs = config_files(files)
    if not configs:
        return _read_script(files)
    if len(configs) != 1 or not next(iter(configs)).lower().endswith(".json"):
        raise InputError(
            f"DeepSpeed: found {', '.join(files)}; one ds_config.json, and the script that starts it, is required"
        )
    ((name, text),) = configs.items()
    table = option_table("deepspeed")
    configured = flatten(parse_json(text, name), table)
    _, arguments = read_launcher_and_script_options(files, "deepspeed")
    options = normalize_values({**configured, **arguments}, table)
    resolved = {option: _resolve_auto(option, value, options) for option, value in options.items()}
    return {option: value for option, value in resolved.items() if value is not None}


def _read_script(files: LaunchFiles) -> Options:
    """Return the options of a script that makes its configuration of arguments. Raises `InputError` for any other script.

    Source: DeepSpeedExamples at 2026-08, applications/DeepSpeed-Chat/dschat/utils/ds_utils.py, get_train_ds_config.
    """
    _, arguments = read_launcher_and_script_options(files, "deepspeed")
    stage = arguments.get(f"{SCRIPT_PREFIX}zero_stage")
    if f"{SCRIPT_PREFIX}deepspeed" not in arguments or not str(stage).isdecimal():
        raise InputError(
            f"DeepSpeed: found {', '.join(files)}; one ds_config.json, and the script that starts it, is required"
        )
    dtype = str(arguments.get(f"{SCRIPT_PREFIX}dtype", "fp16"))
    offload = {"zero_optimization.offload_optimizer.device": "cpu", "zero_optimization.offload_param.device": "cpu"}
    options = {
        STAGE: int(str(stage)), f"{dtype}.enabled": True, **(offload if arguments.get(f"{SCRIPT_PREFIX}offload") else {}),
        **{theirs: arguments[f"{SCRIPT_PREFIX}{ours}"] for theirs, ours in (
            (MICRO_BATCH, "per_device_train_batch_size"), (ACCUMULATION, "gradient_accumulation_steps"),
        ) if f"{SCRIPT_PREFIX}{ours}" in arguments},
    }  # fmt: skip
    return normalize_values({**options, **arguments}, option_table("deepspeed"))


def _resolve_auto(option: str, value: Any, options: Options) -> Any:
    """Resolve "auto" to the training script's argument; None if the script does not set it."""
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


TARGET = Target(
    name="deepspeed", title="DeepSpeed", version="0.19.8", source="https://github.com/deepspeedai/DeepSpeed, deepspeed/runtime",
    stack="deepspeed", options_file="deepspeed", mappings=MAPPINGS, requirements=(),
    write=_write_files, read=_read_files, command=lambda launch: f"bash {SCRIPT}", notes=_notes,
    model_name=script_model_name, find_model=find_script_model, includes_model=False,
)  # fmt: skip
