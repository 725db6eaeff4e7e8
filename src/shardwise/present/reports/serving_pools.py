"""Report of a deployment whose prefill and decode run in pools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import count, num_bytes, seconds, share, significant
from shardwise.present.rendering.report import Block, Line, Report, Section, Status
from shardwise.present.reports.plan import term_table
from shardwise.present.reports.serving import (
    VERDICT_TONES,
    lacking_memory,
    predicted_amount,
    predicted_dollars,
    predicted_rate,
    predicted_time,
    predicted_tpot,
    serving_title,
)
from shardwise.values import pluralize

if TYPE_CHECKING:
    from shardwise.serve import PooledEstimate, PoolFigures


def pooled_estimate_report(estimate: PooledEstimate) -> Report:
    """Report latencies, throughput and both pools; in detail the terms of a first token and of the passes."""
    head = Section([serving_title(estimate.problem), *pooled_summary(estimate, "")])
    return [head, *pooled_sections(estimate, "")]


def pooled_summary(estimate: PooledEstimate, path: str) -> Iterator[Block]:
    """Yield the headline figures of two pools; `path` is where they are in the payload."""
    layout = estimate.layout
    if estimate.prefill.memory.lacking_bytes or estimate.decode.memory.lacking_bytes:
        yield from _lacking_pools(estimate, path)
        return
    yield Line(("  TTFT       ", predicted_time(estimate.ttft_s, f"{path}ttft_s")))
    yield predicted_tpot(estimate, path)
    yield Line(
        (
            "  throughput ", predicted_rate(estimate.tokens_per_s_per_device, f"{path}tokens_per_s_per_device"),
            " output tokens/s per device of both pools, ",
            significant(estimate.requests_per_s, f"{path}requests_per_s", digits=3), " requests/s of all (at most ",
            significant(estimate.max_rate_per_s, f"{path}max_rate_per_s", digits=3), ")",
        )
    )  # fmt: skip
    for name, figures, part in (
        ("prefill", estimate.prefill, layout.prefill), ("decode", estimate.decode, layout.decode)
    ):  # fmt: skip
        yield f"  {name:10} {part} ({pluralize(part.replicas, 'instance')} of {pluralize(part.devices_per_replica, 'device')})"
        yield _pool_line(figures, f"{path}{name}.")
    yield Line(
        (
            f"  full first {estimate.bound}; neither waits with ",
            significant(
                estimate.prefill_devices_per_decode_device, f"{path}prefill_devices_per_decode_device", digits=2
            ),
            " devices that prefill for each that decodes",
        )
    )
    cost = estimate.usd_per_million_output_tokens
    if cost is not None:
        dollars = predicted_dollars(cost, f"{path}usd_per_million_output_tokens")
        yield Line(("  cost       ", dollars, " per million output tokens"))
    joules = estimate.joules_per_output_token
    watts = estimate.prefill.watts_per_device, estimate.decode.watts_per_device
    if joules is not None and watts[0] is not None and watts[1] is not None:
        yield Line(
            (
                "  power      ", predicted_amount(watts[0], f"{path}prefill.watts_per_device", "W"),
                " per device that prefills, ",
                predicted_amount(watts[1], f"{path}decode.watts_per_device", "W"), " that decodes",
            )
        )  # fmt: skip
        energy = predicted_amount(joules, f"{path}joules_per_output_token", "J")
        yield Line(("             ", energy, " of both per output token"))
    yield from (f"  note: {note}" for note in estimate.notes)


def _lacking_pools(estimate: PooledEstimate, path: str) -> Iterator[Block]:
    """Yield the pools that lack memory for one request; latencies are left out, as nothing runs in them."""
    for name, part in estimate.layout.pools.items():
        memory = getattr(estimate, name).memory
        if memory.lacking_bytes:
            yield f"  {name:10} {part}"
            yield from lacking_memory(memory, f"{path}{name}.memory.")
    yield from (f"  note: {note}" for note in estimate.notes)


def _pool_line(figures: PoolFigures, path: str) -> Line:
    """Return the load of a pool and its memory."""
    memory = figures.memory
    return Line(
        (
            "             busy ", share(figures.busy_share, f"{path}busy_share"), " of at most ",
            significant(figures.max_rate_per_s, f"{path}max_rate_per_s", digits=3), " requests/s; ",
            num_bytes(memory.weight_bytes, f"{path}memory.weight_bytes"), " of weights, ",
            count(memory.cache_tokens, f"{path}memory.cache_tokens"), " tokens of cache (",
            Status(memory.verdict, VERDICT_TONES[memory.verdict]), ")",  # type: ignore[arg-type]
        )
    )  # fmt: skip


def pooled_sections(estimate: PooledEstimate, path: str) -> Iterator[Section]:
    """Yield the terms of a first token, and of the passes of each pool."""
    numbers = {term: seconds(value, f"{path}ttft_terms.{term}") for term, value in estimate.ttft_terms.items()}
    moved = Line(
        ("  ", num_bytes(estimate.transfer_bytes, f"{path}transfer_bytes"), " of cache of a request by a device")
    )
    yield Section([term_table(numbers), moved], title="time to the first token", detail=True)
    for name, subject in (("prefill", "one request's prefill"), ("decode", "a decode pass")):
        terms = getattr(estimate, name).terms
        numbers = {term: seconds(value, f"{path}{name}.terms.{term}") for term, value in terms.items()}
        yield Section([term_table(numbers)], title=f"time of {subject}", detail=True)
