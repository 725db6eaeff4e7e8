"""Estimate serving configurations: latencies with intervals, throughput, memory, what bounds a pass, power and price."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwise.serve.configuration_table import ConfigurationTable, Floats, TableEstimate
from shardwise.serve.device_power import predict_energy, predict_power, serving_use
from shardwise.serve.engines import ServingEngine, get_serving_engine
from shardwise.serve.estimate_parts import (
    decode_pass_terms,
    dollars_per_million,
    first,
    interval,
    interval_of,
    memory_of_row,
    prompt_pass_terms,
)
from shardwise.serve.kernel_seconds import ServingRates
from shardwise.serve.legality import draft_problems, serving_layout_problems
from shardwise.serve.memory import MemoryColumns, size_memory
from shardwise.serve.pooled_layout import PooledLayout
from shardwise.serve.serving_calibration import ServingCalibration
from shardwise.serve.serving_constants import NEUTRAL, prediction_spreads
from shardwise.serve.serving_estimate import ServingEstimate
from shardwise.serve.serving_layout import ServingLayout
from shardwise.serve.serving_problem import BatchLimits, ServingProblem
from shardwise.serve.steady_state import (
    PassPricer,
    Requests,
    SteadyState,
    prompt_seconds,
    solve_steady_state,
)
from shardwise.serve.table_work import PassLengths, TableWork
from shardwise.values import InputError, pluralize, raise_problems
from shardwise.values.errors import join_words

GRID_POINTS = 96  # concurrencies that a rate is looked for among
INPUT_SHARES = (0.08, 0.3)  # shares of TPOT that other inputs take, between which spreads differ
LOADS = (8.5, 32.5)  # requests in an instance, between which spreads of first tokens differ
UNMEASURED_FACTOR = 1.5  # on the spreads of chips of which nothing was measured: assumed


@dataclass(frozen=True, kw_only=True)
class ServingModel:
    """A problem with its engine, limits and rates filled in: what single layouts and tables are estimated with."""

    problem: ServingProblem
    engine: ServingEngine
    limits: BatchLimits
    rates: ServingRates

    @classmethod
    def of(cls, problem: ServingProblem) -> ServingModel:
        """Return the model of a problem. Raises `InputError` for an unknown engine or release, and for tokens that are drafted
        without modules of the model."""
        raise_problems(list(draft_problems(problem.architecture, problem.batch_limits.mtp_tokens)))
        engine = get_serving_engine(problem.engine, problem.release)
        limits = engine.batch_limits(problem.batch_limits)
        rates = ServingRates.of(problem.cluster, problem.formats, engine.constants)
        return cls(problem=problem, engine=engine, limits=limits, rates=rates)

    def pricer(self, table: ConfigurationTable) -> PassPricer:
        """Return the passes of a table's rows."""
        problem, limits = self.problem, self.limits
        lengths = PassLengths(
            decode_context=problem.workload.mean_context, prompt_tokens=problem.workload.isl,
            cached_tokens=problem.workload.cached_tokens, tokens_per_sequence=1 + limits.mtp_tokens,
        )  # fmt: skip
        weights = problem.formats.expert_format if problem.architecture.num_experts else problem.formats.weight_format
        factor = self.engine.release_factor(problem.cluster.chip.catalog_name, weights.name)
        measured = problem.calibration or ServingCalibration(pass_factor=1.0)
        return PassPricer(
            work=TableWork.of(problem.architecture, table, lengths), rates=self.rates,
            fuses_chunks=self.engine.fuses_chunks and limits.chunked_prefill, polls=self.engine.polls_requests,
            captures_decode=self.engine.captures_decode,
            pass_factor=factor.pass_factor * measured.pass_factor,
            first_token_factor=factor.first_token_factor * measured.first_token_factor, acceptance=limits.acceptance or None,
        )  # fmt: skip

    @cached_property
    def is_measured(self) -> bool:
        """True if rows of the engine on the chip are among those that the constants rest on."""
        return self.problem.cluster.chip.catalog_name in self.engine.measured_chips

    def memory(self, table: ConfigurationTable) -> MemoryColumns:
        """Return the memory of each row."""
        return size_memory(self.problem, self.engine, self.rates, table, self.limits)

    def steady_state(self, pricer: PassPricer, table: ConfigurationTable, memory: MemoryColumns) -> SteadyState:
        """Return the steady state of each row."""
        present = table.concurrency / (table.replicas * table.attention_dp)
        largest = np.minimum(memory.largest_batch, self.limits.max_num_seqs or self.engine.max_num_seqs)
        workload = self.problem.workload
        requests = Requests(
            osl=float(workload.osl), length_spread=workload.length_spread,
            first_wave_share=1.0 / workload.waves, admission_passes=float(self.limits.admission_passes),
            come_at_random=workload.rate_per_s is not None,
        )  # fmt: skip
        return solve_steady_state(pricer, present, largest, requests)

    def require_runnable(self, layout: ServingLayout | PooledLayout) -> None:
        """Raise `InputError` for a layout that the model or the engine does not have, or of more devices than the cluster has;
        of pools, the pool is named."""
        problem = self.problem
        pools = layout.pools if isinstance(layout, PooledLayout) else {"": layout}
        problems = [
            text.replace("layout: ", f"layout: {name}: ", 1) if name else text
            for name, part in pools.items()
            for text in self._layout_problems(part)
        ]
        if not problems and layout.num_devices > (available := problem.cluster.num_devices):
            problems = [
                f"layout: {layout} takes {layout.num_devices} devices; at most the {available} of {problem.cluster.name} are "
                "required"
            ]
        raise_problems(list(dict.fromkeys(problems)))

    def _layout_problems(self, layout: ServingLayout) -> list[str]:
        """Return what the model does not allow of a layout, or else what the engine does not have of it."""
        architecture = self.problem.architecture
        of_model = serving_layout_problems(architecture, layout, self.problem.formats)
        return of_model or self.engine.layout_problems(architecture, layout)

    @property
    def spread_cells(self) -> tuple[Floats, Floats]:
        """Spreads of TPOT by the share that other inputs take of it, and of TTFT by the requests in an instance."""
        kind = "experts" if self.problem.architecture.num_experts else "dense"
        factor = 1.0 if self.is_measured else UNMEASURED_FACTOR
        of_tpot, of_ttft = (
            np.array(prediction_spreads(name, self.engine.constants_name, kind)) * factor for name in ("tpot", "ttft")
        )
        return of_tpot, of_ttft

    def spreads(self, table: ConfigurationTable, state: SteadyState) -> tuple[Floats, Floats]:
        """Return the standard deviations of the logarithms of TPOT and TTFT over their predictions, of each row.

        They are those of models that were not fitted to: of an engine with dense models or with experts, by the share of a
        token's time that other inputs take, and for first tokens by the requests in the system.
        """
        of_tpot, of_ttft = self.spread_cells
        return of_tpot[np.digitize(state.input_share, INPUT_SHARES)], of_ttft[
            np.digitize(table.concurrency / table.replicas, LOADS)
        ]


BLOCK_ROWS = 1 << 14  # rows that are priced at once: their columns stay in the caches of a core


def estimate_table(problem: ServingProblem, table: ConfigurationTable) -> TableEstimate:
    """Return the estimates of a table of configurations at their concurrencies. The workload's own is not read; where it has a
    rate, requests come at random.

    Raises `InputError` for an unknown engine or release.
    """
    model = ServingModel.of(problem)
    blocks = [
        np.arange(start, min(start + BLOCK_ROWS, len(table))) for start in range(0, max(len(table), 1), BLOCK_ROWS)
    ]
    parts = [_estimate_rows(model, table.take(rows) if len(blocks) > 1 else table) for rows in blocks]
    return TableEstimate(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(TableEstimate)}
    )


def _estimate_rows(model: ServingModel, table: ConfigurationTable) -> TableEstimate:
    problem, memory = model.problem, model.memory(table)
    state = model.steady_state(model.pricer(table), table, memory)
    tpot_spread, ttft_spread = model.spreads(table, state)
    tpot_low, tpot_high = interval(state.tpot_s, tpot_spread)
    ttft_low, ttft_high = interval(state.ttft_s, ttft_spread)
    requests_per_s = _requests_per_s(problem, table, state)
    return TableEstimate(
        ttft_s=state.ttft_s, ttft_low_s=ttft_low, ttft_high_s=ttft_high, tpot_s=state.tpot_s, tpot_low_s=tpot_low,
        tpot_high_s=tpot_high, tokens_per_s_per_device=requests_per_s * problem.workload.osl / table.num_devices,
        requests_per_s=requests_per_s, cache_tokens=memory.cache_tokens, largest_batch=memory.largest_batch,
        fits=memory.largest_batch >= table.concurrency / (table.replicas * table.attention_dp),
    )  # fmt: skip


def _requests_per_s(problem: ServingProblem, table: ConfigurationTable, state: SteadyState) -> Floats:
    """Return the requests per second of all replicas: Little's law over the requests in the system."""
    request_s = state.ttft_s + np.maximum(problem.workload.osl - 1, 0) * state.tpot_s
    requests_per_s: Floats = table.concurrency / request_s
    return requests_per_s


def estimate_serving(problem: ServingProblem, layout: ServingLayout) -> ServingEstimate:
    """Return what a layout gives under the problem's workload.

    Raises `InputError` for a layout that the model or the engine does not have, for more devices than the cluster has, and for a
    rate above what the layout serves.

    >>> import shardwise as sw
    >>> from shardwise.serve import ServingProblem, Workload
    >>> problem = ServingProblem(
    ...     architecture=sw.load_model("llama-3.1-8b"), cluster=sw.load_cluster("h100:1"),
    ...     workload=Workload(isl=1024, osl=256, concurrency=16),
    ... )
    >>> estimate = estimate_serving(problem, ServingLayout())
    >>> 0.006 < estimate.tpot_s.value < 0.014, estimate.memory.verdict
    (True, 'fits')
    """
    model = ServingModel.of(problem)
    model.require_runnable(layout)
    tokens = model.limits.max_batched_tokens or model.engine.max_batched_tokens
    grid = _concurrency_grid(model, layout, tokens)
    concurrency, max_rate = _operating_point(model, grid)
    table = ConfigurationTable.of([layout], [concurrency], [tokens])
    memory = model.memory(table)
    pricer = model.pricer(table)
    state = model.steady_state(pricer, table, memory)
    return _assemble(model, pricer, _Row(layout, table, memory, state, max_rate))


def _concurrency_grid(
    model: ServingModel, layout: ServingLayout, max_batched_tokens: int
) -> tuple[ConfigurationTable, Floats]:
    """Return a table of the layout at concurrencies up to what it holds, and the requests per second of each."""
    single = ConfigurationTable.of([layout], [1.0], [max_batched_tokens])
    batch = float(min(model.memory(single).largest_batch[0], model.limits.max_num_seqs or model.engine.max_num_seqs))
    copies = layout.attention_copies
    concurrencies = np.geomspace(min(0.01, copies), max(batch, 1.0) * copies, GRID_POINTS)
    table = ConfigurationTable.of([layout] * GRID_POINTS, list(concurrencies), [max_batched_tokens] * GRID_POINTS)
    return table, _requests_per_s(
        model.problem, table, model.steady_state(model.pricer(table), table, model.memory(table))
    )


def _operating_point(model: ServingModel, grid: tuple[ConfigurationTable, Floats]) -> tuple[float, float]:
    """Return the concurrency that a workload leads to, and the largest rate of the layout."""
    (table, rates), workload = grid, model.problem.workload
    max_rate = float(rates.max())
    if workload.concurrency is not None:
        return workload.concurrency, max_rate
    rate = workload.rate_per_s or 0.0
    if rate > max_rate:
        raise InputError(
            f"serve: found a rate of {rate:g} requests/s; {table.layout_of(0)} serves at most {max_rate:.3g} requests/s, so more "
            "replicas, a larger layout or a lower rate is required"
        )
    rising = np.maximum.accumulate(rates)
    return float(np.interp(rate, rising, table.concurrency)), max_rate


class _Row(NamedTuple):
    """A layout at its concurrency, with its memory and steady state as tables of one row."""

    layout: ServingLayout
    table: ConfigurationTable
    memory: MemoryColumns
    state: SteadyState
    max_rate: float


def _assemble(model: ServingModel, pricer: PassPricer, row: _Row) -> ServingEstimate:
    workload, layout, state = model.problem.workload, row.layout, row.state
    tpot_spread, ttft_spread = (first(spread) for spread in model.spreads(row.table, state))
    ttft_s, tpot_s, running = (first(column) for column in (state.ttft_s, state.tpot_s, state.running))
    request_s = ttft_s + tpot_s * max(workload.osl - 1, 0)
    requests_per_s = workload.rate_per_s or first(row.table.concurrency) / request_s
    throughput = interval_of(
        requests_per_s * workload.osl / layout.num_devices, 0.0 if workload.rate_per_s else tpot_spread
    )
    decode = decode_pass_terms(pricer, state.running)
    chip = model.problem.cluster.chip
    per_copy = requests_per_s / layout.attention_copies
    use = serving_use(pricer, state.running, per_copy, workload.osl)
    watts = predict_power(chip, use, tpot_spread)
    return ServingEstimate(
        problem=model.problem, layout=layout, ttft_s=interval_of(ttft_s, ttft_spread), tpot_s=interval_of(tpot_s, tpot_spread),
        tokens_per_s_per_device=throughput, requests_per_s=requests_per_s, max_rate_per_s=row.max_rate,
        concurrency=requests_per_s * request_s, running=running, decode_pass_s=first(state.pass_s),
        prefill_s=first(prompt_seconds(pricer)), decode_terms=decode, prefill_terms=prompt_pass_terms(pricer),
        bound=max(decode, key=lambda term: decode[term]), memory=memory_of_row(row.memory),
        usd_per_million_output_tokens=dollars_per_million(chip, throughput), watts_per_device=watts,
        joules_per_output_token=predict_energy(chip, watts, throughput.value, tpot_spread),
        is_measured=model.is_measured, notes=tuple(list_evidence_notes(model, [layout])),
    )  # fmt: skip


def list_evidence_notes(model: ServingModel, layouts: Sequence[ServingLayout]) -> Iterator[str]:
    """Yield what numbers of a deployment rest on, where that is less than measured rows."""
    chip, engine = model.problem.cluster.chip.name, model.engine
    if engine.name == NEUTRAL:
        yield (
            "no engine is priced, but what the derived passes take at the mean launch and host times of the engines that were "
            "measured; an engine's own limits are not known"
        )
    elif not model.is_measured:
        yield (
            f"nothing measured of {engine.title} on {chip} is among the rows that constants rest on: they are those of NVIDIA's "
            "Hopper and Blackwell chips, and the intervals are wider"
        )
    if forms := list(dict.fromkeys(form for layout in layouts for form in layout.forms)):
        yield (
            f"no measured row has {join_words(forms, 'or')}: the time is that of the derived collectives, at the rates of "
            "the others"
        )
    if (measured := model.problem.calibration) is not None:
        yield (
            f"calibrated with {pluralize(measured.num_results, 'result')}: passes take {measured.pass_factor:.3g} times the "
            f"prediction, first tokens {measured.first_token_factor:.3g} times beside; intervals are as without them"
        )
    if any(layout.redundant_experts for layout in layouts):
        yield "redundant experts are priced by what they hold and read; how far they balance the load was not measured"
    if model.limits.mtp_tokens and not model.limits.acceptance:
        yield f"acceptance of drafted tokens is assumed to be {engine.constants.acceptance:.2f} each"
