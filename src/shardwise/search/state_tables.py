"""Costs of the state of units over all placed rows."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np

from shardwise.cost.counts import Model
from shardwise.cost.unit_costs import StateCost, merged
from shardwise.cost.unit_parts import Parts
from shardwise.layout.family import Family, mode_family
from shardwise.search.columns import Ints
from shardwise.search.lean import lean_state
from shardwise.search.table_inputs import TableInputs
from shardwise.symbolic import Value


class StateTables:
    """Prices the units' state over all placed rows; equal derivations share one table."""

    def __init__(self, inputs: TableInputs) -> None:
        self.inputs, self.choices = inputs, inputs.space.choices
        self.num_rows = len(inputs.placed.placement)
        placed = inputs.placed
        self.links = replace(placed.links(inputs.cluster.reached, np.arange(self.num_rows)), sizes=placed.factorisation)
        self.values = inputs.values(placed.first, np.ones_like(placed.first))
        self.known: dict[Hashable, StateCost] = {}
        self.numbers: dict[Hashable, int] = {}
        self.number_of: dict[int, tuple[Parts, int]] = {}

    def units(self, sp: int, zero: int, policy: int) -> tuple[dict[str, StateCost], Ints]:
        """The cost of each unit in each mode that is derived otherwise than those before it, and where each mode's rows begin.

        Modes are distinguished by what they move under ZeRO-3, which moves the most and is derived for the block tables anyway.
        Below it no pass gathers weights, so that recomputation changes nothing.
        """
        stage, sequence_parallel = self.choices.zero_stage[zero], bool(self.choices.sequence_parallel[sp])
        recompute = self.choices.recompute[policy]
        keys = [self.key(mode_family(3, sequence_parallel, recompute, mode)) for mode in self.inputs.modes]
        different = list(dict.fromkeys(keys))
        modes = [self.inputs.modes[keys.index(key)] for key in different]
        families = [mode_family(stage, sequence_parallel, recompute if stage == 3 else "none", mode) for mode in modes]
        held = (*self.inputs.units, *Model.of(self.inputs.architecture).held_apart)
        costs = {unit: self.unit(unit, families) for unit in held}
        return costs, np.array([different.index(key) * self.num_rows for key in keys], dtype=np.int64)

    def key(self, family: Family) -> Hashable:
        return tuple(self.number(family, unit) for unit in self.inputs.units)

    def number(self, family: Family, unit: str) -> int:
        """The number of what a unit's state is derived as; each is looked at once."""
        parts = self.parts(family, unit)
        if id(parts) not in self.number_of:
            self.number_of[id(parts)] = parts, self.numbers.setdefault(parts.state_key, len(self.numbers))
        return self.number_of[id(parts)][1]

    def parts(self, family: Family, unit: str) -> Parts:
        return self.inputs.pricer.parts(self.inputs.pricer.of_structure(family), unit)

    def unit(self, name: str, families: Sequence[Family]) -> StateCost:
        """The columns of a unit in each family."""
        key = name, families[0].zero_stage, tuple(self.number(family, name) for family in families)
        if key not in self.known:
            costs = [self.inputs.pricer.state(name, family, self.values, self.links) for family in families]
            self.known[key] = lean_state(
                _stacked(costs, self.num_rows), self.inputs.job.convention, offloads=self.choices.offloads_optimizer
            )
        return self.known[key]


def _stacked(costs: Sequence[StateCost], num_rows: int) -> StateCost:
    """Each column of the first cost, then that of the next; what is one number for all of them stays one."""

    def column(parts: Sequence[Value]) -> Value:
        if all(np.ndim(part) == 0 and part == parts[0] for part in parts):
            return parts[0]
        return np.concatenate([np.broadcast_to(part, num_rows) for part in parts])

    return costs[0] if len(costs) == 1 else merged(costs, column)
