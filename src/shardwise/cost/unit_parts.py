"""Everything of a unit that costs something, read off its instructions and its derivation once."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import NamedTuple

from shardwise.cost.formats import Products, Saved, products_of, waiting_of
from shardwise.cost.workspace import Held, held_of
from shardwise.derive.derivation import Unit
from shardwise.derive.shardings import optimizer_rest, weight_rest, weight_use
from shardwise.issuing import IssuePolicy
from shardwise.layout.family import Family
from shardwise.lowering.kernels import Kernel
from shardwise.lowering.template import unit_template
from shardwise.lowering.traffic import Traffic
from shardwise.model.architecture import Structure
from shardwise.model.program import Role
from shardwise.symbolic import Polynomial, total


class State(NamedTuple):
    """Elements of a unit's weights on one device: as used and as they rest, those with gradients as used and as the optimizer
    has them, and of these as used but for experts'."""

    used: Polynomial
    resting: Polynomial
    trained: Polynomial
    shard: Polynomial
    passing: Polynomial


def _state_of(unit: Unit, family: Family) -> State:
    dims, trained = unit.weights.values(), unit.trained.values()
    return State(
        total(weight_use(family, d).local_elements() for d in dims),
        total(weight_rest(family, d).local_elements() for d in dims),
        total(weight_use(family, d).local_elements() for d in trained),
        total(optimizer_rest(family, d).local_elements() for d in trained),
        total(weight_use(family, d).local_elements() for d in trained if "E" not in d),
    )


class Parts(NamedTuple):
    """Everything of a unit that costs something, taken from its derivation once."""

    unit: Unit
    kernels: tuple[Kernel, ...]
    collectives: tuple[Traffic, ...]
    products: Products
    waiting: tuple[Saved, ...]
    routed: bool
    state: State

    @property
    def state_collectives(self) -> tuple[Traffic, ...]:
        """Those that move weights and gradients, and control traffic."""
        return tuple(moved for moved in self.collectives if moved.carries_weights or moved.is_control)

    @property
    def state_key(self) -> Hashable:
        """Equal for two units whose state, update, weight and gradient traffic cost the same at any sizes."""
        update = tuple(tuple(kernel.elements.items()) for kernel in self.kernels if kernel.phase == "update")
        return self.state_collectives, update, bool(self.products.operands), self.state


def charged_to(one: Traffic) -> str:
    """The time term that a collective counts in: those of weights are ZeRO's, over whichever axes, but for what replicas reduce
    once per step; and so is what routers counted, where it moves with every micro-batch."""
    group = one.group
    if one.carries_weights or one.is_control:
        return group if one.scope == "step" and group in ("dp", "control") else "fsdp"
    return group


@lru_cache(maxsize=1024)
def parts_of(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> Parts:
    template = unit_template(structure, family, name, policy)
    unit, launched = template.unit, template.kernels
    return Parts(
        unit,
        launched,
        template.traffic,
        products_of(unit),
        waiting_of(unit, launched),
        bool(unit.forward.program.named(Role.ROUTED)),
        _state_of(unit, family),
    )


@lru_cache(maxsize=1024)
def held_in(structure: Structure, family: Family, name: str, policy: IssuePolicy) -> tuple[Held, ...]:
    """What a unit holds at the moments of its backward pass that may be the fullest."""
    parts = parts_of(structure, family, name, policy)
    return held_of(parts.unit, parts.products.operands)
