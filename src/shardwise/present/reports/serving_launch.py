"""Report of an engine's launch that was read: what it says, what is not priced of it, what it costs and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.interop.serving.price_serving import ServingField, list_fields
from shardwise.present.rendering.numbers import count, num_bytes, significant
from shardwise.present.rendering.report import Block, Line, Number, Report, Section, Status, Table
from shardwise.present.reports.serving import lacking_memory, predicted_time, predicted_tpot
from shardwise.present.reports.serving_pools import pooled_sections, pooled_summary
from shardwise.values import format_seconds, format_usd, pluralize

if TYPE_CHECKING:
    from shardwise.interop.serving.faster_launches import FasterServingLaunch
    from shardwise.interop.serving.faster_pools import FasterPools
    from shardwise.interop.serving.price_pools import PricedPools
    from shardwise.interop.serving.price_serving import PricedServing
    from shardwise.interop.serving.read_serving import ReadServing
    from shardwise.serve import PooledEstimate, Prediction, ServingEstimate, ServingVerdict


def serving_launch_report(priced: PricedServing) -> Report:
    """Report the fields of a launch with what each was read from, its price, and in detail what changes nothing."""
    reading = priced.reading
    title = f"{reading.launch.checkpoint} with {reading.engine.title} {reading.engine.version}: {reading.launch.layout}"
    unread = [Section([f"  {', '.join(reading.unread)}"], title="options that change nothing", detail=True)]
    return [
        Section([_field_table(priced.fields)], title=title),
        Section(list(_remarks(reading, priced.notes)), title="beside the price"),
        Section(list(_price(priced)), title="what it costs"),
        *([Section(list(_faster(priced)), title=_changes_title(priced.verdict))] if priced.estimate else []),
        *(unread if reading.unread else []),
    ]


def pooled_launch_report(priced: PricedPools) -> Report:
    """Report the fields of both pools, and what they cost together."""
    reading = priced.reading
    launch = reading.prefill.launch
    title = f"{launch.checkpoint} with {reading.engine.title} {reading.engine.version}: {reading.layout}"
    sections: list[Section] = []
    for name, pool in reading.pools.items():
        table = _field_table(tuple(list_fields(pool)))
        sections.append(Section([table], title=title if not sections else f"{name} pool"))
        sections.append(Section(list(_remarks(pool, ())), title=f"beside the price, of the {name} pool"))
    estimate = priced.estimate
    if estimate is None:
        return [*sections, Section([Status(f"  not known: {priced.reason}", "note")], title="what it costs")]
    workload = estimate.problem.workload
    lines: list[Block] = [
        *(f"  {note}" for note in priced.notes),
        f"  on {estimate.problem.cluster.name}, {estimate.concurrency:,.0f} requests in the system, {workload.isl:,} tokens in "
        f"and {workload.osl:,} out",
        *pooled_summary(estimate, "price."),
    ]  # fmt: skip
    if priced.reason:
        lines.append(Status(f"  whether it fits is not known: {priced.reason}", "note"))
    return [
        *sections, Section(lines, title="what it costs"),
        Section(list(_faster_pools(priced)), title=_changes_title(priced.verdict)),
        *pooled_sections(estimate, "price."),
    ]  # fmt: skip


def _field_table(fields: Sequence[ServingField]) -> Table:
    """Return fields with what each was read from; degrees of 1 that nothing sets are left out."""
    rows = [
        (field.name, field.value or "the engine's own", field.origin)
        for field in fields
        if field.value not in ("1", "0", "all_gather") or not field.origin.startswith("default")
    ]
    return Table(rows=(("field", "value", "from"), *rows), indent=2)


def _faster(priced: PricedServing) -> Iterator[Block]:
    """Yield changes on the same devices with the options that they take, and what they give."""
    if not priced.faster:
        yield _nothing_faster(priced.reading.memory_is_known)
    for index, item in enumerate(priced.faster):
        options = ", ".join(_checkpoint_words(item) + _option_words(item.options))
        yield _faster_line(options, item, index, priced.estimate)


def _faster_pools(priced: PricedPools) -> Iterator[Block]:
    """Yield changes of two pools on the same devices: of an instance of each pool, and of how many there are."""
    if not priced.faster:
        yield _nothing_faster(all(pool.memory_is_known for pool in priced.reading.pools.values()))
    for index, item in enumerate(priced.faster):
        parts = [", ".join(_checkpoint_words(item))]
        for name, options in (("prefill", item.prefill_options), ("decode", item.decode_options)):
            replicas, before = item.layout.pools[name].replicas, priced.reading.layout.pools[name].replicas
            counted = [f"{pluralize(replicas, 'instance')} in place of {before}"] if replicas != before else []
            pool_changes = ", ".join(counted + _option_words(options))
            parts.append(f"{name}: {pool_changes}" if pool_changes else "")
        yield _faster_line("; ".join(filter(None, parts)), item, index, priced.estimate)


def _changes_title(verdict: ServingVerdict) -> str:
    return f"what {'fits' if verdict == 'does not fit' else 'would be faster'} on the same devices"


def _nothing_faster(memory_is_known: bool) -> str:
    return "  nothing of what was priced" if memory_is_known else "  not known, as the memory is not"


def _checkpoint_words(item: FasterServingLaunch | FasterPools) -> list[str]:
    return [f"checkpoint {item.checkpoint}"] if item.checkpoint else []


def _option_words(options: Mapping[str, Any]) -> list[str]:
    """Return options with their new values, as a command line has them."""
    return [f"without --{name}" if value is None else f"--{name} {value}" for name, value in options.items()]


def _faster_line(
    options: str, item: FasterServingLaunch | FasterPools, index: int, estimate: ServingEstimate | PooledEstimate | None
) -> Line:
    """Return what a change gives, beside what the launch does."""
    path = f"faster.{index}.request_s"
    request = Number(format_seconds(item.request_s), item.request_s, "s", path, None, "prediction")
    is_compared = estimate is not None and estimate.verdict != "does not fit"
    before = f" for {format_seconds(estimate.request_s)}" if estimate is not None and is_compared else ""
    has_tpot = estimate is not None and estimate.problem.workload.osl > 1
    tpot = f", TPOT {format_seconds(item.tpot_s.value)}" if has_tpot else ""
    return Line((f"  {options}: a request in ", request, before, tpot))


def _remarks(reading: ReadServing, notes: Sequence[str]) -> Iterator[Block]:
    """Yield what options change without being priced, and notes."""
    for name, effect in reading.not_priced.items():
        yield Status(f"  {name} changes the {effect}, which is not priced", "note")
    for note in (*reading.notes, *notes):
        yield f"  {note}"


def _price(priced: PricedServing) -> Iterator[Block]:
    """Yield the figures of a launch, or why there are none."""
    estimate = priced.estimate
    if estimate is None:
        yield Status(f"  not known: {priced.reason}", "note")
        return
    load = f"{priced.estimate.concurrency:,.0f} requests in the system" if priced.estimate else ""
    workload = estimate.problem.workload
    yield f"  on {estimate.problem.cluster.name}, {load}, {workload.isl:,} tokens in and {workload.osl:,} out"
    if estimate.memory.lacking_bytes and priced.reading.memory_is_known:
        yield from lacking_memory(estimate.memory, "price.memory.")
        yield from (f"  note: {note}" for note in estimate.notes)
        return
    yield Line(("  TTFT       ", predicted_time(estimate.ttft_s, "price.ttft_s")))
    yield predicted_tpot(estimate, "price.")
    rate = estimate.tokens_per_s_per_device
    number = Number(
        f"{rate.value:,.0f}", rate.value, "tokens/s", "price.tokens_per_s_per_device.value", None, "prediction"
    )
    requests = significant(estimate.requests_per_s, "price.requests_per_s", digits=3)
    yield Line(("  throughput ", number, " output tokens/s per device, ", requests, " requests/s of all"))
    yield _memory(priced, estimate)
    if priced.reason:
        yield Status(f"  whether it fits is not known: {priced.reason}", "note")
    yield f"  bound by   {estimate.bound}"
    cost = estimate.usd_per_million_output_tokens
    if cost is not None:
        path = "price.usd_per_million_output_tokens.value"
        dollars = Number(format_usd(cost.value), cost.value, "USD", path, None, "prediction")
        yield Line(("  cost       ", dollars, _interval(cost, format_usd), " per million output tokens"))
    yield from (f"  note: {note}" for note in estimate.notes)


def _memory(priced: PricedServing, estimate: ServingEstimate) -> Line:
    """Return the memory of the fullest device and the verdict on it."""
    memory = estimate.memory
    tone = {"fits": "good", "does not fit": "bad", "not known": "note"}[priced.verdict]
    return Line((
        "  memory     ", num_bytes(memory.weight_bytes, "price.memory.weight_bytes"), " of weights, ",
        count(memory.cache_tokens, "price.memory.cache_tokens"), " tokens of cache, ",
        count(memory.largest_batch, "price.memory.largest_batch"), " such requests in each copy of attention (",
        Status(priced.verdict, tone), ")",  # type: ignore[arg-type]
    ))  # fmt: skip


def _interval(prediction: Prediction, text: object) -> str:
    """Return the 90% interval of a prediction as a text, empty where there is none."""
    if prediction.low is None or prediction.high is None or not callable(text):
        return ""
    return f" (90% interval {text(prediction.low)} to {text(prediction.high)})"
