"""Parameter counts against the models of `transformers`, built on the meta device: the same config, the same count."""

from __future__ import annotations

import dataclasses
import tomllib
import warnings
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from crosscheck.decoders import read_decoders

from shardwise.model.huggingface.config import parse_config
from shardwise.model.huggingface.family_rules import FAMILIES
from shardwise.model.load import load_model
from shardwise.model.parameters_and_flops import num_active_params, num_params

CASES = tomllib.loads((Path(__file__).parent / "configs.toml").read_text(encoding="utf-8"))["config"]


PRESETS = [case for case in CASES if "preset" in case]


def config_of(case: dict[str, Any]) -> dict[str, Any]:
    """The config of a case, without what is said about it."""
    config = {key: value for key, value in case.items() if key not in ("name", "null", "preset", "built_as")}
    return config | dict.fromkeys(case.get("null", ()))


def model_of(case: dict[str, Any]) -> torch.nn.Module:
    """The model that `transformers` builds from a case's config, without memory for its parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        settings = {key: value for key, value in config_of(case).items() if key != "model_type"}
        config = transformers.AutoConfig.for_model(case.get("built_as", case["model_type"]), **settings)
        with torch.device("meta"):
            model: torch.nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    return model


def counts(model: torch.nn.Module, share: Fraction) -> tuple[int, Fraction]:
    """Distinct parameters, tied ones once: all of them, and those that a token meets.

    The routed experts' are the parameters of the modules called `experts`, one row for each expert; of these a token meets
    the share k/E.
    """
    routed = sum(parameter.numel() for name, parameter in model.named_parameters() if name.split(".")[-2] == "experts")
    whole = sum(parameter.numel() for parameter in model.parameters())
    return whole, whole - routed + share * routed


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_parameter_counts_equal_transformers(case: dict[str, Any]) -> None:
    architecture, model = parse_config(config_of(case)), model_of(case)
    share = (
        Fraction(architecture.experts_per_token, architecture.num_experts) if architecture.num_experts else Fraction(1)
    )
    assert (num_params(architecture), num_active_params(architecture)) == counts(model, share)
    stacked = [name for name, _ in model.named_parameters() if name.split(".")[-2] == "experts"]
    assert bool(stacked) == bool(architecture.num_experts), (
        "experts under another name would count as met by every token"
    )


@pytest.mark.parametrize("case", PRESETS, ids=[case["preset"] for case in PRESETS])
def test_the_catalogue_has_what_the_config_says(case: dict[str, Any]) -> None:
    ours = load_model(case["preset"])
    catalogue_fields = {name: getattr(ours, name) for name in ("name", "source", "nominal_num_params", "numerics")}
    assert dataclasses.replace(parse_config(config_of(case)), **catalogue_fields) == ours


# Families of published configs alone (`public_configs.jsonl`): the library has their models under no such name.
PUBLISHED_ONLY = {"nemotron-nas", "step3p5", "step3p7_text"}
TEXT_PARTS = {"mllama_text_model"}  # whose decoders are listed by the type of the whole model


def test_every_family_has_a_case() -> None:
    listed = {row.model_type for row in read_decoders() if row.state == "exact"}
    assert set(FAMILIES) <= {case["model_type"] for case in CASES} | listed | PUBLISHED_ONLY | TEXT_PARTS
