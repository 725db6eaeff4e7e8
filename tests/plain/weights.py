"""Modules whose parameters are the weights of a unit's program: the derivation says which there are and of what dims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.model.architecture import Architecture
from shardwise.model.decoder import build_unit_program
from shardwise.step.parameters import attribute_name


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter's place in the derivation: the unit, the weight's name in the unit's program, and its dims."""

    unit: str
    name: str
    dims: tuple[str, ...]


class UnitModule(nn.Module):
    """The own weights of one unit as parameters, uninitialised; `without` are those that another unit lends it."""

    def __init__(self, unit: str, architecture: Architecture, without: frozenset[str] = frozenset()) -> None:
        super().__init__()
        program, sizes = build_unit_program(architecture, unit), architecture.dims
        names = [name for name in program.weights if name not in without]
        self.weights = {attribute_name(name): Weight(unit, name, program.dims(name)) for name in names}
        for name, weight in self.weights.items():
            values = torch.empty([sizes[dim] for dim in weight.dims])
            self.register_parameter(name, nn.Parameter(values, requires_grad=not program.tensors[weight.name].frozen))

    def parameter(self, weight: str) -> Tensor:
        """A weight by its name in the program."""
        stored: Tensor = getattr(self, attribute_name(weight))
        return stored

    def optional_parameter(self, weight: str) -> Tensor | None:
        """The same of a weight that a structure may lack."""
        return self.parameter(weight) if attribute_name(weight) in self.weights else None


def parameter_weights(model: nn.Module) -> dict[str, Weight]:
    """Every parameter's place in the derivation, by the parameter's full name in `model`."""
    return dict(_parameter_weights(model))


def _parameter_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    for path, module in model.named_modules():
        if isinstance(module, UnitModule):
            prefix = f"{path}." if path else ""
            yield from ((f"{prefix}{name}", weight) for name, weight in module.weights.items())
