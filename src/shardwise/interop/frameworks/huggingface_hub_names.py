"""Models of the catalogue by their names on the Hugging Face hub, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from shardwise.model import Architecture, hub_ids, load_model, model_names, source_hub_id

_TUNING_SUFFIX = re.compile(r"-(instruct|base|chat|hf|it|pt|thinking)(-v?[\d.]+)?$|-v\d+\.\d+$|-\d{4}$")


def hub_name(model: Architecture) -> str | None:
    """Return a model's name on the hub, or None if its source is not a config on the hub."""
    return source_hub_id(model.source) or next(iter(hub_ids(model.name)), None)


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
