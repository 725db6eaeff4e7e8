"""Every value of a model of the catalogue, with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from shardwise.model import DEFAULT_NUMERICS, Architecture, load_model, num_active_params, num_params
from shardwise.model.parameters_and_flops import num_mtp_params
from shardwise.values import SourcedValue


def model_values(name: str) -> list[SourcedValue]:
    """Every value of a model, with the numbers of its parameters. Raises `InputError` for an unknown name."""
    model = load_model(name)
    values = asdict(model)
    source = values.pop("source")
    values.pop("name")
    values |= _flat("numerics", values.pop("numerics"))
    counts = {"num_params": num_params(model), "num_active_params": num_active_params(model)}
    if model.num_predict_layers:  # in training only, and apart from what a model card counts
        counts["num_predict_params"] = num_mtp_params(model)
    counted = [(name, count, "counted from the program") for name, count in counts.items()]
    return [*counted, *((k, v, source) for k, v in values.items())]


def plain_values() -> dict[str, Any]:
    """The defaults of a block by name: the values of most models."""
    return {field.name: field.default for field in fields(Architecture)} | _flat("numerics", asdict(DEFAULT_NUMERICS))


def _flat(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Composite values, with each part under its own name."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(f"{name}.{key}", value) if isinstance(value, Mapping) else {f"{name}.{key}": value}
    return found
