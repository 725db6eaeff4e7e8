"""Pictures of a search to a loss: token time and loss time as batch and devices double together, or over the batches."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Line, LineChart, Marker
from shardwise.present.draw.notebook import Shown, Table
from shardwise.search import LossSearch
from shardwise.search.loss_time import LossPoint, LossTime
from shardwise.values import InputError, format_binary, format_count, format_seconds, format_usd


def search_chart(found: LossSearch) -> LineChart:
    """Token time and loss time against devices, where batch and devices were doubled together; on one cluster, against batches.

    Source: Stratos, Compute-Bound Training, 2026, 2.2.1. Raises `InputError` where only one point has a plan.
    """
    along = [(point, point.time) for point in found.diagonal if point.time]
    if len(along) > 1:
        places = [float(point.num_devices) for point, _ in along]
        each = along[0][0].batch_tokens / along[0][0].num_devices
        axis = f"devices, each with {each:,.0f} tokens of the batch"
        return _chart(found, axis, places, [time for _, time in along], found.target.noise.tokens / each)
    cluster = found.points[found.chosen or 0].cluster
    times = [point.time for point in found.points if point.cluster == cluster and point.time]
    if len(times) < 2:
        raise InputError("picture: found one plan; at least two batches, or clusters of two sizes, are required")
    return _chart(
        found,
        f"batch on {cluster}, tokens",
        [float(time.batch_tokens) for time in times],
        times,
        found.target.noise.tokens,
    )


def _chart(found: LossSearch, axis: str, places: Sequence[float], times: Sequence[LossTime], knee: float) -> LineChart:
    rows = sorted(zip(places, times, strict=True), key=lambda row: row[0])
    of = "the run" if found.target.tokens is not None else "a billion of the fewest tokens"
    point = next(point for point in found.points if point.plan)
    assert point.plan is not None
    first, start = rows[0][0], rows[0][1].loss_s
    inside = rows[0][0] <= knee <= rows[-1][0]
    return LineChart(
        title=f"{point.plan.model.name}: time of the tokens, and to the loss, of {of}",
        subtitle=f"Noise scale {format_count(found.target.noise.tokens)} tokens, {found.target.noise.source}.",
        x=Axis(title=axis), y=Axis(title="time", unit="s"),
        lines=(
            Line(label="time to the loss", points=tuple((place, time.loss_s) for place, time in rows)),
            Line(label="time of the tokens", points=tuple((place, time.token_s) for place, time in rows)),
            Line(
                label="halved by each doubling", reference=True,
                points=tuple((place, start * first / place) for place, _ in rows),
            ),
        ),
        markers=(Marker(label="critical batch", x=knee),) if inside else (),
    )  # fmt: skip


def shown_search(found: LossSearch) -> Shown:
    """The points in a notebook: a row for the best batch of each cluster, and the chart."""
    head = ("cluster", "batch", "of B_crit", "step", "token time", "loss time", "cost", "layout")
    rows = tuple(_row(point) for point in found.best)
    chosen = None if found.chosen is None else found.points[found.chosen]
    name = "none" if chosen is None else f"{chosen.cluster}, batches of {format_binary(chosen.batch_tokens)}"
    return Shown(
        title=f"Chosen: {name}, {found.reason}",
        tables=(Table(head=head, rows=rows),),
        charts=lambda: (search_chart(found),),
    )


def _row(point: LossPoint) -> tuple[str, ...]:
    if point.plan is None or point.time is None:
        return point.cluster, format_binary(point.batch_tokens), point.problem or "", "", "", "", "", ""
    time = point.time
    return (
        point.cluster, format_binary(point.batch_tokens), f"{time.batch_over_noise:.2g}", format_seconds(time.step_time_s),
        format_seconds(time.token_s), format_seconds(time.loss_s), "" if time.usd is None else format_usd(time.usd),
        str(point.plan.layout),
    )  # fmt: skip
