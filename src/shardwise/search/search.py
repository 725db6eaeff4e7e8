"""Price every legal layout and keep the best: top-k by time, the Pareto front of time and memory, the smallest miss."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.cluster.cluster import Cluster
from shardwise.cost.step import Counts, stage_cost, stage_memory, step_time
from shardwise.job import Job
from shardwise.layout.layout import Layout
from shardwise.layout.legality import natural_schedule, num_micro_batches
from shardwise.layout.shardings import atomic_degrees
from shardwise.model.architecture import Architecture
from shardwise.schedule.closed_form import bubble_ratio, in_flight
from shardwise.search.pareto import Front
from shardwise.search.placed import Placed, place_all
from shardwise.search.space import Choices, Space, build_space
from shardwise.search.tables import Gathered, Tables, build_tables
from shardwise.terms import MEMORY_TERMS

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
    """`best`: fitting layouts by step time; `pareto`: by memory; `leanest`: the least memory of all, fitting or not."""

    best: tuple[Found, ...]
    pareto: tuple[Found, ...]
    leanest: Found | None
    space: Mapping[str, list[Any]]
    num_candidates: int
    num_layouts: int
    num_fitting: int
    num_illegal_by_rule: Mapping[str, int]
    cpu_seconds: float


def search(
    architecture: Architecture, cluster: Cluster, job: Job, *, choices: Choices | None = None, top: int = 64
) -> SearchResult:
    """Price every legal layout of the job on the cluster. `cpu_seconds` counts everything, the derivation included."""
    started = time.process_time()
    space = build_space(architecture, job, cluster.num_devices, choices or Choices())
    run = _Search(architecture, cluster, job, space, top)
    run.all()
    return run.result(started)


class _Search:
    def __init__(self, architecture: Architecture, cluster: Cluster, job: Job, space: Space, top: int) -> None:
        self.cluster, self.job, self.space = cluster, job, space
        self.placed: Placed = place_all(
            cluster.topology, {**space.degrees, **atomic_degrees(architecture, space.degrees["tp"])}
        )
        self.families = space.families()
        self.tables: Tables = build_tables(architecture, cluster, job, space, self.placed, self.families)
        self.front = Front(top, cluster.chip.memory_bytes)

    def all(self) -> None:
        """Go through the families, and through each in chunks."""
        for (sp, zero, single), rows in self.families.items():
            for recompute in range(len(self.space.choices.recompute)):
                for candidate, placed in self.chunks(rows):
                    seconds, memory = self.price(sp, zero, recompute, bool(single), candidate, placed)
                    self.front.add(seconds, memory, (candidate, placed, recompute))

    def chunks(self, rows: Ints) -> Iterator[tuple[Ints, Ints]]:
        """Candidates with each of their placements, some thousands at a time."""
        count = self.placed.count[self.space.factorisation[rows]]
        candidate = np.repeat(rows, count)
        offset = np.arange(len(candidate)) - np.repeat(np.cumsum(count) - count, count)
        placed = self.placed.first[self.space.factorisation[candidate]] + offset
        for start in range(0, len(candidate), CHUNK):
            yield candidate[start : start + CHUNK], placed[start : start + CHUNK]

    def price(
        self, sp: int, zero: int, recompute: int, single: bool, candidate: Ints, placed: Ints
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Step time of the slowest and memory of the fullest stage, for a chunk of one family."""
        space, tables = self.space, self.tables
        factorisation = space.factorisation.take(candidate)
        micro_batch, virtual = space.micro_batch.take(candidate), space.virtual.take(candidate)
        block_row = tables.block_row[placed, micro_batch]
        activation: Any = {u: Gathered(cost, block_row) for u, cost in tables.activation[sp, recompute].items()}
        state: Any = {u: Gathered(cost, placed) for u, cost in tables.state[sp, zero].items()}
        stage_row = tables.stage_row[factorisation, virtual]
        degrees: dict[str, Any] = {axis: space.degrees[axis].take(factorisation) for axis in ("dp", "fsdp", "pp")}
        degrees["micro_batch_seqs"] = np.array(space.choices.micro_batch_seqs).take(micro_batch)
        m = num_micro_batches(self.job, degrees)
        v = np.array(space.choices.num_virtual_stages).take(virtual)
        bubble = bubble_ratio(degrees["pp"], m, v)
        slowest = np.zeros(len(candidate))
        fullest = np.zeros(len(candidate))
        for index, name, embedding, head in _STAGES[single]:
            counts = Counts(tables.blocks[name].take(stage_row), embedding, head, 0 if single else v)
            cost = stage_cost(counts, activation, state)
            np.maximum(slowest, step_time(cost, m, bubble, self.job.overlap).total_s, out=slowest)
            flying = in_flight(degrees["pp"], m, v, index) if index >= 0 else in_flight(degrees["pp"], m, v, degrees["pp"] - 1)
            memory = stage_memory(counts, activation, state, flying, self.cluster.chip.runtime_bytes)
            np.maximum(fullest, sum(memory[term] for term in MEMORY_TERMS), out=fullest)
        return slowest, fullest

    def layout(self, candidate: int, placed: int, recompute: int) -> Layout:
        """The layout of one row."""
        space, choices = self.space, self.space.choices
        degrees = {axis: int(column[space.factorisation[candidate]]) for axis, column in space.degrees.items()}
        virtual = choices.num_virtual_stages[space.virtual[candidate]]
        return Layout(
            **degrees, num_virtual_stages=virtual, zero_stage=choices.zero_stage[space.zero[candidate]],
            sequence_parallel=bool(choices.sequence_parallel[space.sequence_parallel[candidate]]),
            micro_batch_seqs=choices.micro_batch_seqs[space.micro_batch[candidate]],
            recompute=choices.recompute[recompute],  # type: ignore[arg-type]
            schedule=natural_schedule(degrees["pp"], virtual),  # type: ignore[arg-type]
            placement=self.placed.placements[self.placed.placement[placed]],
        )  # fmt: skip

    def found(self, row: tuple[float, float, tuple[int, int, int]]) -> Found:
        return Found(self.layout(*row[2]), row[0], row[1])

    def result(self, started: float) -> SearchResult:
        choices, degrees = self.space.choices, self.space.degrees
        values: dict[str, list[Any]] = {axis: np.unique(column).tolist() for axis, column in degrees.items()}
        values |= {name: list(getattr(choices, name)) for name in choices.__slots__}
        values["placement"] = [str(option) for option in self.placed.placements]
        return SearchResult(
            tuple(map(self.found, self.front.best())), tuple(map(self.found, self.front.pareto())),
            self.found(self.front.leanest) if self.front.leanest else None,
            values, self.space.num_candidates, self.front.num_rows, self.front.num_fitting,
            self.space.num_illegal_by_rule, time.process_time() - started,
        )  # fmt: skip


# Stages that can be the slowest or the fullest: number (-1: the last), table of blocks, embedding, head.
_STAGES = {
    True: ((0, "first", 1, 1),),
    False: ((0, "first", 1, 0), (1, "second", 0, 0), (-1, "last", 0, 1)),
}
