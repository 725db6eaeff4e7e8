"""Price legal layouts and keep the best: the fastest, the Pareto front of time and memory, the one with the least memory.

Entry point: `search`, which returns a `SearchResult`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np

from shardwise.hardware.cluster import Cluster
from shardwise.layout.choices import Choices, Policy
from shardwise.layout.degrees import atomic_degrees, num_micro_batches
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.pipeline.registry import NATURAL, natural_schedule
from shardwise.price.device_memory import memory_of
from shardwise.price.estimate_terms import MEMORY
from shardwise.price.roofline import exposed_share, loss_of
from shardwise.price.stage_contents import Counts, Model, Pipeline, host_of, stage_counts
from shardwise.price.stage_contents import Stage as PricedStage
from shardwise.price.step_time import Step
from shardwise.price.unit_cost import StateCost
from shardwise.search.vectorised.best_rows import Chunk, Floats, Front, Ints, Row
from shardwise.search.vectorised.candidates import FamilyKey, Placed, Space, build_space, nearest_to_legal, place_all
from shardwise.search.vectorised.cost_tables import Tables, build_tables
from shardwise.search.vectorised.table_columns import Gathered
from shardwise.search.vectorised.worst_stages import Stage
from shardwise.values.elementwise import added
from shardwise.values.errors import NothingFitsError
from shardwise.values.loss_kernels import loss_named
from shardwise.values.progress import Progress, silent

CHUNK = 131072  # rows that are priced at once: long enough that NumPy computes, short enough for the cache
SLACK = 1 - 1e-12  # for a bound: with zero parts, sums are rounded in another order
MOST_KEPT = 0.7  # of the columns of a chunk: where more are kept, what was gathered for all of them serves


class _Weightless(dict[str, StateCost]):
    """The state of a unit without costs."""

    def __missing__(self, unit: str) -> StateCost:
        nothing: dict[str, Any] = {field.name: 0.0 for field in fields(StateCost)}
        self[unit] = StateCost(**{**nothing, "step_traffic_s": dict.fromkeys(("fsdp", "dp", "control"), 0.0)})
        return self[unit]


WEIGHTLESS = _Weightless()


def search(
    architecture: Architecture, cluster: Cluster, job: Job, *, choices: Choices | None = None, top: int = 64,
    reserve: float = 0.0, sample: int = 0, seed: int = 0, exhaustive: bool = False, progress: Progress = silent,
) -> SearchResult:  # fmt: skip
    """The best legal layouts of the job on the cluster; one fits that leaves the share `reserve` of the memory free.

    Memory is priced of all of them, the step time of those that fit and that a bound does not leave out; `exhaustive`: of all,
    with the same result.

    Raises `NothingFitsError` when the choices leave no legal layout. `cpu_seconds` counts everything, the derivation
    included. `sample` keeps about so many rows at random, to be held against the scalar path.
    """
    started = time.process_time()
    space = build_space(architecture, job, cluster.num_devices, choices or Choices())
    if not len(space.factorisation):
        rules = ", ".join(f"{name} {count:,}" for name, count in space.num_illegal_by_rule.items() if count)
        nearest = nearest_to_legal(architecture, job, cluster.num_devices, space.choices)
        raise NothingFitsError(
            f"no legal layout: all {space.num_candidates:,} candidates break a rule ({rules})\n{nearest}"
        )
    front = Front(top, cluster.chip.memory_bytes * (1 - reserve), len(space.degrees["pp"]))
    run = _Search(architecture, cluster, job, space, front, progress)
    run.exhaustive = exhaustive
    run.sample(sample, seed)
    run.all()
    return run.result(started)


class _Search:
    def __init__(
        self, architecture: Architecture, cluster: Cluster, job: Job, space: Space, front: Front, progress: Progress
    ) -> None:
        self.cluster, self.job, self.space, self.progress = cluster, job, space, progress
        self.stepwise = loss_named(loss_of(cluster, job)).stepwise
        self.placed: Placed = place_all(cluster.reached, atomic_degrees(architecture, space.degrees))
        self.families = space.families()
        self.even = space.even(architecture, job)
        self.modes = space.choices.modes(architecture)
        self.exposed = exposed_share(cluster)
        self.hosts = {offload: host_of(offload, cluster.chip) for offload in space.choices.offload}
        self.model = Model.of(architecture)
        self.tables: Tables = build_tables(architecture, cluster, job, space, self.placed, self.families, progress)
        self.front = front
        self.sampled: list[Row] = []
        self.wanted = 0.0
        self.exhaustive = False
        self.random = np.random.default_rng(0)

    @property
    def num_rows(self) -> int:
        """Candidates with each of their placements and policies."""
        return int(self.placed.count[self.space.factorisation].sum()) * len(self.space.choices.policies)

    def sample(self, count: int, seed: int) -> None:
        """Keep each row with a probability that leaves about `count` of them."""
        self.wanted = min(1.0, count / max(1, self.num_rows))
        self.random = np.random.default_rng(seed)

    def keep_some(self, seconds: Floats, memory: Floats, chunk: Chunk) -> None:
        for index in np.flatnonzero(self.random.random(seconds.size) < self.wanted).tolist() if self.wanted else ():
            self.sampled.append(chunk.row(seconds, memory, index))

    def all(self) -> None:
        """Go through the families, and through each in chunks."""
        total = self.num_rows
        for family, rows in self.families.items():
            for candidate, placed in self.chunks(rows, len(family.zeros)):
                priced = _Chunk(self, family, candidate, placed)
                for number in range(len(self.space.choices.policies)):
                    self.progress("layouts priced", self.front.num_rows, total)
                    self.price(priced, number)

    def chunks(self, rows: Ints, num_lines: int) -> Iterator[tuple[Ints, Ints]]:
        """Candidates with each of their placements, some thousands at a time."""
        count = self.placed.count[self.space.factorisation[rows]]
        candidate = np.repeat(rows, count)
        offset = np.arange(len(candidate)) - np.repeat(np.cumsum(count) - count, count)
        placed = self.placed.first[self.space.factorisation[candidate]] + offset
        size = CHUNK // num_lines
        for start in range(0, len(candidate), size):
            yield candidate[start : start + size], placed[start : start + size]

    def price(self, rows: _Chunk, number: int) -> None:
        """Memory of every row of a chunk under a policy, and the step time of those that may be kept."""
        policy = self.space.choices.policies[number]
        memory = rows.memory_bytes(policy)
        chunk = Chunk(rows.candidate, rows.placed, number, rows.factorisation, rows.even)
        fits = self.front.weigh(memory)
        if not (self.exhaustive or self.wanted):
            kept = np.flatnonzero(self.front.wanted(rows.bound_s(policy) * SLACK, memory, fits, chunk))
            if not len(kept):
                return
            if len(kept) < MOST_KEPT * len(rows.candidate):
                rows, memory, fits = rows.some(kept), memory[:, kept], fits[:, kept]
                chunk = Chunk(rows.candidate, rows.placed, number, rows.factorisation, rows.even)
        seconds = rows.step_s(policy)
        self.keep_some(seconds, memory, chunk)
        self.front.add(seconds, memory, fits, chunk)

    def recompute_layers(self, policy: Policy, schedule: int, stage_row: Ints) -> Any:
        """How many layers of a stage recompute at most, for some rows of stages; None: all."""
        if not isinstance(policy.layers, float):
            return policy.layers
        return np.ceil(policy.layers * self.tables.fullest[schedule].take(stage_row)).astype(np.int64)

    def layout(self, candidate: int, placed: int, number: int) -> Layout:
        """The layout of one row."""
        space, choices = self.space, self.space.choices
        policy = choices.policies[number]
        stage_row = self.tables.stage_row[space.factorisation[candidate], space.virtual[candidate]]
        again = self.recompute_layers(policy, int(space.schedule[candidate]), np.array([stage_row]))
        sp, micro_batch = int(space.sequence_parallel[candidate]), int(space.micro_batch[candidate])
        row = self.tables.block_row[placed, micro_batch]
        mode = self.modes[self.tables.mode[sp, policy.recompute][row]]
        degrees: dict[str, Any] = {axis: int(c[space.factorisation[candidate]]) for axis, c in space.degrees.items()}
        virtual = choices.num_virtual_stages[space.virtual[candidate]]
        schedule = choices.schedule[space.schedule[candidate]]
        experts = {"ep": degrees["ep"] * degrees["tp"], "etp": 1} if mode.whole_experts else {}
        return Layout(
            **{**degrees, **experts}, num_virtual_stages=virtual, zero_stage=choices.zero_stage[space.zero[candidate]],
            sequence_parallel=bool(choices.sequence_parallel[sp]), micro_batch_seqs=choices.micro_batch_seqs[micro_batch],
            cp_variant=mode.cp_variant, async_tp=mode.async_tp, recompute=choices.recompute[policy.recompute],
            recompute_layers=again if again is None or isinstance(again, int) else int(again[0]),
            offload=policy.offload,  # type: ignore[arg-type]
            schedule=natural_schedule(degrees["pp"], virtual) if schedule == NATURAL else schedule,
            placement=self.placed.placements[self.placed.placement[placed]],
        )  # fmt: skip

    def found(self, row: Row) -> Found:
        return Found(partial(self.layout, *row[2]), row[0], row[1])

    def result(self, started: float) -> SearchResult:
        choices, degrees = self.space.choices, self.space.degrees
        values: dict[str, list[Any]] = {axis: np.unique(column).tolist() for axis, column in degrees.items()}
        values |= {
            name: list(value) for name in choices.__slots__ if isinstance(value := getattr(choices, name), tuple)
        }
        values["placement"] = [str(option) for option in self.placed.placements]
        return SearchResult(
            tuple(map(self.found, self.front.rows)), tuple(map(self.found, self.front.front)),
            self.found(self.front.leanest),
            tuple(map(self.found, self.front.fastest.rows)),
            tuple(map(self.found, self.front.fastest_even.rows)), tuple(map(self.found, self.sampled)),
            values, self.space.num_candidates, self.front.num_rows, self.front.num_fitting,
            self.space.num_illegal_by_rule, time.process_time() - started,
        )  # fmt: skip


class _Chunk:
    """Some columns of one family: candidates on their placements, and a line for each ZeRO stage of the family. What does not
    depend on that stage is worked out once for all of them."""

    def __init__(self, search: _Search, family: FamilyKey, candidate: Ints, placed: Ints) -> None:
        self.search, self.family, self.candidate, self.placed = search, family, candidate, placed
        space, tables = search.space, search.tables
        self.factorisation, self.even = space.factorisation.take(candidate), search.even.take(candidate)
        micro_batch, virtual = space.micro_batch.take(candidate), space.virtual.take(candidate)
        self.block_row = tables.block_row[placed, micro_batch]
        self.stage_row = tables.stage_row[self.factorisation, virtual]
        degrees: dict[str, Any] = {a: space.degrees[a].take(self.factorisation) for a in ("dp", "fsdp", "pp")}
        degrees["micro_batch_seqs"] = np.array(space.choices.micro_batch_seqs).take(micro_batch)
        m = num_micro_batches(search.job, degrees)
        v = np.array(space.choices.num_virtual_stages).take(virtual)
        waiting = tables.waiting[family.schedule]
        uneven = waiting.of(self.stage_row).in_step(m) if waiting else 0.0
        self.pipeline = Pipeline(space.choices.schedule[family.schedule], degrees["pp"], v, m, uneven)
        self.known: dict[Policy, list[PricedStage]] = {}

    def some(self, columns: Ints) -> _Chunk:
        """Some of the columns."""
        return _Chunk(self.search, self.family, self.candidate[columns], self.placed[columns])

    def step_s(self, policy: Policy) -> Floats:
        """Step time of the slowest stage."""
        return self.slowest_s(self.stages(policy))

    def bound_s(self, policy: Policy) -> Floats:
        """What a step takes at least, over columns: what the last stage does with weights that take no time.
        Each sum and maximum of its price is no less with more of anything, so that the whole is none either."""
        stages = [replace(stage, state=WEIGHTLESS) for stage in self.stages(policy)[-1:]]
        bound: Floats = self.slowest_s(stages)[0]
        return bound

    def slowest_s(self, stages: Sequence[PricedStage]) -> Floats:
        """Step time of the slowest of some stages; the columns that each is summed from are freed at once, so that the next find
        room in the cache."""
        slowest = np.zeros((len(self.family.zeros), len(self.candidate)))
        for stage in stages:
            step = Step(stage=stage, overlap=self.search.job.convention, share=self.search.exposed)
            np.maximum(slowest, step.total_s, out=slowest)
        return slowest

    def memory_bytes(self, policy: Policy) -> Floats:
        """Memory of a device of the fullest stage."""
        fullest = np.zeros((len(self.family.zeros), len(self.candidate)))
        for stage, worst in zip(self.stages(policy), self.worst, strict=True):
            number = worst.number.take(self.stage_row)
            holding = 1.0 if worst.holding is None else worst.holding.take(self.stage_row)
            memory = memory_of(stage, number, self.search.cluster.chip, holding=holding, stepwise=self.search.stepwise)
            np.maximum(fullest, added(MEMORY.values(memory).values()), out=fullest)
        return fullest

    @property
    def worst(self) -> tuple[Stage, ...]:
        return self.search.tables.stages[self.family.schedule][: 1 if self.family.single else None]

    def stages(self, policy: Policy) -> list[PricedStage]:
        """The stages that can be the slowest or the fullest."""
        if policy not in self.known:
            self.known = {policy: self._stages(policy)}
        return self.known[policy]

    def _stages(self, policy: Policy) -> list[PricedStage]:
        search, family, tables = self.search, self.family, self.search.tables
        costs = tables.activation[family.sequence_parallel, policy.recompute]
        activation: Any = {unit: Gathered([cost], self.block_row) for unit, cost in costs.items()}
        keys = [(family.sequence_parallel, zero, policy.recompute) for zero in family.zeros]
        rows = self.placed + tables.state_offset[keys[0]].take(self.block_row)
        units = tables.state[keys[0]]
        state: Any = {unit: Gathered([tables.state[key][unit] for key in keys], rows) for unit in units}
        again = search.recompute_layers(policy, family.schedule, self.stage_row)
        host = search.hosts[policy.offload]
        return [
            PricedStage(
                counts=self.counts(one, again), activation=activation, state=state, pipeline=self.pipeline, host=host
            )
            for one in self.worst
        ]

    def counts(self, stage: Stage, again: Any) -> Counts:
        """Contents of a stage; `again` is how many of its layers recompute at most."""
        layers = {k: n.take(self.stage_row) if isinstance(n, np.ndarray) else n for k, n in stage.layers.items()}
        carries = 0 if self.family.single else self.pipeline.num_virtual_stages * self.pipeline.ends
        last = bool(self.family.single) or stage.last
        return stage_counts(
            layers, self.search.model, first=stage.first, last=last, carries=carries, recompute_layers=again
        )


class Found:
    """A layout that the search kept, with its time and its memory; `made` is the layout, or makes it on first use."""

    __slots__ = ("_made", "memory_bytes", "step_time_s")

    def __init__(self, made: Layout | Callable[[], Layout], step_time_s: float, memory_bytes: float) -> None:
        self._made, self.step_time_s, self.memory_bytes = made, step_time_s, memory_bytes

    @property
    def layout(self) -> Layout:
        """The layout."""
        if not isinstance(self._made, Layout):
            self._made = self._made()
        return self._made

    def _key(self) -> tuple[Layout, float, float]:
        return self.layout, self.step_time_s, self.memory_bytes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Found) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"Found({self.layout!r}, {self.step_time_s!r}, {self.memory_bytes!r})"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`best`: fitting layouts by step time; `pareto`: by memory; `leanest`: the least memory of all, fitting
    or not; `by_factorisation`: the fastest fitting layout of each way to factor the devices over the axes, `even` the same of
    those that share the batch out evenly."""

    best: tuple[Found, ...]
    pareto: tuple[Found, ...]
    leanest: Found
    by_factorisation: tuple[Found, ...]
    even: tuple[Found, ...]
    sampled: tuple[Found, ...]
    space: Mapping[str, list[Any]]
    num_candidates: int
    num_layouts: int
    num_fitting: int
    num_illegal_by_rule: Mapping[str, int]
    cpu_seconds: float
