"""Models of the catalogue by their names on the Hugging Face hub, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from shardwise.model import Architecture, load_model, model_names

_CONFIG = re.compile(r"^config\.json of (\S+/[\w.-]+?)[,;]?(?:\s|$)")
# Hub names of models that the catalogue has from papers. Source: the cards of these repositories.
PUBLISHED_NAMES = {
    "llama-2-7b": "meta-llama/Llama-2-7b-hf", "llama-2-13b": "meta-llama/Llama-2-13b-hf",
    "llama-2-70b": "meta-llama/Llama-2-70b-hf", "llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama-3-70b": "meta-llama/Meta-Llama-3-70B", "llama-3-405b": "meta-llama/Llama-3.1-405B",
}  # fmt: skip
_TUNING_SUFFIX = re.compile(r"-(instruct|base|chat|hf|it|pt|thinking)(-v?[\d.]+)?$|-v\d+\.\d+$|-\d{4}$")


def hub_name(model: Architecture) -> str | None:
    """Return a model's name on the hub, or None if its source is not a config on the hub."""
    match = _CONFIG.match(model.source)
    return PUBLISHED_NAMES.get(model.name) or (match[1] if match else None)


def hub_model(name: str) -> Architecture | None:
    """Return the catalogue's model with a name on the hub, tuned or not, or None."""
    catalog_names = _by_name()
    catalog_name = catalog_names.get(name.lower()) or catalog_names.get(_plain_name(name))
    return load_model(catalog_name) if catalog_name else None


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
