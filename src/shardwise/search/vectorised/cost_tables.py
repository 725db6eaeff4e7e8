"""Cost tables on unique keys, from which the cost of each layout is gathered. Entry point: `build_cost_tables`.

*Block* tables depend on (tp, cp, ep, sequence parallelism, micro-batch, recompute) and the links of tp, cp, ep and pp, each row
in its fastest mode; *state* tables on (factorisation, placement, ZeRO stage, recompute) and on the modes that change them;
*schedule* tables on (pp, virtual stages), in `worst_stages.py`. Each is the same evaluation of the derived expressions as for one
layout, with arrays in place of numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from shardwise.layout import (
    EXPERT_AXES,
    TP_AXES,
    Layout,
    ShardingScheme,
    atomic_degrees,
    get_cp_variant,
    make_sharding_scheme,
)
from shardwise.layout.rules.table import legal_modes
from shardwise.layout.sharding_scheme import ParallelMode
from shardwise.model import BASE_LAYER, is_layer, unit_counts
from shardwise.pipeline import get_schedule
from shardwise.pipeline.uneven_stage_costs import UnevenBubble
from shardwise.price import NO_RECOMPUTE, Problem, StateCost, loss_kind
from shardwise.price.overlap import exposed_s
from shardwise.price.roofline import chip_rates, exposed_share
from shardwise.price.stage_contents import ModelEnds
from shardwise.price.unit_cost import ActivationCost, UnitPricer, merge_costs
from shardwise.price.unit_inputs import UnitCostInputs, priced_scheme
from shardwise.price.unit_values import UnitValues, unit_values
from shardwise.search.vectorised.candidates import FamilyKey, PlacementTable, Space
from shardwise.search.vectorised.table_columns import (
    Array,
    Ints,
    are_same_column,
    merge_activation_columns,
    merge_state_columns,
    number_distinct_rows,
)
from shardwise.search.vectorised.worst_stages import WorstStage, worst_stages
from shardwise.values import Progress, SymbolValues, Value, get_precision, ignore_progress, sum_values
from shardwise.values.symbolic import CachedSymbolValues


class TableInputs:
    """The question of a search, its placement rows, the families that occur, and the pricer of units."""

    def __init__(
        self, problem: Problem, space: Space, placed: PlacementTable,
        families: tuple[FamilyKey, ...],
    ) -> None:  # fmt: skip
        architecture, cluster, job = problem.architecture, problem.cluster, problem.job
        self.architecture, self.cluster, self.job, self.space = architecture, cluster, job, space
        self.placement_table, self.families = placed, families
        precision = get_precision(job.precision)
        self.pricer = UnitPricer(
            chip_rates(cluster.chip, cluster.calibration, architecture.name),
            precision,
            loss_kind(cluster, job),
            job.optimizer,
            attention=job.attention,
            dropout=job.dropout,
        )
        self.base_scheme = make_sharding_scheme(
            Layout(), architecture.structure, optimizer=job.optimizer, shares_amax=precision.shares_amax
        )
        self.layout_degrees = {axis: column[placed.factorisation] for axis, column in space.degrees.items()}
        self.degrees = atomic_degrees(architecture, self.layout_degrees)
        self.units = tuple(unit_counts(architecture))
        self.modes = space.choices.modes(architecture)

    def scheme(self, zero_stage: int, sequence_parallel: bool, recompute: str) -> ShardingScheme:
        """Return the scheme of layouts with these choices in the plainest mode; `with_mode` gives the others."""
        return replace(
            self.base_scheme, zero_stage=zero_stage, sequence_parallel=sequence_parallel, recompute=recompute
        )

    def values(self, rows: Ints, micro_batch: Ints, cp_variant: str = "all_gather") -> UnitValues:
        degrees = {axis: column[rows] for axis, column in self.degrees.items()} | {"micro_batch_seqs": micro_batch}

        def make(unit: str) -> SymbolValues:
            job = self.job
            return CachedSymbolValues(
                unit_values(self.architecture, job.seq_len, degrees, cp_variant, job.attended_tokens, unit=unit)
            )

        return UnitValues(self.architecture, make)


@dataclass(slots=True)
class CostTables:
    """All sub-tables of one search. `block_row[placement row, micro-batch]` numbers the rows of the block tables.

    Keys are indices of choices: sequence parallelism (sp), ZeRO stage (zero), recompute."""

    activation: Mapping[tuple[int, int], Mapping[str, ActivationCost]]  # (sp, recompute) -> unit -> columns
    mode: Mapping[tuple[int, int], Ints]  # (sp, recompute) -> the fastest mode of each row, by its number
    block_row: Ints
    state: Mapping[tuple[int, int, int], Mapping[str, StateCost]]  # (sp, zero, recompute) -> unit -> columns
    # Same keys -> what each block row adds to a placement row to find its mode in the state columns.
    state_offset: Mapping[tuple[int, int, int], Ints]
    stages: Mapping[int, tuple[WorstStage, ...]]  # by schedule: stages that can be the worst
    fullest: Mapping[int, Ints]  # by schedule, over (pp, virtual) numbers: layers of the stage that has the most
    stage_row: Ints  # [factorisation, virtual] -> number of (pp, virtual)
    waiting: Mapping[
        int, UnevenBubble | None
    ]  # by schedule: what uneven virtual stages add to the bubble; None: nothing


def build_cost_tables(inputs: TableInputs, progress: Progress = ignore_progress) -> CostTables:
    """Evaluate every sub-table once, for the families that occur."""
    activation, mode, block_row = _build_block_tables(inputs, progress)
    stages, waiting, stage_row = worst_stages(inputs.architecture, inputs.space, inputs.families)
    fullest = {
        number: np.max([sum_values(stage.layers.values()) for stage in worst], axis=0)
        for number, worst in stages.items()
    }
    state, offset = _build_state_tables(inputs, _modes_in_use(mode))
    offsets = {(sp, zero, policy): rows[mode[sp, policy]] for (sp, zero, policy), rows in offset.items()}
    return CostTables(activation, mode, block_row, state, offsets, stages, fullest, stage_row, waiting)


def _build_block_tables(
    inputs: TableInputs, progress: Progress
) -> tuple[dict[tuple[int, int], dict[str, ActivationCost]], dict[tuple[int, int], Ints], Ints]:
    """Price each unit in its fastest mode, by (sequence parallelism, recompute).

    Returns the costs, the mode of each row, and the row of each placement row with each micro-batch."""
    links = inputs.placement_table.links(
        inputs.cluster.sustained_topology, np.arange(len(inputs.placement_table.placement))
    )
    priced_links = [
        links.gather_link(TP_AXES), links.gather_link(("cp",)), links.neighbour_link(("pp",)), links.gather_link(EXPERT_AXES)
    ]  # fmt: skip
    priced_links += [links.gather_link(TP_AXES + EXPERT_AXES)] if inputs.architecture.num_experts else []
    reducing_links = (links.all_reduce_link(axes) for axes in (TP_AXES, ("cp",), EXPERT_AXES))
    priced_links += [link for link in reducing_links if link is not None]
    key = [inputs.degrees[axis] for axis in ("tp", "cp", "ep")]
    key += [np.broadcast_to(x, len(key[0])) for link in priced_links for x in (link.seconds_per_byte, link.latency_s)]
    rows, inverse = number_distinct_rows(*key)
    sizes = np.array(inputs.space.choices.micro_batch_seqs, dtype=np.int64)
    repeated_rows = np.repeat(rows, len(sizes))
    block_row = inverse[:, None] * len(sizes) + np.arange(len(sizes))[None, :]
    sequence_parallels = sorted({key.sequence_parallel for key in inputs.families})
    policies = range(len(inputs.space.choices.recompute))
    best: dict[tuple[int, int], tuple[dict[str, ActivationCost], Ints]] = {}
    for sp in sequence_parallels:  # tables of its own for each: nothing is shared, and two at once take much memory
        by_mode = ModeTables(inputs, repeated_rows, np.tile(sizes, len(rows)), sp)
        for policy in policies:
            progress("blocks derived", len(best), len(sequence_parallels) * len(policies))
            best[sp, policy] = by_mode.fastest_costs(policy)
    return ({k: costs for k, (costs, _) in best.items()}, {k: mode for k, (_, mode) in best.items()}, block_row)


def _modes_in_use(mode: Mapping[tuple[int, int], Ints]) -> dict[int, list[int]]:
    """Return the numbers of the modes that are the fastest of any row, by sequence parallelism.

    They are the same for all recompute policies, so that these share state columns."""
    numbers: dict[int, set[int]] = {}
    for (sp, _), chosen in mode.items():
        numbers.setdefault(sp, set()).update(np.unique(chosen).tolist())
    return {sp: sorted(members) for sp, members in numbers.items()}


def _build_state_tables(
    inputs: TableInputs, modes_in_use: Mapping[int, Sequence[int]]
) -> tuple[dict[tuple[int, int, int], dict[str, StateCost]], dict[tuple[int, int, int], Ints]]:
    """Price the units' state over the placement rows, by (sequence parallelism, ZeRO stage, recompute).

    Modes whose state is derived differently follow one another in a column; also returns where the rows of each mode begin.
    Modes that no row is in are not derived."""
    states = StateTables(inputs, modes_in_use)
    structures = {(key.sequence_parallel, zero) for key in inputs.families for zero in key.zero_stages}
    policies = range(len(inputs.space.choices.recompute))
    tables = {
        (sp, zero, policy): states.state_costs(sp, zero, policy) for sp, zero in structures for policy in policies
    }
    return {key: costs for key, (costs, _) in tables.items()}, {key: rows for key, (_, rows) in tables.items()}


class ModeTables:
    """Costs of units at some rows in each mode that can run there, and the fastest of these.

    With or without sequence parallelism (`sp` is the index of the choice)."""

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
        variants = {get_cp_variant(variant).waits_for_last: variant for variant in self.choices.cp_variant}
        self.values = {
            waits: inputs.values(rows[first], micro_batch[first], variant) for waits, variant in variants.items()
        }
        self.degrees = {axis: column[rows] for axis, column in inputs.layout_degrees.items()}
        self.memo: dict[Hashable, ActivationCost] = {}
        self.pairs = any(get_schedule(name).runs_pairs for name in self.choices.schedule)

    def fastest_costs(self, policy: int) -> tuple[dict[str, ActivationCost], Ints]:
        """Return each unit's cost in the fastest mode of each row, and the index of that mode; of equals the first."""
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
        scheme = self.inputs.scheme(3, self.sequence_parallel, self.choices.recompute[policy]).with_mode(mode)
        waits = get_cp_variant(mode.cp_variant).waits_for_last
        costs = {unit: self.unit_cost(unit, scheme, waits) for unit in (*self.inputs.units, "carry")}
        if any(choice.recompute == policy and choice.layers is not None for choice in self.choices.policies):
            plain = scheme.with_recompute("none")
            costs |= {
                NO_RECOMPUTE + unit: self.unit_cost(unit, plain, waits) for unit in filter(is_layer, self.inputs.units)
            }
        return costs

    def unit_cost(self, name: str, scheme: ShardingScheme, waits: bool) -> ActivationCost:
        """Return the cost of a unit, computed once for all schemes that derive it alike."""
        # The mode itself is not in the key: schemes that differ only in what this unit has no part in price it alike. Ring
        # attention waits for the last rank, which its sizes depend on.
        key = name, priced_scheme(scheme, name), waits
        if key not in self.memo:
            cost = self.inputs.pricer.activation(name, scheme, self.values[waits].of(name), self.links)
            measured = self.inputs.cluster.calibration is not None
            self.memo[key] = merge_activation_columns(
                cost, self.job.overlap_convention, pairs=self.pairs, measured=measured
            )
        return self.memo[key]

    def layer_seconds(self, costs: Mapping[str, ActivationCost]) -> Array:
        """Return the part of the layers' time that depends on the mode: that of a base layer, or of all layers of a pattern."""
        architecture = self.inputs.architecture
        counts = architecture.layer_counts if architecture.layer_pattern else {BASE_LAYER: 1}
        total = sum_values(self.unit_seconds(costs[unit]) * count for unit, count in counts.items())
        return np.broadcast_to(total, np.shape(self.degrees["cp"]))

    def unit_seconds(self, cost: ActivationCost) -> Value:
        """Return the seconds of a layer that depend on the mode; under a measured stack communication as exposed."""
        share = exposed_share(self.inputs.cluster)
        compute_by_phase = {"forward": cost.forward_s, "backward": cost.backward_s + cost.recompute_s}
        total: Value = 0.0
        for phase, compute_s in compute_by_phase.items():
            device_s = self.links.per_placement(compute_s)
            traffic = cost.forward_traffic_s if phase == "forward" else cost.backward_traffic_s
            visible_s = (
                sum_values(traffic.values())
                if share is None
                else exposed_s(self.job.overlap_convention, device_s, traffic, (), share)
            )
            total = total + device_s + visible_s
        return total

    def select_by_mode(self, chosen: Ints, costs: Sequence[ActivationCost]) -> ActivationCost:
        """Select each column from the cost of the mode that was chosen for its row.

        Columns over sizes get a value for each row only here: in all modes they would take more memory than the tables."""
        # Columns over sizes are concatenated mode after mode; row i takes its size's value in the block of its mode.
        rows = chosen * self.num_sizes + self.sizes

        def select_sizes(columns: Sequence[Value]) -> Value:
            if are_same_column(columns):
                return self.links.per_placement(columns[0])
            return np.concatenate([np.broadcast_to(column, self.num_sizes) for column in columns]).take(rows)

        def select_traffic(columns: Sequence[Value]) -> Value:
            return columns[0] if are_same_column(columns) else np.choose(chosen, columns)

        return merge_costs(costs, select_sizes, select_traffic)


class StateTables:
    """Prices the units' state over all placement rows; equal derivations share one table."""

    def __init__(self, inputs: TableInputs, modes_in_use: Mapping[int, Sequence[int]]) -> None:
        self.inputs, self.choices, self.modes_in_use = inputs, inputs.space.choices, modes_in_use
        self.num_rows = len(inputs.placement_table.placement)
        placed = inputs.placement_table
        self.links = replace(
            placed.links(inputs.cluster.sustained_topology, np.arange(self.num_rows)), sizes=placed.factorisation
        )
        self.values = inputs.values(placed.first, np.ones_like(placed.first))
        self.memo: dict[Hashable, StateCost] = {}
        self.numbers: dict[Hashable, int] = {}
        self.number_of: dict[int, tuple[UnitCostInputs, int]] = {}

    def state_costs(self, sp: int, zero: int, policy: int) -> tuple[dict[str, StateCost], Ints]:
        """Return the cost of each unit in each mode that is derived differently, and where the rows of each mode in use begin.

        Modes are distinguished by what they move under ZeRO-3, which moves the most and is derived for the block tables anyway.
        Below it no pass gathers weights, so recomputation changes nothing."""
        zero_stage, sequence_parallel = self.choices.zero_stage[zero], bool(self.choices.sequence_parallel[sp])
        recompute = self.choices.recompute[policy]
        most_moved = self.inputs.scheme(3, sequence_parallel, recompute)
        modes = self.inputs.modes
        keys = {number: self.key(most_moved.with_mode(modes[number])) for number in self.modes_in_use[sp]}
        first_with_key: dict[Hashable, int] = {}
        for number, key in keys.items():
            first_with_key.setdefault(key, number)
        base = self.inputs.scheme(zero_stage, sequence_parallel, recompute if zero_stage == 3 else "none")
        schemes = [base.with_mode(modes[number]) for number in first_with_key.values()]
        units = (*self.inputs.units, *ModelEnds.of(self.inputs.architecture).units_without_passes)
        costs = {unit: self.unit_cost(unit, schemes) for unit in units}
        first_row = np.zeros(len(modes), dtype=np.int64)  # 0 for modes that are not in use, whose rows nothing reads
        order = list(first_with_key)
        for number, key in keys.items():
            first_row[number] = order.index(key) * self.num_rows
        return costs, first_row

    def key(self, scheme: ShardingScheme) -> Hashable:
        return tuple(self.state_number(scheme, unit) for unit in self.inputs.units)

    def state_number(self, scheme: ShardingScheme, unit: str) -> int:
        """Return a number that is equal for schemes in which the unit's state is derived alike."""
        parts = self.parts(scheme, unit)
        if id(parts) not in self.number_of:  # holds `parts`, so that their id is not used again
            self.number_of[id(parts)] = parts, self.numbers.setdefault(parts.state_key, len(self.numbers))
        return self.number_of[id(parts)][1]

    def parts(self, scheme: ShardingScheme, unit: str) -> UnitCostInputs:
        return self.inputs.pricer.parts(scheme, unit)

    def unit_cost(self, name: str, schemes: Sequence[ShardingScheme]) -> StateCost:
        """Return the columns of a unit in each scheme."""
        key = name, schemes[0].zero_stage, tuple(self.state_number(scheme, name) for scheme in schemes)
        if key not in self.memo:
            costs = [self.inputs.pricer.state(name, scheme, self.values.of(name), self.links) for scheme in schemes]
            self.memo[key] = merge_state_columns(
                _concatenate_costs(costs, self.num_rows),
                self.inputs.job.overlap_convention,
                offloads=self.choices.offloads_optimizer,
            )
        return self.memo[key]


def _concatenate_costs(costs: Sequence[StateCost], num_rows: int) -> StateCost:
    """Concatenate each column of the costs; a number that all of them share stays one number."""

    def column(parts: Sequence[Value]) -> Value:
        if all(np.ndim(part) == 0 and part == parts[0] for part in parts):
            return parts[0]
        return np.concatenate([np.broadcast_to(part, num_rows) for part in parts])

    return costs[0] if len(costs) == 1 else merge_costs(costs, column)
