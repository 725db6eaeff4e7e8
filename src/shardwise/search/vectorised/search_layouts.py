"""Price legal layouts and keep the best: the fastest, the Pareto front of time and memory, the one with the least memory.

Entry point: `search_layouts`, which returns a `SearchResult`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shardwise.layout import Choices, Layout, atomic_degrees, missing_share, num_micro_batches
from shardwise.layout.choices import RecomputeOffload
from shardwise.pipeline import NATURAL, natural_schedule
from shardwise.price import MEMORY, Problem, StateCost, loss_kind
from shardwise.price.device_memory import price_device_memory
from shardwise.price.roofline import exposed_share, runs_short_micro_batches, updates_on_host
from shardwise.price.stage_contents import ModelEnds, Pipeline, StageCounts, host_offload, stage_counts
from shardwise.price.stage_contents import StageCosts as PricedStage
from shardwise.price.stage_step_time import StageStep
from shardwise.search.vectorised.best_rows import BestRows, Floats, Ints, RankedRow, RowBlock
from shardwise.search.vectorised.candidates import (
    FamilyKey,
    PlacementTable,
    Space,
    build_placement_table,
    build_space,
    explain_nearest_to_legal,
)
from shardwise.search.vectorised.cost_tables import CostTables, TableInputs, build_cost_tables
from shardwise.search.vectorised.table_columns import GatheredColumns
from shardwise.search.vectorised.worst_stages import WorstStage
from shardwise.values import NothingFitsError, Progress, get_loss_kernel, ignore_progress, sum_values

BLOCK_ROWS = 131072  # rows priced at once: enough to amortise NumPy's calls, few enough for the cache
BOUND_SLACK = 1 - 1e-12  # of a bound: parts that are zero change the rounding of sums
MAX_KEPT_SHARE = 0.7  # of a block's columns: if more are kept, columns gathered for all of them are reused


class _WeightlessState(dict[str, StateCost]):
    """State of a unit without any cost."""

    def __missing__(self, unit: str) -> StateCost:
        nothing: dict[str, Any] = {field.name: 0.0 for field in fields(StateCost)}
        self[unit] = StateCost(**{**nothing, "step_traffic_s": dict.fromkeys(("fsdp", "dp", "control"), 0.0)})
        return self[unit]


WEIGHTLESS = _WeightlessState()


class SearchChecks(NamedTuple):
    """Options of a search that is checked.

    `exhaustive` prices the time of all layouts, with the same result. About `num_samples` rows are kept at random, in an order
    that `seed` decides, so that they can be compared with the scalar price.
    """

    exhaustive: bool = False
    num_samples: int = 0
    seed: int = 0


NO_CHECKS = SearchChecks()


def search_layouts(
    problem: Problem, *, choices: Choices | None = None, top: int = 64, reserve: float = 0.0,
    checks: SearchChecks = NO_CHECKS, progress: Progress = ignore_progress,
) -> SearchResult:  # fmt: skip
    """Search the best legal layouts of a job. A layout fits if it leaves the share `reserve` of the memory free.

    The memory of all layouts is priced, the step time only of those that fit and may still be kept by a lower bound.
    `cpu_seconds` of the result includes the derivation.

    Raises `NothingFitsError` if the choices leave no legal layout."""
    started = time.process_time()
    space = build_space(problem.architecture, problem.job, problem.cluster.num_devices, choices or Choices())
    if not len(space.factorisation):
        rules = ", ".join(f"{name} {count:,}" for name, count in space.num_illegal_by_rule.items() if count)
        nearest = explain_nearest_to_legal(
            problem.architecture, problem.job, problem.cluster.num_devices, space.choices
        )
        raise NothingFitsError(
            f"no legal layout: all {space.num_candidates:,} candidates break a rule ({rules})\n{nearest}"
        )
    best = BestRows(top, problem.cluster.chip.capacity_bytes * (1 - reserve), len(space.degrees["pp"]))
    search = _LayoutSearch(problem, space, best, progress)
    search.exhaustive = checks.exhaustive
    search.sample(checks.num_samples, checks.seed)
    search.price_all()
    return search.result(started)


class _LayoutSearch:
    def __init__(self, problem: Problem, space: Space, best: BestRows, progress: Progress) -> None:
        self.cluster, self.job, self.space, self.progress = problem.cluster, problem.job, space, progress
        self.stepwise = get_loss_kernel(loss_kind(problem.cluster, problem.job)).stepwise
        self.placed: PlacementTable = build_placement_table(
            problem.cluster.sustained_topology, atomic_degrees(problem.architecture, space.degrees)
        )
        self.families = space.families()
        self.even, self.has_short_micro_batches = space.even(problem.job), runs_short_micro_batches(problem.cluster)
        self.exposed = exposed_share(problem.cluster)
        updates = updates_on_host(problem.cluster)
        self.hosts = {
            offload: host_offload(offload, problem.cluster.chip, updates=updates) for offload in space.choices.offload
        }
        self.model = ModelEnds.of(problem.architecture)
        inputs = TableInputs(problem, space, self.placed, tuple(self.families))
        self.modes = inputs.modes
        self.tables: CostTables = build_cost_tables(inputs, progress)
        self.best_rows = best
        self.sampled: list[RankedRow] = []
        self.sample_probability = 0.0
        self.exhaustive = False
        self.random = np.random.default_rng(0)

    @property
    def num_rows(self) -> int:
        """Candidates times their placements and policies."""
        return int(self.placed.count[self.space.factorisation].sum()) * len(self.space.choices.policies)

    def sample(self, count: int, seed: int) -> None:
        """Keep each row with a probability that leaves about `count` of them."""
        self.sample_probability = min(1.0, count / max(1, self.num_rows))
        self.random = np.random.default_rng(seed)

    def sample_rows(self, seconds: Floats, memory: Floats, block: RowBlock) -> None:
        if self.sample_probability:
            chosen = np.flatnonzero(self.random.random(seconds.size) < self.sample_probability)
            self.sampled += [block.row(seconds, memory, index) for index in chosen.tolist()]

    def price_all(self) -> None:
        total = self.num_rows
        for family, rows in self.families.items():
            for candidate, placed in self.iterate_candidate_placements(rows, len(family.zero_stages)):
                pricer = _BlockPricer(self, family, candidate, placed)
                for policy_index in range(len(self.space.choices.policies)):
                    self.progress("layouts priced", self.best_rows.num_rows, total)
                    self.price(pricer, policy_index)

    def iterate_candidate_placements(self, rows: Ints, num_lines: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield blocks of candidates with each of their placements."""
        count = self.placed.count[self.space.factorisation[rows]]
        candidate = np.repeat(rows, count)
        offset = np.arange(len(candidate)) - np.repeat(np.cumsum(count) - count, count)
        placed = self.placed.first[self.space.factorisation[candidate]] + offset
        size = BLOCK_ROWS // num_lines
        for start in range(0, len(candidate), size):
            yield candidate[start : start + size], placed[start : start + size]

    def price(self, pricer: _BlockPricer, policy_index: int) -> None:
        """Price the memory of a block under a policy, and the step time of the columns that may be kept."""
        policy = self.space.choices.policies[policy_index]
        memory = pricer.memory_bytes(policy)
        block = pricer.row_block(policy_index)
        fits = self.best_rows.count_fitting(memory)
        if not (self.exhaustive or self.sample_probability):
            columns = np.flatnonzero(
                self.best_rows.may_be_kept(pricer.bound_s(policy) * BOUND_SLACK, memory, fits, block)
            )
            if not len(columns):
                return
            if len(columns) < MAX_KEPT_SHARE * len(pricer.candidate):
                pricer, memory, fits = pricer.select_columns(columns), memory[:, columns], fits[:, columns]
                block = pricer.row_block(policy_index)
        seconds = pricer.step_s(policy)
        self.sample_rows(seconds, memory, block)
        self.best_rows.add(seconds, memory, fits, block)

    def recompute_layers(self, policy: RecomputeOffload, schedule: int, stage_row: Ints) -> Any:
        """Return how many layers of a stage recompute at most, for some rows of stages; None: all."""
        if not isinstance(policy.layers, float):
            return policy.layers
        return np.ceil(policy.layers * self.tables.fullest[schedule].take(stage_row)).astype(np.int64)

    def layout(self, candidate: int, placed: int, policy_index: int) -> Layout:
        """Build the layout of one row."""
        space, choices = self.space, self.space.choices
        policy = choices.policies[policy_index]
        stage_row = self.tables.stage_row[space.factorisation[candidate], space.virtual[candidate]]
        recompute_layers = self.recompute_layers(policy, int(space.schedule[candidate]), stage_row)
        sp, micro_batch = int(space.sequence_parallel[candidate]), int(space.micro_batch[candidate])
        block_row = self.tables.block_row[placed, micro_batch]
        mode = self.modes[self.tables.mode[sp, policy.recompute][block_row]]
        degrees: dict[str, Any] = {
            axis: int(column[space.factorisation[candidate]]) for axis, column in space.degrees.items()
        }
        virtual = choices.num_virtual_stages[space.virtual[candidate]]
        schedule = choices.schedule[space.schedule[candidate]]
        experts = {"ep": degrees["ep"] * degrees["tp"], "etp": 1} if mode.whole_experts else {}
        return Layout(
            **{**degrees, **experts}, num_virtual_stages=virtual, zero_stage=choices.zero_stage[space.zero[candidate]],
            sequence_parallel=bool(choices.sequence_parallel[sp]), micro_batch_seqs=choices.micro_batch_seqs[micro_batch],
            cp_variant=mode.cp_variant, async_tp=mode.async_tp, recompute=choices.recompute[policy.recompute],
            recompute_layers=None if recompute_layers is None else int(recompute_layers),
            offload=policy.offload,  # type: ignore[arg-type]
            schedule=natural_schedule(degrees["pp"], virtual) if schedule == NATURAL else schedule,
            placement=self.placed.placements[self.placed.placement[placed]],
        )  # fmt: skip

    def priced_layout(self, row: RankedRow) -> PricedLayout:
        return PricedLayout(partial(self.layout, *row[2]), row[0], row[1])

    def result(self, started: float) -> SearchResult:
        choices, degrees = self.space.choices, self.space.degrees
        space: dict[str, list[Any]] = {axis: np.unique(column).tolist() for axis, column in degrees.items()}
        space |= {
            name: list(options) for name in choices.__slots__ if isinstance(options := getattr(choices, name), tuple)
        }
        space["placement"] = [str(option) for option in self.placed.placements]
        return SearchResult(
            tuple(map(self.priced_layout, self.best_rows.rows)), tuple(map(self.priced_layout, self.best_rows.pareto)),
            self.priced_layout(self.best_rows.least_memory),
            tuple(map(self.priced_layout, self.best_rows.fastest.rows)),
            tuple(map(self.priced_layout, self.best_rows.fastest_even.rows)), tuple(map(self.priced_layout, self.sampled)),
            space, self.space.num_candidates, self.best_rows.num_rows, self.best_rows.num_fitting,
            self.space.num_illegal_by_rule, time.process_time() - started,
        )  # fmt: skip


class _BlockPricer:
    """Columns of one family: candidates on their placements, with a line for each ZeRO stage of the family.

    What does not depend on the ZeRO stage is computed once for all lines."""

    def __init__(self, search: _LayoutSearch, family: FamilyKey, candidate: Ints, placed: Ints) -> None:
        self.search, self.family, self.candidate, self.placed = search, family, candidate, placed
        space, tables = search.space, search.tables
        self.factorisation, self.even = space.factorisation.take(candidate), search.even.take(candidate)
        micro_batch, virtual = space.micro_batch.take(candidate), space.virtual.take(candidate)
        self.block_row = tables.block_row[placed, micro_batch]
        self.stage_row = tables.stage_row[self.factorisation, virtual]
        degrees: dict[str, Any] = {axis: space.degrees[axis].take(self.factorisation) for axis in ("dp", "fsdp", "pp")}
        degrees["micro_batch_seqs"] = np.array(space.choices.micro_batch_seqs).take(micro_batch)
        micro_batches = num_micro_batches(search.job, degrees)
        virtual_stages = np.array(space.choices.num_virtual_stages).take(virtual)
        waiting = tables.waiting[family.schedule]
        uneven = waiting.of(self.stage_row).for_micro_batches(micro_batches) if waiting else 0.0
        self.pipeline = Pipeline(
            space.choices.schedule[family.schedule],
            degrees["pp"],
            virtual_stages,
            micro_batches,
            uneven,
            missing_share(search.job, degrees) if search.has_short_micro_batches else 0.0,
        )
        self.memo: dict[RecomputeOffload, list[PricedStage]] = {}

    def row_block(self, policy_index: int) -> RowBlock:
        return RowBlock(self.candidate, self.placed, policy_index, self.factorisation, self.even)

    def select_columns(self, columns: Ints) -> _BlockPricer:
        return _BlockPricer(self.search, self.family, self.candidate[columns], self.placed[columns])

    def step_s(self, policy: RecomputeOffload) -> Floats:
        """Step time of the slowest stage."""
        return self.slowest_s(self.stages(policy))

    def bound_s(self, policy: RecomputeOffload) -> Floats:
        """Lower bound of each column's step: its last stage with weightless state.

        Each sum and maximum in the price of a step only grows with its parts, so leaving out other stages and the state cannot
        raise it."""
        stages = [replace(stage, state=WEIGHTLESS) for stage in self.stages(policy)[-1:]]
        bound: Floats = self.slowest_s(stages)[0]
        return bound

    def slowest_s(self, stages: Sequence[PricedStage]) -> Floats:
        """Step time of the slowest of some stages.

        The columns of one stage are freed before the next, so that these find room in the cache."""
        slowest = np.zeros((len(self.family.zero_stages), len(self.candidate)))
        for stage in stages:
            step = StageStep(stage=stage, overlap=self.search.job.overlap_convention, share=self.search.exposed)
            np.maximum(slowest, step.total_s, out=slowest)
        return slowest

    def memory_bytes(self, policy: RecomputeOffload) -> Floats:
        """Memory of a device of the fullest stage."""
        fullest = np.zeros((len(self.family.zero_stages), len(self.candidate)))
        for stage, worst in zip(self.stages(policy), self.worst, strict=True):
            stage_number = worst.number.take(self.stage_row)
            holding = 1.0 if worst.holding is None else worst.holding.take(self.stage_row)
            memory = price_device_memory(
                stage, stage_number, self.search.cluster.chip, holding=holding, stepwise=self.search.stepwise
            )
            np.maximum(fullest, sum_values(MEMORY.values(memory).values()), out=fullest)
        return fullest

    @property
    def worst(self) -> tuple[WorstStage, ...]:
        return self.search.tables.stages[self.family.schedule][: 1 if self.family.single else None]

    def stages(self, policy: RecomputeOffload) -> list[PricedStage]:
        """Stages that can be the slowest or the fullest."""
        if policy not in self.memo:
            self.memo = {policy: self._stages(policy)}
        return self.memo[policy]

    def _stages(self, policy: RecomputeOffload) -> list[PricedStage]:
        search, family, tables = self.search, self.family, self.search.tables
        costs = tables.activation[family.sequence_parallel, policy.recompute]
        activation: Any = {unit: GatheredColumns([cost], self.block_row) for unit, cost in costs.items()}
        keys = [(family.sequence_parallel, zero, policy.recompute) for zero in family.zero_stages]
        rows = self.placed + tables.state_offset[keys[0]].take(self.block_row)
        units = tables.state[keys[0]]
        state: Any = {unit: GatheredColumns([tables.state[key][unit] for key in keys], rows) for unit in units}
        recompute_layers = search.recompute_layers(policy, family.schedule, self.stage_row)
        host = search.hosts[policy.offload]
        return [
            PricedStage(
                counts=self.counts(stage, recompute_layers),
                activation=activation,
                state=state,
                pipeline=self.pipeline,
                host=host,
            )
            for stage in self.worst
        ]  # fmt: skip

    def counts(self, stage: WorstStage, recompute_layers: Any) -> StageCounts:
        """Return the contents of a stage, of which at most `recompute_layers` layers recompute."""
        layers = stage.layers_at(self.stage_row)
        recomputed = None if recompute_layers is None else stage.recomputed_at(self.stage_row, recompute_layers)
        carries = 0 if self.family.single else self.pipeline.num_virtual_stages * self.pipeline.ends
        last = bool(self.family.single) or stage.last
        return stage_counts(
            layers, self.search.model, first=stage.first, last=last, carries=carries, recomputed=recomputed
        )


class PricedLayout:
    """A layout that the search kept, with its time and memory. The layout may be given as a function that builds it on first
    use."""

    __slots__ = ("_layout", "memory_bytes", "step_time_s")

    def __init__(self, layout: Layout | Callable[[], Layout], step_time_s: float, memory_bytes: float) -> None:
        self._layout, self.step_time_s, self.memory_bytes = layout, step_time_s, memory_bytes

    @property
    def layout(self) -> Layout:
        if not isinstance(self._layout, Layout):
            self._layout = self._layout()
        return self._layout

    def _key(self) -> tuple[Layout, float, float]:
        return self.layout, self.step_time_s, self.memory_bytes

    def __eq__(self, value: object) -> bool:
        return isinstance(value, PricedLayout) and self._key() == value._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"PricedLayout({self.layout!r}, {self.step_time_s!r}, {self.memory_bytes!r})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Layouts that a search kept, and its statistics.

    `best`: fitting layouts by step time; `pareto`: by memory; `least_memory`: fitting or not; `by_factorisation`: the fastest
    fitting layout of each factorisation of the devices over the axes; `even`: the same among those that split the batch evenly.
    """

    best: tuple[PricedLayout, ...]
    pareto: tuple[PricedLayout, ...]
    least_memory: PricedLayout
    by_factorisation: tuple[PricedLayout, ...]
    even: tuple[PricedLayout, ...]
    sampled: tuple[PricedLayout, ...]
    space: Mapping[str, list[Any]]
    num_candidates: int
    num_layouts: int
    num_fitting: int
    num_illegal_by_rule: Mapping[str, int]
    cpu_seconds: float
