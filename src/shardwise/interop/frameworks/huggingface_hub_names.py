"""Models of the catalogue by their names on the Hugging Face hub, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from shardwise.model import Architecture, hub_ids, load_model, model_names, source_hub_id

# What a name has behind that of its model: how it was tuned, in which format its weights are stored (bitsandbytes' too, which a
# launch loads in four bits), and its release.
_TUNING_SUFFIX = re.compile(
    r"-(instruct|base|chat|hf|it|pt|thinking|think|reasoning|sft|dpo|checkpoints|linearized|fp16|bf16|dequantized)(-v?[\d.]+)?$"
    r"|-(unsloth-)?bnb-(4bit|nf4)$|-v\d+\.\d+$|-\d{4}$"
)
# Models by plain name that another one of the catalogue has the sizes of: tuned further, or released again. Constants of their
# arithmetic may differ, which no price depends on. Source: the config.json of each, and its model card.
SAME_SIZES: Mapping[str, str] = {
    "llama-7b": "llama-2-7b", "open_llama_7b": "llama-2-7b", "llama-13b": "llama-2-13b", "tinyllama_v1.1": "tinyllama-1.1b",
    "sparse-llama-3.1-8b-2of4": "llama-3.1-8b", "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.3-70b", "llama-3.1-nemotron-nano-8b-v1": "llama-3.1-8b",
    "cogito-v1-preview-llama-3b": "llama-3.2-3b", "cogito-v1-preview-qwen-14b": "qwen2.5-14b",
    **{f"qwen2-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "7b", "72b")},
    **{f"qwen2.5-coder-{size}": f"qwen2.5-{size}" for size in ("0.5b", "1.5b", "3b", "7b", "14b", "32b")},
    **{f"deepseek-r1-distill-qwen-{size}": f"qwen2.5-{size}" for size in ("14b", "32b")},
    "qwq-32b": "qwen2.5-32b", "deepcoder-14b-preview": "qwen2.5-14b", "plano-orchestrator-4b": "qwen3-4b",
    "deepseek-r1": "deepseek-v3", "deepseek-v3.1": "deepseek-v3", "glm-4.6": "glm-4.5", "glm-4.7": "glm-4.5",
    "gpt-oss-safeguard-20b": "gpt-oss-20b", "functiongemma-270m": "gemma-3-270m", "phi-3.5-mini": "phi-3-mini",
    **{f"qwen2.5-math-{size}": f"qwen2.5-{size}" for size in ("1.5b", "7b", "72b")},
    "deepseek-r1-distill-qwen-7b": "qwen2.5-7b", "qwen2.5-math-7b-rope-300k": "qwen2.5-7b", "qwen3.8-27b": "qwen3.5-27b",
    "minimax-m2.1": "minimax-m2", "smollm-135m": "smollm2-135m", "smollm-360m": "smollm2-360m", "smollm-1.7b": "smollm2-1.7b",
    "devstral-small": "mistral-small-24b", "magistral-small": "mistral-small-24b",
}  # fmt: skip
# Releases of these that have further parts: another model by the same plain name.
OTHER_MODELS = ("magistral-small-2509", "devstral-small-2512")


def hub_name(model: Architecture) -> str | None:
    """Return a model's name on the hub, or None if its source is not a config on the hub."""
    return source_hub_id(model.source) or next(iter(hub_ids(model.name)), None)


def hub_model(name: str) -> Architecture | None:
    """Return the catalogue's model with a name on the hub, tuned or not, or None."""
    catalog_names = _by_name()
    plain = _plain_name(name)
    catalog_name = catalog_names.get(name.lower()) or catalog_names.get(plain) or SAME_SIZES.get(plain)
    return load_model(catalog_name) if catalog_name and not name.lower().endswith(OTHER_MODELS) else None


@cache
def _by_name() -> Mapping[str, str]:
    """Return the catalogue's names by full and by plain hub name, in lower case; the first of each counts."""
    catalog_names: dict[str, str] = {}
    for catalog_name in model_names():
        hub_id = hub_name(load_model(catalog_name))
        for key in (hub_id.lower(), _plain_name(hub_id)) if hub_id else ():
            catalog_names.setdefault(key, catalog_name)
    return catalog_names


def _plain_name(name: str) -> str:
    """Return a hub name without its owner and tuning suffixes."""
    plain = name.split("/")[-1].lower().removeprefix("meta-")
    while (shorter := _TUNING_SUFFIX.sub("", plain)) != plain:
        plain = shorter
    return plain
