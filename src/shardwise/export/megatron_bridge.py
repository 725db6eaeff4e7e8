"""Megatron Bridge: a recipe in Python, a function that returns a ConfigContainer.

Source of names and types: megatron-bridge 0.3.1 with megatron-core 0.16.1. Its fields of a launch are what the arguments of
Megatron-LM say, under the names of `bridge_names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export import megatron
from shardwise.export.bridge_names import COMMON, TABLE, field_of, to_bridge, to_megatron
from shardwise.export.field import Field, Given, Options
from shardwise.export.files import README
from shardwise.export.formats.recipe import Call, recipe_in
from shardwise.export.hub import hub_model
from shardwise.export.launch import Launch, Machines
from shardwise.export.launchers import torchrun
from shardwise.export.megatron_model import MODEL
from shardwise.export.saying import hear, say
from shardwise.export.target import Files, Need, Target
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture

SCRIPT = "recipe.py"
PROVIDERS: Mapping[str, Options] = {"GPTModelProvider": {}, "MLAModelProvider": {"model.multi_latent_attention": True}}
# Fields whose meaning is in several: asked for together (bridge_names.to_megatron).
TOGETHER = ("mixed_precision", "mixed_precision.fp32", "mixed_precision.params_dtype", "mixed_precision.pipeline_dtype",
            "model.activation_func", "model.gated_linear_unit", "model.seq_length", "dataset.seq_length", "model.hf_model_id",
            "model.cross_entropy_loss_fusion", "optimizer.use_distributed_optimizer", "comm_overlap")  # fmt: skip
_HUB = re.compile(r"from_hf_pretrained\((['\"])([^'\"]+)\1")
_HEAD = '''"""Started by torchrun on each node; data and tokenizer are mock until cfg.dataset and cfg.tokenizer say which."""

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.mla_provider import MLAModelProvider
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.core.fusions.fused_bias_geglu import quick_gelu


def recipe() -> ConfigContainer:
    cfg = _pretrain_common()
'''
_TAIL = """    return cfg


if __name__ == "__main__":
    pretrain(config=recipe(), forward_step_func=forward_step)
"""


def _say(launch: Launch) -> Options:
    return to_bridge(say(megatron.TARGET, launch))


def _hear(given: Given) -> Mapping[str, Any]:
    """What the arguments of Megatron-LM would say; a field is asked for where its argument is."""
    model = given.model or _model(given.options)
    if model is None and "model.hidden_size" not in given.options:
        raise InputError(
            f"model: found {given.options.get('model.hf_model_id')!r}, whose sizes are not known; name the model"
        )
    said = {**_spoken(model), **to_megatron(given.options)}
    arguments = Given(said, given.machines, problem=megatron.TARGET.value_problem)
    parts = hear(megatron.TARGET, arguments)
    for name in (*TOGETHER, *(field for option in arguments.heard if (field := field_of(option)))):
        given.get(name)
    return parts


def _model(options: Options) -> Architecture | None:
    name = options.get("model.hf_model_id")
    return hub_model(name) if isinstance(name, str) else None


def _spoken(model: Architecture | None) -> Options:
    """The sizes of a model that a recipe names, as arguments of Megatron-LM."""
    if model is None:
        return {}
    job = Job(global_batch_tokens=1, seq_len=1)
    launch = Launch(model=model, job=job, layout=Layout(), machines=Machines(num_devices=1, devices_per_node=1))
    return {name: value for field in MODEL for name, value in field.say(launch).items()}


def _write(options: Options, launch: Launch) -> Files:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        section, _, field = name.partition(".")
        groups.setdefault(section, {})[field] = value
    model = groups.pop("model")
    provider = "MLAModelProvider" if model.get("multi_latent_attention") else "GPTModelProvider"
    lines = [f"cfg.model = {provider}(", *(f"    {field}={value!r}," for field, value in model.items()), ")"]
    made = {"comm_overlap": "CommOverlapConfig", "mixed_precision": "MixedPrecisionConfig"}
    lines += [f"cfg.{name} = {Call(kind, (), groups.pop(name))!r}" for name, kind in made.items() if name in groups]
    lines += [f"cfg.{name}.{field} = {value!r}" for name, own in groups.items() for field, value in own.items()]
    lines += [
        'cfg.tokenizer.tokenizer_type = "NullTokenizer"',
        f"cfg.tokenizer.vocab_size = {launch.model.vocab_size - 1}",
    ]
    return {SCRIPT: _HEAD + "".join(f"    {line}\n" for line in lines) + _TAIL}


def _read(files: Files) -> Options:
    own = [name for name in files if name.endswith(".py")] or [name for name in files if name != README]
    recipe = recipe_in(files[own[0]], own[0])
    found: dict[str, Any] = {}
    for path, value in recipe.values.items():
        found |= _options(path, value)
    return {**found, **dict.fromkeys(recipe.unread)}


def _options(path: str, value: Any) -> dict[str, Any]:
    """The fields that an assignment sets; what is not understood has a name that no field has."""
    if not isinstance(value, Call):
        return {path: value}
    match = _HUB.search(value.name)
    if path == "model" and match:
        return {"model.hf_model_id": match[2]}
    if path == "" and value.name == "_pretrain_common":
        return dict(COMMON)
    if path == "" and value.name == "ConfigContainer":
        return {name: one for own, inner in value.named.items() for name, one in _options(own, inner).items()}
    if path == "mixed_precision" and not value.name.endswith("Config"):
        return {path: value}
    if path and not value.values and (path != "model" or value.name in PROVIDERS):
        return {**PROVIDERS.get(value.name, {}), **{f"{path}.{name}": one for name, one in value.named.items()}}
    return {f"{path or 'recipe'} = {value!r}": None}


def _notes(launch: Launch) -> Iterator[str]:
    yield "data and tokenizer are mock: set cfg.dataset.blend and cfg.tokenizer in the recipe"
    yield from (note for note in megatron.TARGET.notes(launch) if "recomputation" in note)


TARGET = Target(
    name="megatron-bridge", title="Megatron Bridge", version="0.3.1 (megatron-core 0.16.1)",
    source="https://github.com/NVIDIA-NeMo/Megatron-Bridge, src/megatron/bridge/training/config.py", stack="megatron-bridge-26",
    table=TABLE, fields=(Field(_say, _hear),),
    needs=(
        *megatron.TARGET.needs,
        Need(
            lambda launch: launch.model.positions != "learned" or launch.job.seq_len >= (launch.model.max_positions or 0),
            lambda launch: f"seq_len = {launch.job.seq_len} of {launch.model.max_positions} learned positions: Megatron Bridge "
            f"has as many as a sequence; set seq_len={launch.model.max_positions}",
        ),
    ),
    write=_write, read=_read, command=lambda launch: torchrun(launch.machines, SCRIPT), notes=_notes, model=_model,
)  # fmt: skip
