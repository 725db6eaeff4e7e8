"""Reports of serving: what one layout gives under a workload, and the plan of a load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import count, num_bytes, seconds, significant
from shardwise.present.rendering.report import Block, Line, Number, Report, Row, Section, Status, Table
from shardwise.present.reports.plan import term_table
from shardwise.values import format_seconds, format_usd, pluralize

if TYPE_CHECKING:
    from shardwise.search.serving.serving_plan import ServingPlan, ServingPoint
    from shardwise.serve import BatchLimits, PooledEstimate, Prediction, ServingEstimate, ServingMemory, ServingProblem

MAX_POINTS = 12  # of a front in the report; --json has all
VERDICT_TONES = {"fits": "good", "does not fit": "bad", "not known": "note"}


def serving_estimate_report(estimate: ServingEstimate) -> Report:
    """Report latencies, throughput, memory and what bounds a pass; in detail the terms of both passes."""
    head = Section([serving_title(estimate.problem), *_summary(estimate, "")])
    return [head, *_detail_sections(estimate, "")]


def serving_plan_report(plan: ServingPlan) -> Report:
    """Report the chosen layout, what it gives, and twice the load; in detail the runners-up, the front and the terms."""
    estimate = plan.estimate
    head = Section(
        [
            serving_title(estimate.problem),
            f"  limits     {_limits_text(plan)}",
            *_summary(estimate, "estimate."),
            f"  start with {_engine_limits(plan.batch_limits)}",
            *_load_lines(plan),
            *_pool_lines(plan),
        ]
    )
    smallest = f"the smallest that holds the model: {plan.smallest} ({pluralize(plan.smallest.num_devices, 'device')})"
    ratio = Line(
        (
            "  prefill and decode apart: ",
            significant(plan.prefill_devices_per_decode_device, "prefill_devices_per_decode_device", digits=2),
            " devices that prefill for each that decodes",
        )
    )
    searched = Line(("  searched ", count(plan.num_configurations, "num_configurations"), " configurations"))
    return [
        head,
        Section([_alternatives_table(plan)], title="other layouts", detail=True),
        Section([_points_table(plan)], title="latency against throughput", detail=True),
        Section([f"  {smallest}", ratio, searched], title="the search", detail=True),
        *_detail_sections(estimate, "estimate."),
    ]


def serving_title(problem: ServingProblem) -> str:
    """Return a sentence that says what is served, on what, under which load."""
    workload = problem.workload
    load = (
        f"{workload.concurrency:g} requests at once"
        if workload.concurrency is not None
        else f"{workload.rate_per_s:g} requests/s"
    )
    cached = f" ({workload.cached_tokens:,} of them cached)" if workload.cached_tokens else ""
    return (
        f"{problem.architecture.name} on {problem.cluster.name} with {problem.engine}, {load}, "
        f"{workload.isl:,} tokens in{cached} and {workload.osl:,} out, weights {problem.formats}"
    )


def _summary(estimate: ServingEstimate, path: str) -> Iterator[Block]:
    """Yield the headline figures of an estimate."""
    layout, memory = estimate.layout, estimate.memory
    yield f"  layout     {layout} ({pluralize(layout.replicas, 'replica')} of {pluralize(layout.devices_per_replica, 'device')})"
    if memory.lacking_bytes:
        yield from lacking_memory(memory, f"{path}memory.")
        yield from (f"  note: {note}" for note in estimate.notes)
        return
    yield Line(("  TTFT       ", predicted_time(estimate.ttft_s, f"{path}ttft_s")))
    speed = f", {1 / estimate.tpot_s.value:,.0f} tokens/s for each user"
    yield predicted_tpot(estimate, path, speed)
    rate = estimate.tokens_per_s_per_device
    yield Line(
        (
            "  throughput ", predicted_rate(rate, f"{path}tokens_per_s_per_device"), " output tokens/s per device, ",
            significant(estimate.requests_per_s, f"{path}requests_per_s", digits=3), " requests/s of all (at most ",
            significant(estimate.max_rate_per_s, f"{path}max_rate_per_s", digits=3), ")",
        )
    )  # fmt: skip
    yield Line(
        (
            "  memory     ", num_bytes(memory.weight_bytes, f"{path}memory.weight_bytes"), " of weights, ",
            num_bytes(memory.cache_bytes, f"{path}memory.cache_bytes"), " of cache: ",
            count(memory.cache_tokens, f"{path}memory.cache_tokens"), " tokens, ",
            count(memory.largest_batch, f"{path}memory.largest_batch"), " such requests in each copy of attention (",
            Status(memory.verdict, VERDICT_TONES[memory.verdict]), ")",  # type: ignore[arg-type]
        )
    )  # fmt: skip
    total = sum(estimate.decode_terms.values())
    bound_share = estimate.decode_terms.get(estimate.bound, 0.0) / total if total else 0.0
    yield f"  bound by   {estimate.bound}, {bound_share:.0%} of a decode pass of {format_seconds(estimate.decode_pass_s)}"
    cost = estimate.usd_per_million_output_tokens
    if cost is not None:
        yield Line(
            (
                "  cost       ",
                predicted_dollars(cost, f"{path}usd_per_million_output_tokens"),
                " per million output tokens",
            )
        )
    watts, joules = estimate.watts_per_device, estimate.joules_per_output_token
    if watts is not None and joules is not None:
        yield Line(
            (
                "  power      ", predicted_amount(watts, f"{path}watts_per_device", "W"), " per device, ",
                predicted_amount(joules, f"{path}joules_per_output_token", "J"), " per output token",
            )
        )  # fmt: skip
    yield from (f"  note: {note}" for note in estimate.notes)


def predicted_tpot(estimate: ServingEstimate | PooledEstimate, path: str, speed: str = "") -> Line:
    """Return the time of a token after the first one, which requests of one output token do not have."""
    if estimate.problem.workload.osl == 1:
        return Line(("  TPOT       none: a request has one output token",))
    return Line(("  TPOT       ", predicted_time(estimate.tpot_s, f"{path}tpot_s"), speed))


def lacking_memory(memory: ServingMemory, path: str) -> Iterator[Block]:
    """Yield what memory lacks for one request, and what would give it; latencies are left out, as nothing runs in it."""
    doubt = "" if memory.verdict == "does not fit" else ", which is within the error of the parts"
    yield Line(
        (
            "  memory     ", num_bytes(memory.weight_bytes, f"{path}weight_bytes"), " of weights, ",
            num_bytes(memory.activation_bytes, f"{path}activation_bytes"), " of the largest pass, ",
            num_bytes(memory.usable_bytes, f"{path}usable_bytes"), " for all of a device (",
            Status(memory.verdict, VERDICT_TONES[memory.verdict]), ")",  # type: ignore[arg-type]
        )
    )  # fmt: skip
    yield Line(
        (
            "             ", num_bytes(memory.lacking_bytes, f"{path}lacking_bytes"),
            f" more are required for one such request{doubt}: more devices, weights of fewer bits, fewer requests at once, or a "
            "larger share of memory",
        )
    )  # fmt: skip


def _detail_sections(estimate: ServingEstimate, path: str) -> Iterator[Section]:
    for name, terms in (("decode", estimate.decode_terms), ("prefill", estimate.prefill_terms)):
        numbers = {term: seconds(value, f"{path}{name}_terms.{term}") for term, value in terms.items()}
        subject = "a decode pass" if name == "decode" else "one request's prefill"
        if any(terms.values()):
            yield Section([term_table(numbers)], title=f"time of {subject}", detail=True)
    memory = estimate.memory
    parts = {
        part: num_bytes(getattr(memory, f"{part}_bytes"), f"{path}memory.{part}_bytes")
        for part in ("weight", "activation", "runtime", "cache")
    }
    yield Section([term_table(parts), f"  {memory.rule}"], title="memory of a device", detail=True)


def _interval(prediction: Prediction) -> tuple[float, float] | None:
    """Return the ends of an interval; None where there is none, or none to speak of: at a rate, throughput is that rate."""
    if prediction.low is None or prediction.high is None or prediction.low == prediction.high:
        return None
    return prediction.low, prediction.high


def _prediction(prediction: Prediction, path: str, text: str, unit: str) -> Number:
    """Return a predicted number, whose place in the payload is that of its `value`."""
    return Number(text, prediction.value, unit, f"{path}.value", None, "prediction")


def predicted_time(prediction: Prediction, path: str) -> Line:
    """Return a latency with its interval."""
    number = _prediction(prediction, path, format_seconds(prediction.value), "s")
    return Line((number, _interval_text(prediction, format_seconds)))


def predicted_rate(prediction: Prediction, path: str) -> Line:
    """Return tokens per second with their interval."""
    number = _prediction(prediction, path, f"{prediction.value:,.0f}", "tokens/s")
    return Line((number, _interval_text(prediction, lambda value: f"{value:,.0f}")))


def predicted_dollars(prediction: Prediction, path: str) -> Line:
    """Return a price with its interval."""
    return Line(
        (_prediction(prediction, path, format_usd(prediction.value), "$"), _interval_text(prediction, format_usd))
    )


def predicted_amount(prediction: Prediction, path: str, unit: str) -> Line:
    """Return an amount in a unit with its interval."""

    def form(value: float) -> str:
        return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"

    number = _prediction(prediction, path, form(prediction.value), unit)
    return Line((number, _interval_text(prediction, form)))


def _interval_text(prediction: Prediction, form: Callable[[float], str]) -> str:
    interval = _interval(prediction)
    return f" (90% interval {form(interval[0])} to {form(interval[1])})" if interval else ""


def _limits_text(plan: ServingPlan) -> str:
    limits = plan.question.latency_limits
    texts = [
        f"{name} {format_seconds(limit)}" for name, limit in (("TTFT", limits.ttft_s), ("TPOT", limits.tpot_s)) if limit
    ]
    return ", ".join(texts) or "none on latency"


def _engine_limits(limits: BatchLimits) -> str:
    parts = [f"max_num_seqs={limits.max_num_seqs}", f"max_batched_tokens={limits.max_batched_tokens}"]
    parts += [f"memory_fraction={limits.memory_fraction}"] if limits.memory_fraction is not None else []
    return " ".join(parts)


def _load_lines(plan: ServingPlan) -> Iterator[Block]:
    """Yield what the plan leaves free, and what twice the load makes of it."""
    if plan.idle_devices:
        yield f"  free       {pluralize(plan.idle_devices, 'device')} of {plan.question.cluster.num_devices}"
    if plan.question.rate_per_s is not None:
        same = (
            f"TTFT {format_seconds(plan.doubled.ttft_s.value)} and TPOT {format_seconds(plan.doubled.tpot_s.value)} on the same "
            "devices"
            if plan.doubled
            else "more than these instances serve: the queue grows without end"
        )
        yield f"  twice the load: {same}; within the limits it takes {pluralize(plan.doubled_devices or 0, 'device')}"
    knee = plan.knee
    yield (
        f"  knee       {knee.concurrency:g} requests in an instance: {format_seconds(knee.tpot_s)} a token, "
        f"{knee.tokens_per_s_per_device:,.0f} tokens/s per device; beyond it latency grows faster than throughput"
    )


def _pool_lines(plan: ServingPlan) -> Iterator[Block]:
    """Yield the best deployment of two pools beside the plan: more tokens on the cluster, or fewer devices for the rate."""
    pools, gain = plan.pools, plan.pools_gain
    if pools is None or gain is None:
        return
    is_rate = plan.question.rate_per_s is not None
    kind = "devices" if is_rate else "output tokens/s of all"
    sign = -gain if is_rate else gain
    share_text = f"{sign:+.0%} {kind}" if abs(gain) >= 0.005 else f"as many {kind}"
    yield f"  pools      {pools.layout} ({pluralize(pools.layout.num_devices, 'device')}): {share_text}"
    yield Line(
        (
            "             TTFT ", predicted_time(pools.ttft_s, "pools.ttft_s"), ", TPOT ",
            predicted_time(pools.tpot_s, "pools.tpot_s"),
        )
    )  # fmt: skip


def _point_row(point: ServingPoint, path: str) -> Row:
    return (
        seconds(point.tpot_s, f"{path}.tpot_s"),
        count(point.tokens_per_s_per_device, f"{path}.tokens_per_s_per_device", "tokens/s"),
        seconds(point.ttft_s, f"{path}.ttft_s"),
        significant(point.concurrency, f"{path}.concurrency"),
        str(point.layout),
    )


POINT_HEAD: Row = ("TPOT", "tokens/s per device", "TTFT", "requests", "layout")


def _alternatives_table(plan: ServingPlan) -> Table:
    rows = [
        (*_point_row(rejected.point, f"alternatives.{index}"), rejected.reason)
        for index, rejected in enumerate(plan.alternatives)
    ]
    return Table(rows=((*POINT_HEAD, "why not"), *rows), right=(0, 1, 2, 3), indent=2)


def _points_table(plan: ServingPlan) -> Table:
    """Return the Pareto front, thinned evenly."""
    step = max(len(plan.front) // MAX_POINTS, 1)
    rows = [_point_row(point, f"front.{index}") for index, point in enumerate(plan.front) if index % step == 0]
    return Table(rows=(POINT_HEAD, *rows), right=(0, 1, 2, 3), indent=2)
