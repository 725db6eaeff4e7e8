"""Parameter counts against the models of `transformers`, built on the meta device: the same config, the same count."""

from __future__ import annotations

import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.model.counts import num_params
from shardwise.model.huggingface import FAMILIES, parse_config

CASES = tomllib.loads((Path(__file__).parent / "configs.toml").read_text(encoding="utf-8"))["config"]


def count(config: dict[str, Any]) -> int:
    """Distinct parameters of the model that `transformers` builds; tied ones count once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        own = {key: value for key, value in config.items() if key != "model_type"}
        described = transformers.AutoConfig.for_model(config["model_type"], **own)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(described)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_counts_are_equal(case: dict[str, Any]) -> None:
    config = {key: value for key, value in case.items() if key != "name"}
    assert num_params(parse_config(config)) == count(config)


def test_every_family_has_a_case() -> None:
    assert {case["model_type"] for case in CASES} == set(FAMILIES)
