"""Choose two pools: the layouts, and how many instances of each, of a deployment whose prefill and decode part.

Passes of a pool do not depend on the other pool, so that each is searched by itself: of the instances of so many devices, the one
that serves the most requests per second within its own limit. Pairs of them are then filled with instances until neither waits,
and the best of the pairs are priced together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from shardwise.search.serving.candidates import complexity
from shardwise.search.serving.serving_plan import ServingQuestion
from shardwise.serve import ConfigurationTable, PooledEstimate, PooledLayout, ServingLayout, estimate_pools
from shardwise.serve.configuration_table import Floats
from shardwise.serve.estimate import ServingModel
from shardwise.serve.estimate_parts import interval
from shardwise.serve.pools import InputColumns, decode_only_seconds, decode_pool_pricer, pool_tpot_spread
from shardwise.serve.steady_state import latency_within
from shardwise.values import InputError

NUM_PRICED = 4  # pairs that are priced together
PREFILL_LOAD = 0.8  # share of the prefill pool's rate that a plan starts from: beyond it the queue grows fast
LOAD_STEP = 0.85  # of the requests in the system, while a limit on first tokens is missed
MOST_STEPS = 16


class PoolCandidate(NamedTuple):
    """An instance of a pool and the requests per second that it serves; of a decode pool at `running` in a copy of attention."""

    layout: ServingLayout
    rate_per_s: float
    running: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPair:
    """Instances of both pools, and the requests per second at which one of them is full."""

    prefill: PoolCandidate
    decode: PoolCandidate
    num_prefill: int
    num_decode: int

    @property
    def layout(self) -> PooledLayout:
        """Layout of the pools."""
        return PooledLayout(
            prefill=self.prefill.layout.with_replicas(self.num_prefill),
            decode=self.decode.layout.with_replicas(self.num_decode),
        )

    @property
    def rate_per_s(self) -> float:
        """Requests per second of the pool that is full first."""
        return min(self.num_prefill * self.prefill.rate_per_s * PREFILL_LOAD, self.num_decode * self.decode.rate_per_s)


def plan_pools(question: ServingQuestion, layouts: Sequence[ServingLayout]) -> PooledEstimate | None:
    """Return the best pools of layouts of one instance that serve a load within the limits; None where there are none.

    With a rate those on the fewest devices, without one those that serve the most on the whole cluster. Pools with stages of a
    pipeline, or with forms of a layout, are priced where they are asked for and not proposed: nothing measured says how well
    they do.
    """
    plain = [
        layout
        for layout in layouts
        if not layout.forms and layout.pp == 1 and layout.devices_per_replica < question.cluster.num_devices
    ]
    if not plain:
        return None
    model = ServingModel.of(question.problem(concurrency=1.0))
    prefill, decode = _prefill_candidates(model, question, plain), _decode_candidates(model, question, plain)
    pairs = [pair for first in prefill for second in decode if (pair := _fill(question, first, second)) is not None]
    pairs.sort(key=lambda pair: _cost(question, pair))
    priced = [estimate for pair in pairs[:NUM_PRICED] if (estimate := _price(question, pair)) is not None]
    return min(priced, key=lambda estimate: pools_cost(question, estimate), default=None)


def pools_cost(question: ServingQuestion, estimate: PooledEstimate) -> float:
    """Return what pools are ranked by: devices for a rate, else tokens per second of all, negative."""
    num_devices = estimate.layout.num_devices
    if question.rate_per_s is not None:
        return float(num_devices)
    return -estimate.tokens_per_s_per_device.value * num_devices


def _cost(question: ServingQuestion, pair: PoolPair) -> tuple[float, int]:
    """Return what pairs are ranked by, ties by how many axes they use."""
    axes = complexity(pair.prefill.layout) + complexity(pair.decode.layout)
    if question.rate_per_s is not None:
        return float(pair.layout.num_devices), axes
    return -pair.rate_per_s, axes


def _prefill_candidates(
    model: ServingModel, question: ServingQuestion, layouts: Sequence[ServingLayout]
) -> list[PoolCandidate]:
    """Return the quickest instance of each number of devices whose first tokens can be within the limit."""
    tokens = model.limits.max_batched_tokens or model.engine.max_batched_tokens
    table = ConfigurationTable.of(layouts, [1.0] * len(layouts), [tokens] * len(layouts))
    inputs = InputColumns.of(model, model.pricer(table))
    rates = table.attention_dp * table.pp * inputs.pass_inputs / inputs.full_pass_s
    limit = question.latency_limits.ttft_s or math.inf
    fits = (model.memory(table).largest_batch >= 1.0) & (np.asarray(inputs.input_s) <= limit)
    return list(_best_by_size(table, np.where(fits, rates, 0.0)))


def _decode_candidates(
    model: ServingModel, question: ServingQuestion, layouts: Sequence[ServingLayout]
) -> list[PoolCandidate]:
    """Return the instance of each number of devices that decodes the most requests per second within the limit."""
    largest = model.limits.max_num_seqs or model.engine.max_num_seqs
    batches = [float(2**exponent) for exponent in range(max(largest, 1).bit_length()) if 2**exponent <= largest]
    rows = [(layout, batch) for layout in layouts for batch in batches]
    tokens = model.limits.max_batched_tokens or model.engine.max_batched_tokens
    table = ConfigurationTable.of([layout for layout, _ in rows], [batch for _, batch in rows], [tokens] * len(rows))
    running = table.concurrency
    tpot_s = np.asarray(decode_only_seconds(decode_pool_pricer(model, table), running))
    low, high = interval(tpot_s, pool_tpot_spread(model))
    fits = latency_within(question.latency_limits.tpot_s, tpot_s, low, high) & (
        model.memory(table).largest_batch >= running
    )
    rates = running * table.attention_dp / (max(question.osl - 1, 1) * tpot_s)
    return list(_best_by_size(table, np.where(fits, rates, 0.0)))


def _best_by_size(table: ConfigurationTable, rates: Floats) -> Iterator[PoolCandidate]:
    """Yield the row of the highest rate of each number of devices, of those above 0."""
    sizes = table.devices_per_replica
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        best = int(rows[np.argmax(rates[rows])])
        if rates[best] > 0:
            yield PoolCandidate(table.layout_of(best), float(rates[best]), float(table.concurrency[best]))


def _fill(question: ServingQuestion, prefill: PoolCandidate, decode: PoolCandidate) -> PoolPair | None:
    """Return how many instances of two kinds serve the rate, or without one the most on the cluster; None where none do."""
    capacity = question.cluster.num_devices
    sizes = prefill.layout.devices_per_replica, decode.layout.devices_per_replica
    if question.rate_per_s is not None:
        counts = (
            math.ceil(question.rate_per_s / (prefill.rate_per_s * PREFILL_LOAD)),
            math.ceil(question.rate_per_s / decode.rate_per_s),
        )
        if counts[0] * sizes[0] + counts[1] * sizes[1] > capacity:
            return None
        return PoolPair(prefill=prefill, decode=decode, num_prefill=counts[0], num_decode=counts[1])
    pairs = [
        PoolPair(
            prefill=prefill, decode=decode, num_prefill=count, num_decode=(capacity - count * sizes[0]) // sizes[1]
        )
        for count in range(1, (capacity - sizes[1]) // sizes[0] + 1)
    ]
    return max(pairs, key=lambda pair: pair.rate_per_s, default=None)


def _price(question: ServingQuestion, pair: PoolPair) -> PooledEstimate | None:
    """Return the estimate of a pair within the limits: at a rate with as many prefill instances as that takes, else with as many
    requests in the system; None where no number is within them."""
    limits, num_prefill = question.latency_limits, pair.num_prefill
    concurrency = pair.decode.running * pair.decode.layout.attention_dp * pair.num_decode
    for _ in range(MOST_STEPS):
        layout = PooledLayout(prefill=pair.prefill.layout.with_replicas(num_prefill), decode=pair.layout.decode)
        is_rate = question.rate_per_s is not None
        if layout.num_devices > question.cluster.num_devices or concurrency < 1:
            return None
        problem = question.problem(rate_per_s=question.rate_per_s, concurrency=None if is_rate else concurrency)
        try:
            estimate = estimate_pools(problem, layout)
        except InputError:  # the rate is just what so many instances serve: one more is tried
            estimate = None
        if estimate is not None and estimate.meets(limits):
            return estimate
        if is_rate:
            num_prefill += 1
        else:
            concurrency *= LOAD_STEP
    return None
