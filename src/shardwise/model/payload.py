"""A model as it is in every payload of `--json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from shardwise.model.architecture import Architecture
from shardwise.model.parameters_and_flops import num_active_params, num_params
from shardwise.values import Flat, Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(Payload):
    """Facts of a model: its architecture, its number of parameters, and the number of those that a token uses.

    >>> from shardwise.model.load import load_model
    >>> facts = ModelFacts.of(load_model("llama-3-8b"))
    >>> facts.name, facts.num_params, facts.architecture.num_layers
    ('llama-3-8b', 8030261248, 32)
    """

    name: str
    num_params: int
    num_active_params: int
    architecture: Annotated[Architecture, Flat]

    @classmethod
    def of(cls, architecture: Architecture) -> ModelFacts:
        """Return the facts of a model."""
        return cls(
            name=architecture.name, num_params=num_params(architecture),
            num_active_params=num_active_params(architecture), architecture=architecture,
        )  # fmt: skip
