"""Price every legal layout and keep the best: top-k by time, the Pareto front of time and memory, the smallest miss."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Cluster
from shardwise.cost.counts import Counts, Model, stage_counts
from shardwise.cost.host import host_of
from shardwise.cost.memory_terms import MEMORY
from shardwise.cost.pipeline import Pipeline
from shardwise.cost.rates import exposed_share, loss_of
from shardwise.cost.stage import Stage as PricedStage
from shardwise.cost.stage_memory import memory_of
from shardwise.cost.step import Step
from shardwise.errors import NothingFitsError
from shardwise.job import Job
from shardwise.layout.family import atomic_degrees
from shardwise.layout.layout import Layout
from shardwise.layout.legality import num_micro_batches
from shardwise.loss import loss_named
from shardwise.model.architecture import Architecture
from shardwise.progress import Progress, silent
from shardwise.schedule.schedule import NATURAL, natural_schedule
from shardwise.search.pareto import Front, Row
from shardwise.search.placed import Placed, place_all
from shardwise.search.space import Choices, FamilyKey, Policy, Space, build_space, nearest_to_legal
from shardwise.search.tables import Gathered, Stage, Tables, build_tables
from shardwise.symbolic import added

CHUNK = 8192  # rows whose columns stay in the cache
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Found:
    """A layout that the search kept, with the two numbers that it was judged by."""

    layout: Layout
    step_time_s: float
    memory_bytes: float


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


def search(
    architecture: Architecture, cluster: Cluster, job: Job, *, choices: Choices | None = None, top: int = 64,
    reserve: float = 0.0, sample: int = 0, seed: int = 0, progress: Progress = silent,
) -> SearchResult:  # fmt: skip
    """Price every legal layout of the job on the cluster; one fits that leaves the share `reserve` of the memory free.

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
    run = _Search(architecture, cluster, job, space, Front(top, cluster.chip.memory_bytes * (1 - reserve)), progress)
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
        self.random = np.random.default_rng(0)

    @property
    def num_rows(self) -> int:
        """Candidates with each of their placements and policies."""
        return int(self.placed.count[self.space.factorisation].sum()) * len(self.space.choices.policies)

    def sample(self, count: int, seed: int) -> None:
        """Keep each row with the chance that leaves about `count` of them."""
        self.wanted = min(1.0, count / max(1, self.num_rows))
        self.random = np.random.default_rng(seed)

    def keep_some(self, seconds: Any, memory: Any, where: tuple[Ints, Ints, int]) -> None:
        for index in np.nonzero(self.random.random(len(seconds)) < self.wanted)[0] if self.wanted else ():
            self.sampled.append(self.front.row(seconds, memory, where, int(index)))

    def all(self) -> None:
        """Go through the families, and through each in chunks."""
        total = self.num_rows
        for family, rows in self.families.items():
            for number, policy in enumerate(self.space.choices.policies):
                for candidate, placed in self.chunks(rows):
                    where = candidate, placed, number
                    self.progress("layouts priced", self.front.num_rows, total)
                    seconds, memory = self.price(family, policy, candidate, placed)
                    self.keep_some(seconds, memory, where)
                    factorisation, even = self.space.factorisation.take(candidate), self.even.take(candidate)
                    self.front.add(seconds, memory, where, factorisation, even)

    def chunks(self, rows: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Candidates with each of their placements, some thousands at a time."""
        count = self.placed.count[self.space.factorisation[rows]]
        candidate = np.repeat(rows, count)
        offset = np.arange(len(candidate)) - np.repeat(np.cumsum(count) - count, count)
        placed = self.placed.first[self.space.factorisation[candidate]] + offset
        for start in range(0, len(candidate), CHUNK):
            yield candidate[start : start + CHUNK], placed[start : start + CHUNK]

    def price(
        self, family: FamilyKey, policy: Policy, candidate: Ints, placed: Ints
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Step time of the slowest and memory of the fullest stage, for a chunk of one family."""
        space, tables = self.space, self.tables
        factorisation = space.factorisation.take(candidate)
        micro_batch, virtual = space.micro_batch.take(candidate), space.virtual.take(candidate)
        block_row = tables.block_row[placed, micro_batch]
        costs = tables.activation[family.sequence_parallel, policy.recompute]
        activation: Any = {u: Gathered(cost, block_row) for u, cost in costs.items()}
        key = family.sequence_parallel, family.zero, policy.recompute
        held, state_row = tables.state[key], placed + tables.state_offset[key].take(block_row)
        state: Any = {u: Gathered(cost, state_row) for u, cost in held.items()}
        stage_row = tables.stage_row[factorisation, virtual]
        degrees: dict[str, Any] = {axis: space.degrees[axis].take(factorisation) for axis in ("dp", "fsdp", "pp")}
        degrees["micro_batch_seqs"] = np.array(space.choices.micro_batch_seqs).take(micro_batch)
        m = num_micro_batches(self.job, degrees)
        v = np.array(space.choices.num_virtual_stages).take(virtual)
        schedule = space.choices.schedule[family.schedule]
        waiting = tables.waiting[family.schedule]
        uneven = waiting.of(stage_row).in_step(m) if waiting else 0.0
        pipeline = Pipeline(schedule, degrees["pp"], v, m, uneven)
        host, again = self.hosts[policy.offload], self.recompute_layers(policy, family.schedule, stage_row)
        slowest = np.zeros(len(candidate))
        fullest = np.zeros(len(candidate))
        for stage in tables.stages[family.schedule][: 1 if family.single else None]:
            counts = self.counts(stage, pipeline, stage_row, again, single=bool(family.single))
            priced = PricedStage(counts=counts, activation=activation, state=state, pipeline=pipeline, host=host)
            np.maximum(slowest, self.step_s(priced), out=slowest)
            np.maximum(fullest, self.memory_bytes(priced, stage.number.take(stage_row)), out=fullest)
        return slowest, fullest

    def step_s(self, stage: PricedStage) -> NDArray[np.float64]:
        """Step time of a stage; what it is added up from is let go at once, so that the next columns find room in the cache."""
        total_s: NDArray[np.float64] = Step(stage=stage, overlap=self.job.convention, share=self.exposed).total_s
        return total_s

    def memory_bytes(self, stage: PricedStage, number: Ints) -> NDArray[np.float64]:
        """Memory of a device of a stage, likewise."""
        memory = memory_of(stage, number, self.cluster.chip, stepwise=self.stepwise)
        total: NDArray[np.float64] = added(MEMORY.values(memory).values())
        return total

    def counts(self, stage: Stage, pipeline: Pipeline, rows: Ints, again: Any, *, single: bool) -> Counts:
        """What a stage holds, over the rows of a chunk; `again` is how many of its layers recompute at most."""
        layers = {kind: n.take(rows) if isinstance(n, np.ndarray) else n for kind, n in stage.layers.items()}
        carries = 0 if single else pipeline.num_virtual_stages * pipeline.ends
        last = single or stage.last
        return stage_counts(layers, self.model, first=stage.first, last=last, carries=carries, recompute_layers=again)

    def recompute_layers(self, policy: Policy, schedule: int, stage_row: Ints) -> Any:
        """How many of a stage's layers recompute at most, for some rows of stages; None: all."""
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
        return Found(self.layout(*row[2]), row[0], row[1])

    def result(self, started: float) -> SearchResult:
        choices, degrees = self.space.choices, self.space.degrees
        values: dict[str, list[Any]] = {axis: np.unique(column).tolist() for axis, column in degrees.items()}
        values |= {
            name: list(value) for name in choices.__slots__ if isinstance(value := getattr(choices, name), tuple)
        }
        values["placement"] = [str(option) for option in self.placed.placements]
        return SearchResult(
            tuple(map(self.found, self.front.best())), tuple(map(self.found, self.front.pareto())),
            self.found(self.front.leanest),
            tuple(map(self.found, self.front.fastest.values())),
            tuple(map(self.found, self.front.fastest_even.values())), tuple(map(self.found, self.sampled)),
            values, self.space.num_candidates, self.front.num_rows, self.front.num_fitting,
            self.space.num_illegal_by_rule, time.process_time() - started,
        )  # fmt: skip
