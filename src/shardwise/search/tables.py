"""Sub-tables on unique keys: the cost of a layout is gathered from them, not computed for each layout.

*Block* tables depend on (tp, cp, ep, sequence parallelism, micro-batch, recompute) and the links of tp, cp, ep and pp; *state*
tables on (factorisation, placement, ZeRO stage, recompute) and on the modes that change them; *schedule* tables on (pp,
virtual stages). Each is the same evaluation of the derived expressions as for one layout, with arrays in place of numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Cluster
from shardwise.cost.counts import KEPT, Model
from shardwise.cost.overlap import convention_of, exposed_s
from shardwise.cost.rates import exposed_share, loss_of, rates_of
from shardwise.cost.unit import UnitPricer, unit_values
from shardwise.cost.unit_costs import ActivationCost, StateCost, Traffic, merged
from shardwise.cost.unit_parts import Parts, priced_family
from shardwise.job import Job, Overlap, precision_named
from shardwise.layout.context import variant_of
from shardwise.layout.family import EXPERT, TP, Family, Mode, atomic_degrees, mode_family
from shardwise.layout.legality import possible_modes
from shardwise.layout.stages import MOST_EMPTY, dense_layers, even_virtual_stages, evenly_placed
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS, unit_counts
from shardwise.progress import Progress, silent
from shardwise.schedule.schedule import NATURAL, natural_schedule, schedule_of
from shardwise.schedule.uneven import NONE, Waiting, waiting
from shardwise.search.placed import Placed
from shardwise.search.space import FamilyKey, Space
from shardwise.symbolic import FrozenValues, Value, Values, added

Ints = NDArray[np.int64]
Array = NDArray[Any]


def codes(*columns: Array) -> tuple[Ints, Ints]:
    """Number the distinct rows of some columns: (a row that represents each number, the number of each row)."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        code = code * len(values) + inverse
        # keep the numbers small, so that columns never overflow
        _, code = np.unique(code, return_inverse=True)
    _, first, inverse = np.unique(code, return_index=True, return_inverse=True)
    return first, inverse


class Gathered:
    """Columns of cost tables at some rows; each is gathered on first use. With several tables, one for each ZeRO stage, a
    column has a line from each, unless all of them are equal."""

    def __init__(self, costs: Sequence[ActivationCost | StateCost], rows: Ints) -> None:
        self._costs = costs
        self._rows = rows
        self._got: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        got: dict[str, Any] = self.__dict__["_got"]
        if name not in got:
            columns = [getattr(cost, name) for cost in self._costs]
            by_axis = isinstance(columns[0], Mapping)
            got[name] = _Taken(columns, self._rows) if by_axis else _taken(columns, self._rows)
        return got[name]


class _Taken(dict[str, Any]):
    """Columns by axis at some rows, gathered likewise."""

    def __init__(self, columns: Sequence[Mapping[str, Any]], rows: Ints) -> None:
        super().__init__()
        self._columns, self._rows = columns, rows

    def __missing__(self, axis: str) -> Any:
        self[axis] = _taken([column[axis] for column in self._columns], self._rows)
        return self[axis]


def _alike(columns: Sequence[Value]) -> bool:
    """Whether all are one column, or one number."""
    first = columns[0]
    return all(
        column is first or (np.ndim(column) == 0 and np.ndim(first) == 0 and column == first) for column in columns
    )


def _taken(columns: Sequence[Any], rows: Ints) -> Any:
    first = columns[0]
    if _alike(columns):
        return first.take(rows, mode="clip") if np.ndim(first) else first
    found = np.empty((len(columns), len(rows)))
    for line, column in zip(found, columns, strict=True):
        if np.ndim(column):
            column.take(rows, out=line, mode="clip")
        else:
            line[:] = column
    return found


def lean_activation(cost: ActivationCost, overlap: Overlap, *, pairs: bool, measured: bool) -> ActivationCost:
    """The same cost in fewer columns: what a step only ever adds up is added up before it is gathered.

    Experts' traffic stays apart where passes run in `pairs`, which hide it (`overlap.HIDEABLE_TOGETHER`), and under a `measured`
    stack, which shows a share of it and all of the others' (`overlap.BLOCKING`).
    """
    cost = replace(cost, backward_s=cost.backward_s + cost.recompute_s, recompute_s=0.0)
    if not convention_of(overlap).adds_up:  # the longest axis counts, so the axes stay apart
        return cost
    alike = ("tp", "cp") if measured or pairs else ("tp", "cp", "ep")
    return replace(
        cost, forward_traffic_s=_joined(cost.forward_traffic_s, *alike),
        backward_traffic_s=_joined(cost.backward_traffic_s, *alike),
    )  # fmt: skip


def _joined(traffic: Traffic, axis: str, *others: str) -> Traffic:
    """The same with some axes' seconds at another one's."""
    return {**traffic, axis: added(traffic[name] for name in (axis, *others)), **dict.fromkeys(others, 0.0)}


def lean_state(cost: StateCost, overlap: Overlap, *, offloads: bool = False) -> StateCost:
    """The same for state: bytes at rest in one column, in two where the optimizer's can rest on the host."""
    optimizer = cost.master_bytes + cost.optimizer_bytes
    rest = cost.parameters_bytes + cost.gradients_bytes + (0.0 if offloads else optimizer)
    cost = replace(
        cost,
        parameters_bytes=rest,
        gradients_bytes=0.0,
        master_bytes=0.0,
        optimizer_bytes=optimizer if offloads else 0.0,
    )
    if not convention_of(overlap).adds_up:
        return cost
    return replace(cost, step_traffic_s=_joined(cost.step_traffic_s, "fsdp", "dp", "control"))


class Stage(NamedTuple):
    """A stage that can be the slowest or the fullest: whether it is the first or the last one, its number, its layers by kind.

    Numbers and layers are over numbers of (pp, virtual). Where micro-batches come from both ends it is a device, with the
    layers of both of its stages, and the first is the last as well.
    """

    first: bool
    last: bool
    number: Ints
    layers: Mapping[str, Value]


@dataclass(slots=True)
class Tables:
    """All sub-tables of one search. `block_row[placed row, micro-batch]` numbers the rows of the block tables."""

    activation: Mapping[tuple[int, int], Mapping[str, ActivationCost]]  # (sp, recompute) -> unit -> columns
    mode: Mapping[tuple[int, int], Ints]  # (sp, recompute) -> the fastest mode of each row, by its number
    block_row: Ints
    state: Mapping[tuple[int, int, int], Mapping[str, StateCost]]  # (sp, zero, recompute) -> unit -> columns
    state_offset: Mapping[
        tuple[int, int, int], Ints
    ]  # the same -> what each block row adds to the placed row, by its mode
    stages: Mapping[int, tuple[Stage, ...]]  # by schedule: those that can be the worst
    fullest: Mapping[int, Ints]  # by schedule, over (pp, virtual) numbers: layers of the stage that has the most
    stage_row: Ints  # [factorisation, virtual] -> number of (pp, virtual)
    waiting: Mapping[
        int, Waiting | None
    ]  # by schedule, likewise: what uneven virtual stages add; None: nothing anywhere


def build_tables(
    architecture: Architecture,
    cluster: Cluster,
    job: Job,
    space: Space,
    placed: Placed,
    families: Iterable[FamilyKey],
    progress: Progress = silent,
) -> Tables:
    """Evaluate every sub-table once, for the families that occur."""
    build = _Builder(architecture, cluster, job, space, placed, tuple(families))
    activation, mode, block_row = build.block_tables(progress)
    stages, waits, stage_row = build.stages()
    fullest = {one: np.max([sum(stage.layers.values()) for stage in worst], axis=0) for one, worst in stages.items()}
    state, offset = build.state_tables()
    offsets = {(sp, zero, policy): rows[mode[sp, policy]] for (sp, zero, policy), rows in offset.items()}
    return Tables(activation, mode, block_row, state, offsets, stages, fullest, stage_row, waits)


class _Builder:
    def __init__(
        self, architecture: Architecture, cluster: Cluster, job: Job, space: Space, placed: Placed,
        families: tuple[FamilyKey, ...],
    ) -> None:  # fmt: skip
        self.architecture, self.cluster, self.job, self.space, self.placed = architecture, cluster, job, space, placed
        self.families = families
        self.pricer = UnitPricer(
            architecture,
            rates_of(cluster.chip, cluster.calibration),
            precision_named(job.precision),
            loss_of(cluster, job),
            job.optimizer,
        )
        self.whole = {axis: column[placed.factorisation] for axis, column in space.degrees.items()}
        self.degrees = atomic_degrees(architecture, self.whole)
        self.units = tuple(unit_counts(architecture))
        self.modes = space.choices.modes(architecture)

    def block_tables(
        self, progress: Progress
    ) -> tuple[dict[tuple[int, int], dict[str, ActivationCost]], dict[tuple[int, int], Ints], Ints]:
        links = self.placed.links(self.cluster.reached, np.arange(len(self.placed.placement)))
        priced = [links.group(TP), links.group(("cp",)), links.hop(("pp",)), links.group(EXPERT)]
        priced += [links.group(TP + EXPERT)] if self.architecture.num_experts else []
        key = [self.degrees[axis] for axis in ("tp", "cp", "ep")]
        key += [np.broadcast_to(v, len(key[0])) for link in priced for v in (link.seconds_per_byte, link.latency_s)]
        rows, inverse = codes(*key)
        sizes = np.array(self.space.choices.micro_batch_seqs, dtype=np.int64)
        some = np.repeat(rows, len(sizes))
        by_mode = _ByMode(self, some, np.tile(sizes, len(rows)))
        row = inverse[:, None] * len(sizes) + np.arange(len(sizes))[None, :]
        policies = range(len(self.space.choices.recompute))
        families = [(sp, policy) for sp in {key.sequence_parallel for key in self.families} for policy in policies]
        best = {}
        for number, family in enumerate(families):
            progress("blocks derived", number, len(families))
            best[family] = by_mode.fastest(*family)
        return {f: costs for f, (costs, _) in best.items()}, {f: mode for f, (_, mode) in best.items()}, row

    def values(self, rows: Ints, micro_batch: Ints, cp_variant: str = "all_gather") -> Values:
        degrees = {axis: column[rows] for axis, column in self.degrees.items()} | {"micro_batch_seqs": micro_batch}
        found = unit_values(self.architecture, self.job.seq_len, degrees, cp_variant, self.job.attended_tokens)
        return FrozenValues(found)

    def state_tables(
        self,
    ) -> tuple[dict[tuple[int, int, int], dict[str, StateCost]], dict[tuple[int, int, int], Ints]]:
        """By (sequence parallelism, ZeRO stage, recompute): columns over the placed rows, once for each mode whose state is
        derived otherwise, one behind the other; and where the rows of each mode begin."""
        priced = _StatePricer(self)
        structures = {(key.sequence_parallel, zero) for key in self.families for zero in key.zeros}
        policies = range(len(self.space.choices.recompute))
        found = {(sp, zero, policy): priced.units(sp, zero, policy) for sp, zero in structures for policy in policies}
        return {key: costs for key, (costs, _) in found.items()}, {key: rows for key, (_, rows) in found.items()}

    def stages(self) -> tuple[dict[int, tuple[Stage, ...]], dict[int, Waiting | None], Ints]:
        """The stages of each schedule that can be the worst, what uneven ones add to its bubble, and the number of (pp, virtual)
        of each row."""
        pps, number = np.unique(self.space.degrees["pp"], return_inverse=True)
        virtual = self.space.choices.num_virtual_stages
        every = [(pp, count) for pp in pps.tolist() for count in virtual]
        row = number[:, None] * len(virtual) + np.arange(len(virtual))[None, :]
        schedules = sorted({key.schedule for key in self.families})
        worst = {one: self.worst(self.space.choices.schedule[one], every) for one in schedules}
        used = np.unique(row[self.space.factorisation, self.space.virtual]).tolist()
        names = {one: self.space.choices.schedule[one] for one in schedules}
        return worst, {one: self.waiting(name, every, used) for one, name in names.items()}, row

    def waiting(self, schedule: str, every: Sequence[tuple[int, int]], used: Iterable[int]) -> Waiting | None:
        """What uneven virtual stages add for each (pp, virtual) that layouts have."""
        found = [NONE] * len(every)
        for number in used:
            found[number] = self._waiting(schedule, *every[number])
        return Waiting(*np.array(found).T) if any(map(any, found)) else None

    def _waiting(self, schedule: str, pp: int, count: int) -> Waiting:
        if pp == 1 or count == 1 or pp * count > self.architecture.num_layers + MOST_EMPTY:
            return NONE
        named = natural_schedule(pp, count) if schedule == NATURAL else schedule
        return waiting(named, even_virtual_stages(self.architecture, pp, count), pp)

    def worst(self, schedule: str, every: Sequence[tuple[int, int]]) -> tuple[Stage, ...]:
        """For each (pp, virtual) the same number of stages, the first and the last at their ends of the row."""
        found = [_worst_stages(self.architecture, schedule, pp, count) for pp, count in every]
        held = [_layers(self.architecture, schedule, *key, own) for key, own in zip(every, found, strict=True)]
        numbers, layers = np.array(found, dtype=np.int64), np.array(held, dtype=np.int64)
        last = 0 if _has_both_ends(schedule) else numbers.shape[1] - 1
        return tuple(
            Stage(position == 0, position == last, numbers[:, position], self.by_kind(layers[:, position]))
            for position in range(numbers.shape[1])
        )

    def by_kind(self, layers: Ints) -> dict[str, Value]:
        dense = layers[:, 1] if self.architecture.num_dense_layers else 0
        return {"dense_block": dense, "block": layers[:, 0] - dense}


class _StatePricer:
    """Prices the units' state over all placed rows; equal derivations share one table."""

    def __init__(self, builder: _Builder) -> None:
        self.builder, self.choices = builder, builder.space.choices
        self.num_rows = len(builder.placed.placement)
        placed = builder.placed
        self.links = replace(
            placed.links(builder.cluster.reached, np.arange(self.num_rows)), sizes=placed.factorisation
        )
        self.values = builder.values(placed.first, np.ones_like(placed.first))
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
        keys = [self.key(mode_family(3, sequence_parallel, recompute, mode)) for mode in self.builder.modes]
        different = list(dict.fromkeys(keys))
        modes = [self.builder.modes[keys.index(key)] for key in different]
        families = [mode_family(stage, sequence_parallel, recompute if stage == 3 else "none", mode) for mode in modes]
        held = (*self.builder.units, *Model.of(self.builder.architecture).held_apart)
        costs = {unit: self.unit(unit, families) for unit in held}
        return costs, np.array([different.index(key) * self.num_rows for key in keys], dtype=np.int64)

    def key(self, family: Family) -> Hashable:
        return tuple(self.number(family, unit) for unit in self.builder.units)

    def number(self, family: Family, unit: str) -> int:
        """The number of what a unit's state is derived as; each is looked at once."""
        parts = self.parts(family, unit)
        if id(parts) not in self.number_of:
            self.number_of[id(parts)] = parts, self.numbers.setdefault(parts.state_key, len(self.numbers))
        return self.number_of[id(parts)][1]

    def parts(self, family: Family, unit: str) -> Parts:
        return self.builder.pricer.parts(self.builder.pricer.of_structure(family), unit)

    def unit(self, name: str, families: Sequence[Family]) -> StateCost:
        """The columns of a unit in each family."""
        key = name, families[0].zero_stage, tuple(self.number(family, name) for family in families)
        if key not in self.known:
            costs = [self.builder.pricer.state(name, family, self.values, self.links) for family in families]
            self.known[key] = lean_state(
                _stacked(costs, self.num_rows), self.builder.job.convention, offloads=self.choices.offloads_optimizer
            )
        return self.known[key]


def _stacked(costs: Sequence[StateCost], num_rows: int) -> StateCost:
    """Each column of the first cost, then that of the next; what is one number for all of them stays one."""

    def column(parts: Sequence[Value]) -> Value:
        if all(np.ndim(part) == 0 and part == parts[0] for part in parts):
            return parts[0]
        return np.concatenate([np.broadcast_to(part, num_rows) for part in parts])

    return costs[0] if len(costs) == 1 else merged(costs, column)


def _worst_stages(architecture: Architecture, schedule: str, pp: int, num_virtual_stages: int) -> list[int]:
    """Those with dense layers, the one after, and the last; in a pipeline with fewer, the last interior one again.

    Where the backward pass is split, more micro-batches wait for their weight gradients the later the stage: then also the
    last interior stage, and the last with as many layers as any. Of devices that hold a stage and its mirror image the first half
    stands for the other. Where the first holds the last stage too, all behind it are interior.
    """
    early = range(max(architecture.num_dense_layers, 1) + 1)
    end = max(pp // 2, 1) if schedule_of(schedule).both_ends else pp
    found = [min(stage, end - 1) for stage in early]
    if schedule_of(schedule).splits_backward:
        inner = range(early.stop, end if _has_both_ends(schedule) else end - 1) or range(end - 1, end)
        layers = [layers for layers, _ in _layers(architecture, schedule, pp, num_virtual_stages, inner)]
        found += [max(zip(layers, inner, strict=True))[1], inner[-1]]
    return found if _has_both_ends(schedule) else [*found, pp - 1]


def _has_both_ends(schedule: str) -> bool:
    """Whether the first device of any pipeline has the first and the last stage of the model."""
    usual = schedule_of(schedule).placement(2, 2)
    return len(usual.ranks) - 1 in usual.held(0)


def _layers(
    architecture: Architecture, schedule: str, pp: int, num_virtual_stages: int, stages: Sequence[int]
) -> list[tuple[int, int]]:
    """(all, dense) layers that some devices hold."""
    placement = schedule_of(schedule).placement(pp, num_virtual_stages)
    if len(placement.ranks) > architecture.num_layers + MOST_EMPTY:  # not legal
        return [(0, 0)] * len(stages)
    every = evenly_placed(architecture, placement)
    dense = dense_layers(architecture, every)
    held = [placement.held(stage) for stage in stages]
    return [(sum(every[one] for one in own), sum(dense[one] for one in own)) for own in held]


class _ByMode:
    """Costs of units at some rows in each mode that can run there, and the fastest of these."""

    def __init__(self, builder: _Builder, rows: Ints, micro_batch: Ints) -> None:
        self.builder = builder
        self.choices, self.job = builder.space.choices, builder.job
        self.modes = builder.modes
        first, self.sizes = codes(*(builder.degrees[axis][rows] for axis in ("tp", "cp", "ep")), micro_batch)
        self.num_sizes = len(first)
        self.links = replace(builder.placed.links(builder.cluster.reached, rows), sizes=self.sizes)
        last = {variant_of(v).waits_for_last: v for v in self.choices.cp_variant}
        self.values = {waits: builder.values(rows[first], micro_batch[first], v) for waits, v in last.items()}
        self.degrees = {axis: column[rows] for axis, column in builder.whole.items()}
        self.known: dict[Hashable, ActivationCost] = {}
        self.pairs = any(schedule_of(one).pairs for one in self.choices.schedule)

    def fastest(self, sp: int, policy: int) -> tuple[dict[str, ActivationCost], Ints]:
        """For each unit its cost in the fastest mode of each row, and which mode that is; the first of equals."""
        degrees = {**self.degrees, "sequence_parallel": self.choices.sequence_parallel[sp]}
        possible = possible_modes(self.builder.architecture, self.job, degrees, self.modes, self.choices.mode_rules)
        tried = [number for number, legal in enumerate(possible) if np.any(legal)]
        costs = [self.costs(sp, policy, self.modes[number]) for number in tried]
        seconds = [np.where(possible[n], self.seconds(cost), np.inf) for n, cost in zip(tried, costs, strict=True)]
        chosen = np.argmin(np.stack(seconds), axis=0)
        fastest = {unit: self.combined(chosen, [cost[unit] for cost in costs]) for unit in costs[0]}
        return fastest, np.array(tried, dtype=np.int64)[chosen]

    def costs(self, sp: int, policy: int, mode: Mode) -> dict[str, ActivationCost]:
        family = mode_family(3, bool(self.choices.sequence_parallel[sp]), self.choices.recompute[policy], mode)
        waits = variant_of(mode.cp_variant).waits_for_last
        priced = {u: self.unit(u, family, waits) for u in (*self.builder.units, "carry")}
        if any(p.recompute == policy and p.layers is not None for p in self.choices.policies):
            plain = replace(family, recompute="none")
            priced |= {KEPT + u: self.unit(u, plain, waits) for u in self.builder.units if u in LAYERS}
        return priced

    def unit(self, name: str, family: Family, waits: bool) -> ActivationCost:
        """The cost of a unit, once for all families in which it is derived alike."""
        key = name, priced_family(self.builder.architecture.structure, family, name), waits
        if key not in self.known:
            cost = self.builder.pricer.activation(name, family, self.values[waits], self.links)
            measured = self.builder.cluster.calibration is not None
            self.known[key] = lean_activation(cost, self.job.convention, pairs=self.pairs, measured=measured)
        return self.known[key]

    def seconds(self, costs: Mapping[str, ActivationCost]) -> Array:
        """What a mode changes of a layer's time, whatever else overlaps with it; where it was measured, what shows."""
        block, share = costs["block"], exposed_share(self.builder.cluster)
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
            if _alike(columns):
                return self.links.along(columns[0])
            return np.concatenate([np.broadcast_to(column, self.num_sizes) for column in columns]).take(rows)

        def of_traffic(columns: Sequence[Value]) -> Value:
            return columns[0] if _alike(columns) else np.choose(chosen, columns)

        return merged(costs, of_sizes, of_traffic)
