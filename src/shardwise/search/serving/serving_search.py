"""Choose a serving layout: all candidates are estimated at once, those that miss a limit go, and the cheapest that is left wins.

With a rate the plan has the fewest devices that serve it; without one it serves the most tokens per device on the whole cluster.
A limit is met where the predicted latency is within it with `CONFIDENCE`, so that a pick rarely misses what it was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from shardwise.search.serving.candidates import build_table, complexity, list_serving_layouts
from shardwise.search.serving.pool_search import plan_pools
from shardwise.search.serving.serving_plan import (
    RejectedServingLayout,
    ServingPlan,
    ServingPoint,
    ServingQuestion,
    find_knee,
    pareto_front,
)
from shardwise.serve import (
    WEIGHT_FORMATS,
    BatchLimits,
    ConfigurationTable,
    ServingEstimate,
    ServingLayout,
    TableEstimate,
    serving_layout_problems,
)
from shardwise.serve.engines import get_serving_engine
from shardwise.serve.estimate import estimate_serving, estimate_table
from shardwise.serve.steady_state import latency_within
from shardwise.values import InputError, format_seconds, pluralize
from shardwise.values.errors import MissedLimitError, NothingFitsError

RESOLUTION = 0.03  # a share of throughput that predictions cannot tell apart; the simpler layout is taken
NUM_ALTERNATIVES = 5  # runners-up that a plan lists
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class _Candidates:
    """All rows of a search with their estimates; `within` marks those that fit and meet the limits."""

    question: ServingQuestion
    table: ConfigurationTable
    estimate: TableEstimate

    @cached_property
    def within(self) -> Mask:
        """Rows that fit and meet both limits."""
        limits, estimate = self.question.latency_limits, self.estimate
        return (
            estimate.fits
            & latency_within(limits.ttft_s, estimate.ttft_s, estimate.ttft_low_s, estimate.ttft_high_s)
            & latency_within(limits.tpot_s, estimate.tpot_s, estimate.tpot_low_s, estimate.tpot_high_s)
        )

    def point(self, row: int) -> ServingPoint:
        """Return a row as a point of one instance."""
        estimate = self.estimate
        return ServingPoint(
            layout=self.table.layout_of(row), concurrency=float(self.table.concurrency[row]),
            ttft_s=float(estimate.ttft_s[row]), tpot_s=float(estimate.tpot_s[row]),
            tokens_per_s_per_device=float(estimate.tokens_per_s_per_device[row]),
            requests_per_s=float(estimate.requests_per_s[row]),
        )  # fmt: skip

    def best_points(self) -> Iterator[ServingPoint]:
        """Yield each layout at the most requests per second that it serves within the limits, in the order of the table."""
        rows = np.flatnonzero(self.within)
        for _, group in groupby(rows, key=lambda row: str(self.table.layout_of(int(row)))):
            yield self.point(int(max(group, key=lambda row: self.estimate.requests_per_s[row])))

    def curve(self, layout: ServingLayout) -> tuple[ServingPoint, ...]:
        """Return a layout at every concurrency that fits."""
        rows = (int(row) for row in np.flatnonzero(self.estimate.fits))
        return tuple(self.point(row) for row in rows if self.table.layout_of(row) == layout)


def plan_serving(question: ServingQuestion) -> ServingPlan:
    """Return the plan of a question.

    Raises `InputError` for a problem that cannot be served as asked, and `NothingFitsError` where the model does not fit
    the cluster, and `MissedLimitError` where no layout meets the limits, with the best that any reaches.
    """
    engine = get_serving_engine(question.engine, question.release)
    layouts = list_serving_layouts(question.architecture, question.cluster, question.formats, engine)
    if not layouts:
        raise InputError(
            *serving_layout_problems(question.architecture, ServingLayout(), question.formats),
            f"serve: no layout of {question.architecture.name} on {question.cluster.name} that {engine.name} runs",
        )
    limits = engine.batch_limits(question.batch_limits)
    table = build_table(
        layouts, limits.max_num_seqs or engine.max_num_seqs, limits.max_batched_tokens or engine.max_batched_tokens
    )
    load = {"rate_per_s": question.rate_per_s} if question.rate_per_s is not None else {"concurrency": 1.0}
    candidates = _Candidates(question, table, estimate_table(question.problem(**load), table))
    if not candidates.estimate.fits.any():
        raise NothingFitsError(_describe_too_small(candidates))
    points = list(candidates.best_points())
    if not points:
        raise MissedLimitError(_describe_missed_limits(candidates))
    ranked = _rank(question, points)
    chosen, layout, estimate = _choose(question, ranked)
    curve = candidates.curve(layout.with_replicas(1))
    fitting = [candidates.point(int(row)) for row in np.flatnonzero(candidates.estimate.fits)]
    doubled, doubled_devices = _double(question, layout, ranked, estimate)
    return ServingPlan(
        question=question, layout=layout, batch_limits=_limits_to_start_with(limits, chosen), estimate=estimate,
        concurrency=chosen.concurrency * layout.replicas, alternatives=_list_alternatives(question, chosen, ranked),
        front=pareto_front(fitting), curve=curve, knee=find_knee(curve),
        smallest=min(fitting, key=lambda point: point.layout.num_devices).layout,
        doubled=doubled, doubled_devices=doubled_devices, num_configurations=len(table),
        prefill_devices_per_decode_device=prefill_ratio(estimate), pools=plan_pools(question, layouts),
    )  # fmt: skip


def prefill_ratio(estimate: ServingEstimate) -> float:
    """Return the devices that prefill for each that decodes, where the two part.

    A request takes its prefill on one instance, and its share of `osl` passes on another, which it has with all that run beside
    it: the ratio of the two is that of the devices, so that neither waits. Source: the book, "Inference", disaggregated serving.
    """
    decode_s = (
        estimate.problem.workload.osl * estimate.decode_pass_s / (estimate.running * estimate.layout.attention_dp)
    )
    return estimate.prefill_s / decode_s


def _devices_needed(question: ServingQuestion, point: ServingPoint, rate_per_s: float | None) -> int:
    """Return the devices of a layout that serve the rate; without one those of one instance."""
    if rate_per_s is None:
        return point.layout.devices_per_replica
    return point.layout.devices_per_replica * max(math.ceil(rate_per_s / point.requests_per_s), 1)


def _rank(question: ServingQuestion, points: Iterable[ServingPoint]) -> list[ServingPoint]:
    """Return the layouts, the best first: by devices for a rate, else by tokens/s per device, with ties to the simplest."""
    capacity = question.cluster.num_devices

    def cost(point: ServingPoint) -> float:
        if question.rate_per_s is not None:
            return _devices_needed(question, point, question.rate_per_s)
        used = capacity // point.layout.devices_per_replica * point.layout.devices_per_replica
        return -point.tokens_per_s_per_device * used / capacity

    ordered = sorted(points, key=lambda point: (cost(point), point.tpot_s))
    best = cost(ordered[0])
    equivalent = [point for point in ordered if abs(cost(point) - best) <= RESOLUTION * abs(best)]
    equivalent.sort(key=lambda point: (complexity(point.layout), cost(point)))
    return equivalent + [point for point in ordered if point not in equivalent]


def _choose(
    question: ServingQuestion, ranked: list[ServingPoint]
) -> tuple[ServingPoint, ServingLayout, ServingEstimate]:
    """Return the first layout that serves the load on the cluster, with its instances, and its estimate.

    At a rate requests arrive at random and queue, so that instances are added until the limits are met under that too.
    """
    capacity, limits = question.cluster.num_devices, question.latency_limits
    for point in ranked:
        max_replicas = capacity // point.layout.devices_per_replica
        if question.rate_per_s is None:
            layout = point.layout.with_replicas(max_replicas)
            problem = question.problem(concurrency=point.concurrency * max_replicas)
            return point, layout, estimate_serving(problem, layout)
        for replicas in range(max(math.ceil(question.rate_per_s / point.requests_per_s), 1), max_replicas + 1):
            layout = point.layout.with_replicas(replicas)
            try:
                estimate = estimate_serving(question.problem(rate_per_s=question.rate_per_s), layout)
            except InputError:  # the rate is just what so many instances serve: one more is tried
                continue
            if estimate.meets(limits):
                return point, layout, estimate
    best = ranked[0]
    num_devices = _devices_needed(question, best, question.rate_per_s)
    raise MissedLimitError(
        f"serve: {question.rate_per_s:g} requests/s need about {num_devices} devices ({best.layout}, {best.requests_per_s:.3g} "
        f"requests/s an instance); {question.cluster.name} has {capacity}"
    )


def _double(
    question: ServingQuestion, layout: ServingLayout, ranked: list[ServingPoint], estimate: ServingEstimate
) -> tuple[ServingEstimate | None, int | None]:
    """Return what the same instances give at twice the rate, if they serve it, and the devices that it takes."""
    if question.rate_per_s is None:
        return None, None
    rate = 2 * question.rate_per_s
    same = estimate_serving(question.problem(rate_per_s=rate), layout) if rate < estimate.max_rate_per_s else None
    return same, min(_devices_needed(question, point, rate) for point in ranked)


def _limits_to_start_with(limits: BatchLimits, chosen: ServingPoint) -> BatchLimits:
    """Return limits that hold the chosen concurrency: the next power of two, at most the engine's default."""
    per_copy = math.ceil(chosen.concurrency / chosen.layout.attention_dp)
    num_seqs = 2 ** math.ceil(math.log2(per_copy)) if per_copy > 1 else 1
    default = limits.max_num_seqs or num_seqs
    return replace(limits, max_num_seqs=min(max(num_seqs, 8), max(default, per_copy)))


def _list_alternatives(
    question: ServingQuestion, chosen: ServingPoint, ranked: list[ServingPoint]
) -> tuple[RejectedServingLayout, ...]:
    rejected = [point for point in ranked if point is not chosen]
    return tuple(
        RejectedServingLayout(point=point, reason=_reason(question, chosen, point))
        for point in rejected[:NUM_ALTERNATIVES]
    )


def _reason(question: ServingQuestion, chosen: ServingPoint, point: ServingPoint) -> str:
    """Return why a layout was not chosen: more devices, fewer tokens, or the same with more axes."""
    if question.rate_per_s is not None:
        num_devices, num_chosen = (
            _devices_needed(question, candidate, question.rate_per_s) for candidate in (point, chosen)
        )
        if num_devices > num_chosen:
            return f"{pluralize(num_devices, 'device')} for the rate, {num_chosen} of the chosen"
        return f"as many devices, {format_seconds(point.tpot_s)} a token"
    ratio = point.tokens_per_s_per_device / chosen.tokens_per_s_per_device - 1
    if abs(ratio) <= RESOLUTION:
        return f"{ratio:+.1%} tokens/s per device, within the resolution of predictions, {RESOLUTION:.0%}"
    return f"{ratio:+.1%} tokens/s per device within the limits"


NARROW_WEIGHTS = ("fp8", "int4")  # to propose where a model does not fit


def _describe_too_small(candidates: _Candidates) -> str:
    question = candidates.question
    stored = question.formats.weight_format.element_bytes
    narrower = next((name for name in NARROW_WEIGHTS if WEIGHT_FORMATS[name].element_bytes < stored), None)
    fix = "more devices" + (f", or weights of fewer bits (--weights {narrower})," if narrower else "")
    return (
        f"serve: {question.architecture.name} in {question.formats} does not fit on {question.cluster.name} with one request of "
        f"{question.isl + question.osl} tokens under any layout; {fix} are required"
    )


def _describe_missed_limits(candidates: _Candidates) -> str:
    """Return which limits no layout meets, and the best that any reaches: those that are out of reach by themselves, or all."""
    estimate, limits, fits = candidates.estimate, candidates.question.latency_limits, candidates.estimate.fits
    best_of = {
        (name, limit): float(values[fits].min())
        for name, limit, values in (("TTFT", limits.ttft_s, estimate.ttft_s), ("TPOT", limits.tpot_s, estimate.tpot_s))
        if limit is not None
    }
    missed = {key: best for key, best in best_of.items() if best > key[1]}
    parts = [
        f"a {name} of {format_seconds(limit)} (the best of any layout is {format_seconds(best)})"
        for (name, limit), best in (missed or best_of).items()
    ]
    at_once = "" if missed or len(best_of) == 1 else " at once"
    return f"serve: no layout on {candidates.question.cluster.name} meets {' and '.join(parts)}{at_once}"
