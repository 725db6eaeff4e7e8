"""What narrow products take: where scales follow from the largest sizes of earlier steps, a number for each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from shardwise.derive.derivation import derived_unit
from shardwise.derive.products import products
from shardwise.layout.family import Family
from shardwise.lowering.parameters import unit_paths
from shardwise.model.architecture import Architecture, Structure
from shardwise.model.decoder import LAYERS, PREDICTS, structure_units, unit_counts
from shardwise.symbolic import Polynomial, product, total

COUNTS = {unit: f"num_{unit}" for unit in LAYERS + PREDICTS}  # the symbols for how many layers of a kind there are
ANY = Family(zero_stage=0, sequence_parallel=False, recompute="none")  # a program is the same in every family


@lru_cache(maxsize=1024)
def unit_operands(structure: Structure, name: str) -> tuple[str, ...]:
    """The tensors of a unit that products with its weights take, in the order of the forward and then the backward pass."""
    unit = derived_unit(structure, ANY, name)
    steps = (*unit.forward.steps, *unit.backward_steps)
    return tuple(dict.fromkeys(name for one in products(steps, unit.tensors) for name in one.operation.inputs))


def operands_by_path(architecture: Architecture) -> dict[str, tuple[str, ...]]:
    """Those of every unit that has any, by its path, in the model's order."""
    found = {path: unit_operands(architecture.structure, unit) for path, unit in unit_paths(architecture)}
    return {path: names for path, names in found.items() if names}


def num_operands(structure: Structure) -> Polynomial:
    """How many there are in a model, by the numbers of its layers (`layer_counts`)."""
    names = [name for name in structure_units(structure) if name in COUNTS]
    return total(product([COUNTS[name]], coefficient=len(unit_operands(structure, name))) for name in names)


def layer_counts(architecture: Architecture) -> Mapping[str, int]:
    """The symbols for how many layers of each kind a model has."""
    counts = unit_counts(architecture)
    return {symbol: counts.get(name, 0) for name, symbol in COUNTS.items()}
