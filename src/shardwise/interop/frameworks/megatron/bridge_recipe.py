"""Megatron Bridge: a recipe in Python, a function that returns a ConfigContainer.

Fields of a launch are written as Megatron-LM's arguments under Bridge's names: the same in snake case, except for those in the
tables below. Source of names and types: megatron-bridge 0.3.1, training/config.py, models/gpt_provider.py and
training/mixed_precision.py, with megatron-core 0.16.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from shardwise.interop.frameworks.huggingface_hub_names import hub_model
from shardwise.interop.frameworks.megatron import launch_script
from shardwise.interop.frameworks.megatron.bridge_providers import (
    CAPPED_SCORES,
    LATENT_FIELDS,
    PROVIDER,
    PROVIDERS,
    YARN_FIELDS,
    generalise_fields,
    read_provider,
    write_provider,
)
from shardwise.interop.frameworks.megatron.model_options import MODEL_MAPPINGS
from shardwise.interop.frameworks.trainers.adapter_options import adapter_fields, read_targets
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.launch_scripts import torchrun_command
from shardwise.interop.launches.target import README_FILE, LaunchFiles, OptionMapping, OptionReader, Requirement, Target
from shardwise.interop.launches.translate_launch import from_options, to_options
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.interop.text_formats.python_config import CallExpr, NameExpr, parse_python_config
from shardwise.layout import Layout
from shardwise.model import Architecture, Job
from shardwise.values import InputError
from shardwise.values.input_texts import parse_integer

OPTIONS_FILE = "megatron_bridge"
SECTIONS = ("model", "train", "ddp", "optimizer", "checkpoint")
RENAMED_FIELDS = {
    "num-experts": "model.num_moe_experts", "norm-epsilon": "model.layernorm_epsilon",
    "num-virtual-stages-per-pipeline-rank": "model.virtual_pipeline_model_parallel_size",
    "tp-comm-overlap": "comm_overlap.tp_comm_overlap", "fp8-format": "mixed_precision.fp8",
    "fp8-recipe": "mixed_precision.fp8_recipe", "fp4-format": "mixed_precision.fp4", "fp4-recipe": "mixed_precision.fp4_recipe",
    "bf16": "mixed_precision.bf16", "fp16": "mixed_precision.fp16", "swiglu": "model.gated_linear_unit",
    "use-rope-scaling": "model.rope_scaling", "rotary-seq-len-interpolation-factor": "model.seq_len_interpolation_factor",
    "apply-layernorm-1p": "model.layernorm_zero_centered_gamma",
}  # fmt: skip
INVERTED_FIELDS = {
    "untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights",
    "disable-bias-linear": "model.add_bias_linear", "grad-reduce-in-bf16": "mixed_precision.grad_reduce_in_fp32",
    "no-yarn-correction-range-round-to-int": "model.yarn_correction_range_round_to_int",
}  # fmt: skip
# Arguments without a field of their own: Bridge lacks them or expresses them by other fields (below).
UNNAMED_OPTIONS = {
    "group-query-attention", "max-position-embeddings", "train-samples", "quick-geglu", "swiglu",
    "yarn-correction-range-round-to-int",
}  # fmt: skip
# Defaults of a recipe that begins with _pretrain_common.
COMMON_DEFAULTS: Options = {
    "train.global_batch_size": 32, "train.micro_batch_size": 2, "train.train_iters": 300_000, "dataset.seq_length": 4096,
    "ddp.use_distributed_optimizer": True, "optimizer.use_distributed_optimizer": True, "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True, "ddp.data_parallel_sharding_strategy": "optim_grads_params",
    "mixed_precision": "bf16_mixed", "checkpoint.ckpt_format": "torch_dist",
}  # fmt: skip
# Defaults of one that trains a pretrained model further.
FINETUNE_DEFAULTS: Options = {
    **COMMON_DEFAULTS, "ddp.overlap_grad_reduce": False, "ddp.overlap_param_gather": False, "train.global_batch_size": 128,
    "train.micro_batch_size": 1, "train.train_iters": 1000, "dataset.seq_length": 2048,
}  # fmt: skip
# Functions of megatron/bridge/recipes/common.py that recipes begin with. Source: main of 2026-08-22.
ADAPTED_MODULES = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
BASE_RECIPES: Mapping[str, Options] = {
    "_pretrain_common": COMMON_DEFAULTS, "_sft_common": FINETUNE_DEFAULTS,
    "_peft_common": {**FINETUNE_DEFAULTS, "peft.dim": 32, "peft.target_modules": ADAPTED_MODULES},
}  # fmt: skip
# COMMON_DEFAULTS sets them, so a recipe must say if they are off.
ALWAYS_SET = ("ddp.use_distributed_optimizer", "ddp.overlap_grad_reduce", "ddp.overlap_param_gather")
DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16", "fp8": "torch.uint8"}
_FP8_FORMATS = {"": {}, "fp8_delayed_scaling": ("hybrid", "delayed"), "fp8_current_scaling": ("hybrid", "tensorwise"),
            "fp8_subchannel_scaling": ("hybrid", "blockwise"), "mxfp8": ("e4m3", "mxfp8")}  # fmt: skip


def bridge_field(option: str) -> str | None:
    """Return Bridge's field for a Megatron-LM argument, or None."""
    if option in RENAMED_FIELDS or option in INVERTED_FIELDS:
        return RENAMED_FIELDS.get(option) or INVERTED_FIELDS[option]
    name, table = option.replace("-", "_"), option_table(OPTIONS_FILE)
    return next((f"{section}.{name}" for section in SECTIONS if f"{section}.{name}" in table), None)


@cache
def options_by_field() -> Mapping[str, str]:
    """Return Megatron-LM's arguments by Bridge's field."""
    named = (option for option in option_table("megatron") if option not in UNNAMED_OPTIONS)
    return {field: option for option in named if (field := bridge_field(option))}


def _format_layer_freq(freq: Any) -> str:
    """Return which layers have experts in Megatron-LM's notation: dense layers first."""
    if not isinstance(freq, (list, tuple)) or list(freq) != sorted(freq):
        return str(freq)
    return f"([0]*{freq.count(0)}+[1]*{freq.count(1)})" if 0 in freq else "1"


def _parse_layer_freq(text: str) -> Any:
    dense, experts = (parse_integer(part.split("*")[1]) for part in text.strip("()").split("+"))
    return [0] * dense + [1] * experts


# Arguments whose values Bridge writes otherwise: functions to Bridge's value, and back.
VALUE_CONVERTERS: Mapping[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "cp-comm-type": (lambda kinds: kinds[0], lambda kind: list(kind) if isinstance(kind, (list, tuple)) else [kind]),
    "window-size": (
        lambda text: tuple(map(int, text.split(","))), lambda pair: ",".join(map(str, pair)) if pair else None,
    ),
    "window-attn-skip-freq": (int, lambda freq: freq),
    "moe-layer-freq": (_parse_layer_freq, _format_layer_freq),
    **dict.fromkeys(
        ("exp-avg-dtype", "exp-avg-sq-dtype"),
        (lambda kind: NameExpr(DTYPES[kind]), lambda kind: {v: k for k, v in DTYPES.items()}.get(str(kind), str(kind))),
    ),
}  # fmt: skip


def _convert_value(option: str, value: Any, direction: int) -> Any:
    """Return Bridge's value of an argument (`direction` 0), or the argument's value (1)."""
    if option in INVERTED_FIELDS:
        return not value
    return VALUE_CONVERTERS[option][direction](value) if option in VALUE_CONVERTERS else value


def to_bridge(options: Options) -> dict[str, Any]:
    """Return Bridge's fields for Megatron-LM's arguments."""
    fields: dict[str, Any] = {}
    for option, value in options.items():
        field = None if option in UNNAMED_OPTIONS else bridge_field(option)
        if field:
            fields[field] = _convert_value(option, value, 0)
    fields |= {name: fields.get(name, False) for name in ALWAYS_SET}
    fields["optimizer.use_distributed_optimizer"] = fields["ddp.use_distributed_optimizer"]
    fields["model.cross_entropy_loss_fusion"] = fields.get("model.cross_entropy_loss_fusion", False)
    fields["dataset.seq_length"] = fields["model.seq_length"]
    if "train-samples" in options:
        fields["train.train_iters"] = max(round(options["train-samples"] / options["global-batch-size"]), 1)
    dtype = NameExpr(DTYPES["bf16" if "bf16" in options else "fp16" if "fp16" in options else "fp32"])
    plain = {} if "bf16" in options or "fp16" in options else {"mixed_precision.fp32": True}
    return {**fields, **plain, "mixed_precision.params_dtype": dtype, "mixed_precision.pipeline_dtype": dtype}


def to_megatron(fields: Options) -> dict[str, Any]:
    """Return Megatron-LM's arguments for Bridge's fields; fields that are None are left out."""
    named_precision = {} if fields.get("mixed_precision.fp32") else precision_fields(fields.get("mixed_precision"))
    explicit = {**named_precision, **{name: value for name, value in fields.items() if value is not None}}
    arguments: dict[str, Any] = {}
    for field, option in options_by_field().items():
        if field in explicit:
            value = _convert_value(option, explicit[field], 1)
            arguments |= {} if value is None or value is False else {option: value}
    length = explicit.get("model.seq_length", explicit.get("dataset.seq_length"))
    arguments |= {"seq-length": length, "max-position-embeddings": length} if length is not None else {}
    arguments |= {"group-query-attention": True} if "num-query-groups" in arguments else {}
    arguments |= {"cross-entropy-loss-fusion": True} if explicit.get("model.cross_entropy_loss_fusion", True) else {}
    return arguments


def precision_fields(precision: Any) -> dict[str, Any]:
    """Return the fields of a precision that is named by a text or by a call of its function."""
    name = precision.name if isinstance(precision, CallExpr) else str(precision or "")
    name = str(precision.values[0]) if isinstance(precision, CallExpr) and precision.values else name
    base, _, suffix = name.replace("-", "_").removesuffix("_mixed").partition("_with_")
    if base not in ("bf16", "fp16"):
        return {}
    fields: dict[str, Any] = {f"mixed_precision.{base}": True, "mixed_precision.grad_reduce_in_fp32": base == "bf16"}
    if suffix == "nvfp4":
        return {**fields, "mixed_precision.fp4": "e2m1", "mixed_precision.fp4_recipe": "nvfp4"}
    formats = _FP8_FORMATS.get(suffix)
    names = ("mixed_precision.fp8", "mixed_precision.fp8_recipe")
    return {**fields, **(dict(zip(names, formats, strict=True)) if formats else {})}


RECIPE_FILE = "recipe.py"
# Fields that `to_megatron` combines, so that none of them has an argument of its own.
JOINT_FIELDS = (
    "mixed_precision", "mixed_precision.fp32", "mixed_precision.params_dtype", "mixed_precision.pipeline_dtype",
    "model.activation_func", "model.gated_linear_unit", PROVIDER, *YARN_FIELDS.values(), *LATENT_FIELDS,
    "model.interleaved_attn_pattern", "model.softmax_scale", "model.seq_length", "dataset.seq_length", "model.hf_model_id",
    "model.cross_entropy_loss_fusion", "optimizer.use_distributed_optimizer", "comm_overlap",
)  # fmt: skip
_HUB_CALL = re.compile(r"from_hf_pretrained\((['\"])([^'\"]+)\1")
_HEAD = '''"""Started by torchrun on each node; data and tokenizer are mock until cfg.dataset and cfg.tokenizer say which."""

import torch
{}
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.core.activations import fast_gelu
from megatron.core.fusions.fused_bias_geglu import quick_gelu


def recipe() -> ConfigContainer:
    cfg = _pretrain_common()
'''
_TAIL = """    return cfg


if __name__ == "__main__":
    pretrain(config=recipe(), forward_step_func=forward_step)
"""


def _bridge_options(launch: Launch) -> Options:
    return write_provider(launch, to_bridge(to_options(launch_script.TARGET, launch)))


def _read_launch(reader: OptionReader) -> Mapping[str, Any]:
    """Read the fields through Megatron-LM's mappings, and record a field as read if its argument was."""
    model = reader.model or _find_model(reader.options)
    if model is None and "model.hidden_size" not in reader.options:
        name = reader.options.get("model.hf_model_id")
        problem = (
            "the recipe does not say its model"
            if name is None
            else f"found {str(name)[:80]!r}, whose sizes are not known"
        )
        raise InputError(f"model: {problem}; give --model, a name or a config.json")
    megatron_options = {**_model_arguments(model), **to_megatron(generalise_fields(reader.options))}
    argument_reader = OptionReader(megatron_options, reader.machines, problem=launch_script.TARGET.value_problem)
    launch_fields = from_options(launch_script.TARGET, argument_reader)
    reader.acknowledge(*JOINT_FIELDS, *filter(None, map(bridge_field, argument_reader.read_names)))
    return {**launch_fields, **read_provider(reader.options), **_read_adapters(reader)}


def _read_adapters(reader: OptionReader) -> Mapping[str, Any]:
    """Return the adapters of `peft`, if any. A fused module's adapter has one A; it is priced as one for each matrix."""
    rank, modules = reader.get_count("peft.dim"), reader.get("peft.target_modules")
    if rank is None:
        return {}
    if modules is None or "linear_qkv" in modules or "linear_fc1" in modules:
        reader.notes.append("adapters of linear_qkv and linear_fc1 are priced as one for each of their matrices")
    return adapter_fields(rank, read_targets(modules or ADAPTED_MODULES, "peft.target_modules", reader))


def _find_model(options: Options) -> Architecture | None:
    name = options.get("model.hf_model_id")
    return hub_model(name) if isinstance(name, str) else None


def _model_arguments(model: Architecture | None) -> Options:
    """Return the sizes of a model that a recipe names, as Megatron-LM's arguments."""
    if model is None:
        return {}
    job = Job(global_batch_tokens=1, seq_len=1)
    launch = Launch(model=model, job=job, layout=Layout(), machines=Machines(num_devices=1, devices_per_node=1))
    return {name: value for mapping in MODEL_MAPPINGS for name, value in mapping.to_options(launch).items()}


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    model = sections.pop("model")
    provider = model.pop("provider")
    later = {
        field: model.pop(field) for field in list(model) if field.startswith("yarn_")
    }  # no field of every provider
    lines = [f"cfg.model = {provider}(", *(f"    {field}={value!r}," for field, value in model.items()), ")"]
    lines += [f"cfg.model.{field} = {value!r}" for field, value in later.items()]
    config_classes = {"comm_overlap": "CommOverlapConfig", "mixed_precision": "MixedPrecisionConfig"}
    for name, config_class in config_classes.items():
        if name in sections:
            lines.append(f"cfg.{name} = {CallExpr(config_class, (), sections.pop(name))!r}")
    for name, settings in sections.items():
        lines += [f"cfg.{name}.{field} = {value!r}" for field, value in settings.items()]
    lines.append('cfg.tokenizer.tokenizer_type = "NullTokenizer"')
    lines.append(f"cfg.tokenizer.vocab_size = {launch.model.vocab_size - 1}")
    provider_import = f"from megatron.bridge.models.{PROVIDERS[provider].module} import {provider}"
    return {RECIPE_FILE: _HEAD.format(provider_import) + "".join(f"    {line}\n" for line in lines) + _TAIL}


def _read_files(files: LaunchFiles, recipe: str | None = None) -> Options:
    names = [name for name in files if name.endswith(".py")] or [name for name in files if name != README_FILE]
    config = parse_python_config(files[names[0]], names[0], recipe)
    fields: dict[str, Any] = {}
    for path, value in config.values.items():
        fields |= _assigned_fields(path, value)
    return {**fields, **dict.fromkeys(config.unread)}


def _adapter_settings(value: Any) -> dict[str, Any]:
    """Return the rank and the targets of an adapter; LoRA's defaults of peft/lora.py where a recipe sets none."""
    keywords = value.keywords if isinstance(value, CallExpr) else {}
    modules = keywords.get("target_modules", ADAPTED_MODULES)
    schemes = {value.name} | set(map(str, value.values)) if isinstance(value, CallExpr) else {str(value)}
    scheme = {"peft.scheme": "dora"} if schemes & {"DoRA", "dora"} else {}
    return {"peft.dim": keywords.get("dim", 32), "peft.target_modules": modules, **scheme}


def _assigned_fields(path: str, value: Any) -> dict[str, Any]:
    """Return the fields that an assignment sets; one that is not understood gets a name that no field has."""
    if path == "peft" and value is not None:
        return _adapter_settings(value)
    if not isinstance(value, CallExpr):
        return {path: value}
    match = _HUB_CALL.search(value.name)
    if path == "model" and match:
        return {"model.hf_model_id": match[2]}
    if path == "" and value.name in BASE_RECIPES:
        return dict(BASE_RECIPES[value.name])
    if path == "" and value.name == "ConfigContainer":
        return {
            name: setting
            for section, call in value.keywords.items()
            for name, setting in _assigned_fields(section, call).items()
        }
    if path == "mixed_precision" and not value.name.endswith("Config"):
        return {path: value}
    if path and not value.values and (path != "model" or value.name in PROVIDERS):
        fields = {f"{path}.{name}": setting for name, setting in value.keywords.items()}
        return {**({PROVIDER: value.name} if path == "model" else {}), **fields}
    return {f"{path or 'recipe'} = {value!r}": None}


def _notes(launch: Launch) -> Iterator[str]:
    yield "data and tokenizer are mock: set cfg.dataset.blend and cfg.tokenizer in the recipe"
    if not launch.job.tokens:
        yield "the length of the run is yours: set cfg.train.train_iters, which is 300,000 otherwise; or plan with --tokens"
    yield from (note for note in launch_script.TARGET.notes(launch) if "recomputation" in note)


TARGET = Target(
    name="megatron-bridge", title="Megatron Bridge", version="0.3.1 (megatron-core 0.16.1)",
    source="https://github.com/NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/config.py", stack="megatron-bridge-26",
    options_file=OPTIONS_FILE, mappings=(OptionMapping(_bridge_options, _read_launch),),
    requirements=(
        *launch_script.TARGET.requirements, CAPPED_SCORES,
        Requirement(
            lambda launch: launch.model.positions != "learned" or launch.job.seq_len >= (launch.model.max_positions or 0),
            lambda launch: f"seq_len = {launch.job.seq_len} of {launch.model.max_positions} learned positions: Megatron Bridge "
            f"has as many as a sequence; set seq_len={launch.model.max_positions}",
        ),
    ),
    write=_write_files, read=_read_files, read_recipe=_read_files,
    command=lambda launch: torchrun_command(launch.machines, RECIPE_FILE), notes=_notes, find_model=_find_model,
)  # fmt: skip
