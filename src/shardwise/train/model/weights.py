"""Modules whose parameters are the weights of a unit's program: the derivation says which there are and of what dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwise.layout.derivation import derived_unit
from shardwise.layout.shardings import Family, optimizer_rest, weight_use
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import UNITS
from shardwise.sharding.spec import Spec


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter's place in the derivation: the unit, the weight's name in the unit's program, and its dims."""

    unit: str
    name: str
    dims: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """Where a weight rests, how it lies where it is used, where its gradient rests when a backward pass has ended, and where
    the optimizer's state of it rests. The last two are None of a weight that is frozen."""

    weight: Weight
    rest: Spec
    use: Spec
    gradient: Spec | None
    state: Spec | None


def attribute(weight: str) -> str:
    """The name of the parameter that a weight is: a module's parameters have no dots in their names."""
    return weight.replace(".", "_")


class UnitModule(nn.Module):
    """The own weights of one unit as parameters, uninitialised; `without` are those that another unit lends it."""

    def __init__(self, unit: str, architecture: Architecture, without: frozenset[str] = frozenset()) -> None:
        super().__init__()
        program, sizes = UNITS[unit](architecture), architecture.dims
        names = [name for name in program.weights if name not in without]
        self.weights = {attribute(name): Weight(unit, name, program.dims(name)) for name in names}
        for name, weight in self.weights.items():
            values = torch.empty([sizes[dim] for dim in weight.dims])
            self.register_parameter(name, nn.Parameter(values, requires_grad=not program.tensors[weight.name].frozen))

    def own(self, weight: str) -> Tensor:
        """A weight by its name in the program."""
        found: Tensor = getattr(self, attribute(weight))
        return found

    def if_any(self, weight: str) -> Tensor | None:
        """The same of a weight that a structure may lack."""
        return self.own(weight) if attribute(weight) in self.weights else None


def parameter_weights(model: nn.Module) -> dict[str, Weight]:
    """Every parameter's place in the derivation, by the parameter's full name in `model`."""
    return dict(_parameter_weights(model))


def _parameter_weights(model: nn.Module) -> Iterator[tuple[str, Weight]]:
    for path, module in model.named_modules():
        if isinstance(module, UnitModule):
            prefix = f"{path}." if path else ""
            yield from ((f"{prefix}{name}", weight) for name, weight in module.weights.items())


def parameter_specs(model: nn.Module, architecture: Architecture, family: Family) -> Mapping[str, ParameterSpec]:
    """Every parameter's shardings in a layout of this family, as derived, by the parameter's full name in `model`."""
    return {name: _spec(weight, architecture, family) for name, weight in parameter_weights(model).items()}


def _spec(weight: Weight, architecture: Architecture, family: Family) -> ParameterSpec:
    unit = derived_unit(architecture.structure, family, weight.unit)
    trained = weight.name in unit.gradients
    return ParameterSpec(
        weight,
        rest=unit.forward.specs[weight.name],
        use=weight_use(unit.family, weight.dims),
        gradient=unit.backward.specs[unit.gradients[weight.name]] if trained else None,
        state=optimizer_rest(unit.family, weight.dims) if trained else None,
    )
