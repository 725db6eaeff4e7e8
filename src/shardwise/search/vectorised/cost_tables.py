"""Cost tables on unique keys, from which the cost of each layout is gathered. Entry point: `build_cost_tables`.

*Block* tables depend on (tp, cp, ep, sequence parallelism, micro-batch, recompute) and the links of tp, cp, ep and pp, each row
in its fastest mode; *state* tables on (factorisation, placement, ZeRO stage, recompute) and on the modes that change them;
*schedule* tables on (pp, virtual stages), in `worst_stages.py`. Each is the same evaluation of the derived expressions as for one
layout, with arrays in place of numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.hardware.cluster import Cluster
from shardwise.layout.context_parallel import get_cp_variant
from shardwise.layout.rules.table import legal_modes
from shardwise.layout.sharding_scheme import EXPERT_AXES, TP_AXES, ParallelMode, ShardingScheme, make_scheme_of_mode
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYER_UNITS
from shardwise.model.job import Job
from shardwise.pipeline.registry import get_schedule
from shardwise.pipeline.uneven_stages import UnevenBubble
from shardwise.price.overlap import exposed_s
from shardwise.price.roofline import exposed_share
from shardwise.price.stage_contents import NO_RECOMPUTE, ModelEnds
from shardwise.price.unit_cost import ActivationCost, StateCost, merge_costs
from shardwise.price.unit_inputs import UnitCostInputs, priced_family
from shardwise.search.vectorised.candidates import FamilyKey, PlacementTable, Space
from shardwise.search.vectorised.table_columns import (
    Array,
    Ints,
    are_same_column,
    merge_activation_columns,
    merge_state_columns,
    number_distinct_rows,
)
from shardwise.search.vectorised.table_inputs import TableInputs
from shardwise.search.vectorised.worst_stages import StageTables, WorstStage
from shardwise.values.elementwise import Value, sum_values
from shardwise.values.progress import Progress, ignore_progress


@dataclass(slots=True)
class CostTables:
    """All sub-tables of one search. `block_row[placed row, micro-batch]` numbers the rows of the block tables."""

    activation: Mapping[tuple[int, int], Mapping[str, ActivationCost]]  # (sp, recompute) -> unit -> columns
    mode: Mapping[tuple[int, int], Ints]  # (sp, recompute) -> the fastest mode of each row, by its number
    block_row: Ints
    state: Mapping[tuple[int, int, int], Mapping[str, StateCost]]  # (sp, zero, recompute) -> unit -> columns
    state_offset: Mapping[
        tuple[int, int, int], Ints
    ]  # the same -> what each block row adds to the placed row, by its mode
    stages: Mapping[int, tuple[WorstStage, ...]]  # by schedule: those that can be the worst
    fullest: Mapping[int, Ints]  # by schedule, over (pp, virtual) numbers: layers of the stage that has the most
    stage_row: Ints  # [factorisation, virtual] -> number of (pp, virtual)
    waiting: Mapping[
        int, UnevenBubble | None
    ]  # by schedule, likewise: what uneven virtual stages add; None: nothing anywhere


def build_cost_tables(
    architecture: Architecture,
    cluster: Cluster,
    job: Job,
    space: Space,
    placed: PlacementTable,
    families: Iterable[FamilyKey],
    progress: Progress = ignore_progress,
) -> CostTables:
    """Evaluate every sub-table once, for the families that occur."""
    inputs = TableInputs(architecture, cluster, job, space, placed, tuple(families))
    activation, mode, block_row = _build_block_tables(inputs, progress)
    stages, waits, stage_row = StageTables(inputs).worst_stages()
    fullest = {one: np.max([sum(stage.layers.values()) for stage in worst], axis=0) for one, worst in stages.items()}
    state, offset = _build_state_tables(inputs)
    offsets = {(sp, zero, policy): rows[mode[sp, policy]] for (sp, zero, policy), rows in offset.items()}
    return CostTables(activation, mode, block_row, state, offsets, stages, fullest, stage_row, waits)


def _build_block_tables(
    inputs: TableInputs, progress: Progress
) -> tuple[dict[tuple[int, int], dict[str, ActivationCost]], dict[tuple[int, int], Ints], Ints]:
    """By (sequence parallelism, recompute) the costs of each unit in the fastest mode of each row, and that mode; and the row of
    each placed row with each micro-batch."""
    links = inputs.placement_table.links(
        inputs.cluster.sustained_topology, np.arange(len(inputs.placement_table.placement))
    )
    priced = [
        links.gather_link(TP_AXES),
        links.gather_link(("cp",)),
        links.neighbour_link(("pp",)),
        links.gather_link(EXPERT_AXES),
    ]
    priced += [links.gather_link(TP_AXES + EXPERT_AXES)] if inputs.architecture.num_experts else []
    key = [inputs.degrees[axis] for axis in ("tp", "cp", "ep")]
    key += [np.broadcast_to(v, len(key[0])) for link in priced for v in (link.seconds_per_byte, link.latency_s)]
    rows, inverse = number_distinct_rows(*key)
    sizes = np.array(inputs.space.choices.micro_batch_seqs, dtype=np.int64)
    some = np.repeat(rows, len(sizes))
    row = inverse[:, None] * len(sizes) + np.arange(len(sizes))[None, :]
    either = sorted({key.sequence_parallel for key in inputs.families})
    policies = range(len(inputs.space.choices.recompute))
    best: dict[tuple[int, int], tuple[dict[str, ActivationCost], Ints]] = {}
    for sp in either:  # each with tables of its own: nothing is used twice, and two at once are much memory
        by_mode = ModeTables(inputs, some, np.tile(sizes, len(rows)), sp)
        for policy in policies:
            progress("blocks derived", len(best), len(either) * len(policies))
            best[sp, policy] = by_mode.fastest_costs(policy)
    return {f: costs for f, (costs, _) in best.items()}, {f: mode for f, (_, mode) in best.items()}, row


def _build_state_tables(
    inputs: TableInputs,
) -> tuple[dict[tuple[int, int, int], dict[str, StateCost]], dict[tuple[int, int, int], Ints]]:
    """By (sequence parallelism, ZeRO stage, recompute): columns over the placed rows, once for each mode whose state is
    derived otherwise, one behind the other; and where the rows of each mode begin."""
    priced = StateTables(inputs)
    structures = {(key.sequence_parallel, zero) for key in inputs.families for zero in key.zero_stages}
    policies = range(len(inputs.space.choices.recompute))
    found = {(sp, zero, policy): priced.state_costs(sp, zero, policy) for sp, zero in structures for policy in policies}
    return {key: costs for key, (costs, _) in found.items()}, {key: rows for key, (_, rows) in found.items()}


class ModeTables:
    """Costs of units at some rows in each mode that can run there, and the fastest of these; with sequence parallelism or
    without (`sp` is the number of the choice)."""

    def __init__(self, inputs: TableInputs, rows: Ints, micro_batch: Ints, sp: int) -> None:
        self.inputs = inputs
        self.sequence_parallel = bool(inputs.space.choices.sequence_parallel[sp])
        self.choices, self.job = inputs.space.choices, inputs.job
        self.modes = inputs.modes
        first, self.sizes = number_distinct_rows(
            *(inputs.degrees[axis][rows] for axis in ("tp", "cp", "ep")), micro_batch
        )
        self.num_sizes = len(first)
        self.links = replace(inputs.placement_table.links(inputs.cluster.sustained_topology, rows), sizes=self.sizes)
        last = {get_cp_variant(v).waits_for_last: v for v in self.choices.cp_variant}
        self.values = {waits: inputs.values(rows[first], micro_batch[first], v) for waits, v in last.items()}
        self.degrees = {axis: column[rows] for axis, column in inputs.layout_degrees.items()}
        self.known: dict[Hashable, ActivationCost] = {}
        self.pairs = any(get_schedule(one).runs_pairs for one in self.choices.schedule)

    def fastest_costs(self, policy: int) -> tuple[dict[str, ActivationCost], Ints]:
        """For each unit its cost in the fastest mode of each row, and which mode that is; the first of equals."""
        degrees = {**self.degrees, "sequence_parallel": self.sequence_parallel}
        possible = legal_modes(self.inputs.architecture, self.job, degrees, self.modes, self.choices.mode_rules)
        tried = [number for number, legal in enumerate(possible) if np.any(legal)]
        costs = [self.unit_costs(policy, self.modes[number]) for number in tried]
        seconds = [
            np.where(possible[n], self.layer_seconds(cost), np.inf) for n, cost in zip(tried, costs, strict=True)
        ]
        chosen = np.argmin(np.stack(seconds), axis=0)
        fastest = {unit: self.select_by_mode(chosen, [cost[unit] for cost in costs]) for unit in costs[0]}
        return fastest, np.array(tried, dtype=np.int64)[chosen]

    def unit_costs(self, policy: int, mode: ParallelMode) -> dict[str, ActivationCost]:
        family = make_scheme_of_mode(3, self.sequence_parallel, self.choices.recompute[policy], mode)
        waits = get_cp_variant(mode.cp_variant).waits_for_last
        priced = {u: self.unit_cost(u, family, waits) for u in (*self.inputs.units, "carry")}
        if any(p.recompute == policy and p.layers is not None for p in self.choices.policies):
            plain = replace(family, recompute="none")
            priced |= {NO_RECOMPUTE + u: self.unit_cost(u, plain, waits) for u in self.inputs.units if u in LAYER_UNITS}
        return priced

    def unit_cost(self, name: str, family: ShardingScheme, waits: bool) -> ActivationCost:
        """The cost of a unit, once for all families in which it is derived alike."""
        key = name, priced_family(self.inputs.architecture.structure, family, name), waits
        if key not in self.known:
            cost = self.inputs.pricer.activation(name, family, self.values[waits], self.links)
            measured = self.inputs.cluster.calibration is not None
            self.known[key] = merge_activation_columns(
                cost, self.job.overlap_convention, pairs=self.pairs, measured=measured
            )
        return self.known[key]

    def layer_seconds(self, costs: Mapping[str, ActivationCost]) -> Array:
        """What a mode changes of a layer's time, whatever else overlaps with it; where it was measured, what shows."""
        block, share = costs["block"], exposed_share(self.inputs.cluster)
        work = {"forward": block.forward_s, "backward": block.backward_s + block.recompute_s}
        total: Value = 0.0
        for phase, compute_s in work.items():
            device_s = self.links.per_placement(compute_s)
            traffic = block.forward_traffic_s if phase == "forward" else block.backward_traffic_s
            shown = (
                sum_values(traffic.values())
                if share is None
                else exposed_s(self.job.overlap_convention, device_s, traffic, (), share)
            )
            total = total + device_s + shown
        return np.broadcast_to(total, np.shape(self.degrees["cp"]))

    def select_by_mode(self, chosen: Ints, costs: Sequence[ActivationCost]) -> ActivationCost:
        """Each column from the cost that was chosen for its row. What depends on sizes alone has a value for each row only here:
        in all modes it would take more memory than the tables."""
        rows = chosen * self.num_sizes + self.sizes  # of columns over sizes, one behind the other

        def of_sizes(columns: Sequence[Value]) -> Value:
            if are_same_column(columns):
                return self.links.per_placement(columns[0])
            return np.concatenate([np.broadcast_to(column, self.num_sizes) for column in columns]).take(rows)

        def of_traffic(columns: Sequence[Value]) -> Value:
            return columns[0] if are_same_column(columns) else np.choose(chosen, columns)

        return merge_costs(costs, of_sizes, of_traffic)


class StateTables:
    """Prices the units' state over all placed rows; equal derivations share one table."""

    def __init__(self, inputs: TableInputs) -> None:
        self.inputs, self.choices = inputs, inputs.space.choices
        self.num_rows = len(inputs.placement_table.placement)
        placed = inputs.placement_table
        self.links = replace(
            placed.links(inputs.cluster.sustained_topology, np.arange(self.num_rows)), sizes=placed.factorisation
        )
        self.values = inputs.values(placed.first, np.ones_like(placed.first))
        self.known: dict[Hashable, StateCost] = {}
        self.numbers: dict[Hashable, int] = {}
        self.number_of: dict[int, tuple[UnitCostInputs, int]] = {}

    def state_costs(self, sp: int, zero: int, policy: int) -> tuple[dict[str, StateCost], Ints]:
        """The cost of each unit in each mode that is derived otherwise than those before it, and where each mode's rows begin.

        Modes are distinguished by what they move under ZeRO-3, which moves the most and is derived for the block tables anyway.
        Below it no pass gathers weights, so that recomputation changes nothing.
        """
        stage, sequence_parallel = self.choices.zero_stage[zero], bool(self.choices.sequence_parallel[sp])
        recompute = self.choices.recompute[policy]
        keys = [self.key(make_scheme_of_mode(3, sequence_parallel, recompute, mode)) for mode in self.inputs.modes]
        different = list(dict.fromkeys(keys))
        modes = [self.inputs.modes[keys.index(key)] for key in different]
        families = [
            make_scheme_of_mode(stage, sequence_parallel, recompute if stage == 3 else "none", mode) for mode in modes
        ]
        held = (*self.inputs.units, *ModelEnds.of(self.inputs.architecture).units_without_passes)
        costs = {unit: self.unit_cost(unit, families) for unit in held}
        return costs, np.array([different.index(key) * self.num_rows for key in keys], dtype=np.int64)

    def key(self, family: ShardingScheme) -> Hashable:
        return tuple(self.state_number(family, unit) for unit in self.inputs.units)

    def state_number(self, family: ShardingScheme, unit: str) -> int:
        """The number of what a unit's state is derived as; each is looked at once."""
        parts = self.parts(family, unit)
        if id(parts) not in self.number_of:
            self.number_of[id(parts)] = parts, self.numbers.setdefault(parts.state_key, len(self.numbers))
        return self.number_of[id(parts)][1]

    def parts(self, family: ShardingScheme, unit: str) -> UnitCostInputs:
        return self.inputs.pricer.parts(self.inputs.pricer.complete_family(family), unit)

    def unit_cost(self, name: str, families: Sequence[ShardingScheme]) -> StateCost:
        """The columns of a unit in each family."""
        key = name, families[0].zero_stage, tuple(self.state_number(family, name) for family in families)
        if key not in self.known:
            costs = [self.inputs.pricer.state(name, family, self.values, self.links) for family in families]
            self.known[key] = merge_state_columns(
                _concatenate_costs(costs, self.num_rows),
                self.inputs.job.overlap_convention,
                offloads=self.choices.offloads_optimizer,
            )
        return self.known[key]


def _concatenate_costs(costs: Sequence[StateCost], num_rows: int) -> StateCost:
    """Each column of the first cost, then that of the next; what is one number for all of them stays one."""

    def column(parts: Sequence[Value]) -> Value:
        if all(np.ndim(part) == 0 and part == parts[0] for part in parts):
            return parts[0]
        return np.concatenate([np.broadcast_to(part, num_rows) for part in parts])

    return costs[0] if len(costs) == 1 else merge_costs(costs, column)
