"""Models of the catalogue by their names on the Hugging Face hub, and the other way."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from shardwise.model.architecture import Architecture
from shardwise.model.load import load_model, model_names

_CONFIG = re.compile(r"^config\.json of (\S+/[\w.-]+?)[,;]?(?:\s|$)")
# Of models that the catalogue has from papers. Source: the cards of these repositories.
PUBLISHED_NAMES = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf", "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf", "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B", "llama-3-405b": "meta-llama/Llama-3.1-405B",
}  # fmt: skip
_TUNING_SUFFIX = re.compile(r"-(instruct|base|chat|hf|it|pt|thinking)(-v?[\d.]+)?$|-v\d+\.\d+$|-\d{4}$")


def hub_name(model: Architecture) -> str | None:
    """The name on the hub of a model with the weights' own config; None for a model that has none."""
    match = _CONFIG.match(model.source)
    return PUBLISHED_NAMES.get(model.name) or (match[1] if match else None)


def hub_model(name: str) -> Architecture | None:
    """The model of the catalogue with a name on the hub, tuned or not; None where it has none."""
    known = _by_name()
    found = known.get(name.lower()) or known.get(_plain_name(name))
    return load_model(found) if found else None


@cache
def _by_name() -> Mapping[str, str]:
    """Names of the catalogue by names on the hub, whole and plain; the first of each counts."""
    found: dict[str, str] = {}
    for own in model_names():
        name = hub_name(load_model(own))
        for key in (name.lower(), _plain_name(name)) if name else ():
            found.setdefault(key, own)
    return found


def _plain_name(name: str) -> str:
    """A name without its owner, and without how its weights were tuned."""
    plain = name.split("/")[-1].lower().removeprefix("meta-")
    while (shorter := _TUNING_SUFFIX.sub("", plain)) != plain:
        plain = shorter
    return plain
