"""Price two pools: first tokens from the instances that prefill, tokens after them from those that decode.

Inputs queue for the servers of the prefill pool (a copy of attention of an instance is one, or as many as its pipeline has
stages), and each takes the seconds of its chunks there. Its cache is then sent to an instance of the decode pool, which runs
passes without inputs:

    TTFT = server + queue + prefill + transfer + wait for the decode pool
    TPOT = pass(b) / tokens per pass

By Little's law b = rate * (osl - 1) * TPOT(b) / copies. At a concurrency C the rate is that at which C requests are in both pools
together: C = rate * (TTFT(rate) + (osl - 1) * TPOT(b)); where a pool is full, what is beyond it waits there. Random arrivals wait
at the server that they are sent to when they come, each a queue with service of one length (M/D/1: Pollaczek and Khinchine). The
transfer takes the bytes of the fullest device on either side over its network link: nothing of it is hidden behind the prefill.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from shardwise.serve.configuration_table import ConfigurationTable, Floats
from shardwise.serve.device_power import decode_use, input_use, predict_power, sum_energy
from shardwise.serve.estimate import LOADS, ServingModel, list_evidence_notes
from shardwise.serve.estimate_parts import (
    decode_pass_terms,
    dollars_per_million,
    first,
    interval_of,
    memory_of_row,
    prompt_pass_terms,
)
from shardwise.serve.first_tokens import queued_passes, wave_crowding
from shardwise.serve.memory import MemoryColumns
from shardwise.serve.pass_work import Column
from shardwise.serve.pooled_estimate import PooledEstimate, PoolFigures
from shardwise.serve.pooled_layout import PooledLayout
from shardwise.serve.resting_elements import request_elements
from shardwise.serve.serving_estimate import Prediction
from shardwise.serve.serving_layout import ServingLayout
from shardwise.serve.serving_problem import BatchLimits, ServingProblem
from shardwise.serve.steady_state import PassPricer, queueing_seconds, server_seconds
from shardwise.values import InputError
from shardwise.values.errors import join_words

GRID_POINTS = 256  # batches of the decode pool that a steady state is looked for among
# Deviations of logarithms beside those of instances that do both: 90% of the 69 published rows that state the workers of both
# pools are then in their intervals. Nothing else judges them.
POOL_TPOT_SPREAD, POOL_TTFT_SPREAD = 0.2, 0.65
MEASURED_MODELS = ("deepseek-v3", "qwen3-32b")
FULL = 0.999  # share of a pool's rate beyond which it counts as full
QUEUE, PREFILL, TRANSFER, SERVER, DECODE_WAIT = "queue", "prefill", "transfer of the cache", "server", "wait for decode"
"""Names of the terms of a first token."""


@dataclass(frozen=True, kw_only=True)
class InputColumns:
    """Seconds of one input by itself, inputs of a full pass, and the seconds of that, in servers of a prefill pool."""

    input_s: Column
    pass_inputs: Column
    full_pass_s: Column

    @classmethod
    def of(cls, model: ServingModel, pricer: PassPricer) -> InputColumns:
        """Return the columns of the rows of a table."""
        scale = pricer.work.num_chunks * pricer.constants.prompt_factor * model.engine.pool_prefill_factor
        pass_inputs = pricer.inputs_per_pass
        return cls(
            input_s=scale * pricer.mixed_pass_seconds(0.0, 1.0), pass_inputs=pass_inputs,
            full_pass_s=scale * pricer.mixed_pass_seconds(0.0, pass_inputs),
        )  # fmt: skip


def decode_pool_pricer(model: ServingModel, table: ConfigurationTable) -> PassPricer:
    """Return the passes of a pool that decodes, whose host serves all copies of attention or its own by the engine."""
    return replace(model.pricer(table), shares_host=model.engine.pool_shares_host)


def decode_only_seconds(pricer: PassPricer, running: Column) -> Column:
    """Return the seconds of a token in passes that have no inputs."""
    seconds: Column = pricer.decode_seconds(np.maximum(running, 1.0)) / pricer.tokens_per_pass
    return seconds


@dataclass(frozen=True, kw_only=True)
class PrefillPool:
    """Instances that compute inputs: `servers` take one pass of inputs at a time, `input_s` for one input by itself."""

    pricer: PassPricer
    memory: MemoryColumns
    servers: int
    input_s: float
    pass_inputs: float
    full_pass_s: float

    @classmethod
    def of(cls, model: ServingModel, layout: ServingLayout) -> PrefillPool:
        """Return the pool of a layout."""
        table = _single_row(model, layout)
        pricer = model.pricer(table)
        inputs = InputColumns.of(model, pricer)
        return cls(
            pricer=pricer, memory=model.memory(table), servers=layout.attention_copies * layout.pp,
            input_s=first(inputs.input_s), pass_inputs=first(inputs.pass_inputs), full_pass_s=first(inputs.full_pass_s),
        )  # fmt: skip

    @property
    def max_rate_per_s(self) -> float:
        """Requests per second of all servers with full passes."""
        return self.servers * self.pass_inputs / self.full_pass_s

    def random_wait_seconds(self, rates: Floats) -> Floats:
        """Return the mean wait of random arrivals at rates below the pool's."""
        wait: Floats = queueing_seconds(rates / (self.servers * self.pass_inputs), np.asarray(self.full_pass_s))
        return wait

    def wave_wait_seconds(self, rates: Floats, concurrency: float, life_s: Floats, model: ServingModel) -> Floats:
        """Return the mean wait where each of `concurrency` requests, of `life_s`, is followed by another."""
        workload = model.problem.workload
        all_s = concurrency / self.max_rate_per_s  # to compute an input of each
        crowding, randomness = wave_crowding(
            np.full_like(rates, workload.length_spread), np.minimum(all_s / life_s, 1.0)
        )
        other_share = max(1.0 - 1.0 / concurrency, 0.0)  # share of the requests that another one can meet
        load = np.minimum(other_share * rates * crowding / self.max_rate_per_s, 1.0)
        passes = max(concurrency / (self.servers * self.pass_inputs), 1.0)
        later = queued_passes(load, randomness, np.full_like(rates, passes)) * self.full_pass_s
        first_wave_s = (passes - 1.0) / 2.0 * self.full_pass_s
        share = 1.0 / workload.waves
        wait: Floats = share * first_wave_s + (1.0 - share) * later
        return wait


@dataclass(frozen=True, kw_only=True)
class DecodePool:
    """Instances that decode, at a grid of `running` requests in each of `copies` of attention."""

    pricer: PassPricer
    memory: MemoryColumns
    copies: int
    running: Floats
    tpot_s: Floats
    rates: Floats

    @classmethod
    def of(cls, model: ServingModel, layout: ServingLayout) -> DecodePool:
        """Return the pool of a layout."""
        table = _single_row(model, layout)
        pricer, memory = decode_pool_pricer(model, table), model.memory(table)
        largest = first(memory.largest_batch) * pricer.constants.capacity_margin
        limit = max(min(largest, float(model.limits.max_num_seqs or model.engine.max_num_seqs)), 1.0)
        running = np.geomspace(1e-3, limit, GRID_POINTS)
        tpot_s = decode_only_seconds(pricer, running)
        rates = running * layout.attention_copies / (max(model.problem.workload.osl - 1, 1) * tpot_s)
        return cls(
            pricer=pricer, memory=memory, copies=layout.attention_copies, running=running, tpot_s=np.asarray(tpot_s),
            rates=np.maximum.accumulate(rates),
        )  # fmt: skip

    @property
    def max_rate_per_s(self) -> float:
        """Requests per second of all copies at the largest batch."""
        return float(self.rates[-1])


@dataclass(frozen=True, kw_only=True)
class PooledState:
    """Steady state of two pools."""

    rate_per_s: float
    running: float
    tpot_s: float
    terms: dict[str, float]


def _single_row(model: ServingModel, layout: ServingLayout) -> ConfigurationTable:
    tokens = model.limits.max_batched_tokens or model.engine.max_batched_tokens
    return ConfigurationTable.of([layout], [1.0], [tokens])


def transfer_seconds(model: ServingModel, layout: PooledLayout) -> tuple[float, float]:
    """Return the seconds that the cache of a request's input takes from one pool to the other, and the bytes that the fullest
    device on either side sends or receives."""
    problem = model.problem
    tables = [_single_row(model, pool) for pool in (layout.prefill, layout.decode)]
    moved_bytes = max(
        first(request_elements(problem.architecture, table, problem.workload.isl))
        * model.rates.cache_bytes
        / table.pp[0]
        for table in tables
    )
    # Between instances that share a scale-up domain the cache takes its links.
    is_inside = layout.num_devices <= int(first(model.rates.domain))
    rate = first(model.rates.link_bytes_per_s if is_inside else model.rates.network_bytes_per_s)
    return float(moved_bytes) / (rate * model.engine.constants.link_share), float(moved_bytes)


def estimate_pools(
    problem: ServingProblem, layout: PooledLayout, decode_limits: BatchLimits | None = None
) -> PooledEstimate:
    """Return what two pools give under the problem's workload; `decode_limits` are those of the decode pool, where it has others.

    Raises `InputError` for a layout that the model or the engine does not have, for more devices than the cluster has, and for a
    rate above what the pools serve.

    >>> import shardwise as sw
    >>> from shardwise.serve import PooledLayout, ServingProblem, Workload
    >>> problem = ServingProblem(
    ...     architecture=sw.load_model("llama-3.1-8b"), cluster=sw.load_cluster("h100:8"),
    ...     workload=Workload(isl=4000, osl=200, rate_per_s=10),
    ... )
    >>> estimate = estimate_pools(problem, PooledLayout.parse("prefill: tp=1 replicas=4; decode: tp=1 replicas=4"))
    >>> estimate.bound, 0.5 < estimate.prefill_devices_per_decode_device < 4
    ('prefill', True)
    """
    model = ServingModel.of(problem)
    decode_model = model if decode_limits is None else ServingModel.of(replace(problem, batch_limits=decode_limits))
    model.require_runnable(layout)
    prefill, decode = PrefillPool.of(model, layout.prefill), DecodePool.of(decode_model, layout.decode)
    transfer_s, transfer_bytes = transfer_seconds(model, layout)
    state = _steady_state(model, prefill, decode, transfer_s)
    return _assemble(model, layout, (prefill, decode), state, transfer_bytes)


def _steady_state(model: ServingModel, prefill: PrefillPool, decode: DecodePool, transfer_s: float) -> PooledState:
    """Return the steady state of a workload."""
    workload, largest = model.problem.workload, min(prefill.max_rate_per_s, decode.max_rate_per_s)
    fixed = {
        SERVER: first(server_seconds(prefill.pricer, 1.0)), PREFILL: prefill.input_s, TRANSFER: transfer_s,
        DECODE_WAIT: 0.0,
    }  # fmt: skip
    if workload.concurrency is None:
        rate = workload.rate_per_s or 0.0
        if rate > largest * FULL:
            raise InputError(
                f"serve: found a rate of {rate:g} requests/s; the prefill pool serves at most {prefill.max_rate_per_s:.3g} and "
                f"the decode pool {decode.max_rate_per_s:.3g} requests/s, so more instances or a lower rate are required"
            )
        waits = prefill.random_wait_seconds(decode.rates)
    else:
        decode_s = decode.tpot_s * max(workload.osl - 1, 0)
        latency_s = sum(fixed.values()) + decode_s
        waits = prefill.wave_wait_seconds(decode.rates, workload.concurrency, latency_s, model)
        present = np.maximum.accumulate(decode.rates * (latency_s + waits))
        rate = min(float(np.interp(workload.concurrency, present, decode.rates)), largest)
    running, tpot_s = (float(np.interp(rate, decode.rates, values)) for values in (decode.running, decode.tpot_s))
    terms = {**fixed, QUEUE: float(np.interp(rate, decode.rates, waits))}
    if workload.concurrency is not None:
        # What is in neither pool while one of them is full waits for it.
        beyond = max(workload.concurrency / rate - tpot_s * max(workload.osl - 1, 0) - sum(terms.values()), 0.0)
        terms[QUEUE if prefill.max_rate_per_s <= decode.max_rate_per_s else DECODE_WAIT] += beyond
    return PooledState(rate_per_s=rate, running=running, tpot_s=tpot_s, terms=terms)


def _spreads(model: ServingModel, layout: PooledLayout, state: PooledState) -> tuple[float, float]:
    """Return the spreads of TPOT, and of TTFT by the requests in an instance of the prefill pool."""
    of_ttft = model.spread_cells[1]
    load = state.rate_per_s * sum(state.terms.values()) / layout.prefill.replicas
    return pool_tpot_spread(model), math.hypot(float(of_ttft[np.digitize(load, LOADS)]), POOL_TTFT_SPREAD)


def pool_tpot_spread(model: ServingModel) -> float:
    """Return the spread of TPOT of a decode pool: that of passes without inputs, and that of pools beside."""
    return math.hypot(float(model.spread_cells[0][0]), POOL_TPOT_SPREAD)


def _assemble(
    model: ServingModel,
    layout: PooledLayout,
    pools: tuple[PrefillPool, DecodePool],
    state: PooledState,
    transfer: float,
) -> PooledEstimate:
    """Return the estimate of a steady state."""
    (prefill, decode), workload = pools, model.problem.workload
    members: list[PrefillPool | DecodePool] = [*pools]
    tpot_spread, ttft_spread = _spreads(model, layout, state)
    ttft_s, num_devices = sum(state.terms.values()), layout.num_devices
    throughput = state.rate_per_s * workload.osl / num_devices
    tokens = interval_of(throughput, 0.0 if workload.rate_per_s else tpot_spread)
    terms = (prompt_pass_terms(prefill.pricer), decode_pass_terms(decode.pricer, max(state.running, 1.0)))
    watts = _pool_watts(model, layout, pools, state)
    figures = [
        PoolFigures(
            max_rate_per_s=pool.max_rate_per_s, busy_share=min(state.rate_per_s / pool.max_rate_per_s, 1.0),
            pass_s=sum(pass_terms.values()), terms=pass_terms, memory=memory_of_row(pool.memory), watts_per_device=power,
        )
        for pool, pass_terms, power in zip(members, terms, watts, strict=True)
    ]  # fmt: skip
    joules = sum_energy(
        [(watts[0], layout.prefill.num_devices), (watts[1], layout.decode.num_devices)], state.rate_per_s * workload.osl
    )
    rates_per_device = [
        pool.max_rate_per_s / part.num_devices
        for pool, part in zip(members, (layout.prefill, layout.decode), strict=True)
    ]
    request_s = ttft_s + state.tpot_s * max(workload.osl - 1, 0)
    return PooledEstimate(
        problem=model.problem, layout=layout, ttft_s=interval_of(ttft_s, ttft_spread),
        tpot_s=interval_of(state.tpot_s, tpot_spread), tokens_per_s_per_device=tokens, requests_per_s=state.rate_per_s,
        max_rate_per_s=min(pool.max_rate_per_s for pool in members), concurrency=state.rate_per_s * request_s,
        running=state.running, ttft_terms=dict(sorted(state.terms.items(), key=lambda item: -item[1])),
        transfer_bytes=transfer, prefill=figures[0], decode=figures[1],
        bound="prefill" if prefill.max_rate_per_s <= decode.max_rate_per_s else "decode",
        prefill_devices_per_decode_device=rates_per_device[1] / rates_per_device[0],
        usd_per_million_output_tokens=dollars_per_million(model.problem.cluster.chip, tokens), joules_per_output_token=joules,
        is_measured=model.is_measured,
        notes=tuple(_list_notes(model, layout, (prefill, decode), state)),
    )  # fmt: skip


def _pool_watts(
    model: ServingModel, layout: PooledLayout, pools: tuple[PrefillPool, DecodePool], state: PooledState
) -> tuple[Prediction | None, Prediction | None]:
    """Return the watts of a device of each pool: one computes inputs, the other tokens after the first."""
    prefill, decode = pools
    inputs = input_use(prefill.pricer, 0.0).scaled(state.rate_per_s / layout.prefill.attention_copies)
    running = max(state.running, 1.0)
    tokens_per_s = state.rate_per_s * max(model.problem.workload.osl - 1, 0) / layout.decode.attention_copies
    tokens = decode_use(decode.pricer, running).scaled(tokens_per_s / (decode.pricer.tokens_per_pass * running))
    chip, spread = model.problem.cluster.chip, pool_tpot_spread(model)
    return predict_power(chip, inputs, spread), predict_power(chip, tokens, spread)


def _list_notes(
    model: ServingModel, layout: PooledLayout, pools: tuple[PrefillPool, DecodePool], state: PooledState
) -> Iterator[str]:
    """Yield what numbers rest on, and which pool is full."""
    yield from list_evidence_notes(model, [layout.prefill, layout.decode])
    rates = {"prefill": pools[0].max_rate_per_s, "decode": pools[1].max_rate_per_s}
    for name, max_rate_per_s in rates.items():
        if state.rate_per_s >= FULL * max_rate_per_s:
            yield f"the {name} pool is full: requests wait for it"
    if layout.prefill.pp > 1 or layout.decode.pp > 1:
        yield "no measured row of pools has stages of a pipeline: pp is priced with every stage busy"
    if model.problem.architecture.name not in MEASURED_MODELS:
        yield f"pools were measured with {join_words(MEASURED_MODELS, 'and')} alone: first tokens of others are less sure"
