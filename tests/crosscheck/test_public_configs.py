"""Config files that people publish for the models that they serve and train: exact or refused, none wrong.

`public_configs.jsonl` has the keys of each config.json (Hugging Face Hub, November 2026) that decide its weights, and the
parameters of transformers' own model (5.23, on the meta device); of multimodal models those of all parts together. Nemotron-NAS,
which transformers does not define, is counted by a closed form of its blocks.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.model import num_params, unit_program
from shardwise.model.decoder import unit_counts
from shardwise.model.huggingface.config import parse_config
from shardwise.values import InputError

LINES = (Path(__file__).parent / "public_configs.jsonl").read_text(encoding="utf-8").splitlines()
CONFIGS: list[dict[str, Any]] = [json.loads(line) for line in LINES]
# transformers builds the text model alone from these files, whatever else their config describes.
TEXT_ONLY = {
    "Qwen/Qwen3.5-27B",
    "qwen3.5-122B-A10B",
    "nvidia/Qwen3.5-397B-A17B-NVFP4",
    "llama-4-scout-17b-16e-instruct-fp8-dynamic",
}


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: row["name"])
def test_a_published_config_is_exact_or_refused(row: dict[str, Any]) -> None:
    if row["state"] == "refused":
        with pytest.raises(InputError, match=r"not planned for|not known with that"):
            parse_config(row["config"])
        return
    model = parse_config(row["config"])
    omitted = 0 if row["name"] in TEXT_ONLY else sum(part.num_params or 0 for part in model.omitted_parts)
    assert num_params(model) + omitted == row["num_params"]


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: row["name"])
def test_programs_of_all_units_follow_from_the_structure(row: dict[str, Any]) -> None:
    """Derivations read no sizes: a structure that needs one would end in an error about a model that nobody gave."""
    model = parse_config(row["config"])
    for unit in unit_counts(model):
        assert unit_program(model.structure, unit).operations


def test_public_configs_are_all_exact() -> None:
    assert all(row["state"] == "exact" for row in CONFIGS)
