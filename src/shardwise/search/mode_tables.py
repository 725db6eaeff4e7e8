"""Costs of units in the fastest mode of each row."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from shardwise.cost.counts import KEPT
from shardwise.cost.overlap import exposed_s
from shardwise.cost.rates import exposed_share
from shardwise.cost.unit_costs import ActivationCost, merged
from shardwise.cost.unit_parts import priced_family
from shardwise.layout.context import variant_of
from shardwise.layout.family import Family, Mode, mode_family
from shardwise.layout.legality import possible_modes
from shardwise.model.decoder import LAYERS
from shardwise.schedule.schedule import schedule_of
from shardwise.search.columns import Array, Ints, alike, codes
from shardwise.search.lean import lean_activation
from shardwise.search.table_inputs import TableInputs
from shardwise.symbolic import Value, added


class ModeTables:
    """Costs of units at some rows in each mode that can run there, and the fastest of these; with sequence parallelism or
    without (`sp` is the number of the choice)."""

    def __init__(self, inputs: TableInputs, rows: Ints, micro_batch: Ints, sp: int) -> None:
        self.inputs = inputs
        self.sequence_parallel = bool(inputs.space.choices.sequence_parallel[sp])
        self.choices, self.job = inputs.space.choices, inputs.job
        self.modes = inputs.modes
        first, self.sizes = codes(*(inputs.degrees[axis][rows] for axis in ("tp", "cp", "ep")), micro_batch)
        self.num_sizes = len(first)
        self.links = replace(inputs.placed.links(inputs.cluster.reached, rows), sizes=self.sizes)
        last = {variant_of(v).waits_for_last: v for v in self.choices.cp_variant}
        self.values = {waits: inputs.values(rows[first], micro_batch[first], v) for waits, v in last.items()}
        self.degrees = {axis: column[rows] for axis, column in inputs.whole.items()}
        self.known: dict[Hashable, ActivationCost] = {}
        self.pairs = any(schedule_of(one).pairs for one in self.choices.schedule)

    def fastest(self, policy: int) -> tuple[dict[str, ActivationCost], Ints]:
        """For each unit its cost in the fastest mode of each row, and which mode that is; the first of equals."""
        degrees = {**self.degrees, "sequence_parallel": self.sequence_parallel}
        possible = possible_modes(self.inputs.architecture, self.job, degrees, self.modes, self.choices.mode_rules)
        tried = [number for number, legal in enumerate(possible) if np.any(legal)]
        costs = [self.costs(policy, self.modes[number]) for number in tried]
        seconds = [np.where(possible[n], self.seconds(cost), np.inf) for n, cost in zip(tried, costs, strict=True)]
        chosen = np.argmin(np.stack(seconds), axis=0)
        fastest = {unit: self.combined(chosen, [cost[unit] for cost in costs]) for unit in costs[0]}
        return fastest, np.array(tried, dtype=np.int64)[chosen]

    def costs(self, policy: int, mode: Mode) -> dict[str, ActivationCost]:
        family = mode_family(3, self.sequence_parallel, self.choices.recompute[policy], mode)
        waits = variant_of(mode.cp_variant).waits_for_last
        priced = {u: self.unit(u, family, waits) for u in (*self.inputs.units, "carry")}
        if any(p.recompute == policy and p.layers is not None for p in self.choices.policies):
            plain = replace(family, recompute="none")
            priced |= {KEPT + u: self.unit(u, plain, waits) for u in self.inputs.units if u in LAYERS}
        return priced

    def unit(self, name: str, family: Family, waits: bool) -> ActivationCost:
        """The cost of a unit, once for all families in which it is derived alike."""
        key = name, priced_family(self.inputs.architecture.structure, family, name), waits
        if key not in self.known:
            cost = self.inputs.pricer.activation(name, family, self.values[waits], self.links)
            measured = self.inputs.cluster.calibration is not None
            self.known[key] = lean_activation(cost, self.job.convention, pairs=self.pairs, measured=measured)
        return self.known[key]

    def seconds(self, costs: Mapping[str, ActivationCost]) -> Array:
        """What a mode changes of a layer's time, whatever else overlaps with it; where it was measured, what shows."""
        block, share = costs["block"], exposed_share(self.inputs.cluster)
        work = {"forward": block.forward_s, "backward": block.backward_s + block.recompute_s}
        total: Value = 0.0
        for phase, compute_s in work.items():
            device_s = self.links.along(compute_s)
            traffic = block.forward_traffic_s if phase == "forward" else block.backward_traffic_s
            shown = (
                added(traffic.values())
                if share is None
                else exposed_s(self.job.convention, device_s, traffic, (), share)
            )
            total = total + device_s + shown
        return np.broadcast_to(total, np.shape(self.degrees["cp"]))

    def combined(self, chosen: Ints, costs: Sequence[ActivationCost]) -> ActivationCost:
        """Each column from the cost that was chosen for its row. What depends on sizes alone has a value for each row only here:
        in all modes it would take more memory than the tables."""
        rows = chosen * self.num_sizes + self.sizes  # of columns over sizes, one behind the other

        def of_sizes(columns: Sequence[Value]) -> Value:
            if alike(columns):
                return self.links.along(columns[0])
            return np.concatenate([np.broadcast_to(column, self.num_sizes) for column in columns]).take(rows)

        def of_traffic(columns: Sequence[Value]) -> Value:
            return columns[0] if alike(columns) else np.choose(chosen, columns)

        return merged(costs, of_sizes, of_traffic)
