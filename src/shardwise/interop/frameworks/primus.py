"""Primus: an experiment in YAML, which names a framework, a model of Primus and what it overrides of the framework's options.

Its experiments are read as launches of Megatron-LM, torchtitan and MaxText, whose options they hold. Source: Primus at main of
2026-08-22, primus/configs (modules and models).
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from shardwise.interop.launches.target import LaunchFiles
from shardwise.interop.text_formats.config_trees import find_marked_yaml, flatten, normalize_values, parse_yaml
from shardwise.interop.text_formats.option_tables import Options, option_table, read_option_file
from shardwise.values import InputError, describe_unknown

MODULES = "modules"
TRAINERS = ("pre_trainer", "post_trainer", "sft_trainer")
_PLACEHOLDER = re.compile(r"\$\{\w+:([^{}]*)\}")  # an environment variable with its default
# Options of primus/configs/modules that differ from the framework's own defaults and that a plan depends on.
DEFAULTS: Mapping[str, Options] = {
    "megatron": {
        "micro-batch-size": 2, "global-batch-size": 16, "seq-length": 1024, "bf16": True, "use-distributed-optimizer": True,
        "sequence-parallel": True,
    },
    "torchtitan": {"training.local_batch_size": 8, "training.seq_len": 2048, "activation_checkpoint.mode": "none",
                   "compile.enable": True},
    "maxtext": {"hardware": "gpu", "remat_policy": "full", "dtype": "bfloat16", "weight_dtype": "bfloat16",
                "base_config": "base.yml"},
}  # fmt: skip
# Names in Megatron-LM's namespace whose option is called otherwise. Source: megatron/training/arguments.py, d98e8a64.
MEGATRON_OPTIONS = {"fp8": "fp8-format", "fp4": "fp4-format"}
TURBO_CONVERTER = "primus_turbo"
MEGATRON_INVERTED_OPTIONS = {"add-bias-linear": "disable-bias-linear"}


class PrimusExperiment(NamedTuple):
    """An experiment: its framework, and the options of its model and of its overrides by dotted name."""

    framework: str
    model: Options
    overrides: Options


# Targets as whose launches experiments are read, by the framework that they name.
TARGETS_OF_EXPERIMENTS = {"megatron": "megatron", "torchtitan": "torchtitan-toml", "maxtext": "maxtext-gpu"}


def target_of_experiment(files: LaunchFiles) -> str | None:
    """Return the target as whose launch an experiment is read; None for files that are no experiment.

    Raises `InputError` for a framework whose options are not read out of experiments.
    """
    marked = find_marked_yaml(files, MODULES)
    if marked is None:
        return None
    name, text = marked
    modules = parse_yaml(_PLACEHOLDER.sub(r"\1", text), name)[MODULES]
    trainers = [module for key, module in modules.items() if key in TRAINERS] if isinstance(modules, Mapping) else []
    frameworks = [module.get("framework") for module in trainers if isinstance(module, Mapping)]
    if not frameworks:
        return None
    if frameworks[0] not in TARGETS_OF_EXPERIMENTS:
        readable = ", ".join(TARGETS_OF_EXPERIMENTS)
        raise InputError(
            f"{name}: an experiment of Primus for {str(frameworks[0])[:40]}; one for {readable} can be read"
        )
    return TARGETS_OF_EXPERIMENTS[frameworks[0]]


def read_experiment(files: LaunchFiles, framework: str) -> PrimusExperiment | None:
    """Return the experiment of a framework in the files; None for files that are no experiment.

    Raises `InputError` for one of another framework, of several modules, and of a model that is not known.
    """
    marked = find_marked_yaml(files, MODULES)
    if marked is None:
        return None
    name, text = marked
    modules = parse_yaml(_PLACEHOLDER.sub(r"\1", text), name)[MODULES]
    trainers = [module for key, module in modules.items() if key in TRAINERS] if isinstance(modules, Mapping) else []
    if len(trainers) != 1 or not isinstance(trainers[0], Mapping):
        raise InputError(f"{name}: found {len(trainers)} of {', '.join(TRAINERS)} in {MODULES}; one is required")
    trainer: Mapping[str, Any] = trainers[0]
    if trainer.get("framework") != framework:
        raise InputError(f"{name}: an experiment of {trainer.get('framework')}; one of {framework} is required")
    overrides = trainer.get("overrides") or {}
    return PrimusExperiment(framework, _model_options(framework, str(trainer.get("model"))), flatten(overrides))


def megatron_arguments(experiment: PrimusExperiment) -> dict[str, Any]:
    """Return Megatron-LM's arguments: the model's, Primus's defaults, and what the experiment overrides."""
    if experiment.overrides.get("lora.enabled"):
        raise InputError(
            "lora.enabled: found true; adapters of Primus's Megatron trainer are not read, only a training of all weights; set "
            "it to false, or read the recipe of Megatron Bridge"
        )
    arguments: dict[str, Any] = {**experiment.model, **DEFAULTS["megatron"]}
    for key, value in experiment.overrides.items():
        name = key.replace("_", "-")
        name, value = (
            (MEGATRON_INVERTED_OPTIONS[name], not value) if name in MEGATRON_INVERTED_OPTIONS else (name, value)
        )
        name = MEGATRON_OPTIONS.get(name, name)
        arguments.pop(name, None)
        if value is not None and value is not False:
            arguments[name] = value
    return normalize_values(arguments, option_table("megatron"))


def framework_options(experiment: PrimusExperiment, table: str) -> dict[str, Any]:
    """Return the options of a framework that Primus gives under their own names."""
    options = {**DEFAULTS[experiment.framework], **experiment.model, **experiment.overrides}
    converters = options.get("model.converters")
    if isinstance(converters, list):  # Primus's own kernels under the same operations
        options["model.converters"] = [converter for converter in converters if converter != TURBO_CONVERTER]
    return normalize_values({name: value for name, value in options.items() if value is not None}, option_table(table))


def _model_options(framework: str, file: str) -> Options:
    """Return the options of a model's file. Raises `InputError` for one that is not known."""
    models = _models().get(framework, {})
    name = file.removesuffix(".yaml")
    if name not in models:
        raise InputError(f"model: {describe_unknown(name, models)}")
    return models[name]


@cache
def _models() -> Mapping[str, Mapping[str, Options]]:
    """Return the options of models by framework and name."""
    models: dict[str, dict[str, Options]] = {}
    for row in csv.DictReader(read_option_file("primus_models.csv").splitlines()):
        models.setdefault(row["framework"], {})[row["name"]] = json.loads(row["options"])
    return models
