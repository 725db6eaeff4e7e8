"""What serving configurations give: latencies with intervals, throughput, memory, what bounds a pass, power and price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardwise.serve.configuration_table import ConfigurationTable, Floats, TableEstimate
from shardwise.serve.engines import ServingEngine, get_serving_engine
from shardwise.serve.kernel_seconds import ServingRates
from shardwise.serve.legality import require_legal_serving_layout
from shardwise.serve.memory import MemoryColumns, size_memory
from shardwise.serve.pass_cost import HOST, price_pass
from shardwise.serve.pass_work import PassTokens
from shardwise.serve.serving_constants import constants_file
from shardwise.serve.serving_estimate import Prediction, ServingEstimate, ServingMemory, ServingVerdict
from shardwise.serve.serving_layout import ServingLayout
from shardwise.serve.serving_problem import BatchLimits, ServingProblem
from shardwise.serve.steady_state import (
    INTERVAL_DEVIATIONS,
    PassPricer,
    SteadyState,
    first_token_seconds,
    queueing_seconds,
    solve_steady_state,
)
from shardwise.values import InputError

MEMORY_MARGIN = 0.03  # a cache within this share of what is required is neither said to fit nor not to
GRID_POINTS = 96  # concurrencies that a rate is looked for among
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class ServingModel:
    """A problem with its engine, limits and rates filled in: what single layouts and tables are estimated with."""

    problem: ServingProblem
    engine: ServingEngine
    limits: BatchLimits
    pricer: PassPricer

    @classmethod
    def of(cls, problem: ServingProblem) -> ServingModel:
        """Return the model of a problem. Raises `InputError` for an unknown engine or release."""
        engine = get_serving_engine(problem.engine, problem.release)
        limits = engine.batch_limits(problem.batch_limits)
        rates = ServingRates.of(problem.cluster, problem.formats, engine.constants)
        weights = problem.formats.expert_format if problem.architecture.num_experts else problem.formats.weight_format
        factor = engine.release_factor(problem.cluster.chip.catalog_name, weights.name)
        pricer = PassPricer(
            architecture=problem.architecture, rates=rates, engine=engine, factor=factor, limits=limits
        )  # fmt: skip
        return cls(problem=problem, engine=engine, limits=limits, pricer=pricer)

    @cached_property
    def is_measured(self) -> bool:
        """True if rows of the engine on the chip are among those that the constants rest on."""
        measured = constants_file()["engines"][self.engine.name]["measured_chips"]
        return self.problem.cluster.chip.catalog_name in measured

    def memory(self, table: ConfigurationTable) -> MemoryColumns:
        """Return the memory of each row."""
        return size_memory(self.problem, self.engine, self.pricer.rates, table, self.limits)

    def steady_state(self, table: ConfigurationTable, memory: MemoryColumns) -> SteadyState:
        """Return the steady state of each row."""
        return solve_steady_state(self.pricer, self.problem, table, memory)

    @property
    def spreads(self) -> tuple[float, float]:
        """Standard deviations of the logarithms of TPOT and TTFT over their predictions, for models that were not fitted to."""
        spreads: Mapping[str, Mapping[str, float]] = constants_file()["spreads"]
        kind = "experts" if self.problem.architecture.num_experts else "dense"
        unmeasured = 1.0 if self.is_measured else spreads["unmeasured"]["factor"]
        return spreads["tpot"][kind] * unmeasured, spreads["ttft"][kind] * unmeasured

    def interval(self, values: Floats, spread: float) -> tuple[Floats, Floats]:
        """Return the ends of the 90% intervals of values."""
        factor = np.exp(INTERVAL_DEVIATIONS * spread)
        return values / factor, values * factor


def estimate_table(problem: ServingProblem, table: ConfigurationTable) -> TableEstimate:
    """Return the estimates of a table of configurations at their concurrencies; the workload's own is not read.

    Raises `InputError` for an unknown engine or release.
    """
    model = ServingModel.of(problem)
    memory = model.memory(table)
    state = model.steady_state(table, memory)
    tpot_spread, ttft_spread = model.spreads
    tpot_low, tpot_high = model.interval(state.tpot_s, tpot_spread)
    ttft_low, ttft_high = model.interval(state.ttft_s, ttft_spread)
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
    require_legal_serving_layout(problem.architecture, layout, problem.formats)
    model = ServingModel.of(problem)
    _require_runnable(model, layout)
    tokens = model.limits.max_batched_tokens or model.engine.max_batched_tokens
    grid = _concurrency_grid(model, layout, tokens)
    concurrency, max_rate = _operating_point(model, grid)
    table = ConfigurationTable.of([layout], [concurrency], [tokens])
    memory = model.memory(table)
    state = model.steady_state(table, memory)
    if problem.workload.rate_per_s is not None:
        state = _at_rate(model, table, state, problem.workload.rate_per_s)
    return _assemble(model, layout, table, memory, state, max_rate)


def _require_runnable(model: ServingModel, layout: ServingLayout) -> None:
    problems = model.engine.layout_problems(model.problem.architecture, layout)
    if layout.num_devices > (available := model.problem.cluster.num_devices):
        problems.append(
            f"layout: {layout} takes {layout.num_devices} devices; at most the {available} of "
            f"{model.problem.cluster.name} are required"
        )
    if problems:
        raise InputError("\n".join(problems))


def _concurrency_grid(
    model: ServingModel, layout: ServingLayout, max_batched_tokens: int
) -> tuple[ConfigurationTable, Floats]:
    """Return a table of the layout at concurrencies up to what it holds, and the requests per second of each."""
    single = ConfigurationTable.of([layout], [1.0], [max_batched_tokens])
    batch = float(min(model.memory(single).largest_batch[0], model.limits.max_num_seqs or model.engine.max_num_seqs))
    copies = layout.attention_copies
    concurrencies = np.geomspace(min(0.01, copies), max(batch, 1.0) * copies, GRID_POINTS)
    table = ConfigurationTable.of([layout] * GRID_POINTS, list(concurrencies), [max_batched_tokens] * GRID_POINTS)
    return table, _requests_per_s(model.problem, table, model.steady_state(table, model.memory(table)))


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


def _at_rate(model: ServingModel, table: ConfigurationTable, state: SteadyState, rate_per_s: float) -> SteadyState:
    """Return the state with first tokens of random arrivals in place of those of a fixed concurrency."""
    per_copy = rate_per_s / (table.replicas * table.attention_dp)
    service_s = state.prompt_s * model.pricer.constants.prompt_factor
    first_token_s = first_token_seconds(model.pricer, table, state.running, state.pass_s, state.prompt_s)
    ttft_s = (first_token_s + queueing_seconds(per_copy, service_s)) * model.pricer.factor.first_token_factor
    return replace(state, ttft_s=ttft_s)


def _assemble(
    model: ServingModel,
    layout: ServingLayout,
    table: ConfigurationTable,
    memory: MemoryColumns,
    state: SteadyState,
    max_rate: float,
) -> ServingEstimate:
    problem, workload = model.problem, model.problem.workload
    tpot_spread, ttft_spread = model.spreads
    ttft_s, tpot_s = float(state.ttft_s[0]), float(state.tpot_s[0])
    requests_per_s = workload.rate_per_s or float(table.concurrency[0]) / (ttft_s + tpot_s * max(workload.osl - 1, 0))
    throughput = _predict(
        requests_per_s * workload.osl / layout.num_devices, 0.0 if workload.rate_per_s else tpot_spread
    )
    decode, prompt = _decode_terms(model, table, state), _prompt_terms(model, table)
    return ServingEstimate(
        problem=problem, layout=layout, ttft_s=_predict(ttft_s, ttft_spread), tpot_s=_predict(tpot_s, tpot_spread),
        tokens_per_s_per_device=throughput, requests_per_s=requests_per_s, max_rate_per_s=max_rate,
        concurrency=requests_per_s * (ttft_s + tpot_s * max(workload.osl - 1, 0)), running=float(state.running[0]),
        decode_pass_s=float(state.pass_s[0]), prefill_s=float(state.prompt_s[0]), decode_terms=decode, prefill_terms=prompt,
        bound=max(decode, key=lambda term: decode[term]), memory=_memory(model, table, memory),
        usd_per_million_output_tokens=_price(model, throughput), watts_per_device=_watts(model),
        is_measured=model.is_measured, notes=_notes(model),
    )  # fmt: skip


def _predict(value: float, spread: float) -> Prediction:
    factor = float(np.exp(INTERVAL_DEVIATIONS * spread))
    return Prediction(value=value, low=value / factor, high=value * factor)


def _decode_terms(model: ServingModel, table: ConfigurationTable, state: SteadyState) -> dict[str, float]:
    """Return the terms of a decode pass, the largest first; they add up to the pass."""
    pricer = model.pricer
    terms = pricer.decode_terms(table, state.running, model.problem.workload.mean_context)
    drafted = model.limits.mtp_tokens
    share = 1.0 + drafted * 2.0 / model.problem.architecture.num_layers
    seconds = {name: float(np.ravel(value)[0]) * share for name, value in terms.items()}
    seconds[HOST] = float(pricer.host_seconds(table, state.running, 1 + drafted)[0])
    return _sorted({name: value * pricer.factor.pass_factor for name, value in seconds.items()})


def _prompt_terms(model: ServingModel, table: ConfigurationTable) -> dict[str, float]:
    """Return the terms of one request's chunks, the largest first, scaled to add up to the chunks' seconds."""
    isl, pricer = model.problem.workload.new_input_tokens, model.pricer
    num_chunks = np.ceil(isl / np.minimum(table.max_batched_tokens, isl))
    tokens = PassTokens(prompt_tokens=isl / num_chunks / table.cp, prompt_context=isl / 2)
    terms = price_pass(model.problem.architecture, table, pricer.rates, tokens, has_prompt=True)
    seconds = {name: float((num_chunks * value)[0]) for name, value in terms.items()}
    total = float(pricer.prompt_seconds(table, np.ones(1), isl, model.problem.workload.mean_context)[0][0])
    seconds[HOST] = max(total / pricer.factor.pass_factor - sum(seconds.values()), 0.0)
    scale = total / sum(seconds.values())
    return _sorted({name: value * scale for name, value in seconds.items()})


def _sorted(seconds: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in sorted(seconds.items(), key=lambda item: -item[1]) if value > 0}


def _memory(model: ServingModel, table: ConfigurationTable, memory: MemoryColumns) -> ServingMemory:
    required = 1.0
    batch = float(memory.largest_batch[0])
    verdict: ServingVerdict = "fits"
    if batch < required * (1 + MEMORY_MARGIN):
        verdict = "does not fit" if batch < required * (1 - MEMORY_MARGIN) else "not known"
    return ServingMemory(
        capacity_bytes=memory.capacity_bytes, usable_bytes=float(memory.usable_bytes[0]),
        weight_bytes=float(memory.weight_bytes[0]), activation_bytes=float(memory.activation_bytes[0]),
        runtime_bytes=float(memory.runtime_bytes[0]), cache_bytes=float(memory.cache_bytes[0]),
        cache_bytes_per_token=float(memory.cache_bytes_per_token[0]), cache_tokens=int(memory.cache_tokens[0]),
        largest_batch=int(batch), verdict=verdict, rule=memory.rule,
    )  # fmt: skip


def _price(model: ServingModel, throughput: Prediction) -> Prediction | None:
    """Return the dollars of a million output tokens, where the chip has a price."""
    price = model.problem.cluster.chip.price_usd_per_hour
    if price is None:
        return None
    per_million = price / SECONDS_PER_HOUR * 1e6
    assert throughput.low is not None
    assert throughput.high is not None
    return Prediction(
        value=per_million / throughput.value, low=per_million / throughput.high, high=per_million / throughput.low
    )


def _watts(model: ServingModel) -> float | None:
    """Return the mean watts of a device: its rated power by the share that serving draws of it."""
    power = model.problem.cluster.chip.power_w
    return None if power is None else power * constants_file()["power"]["mean_share"]


def _notes(model: ServingModel) -> tuple[str, ...]:
    notes = []
    if not model.is_measured:
        chip, engine = model.problem.cluster.chip.name, model.engine.title
        notes.append(
            f"nothing measured of {engine} on {chip} is among the rows that constants rest on: they are those of NVIDIA's "
            "Hopper and Blackwell chips, and the intervals are wider"
        )
    if model.limits.mtp_tokens and not model.limits.acceptance:
        notes.append(f"acceptance of drafted tokens is assumed to be {model.pricer.constants.acceptance:.2f} each")
    return tuple(notes)
