"""Rows of one engine as columns of one table, whatever their models, chips and formats: what a fit prices at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.measure.serving.serving_rows import ServingRow
from shardwise.serve import ConfigurationTable
from shardwise.serve.engines import ServingEngine, get_serving_engine
from shardwise.serve.kernel_seconds import GroupRates, ServingRates
from shardwise.serve.memory import MemoryParts, cache_bytes, size_parts
from shardwise.serve.serving_constants import ServingConstants
from shardwise.serve.steady_state import PassPricer, Requests, SteadyState, solve_steady_state
from shardwise.serve.table_work import PassLengths, TableWork, join_columns, join_work

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowStack:
    """All rows of an engine; `index` are their positions among all rows."""

    engine: ServingEngine
    index: NDArray[np.int64]
    work: TableWork
    rates: ServingRates
    memory: MemoryParts
    present: Array
    requests: Requests

    def solve(self, constants: ServingConstants, pass_factor: Any = 1.0, first_token_factor: Any = 1.0) -> SteadyState:
        """Return the steady state of each row under an engine's constants."""
        cache = cache_bytes(self.engine.memory_rule, constants.memory_fraction, self.memory)
        pricer = PassPricer(
            work=self.work, rates=replace(self.rates, constants=constants), fuses_chunks=self.engine.fuses_chunks,
            polls=self.engine.polls_requests, captures_decode=self.engine.captures_decode,
            pass_factor=pass_factor, first_token_factor=first_token_factor,
        )  # fmt: skip
        return solve_steady_state(pricer, self.present, cache / self.memory.request_bytes, self.requests)


def stack_rows(rows: Sequence[ServingRow]) -> tuple[RowStack, ...]:
    """Return the rows as one stack for each engine, and for each of its releases that has constants of its own."""
    by_engine: dict[str, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        by_engine[row.constants_name].append(position)
    return tuple(_stack_engine(positions, rows) for positions in by_engine.values())


def _stack_engine(positions: Sequence[int], rows: Sequence[ServingRow]) -> RowStack:
    engine = get_serving_engine(rows[positions[0]].engine, rows[positions[0]].problem.release)
    groups: dict[Any, list[int]] = defaultdict(list)
    for position in positions:
        row = rows[position]
        key = row.model, row.chip, row.formats, row.mean_isl, row.mean_osl, row.mtp_tokens, row.max_batched_tokens
        groups[key].append(position)
    parts = [_price_alike([rows[position] for position in members], engine) for members in groups.values()]
    index = np.concatenate([np.array(members, dtype=np.int64) for members in groups.values()])
    ordered = [rows[position] for position in index]
    copies = np.array([row.layout.attention_copies for row in ordered], dtype=np.float64)
    return RowStack(
        engine=engine, index=index, work=join_work([work for work, _, _ in parts]),
        rates=_join_rates([(rates, len(work.pp)) for work, rates, _ in parts]),
        memory=_join_memory([memory for _, _, memory in parts]),
        present=np.array([row.concurrency for row in ordered]) / copies,
        requests=Requests(
            osl=np.array([row.mean_osl for row in ordered], dtype=np.float64),
            length_spread=np.array([row.length_spread for row in ordered]),
            first_wave_share=np.array([1.0 / row.waves for row in ordered]),
            admission_passes=np.array([row.admission_passes for row in ordered], dtype=np.float64),
        ),
    )  # fmt: skip


def _price_alike(rows: Sequence[ServingRow], engine: ServingEngine) -> tuple[TableWork, ServingRates, MemoryParts]:
    problem, limits = rows[0].problem, engine.batch_limits(rows[0].problem.batch_limits)
    assert limits.max_batched_tokens is not None
    table = ConfigurationTable.of(
        [row.layout for row in rows], [row.concurrency for row in rows], [limits.max_batched_tokens] * len(rows)
    )
    lengths = PassLengths(
        decode_context=problem.workload.mean_context, prompt_tokens=problem.workload.isl,
        tokens_per_sequence=1 + limits.mtp_tokens,
    )  # fmt: skip
    rates = ServingRates.of(problem.cluster, problem.formats, engine.constants)
    return TableWork.of(problem.architecture, table, lengths), rates, size_parts(problem, engine, rates, table, limits)


def _join_rates(parts: Sequence[tuple[ServingRates, int]]) -> ServingRates:
    lengths = [length for _, length in parts]

    def columns(values: Sequence[Any], names: Sequence[str]) -> dict[str, Array]:
        return {name: join_columns([getattr(value, name) for value in values], lengths) for name in names}

    group_fields = [field.name for field in fields(GroupRates)]
    groups: Mapping[str, GroupRates] = {
        group: GroupRates(**columns([rates.groups[group] for rates, _ in parts], group_fields))
        for group in parts[0][0].groups
    }
    names = [field.name for field in fields(ServingRates) if field.name not in ("constants", "groups")]
    return ServingRates(constants=parts[0][0].constants, groups=groups, **columns([rates for rates, _ in parts], names))


def _join_memory(parts: Sequence[MemoryParts]) -> MemoryParts:
    return MemoryParts(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(MemoryParts)}
    )
