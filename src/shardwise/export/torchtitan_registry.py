"""The function of torchtitan's registry that a run starts from, and the function of its own where flags do not say the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

from shardwise.errors import InputError
from shardwise.export.field import Options
from shardwise.export.torchtitan_model import attention_of

MODELS = "torchtitan.models."
MODULE = "run_config"  # the file of a function of its own
LISTS = ("parallelism.module_fqns_per_model_part",)  # what tyro does not read back as it was
DATA = ("sft", "debug")  # functions with other data than text from the web
LOSSES = {
    "ChunkedLossWrapper": "ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config({vocabulary}))",
    "CrossEntropyLoss": "CrossEntropyLoss.Config({vocabulary})",
    "MTPLoss": "MTPLoss.Config({vocabulary})",
}
VOCABULARY = "global_vocab_size=decoder_vocab_size(config.model_spec)"
HOMES = {
    "ChunkedLossWrapper": "torchtitan.components.loss", "CrossEntropyLoss": "torchtitan.components.loss",
    "MTPLoss": "torchtitan.models.deepseek_v3.mtp", "decoder_vocab_size": "torchtitan.models.common.config_utils",
    "Float8LinearConverter": "torchtitan.components.quantization",
    "Float8GroupedExpertsConverter": "torchtitan.components.quantization",
}  # fmt: skip
# Arguments that say what is so without them
USUAL = {"model.moe_comm_backend": "standard", "Float8LinearConverter.recipe_name": "rowwise"}


class Base(NamedTuple):
    """A function of a registry, and what it sets."""

    module: str
    name: str
    options: Options


def base_of(options: Options) -> Base:
    """The function of the model's module from which the fewest steps lead to some options."""
    module = options["model.name"]
    every = [Base(module, name, own) for name, own in registered()[module].items()]
    usual = [one for one in every if not any(word in one.name for word in DATA)] or every
    return min(usual, key=lambda one: _distance(options, one))


def _distance(options: Options, base: Base) -> tuple[Any, ...]:
    """How far: formats that were not requested, statements that it takes, and whether it is of the same flavour."""
    strange = "model.converters" in base.options and "model.converters" not in options
    return strange, len(list(_statements(options, base))), base.options.get("model.flavor") != options["model.flavor"]


def _of_model(options: Options) -> dict[str, Any]:
    """What a model registry is asked for, without what it would give unasked."""
    usual = {**USUAL, "model.attn_backend": attention_of(options.get("model.name"), options.get("model.flavor"))}
    return {
        name: value for name, value in options.items()
        if (name.startswith("model.") or "Converter." in name) and not name.endswith("model_compile_enabled")
        and value != usual.get(name)
    }  # fmt: skip


def _statements(options: Options, base: Base) -> Iterator[tuple[str, str]]:
    """What changes a config to some options where flags cannot: where each name is from, and the statement."""
    module = options["model.name"]
    other = _of_model(options) != {"model.flavor": base.options.get("model.flavor"), **_of_model(base.options)}
    if other:
        yield f"{MODELS}{module}", f"config.model_spec = model_registry({', '.join(_arguments(options))})"
    loss = options["loss"]
    if loss != base.options.get("loss") or (other and options["model.flavor"] != base.options.get("model.flavor")):
        yield "", f"config.loss = {LOSSES[loss].format(vocabulary=VOCABULARY)}"
    for name in LISTS:
        if name in options:
            yield "", f"config.{name} = {options[name]!r}"


def _arguments(options: Options) -> Iterator[str]:
    """Arguments of model_registry."""
    yield repr(options["model.flavor"])
    for name in ("attn_backend", "num_mtp_layers"):
        if f"model.{name}" in options:
            yield f"{name}={options[f'model.{name}']!r}"
    if "model.converters" in options:
        yield f"converters=[{', '.join(_converter(options, name) for name in options['model.converters'])}]"


def _converter(options: Options, name: str) -> str:
    own = [f"{key.partition('.')[2]}={value!r}" for key, value in options.items() if key.startswith(f"{name}.")]
    return f"{name}.Config({', '.join([*own, 'model_compile_enabled=True'])})"


def file_text(options: Options, base: Base) -> str:
    """The file of a function of its own; empty where flags say all."""
    statements = list(_statements(options, base))
    if not statements:
        return ""
    imports = [f"from {home} import model_registry" for home, _ in statements if home]
    imports += [
        f"from {home} import {name}" for name, home in HOMES.items() if any(name in text for _, text in statements)
    ]
    return function_text(base.name, base.module, options, imports, [text for _, text in statements])


def changed(options: Options, base: Base) -> dict[str, Any]:
    """The flags of some options: those that the function does not set as they are."""
    told = (*LISTS, "loss", "optimizer")
    return {
        name: value for name, value in options.items()
        if name not in told and not name.startswith("model.") and "Converter." not in name and base.options.get(name) != value
    }  # fmt: skip


@cache
def registered() -> Mapping[str, Mapping[str, Options]]:
    """Functions of the release's registries by module, each with the options that it sets, as read from the wheel."""
    text = (
        resources.files("shardwise.export").joinpath("options", "torchtitan_configs.json").read_text(encoding="utf-8")
    )
    found: Mapping[str, Mapping[str, Options]] = json.loads(text)
    return found


def registered_options(module: str, name: str) -> Options:
    """The options of a function of the release. Raises `InputError` for one that it lacks."""
    functions = registered().get(module, {})
    if name not in functions:
        known = ", ".join(functions) or ", ".join(registered())
        raise InputError(
            f"config: found {module} {name}, whose file is not among those given; it, or one of {known}, is required"
        )
    return functions[name]


def function_text(base: str, module: str, options: Options, imports: Sequence[str], statements: Sequence[str]) -> str:
    """A file with one function, `run`: the config of a registered one, and statements that change it."""
    lines = "\n".join(f"    {line}" for line in statements)
    names = "\n".join(sorted({*imports, f"from {MODELS}{module}.config_registry import {base}",
                              "from torchtitan.trainer import Trainer"}))  # fmt: skip
    return (
        f'"""Settings of {options["model.name"]} {options["model.flavor"]} that have no flag."""\n\n{names}\n\n\n'
        f"def run() -> Trainer.Config:\n    config = {base}()\n{lines}\n    return config\n"
    )
