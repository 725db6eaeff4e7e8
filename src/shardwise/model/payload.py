"""A model as it is in every payload of `--json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from typing_extensions import TypedDict

from shardwise.model.architecture import Architecture
from shardwise.model.parameters_and_flops import num_active_params, num_params
from shardwise.values import MergedFields


class ParameterCounts(TypedDict):
    """Number of parameters: all, and those that a token uses."""

    num_params: int
    num_active_params: int


ModelPayload = Annotated[dict[str, Any], MergedFields(Architecture, ParameterCounts)]


def model_payload(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of a model, with its numbers of parameters.

    >>> from shardwise.model.load import load_model
    >>> payload = model_payload(load_model("llama-3-8b"))
    >>> payload["name"], payload["num_params"], payload["num_layers"]
    ('llama-3-8b', 8030261248, 32)
    """
    counts = {"num_params": num_params(architecture), "num_active_params": num_active_params(architecture)}
    return {"name": architecture.name, **counts, **asdict(architecture)}
