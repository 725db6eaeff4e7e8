"""Timelines and traces, from values that know nothing of schedules."""

from __future__ import annotations

import json

from shardwise.present.charts.chart import Category, Chart, LegendEntry, Span
from shardwise.present.charts.common_charts import timeline
from shardwise.present.charts.draw_chart import draw
from shardwise.present.charts.drawing import Path, Rect
from shardwise.present.charts.palette import BLUE, EMPTY, ORANGE, PAPER
from shardwise.present.traces import Arrow, Event, chrome_trace

from .page import check_texts, texts


def chart(end: float = 4.0) -> Chart:
    spans = (
        Span(row=0, start=0.0, end=1.0, colour="series:0", text="0"),
        Span(row=0, start=2.0, end=4.0, colour="series:0", text="1", lane=(0, 2)),
        Span(row=0, start=2.0, end=4.0, colour="series:1", text="0", lane=(1, 2), striped=True),
    )
    legend = (LegendEntry(label="forward", colour="series:0"), LegendEntry(label="backward", colour="series:1"))
    rows = [Category(label="rank 0", lines=("25% idle",)), Category(label="rank 1")]
    held = {0: ((0.0, 1.0), (2.0, 2.0), (4.0, 0.0))}
    if not end:
        spans, held = (), {0: ((0.0, 1.0),)}
    return timeline("two", "a subtitle", end, rows, spans, held, curves_title="held", legend=legend)


def rects(end: float = 4.0) -> list[Rect]:
    return [mark for mark in draw(chart(end)).marks if isinstance(mark, Rect)]


def test_spans_lie_where_they_are_in_time() -> None:
    idle, other = [one for one in rects() if one.fill == EMPTY and one.height == 30.0]
    scale = idle.width / 4.0
    assert idle.width == other.width
    first, upper, lower = [one for one in rects() if one.stroke == PAPER]
    assert first.width == scale
    assert upper.x == lower.x == idle.x + 2 * scale
    assert upper.height == lower.height == 15.0
    assert lower.y - upper.y == 15.0
    assert (first.fill, upper.fill, lower.fill) == (BLUE, BLUE, ORANGE)


def test_a_stripe_runs_through_what_is_striped() -> None:
    _, _, lower = [one for one in rects() if one.stroke == PAPER]
    stripe, sample = [one for one in rects() if one.height == 3.0]
    assert lower.x < stripe.x < stripe.x + stripe.width < lower.x + lower.width
    assert lower.y < stripe.y < stripe.y + stripe.height < lower.y + lower.height
    assert sample.y > lower.y + lower.height


def test_what_is_written() -> None:
    drawing = draw(chart())
    check_texts(drawing)
    for text in ("two", "a subtitle", "rank 0", "25% idle", "forward", "backward", "idle", "held", "2", "4 s"):
        assert text in texts(drawing)


def test_everything_is_inside_of_the_picture() -> None:
    drawing = draw(chart())
    for mark in drawing.marks:
        if isinstance(mark, Rect):
            assert 0 <= mark.x <= mark.x + mark.width <= drawing.width
            assert 0 <= mark.y <= mark.y + mark.height <= drawing.height
        if isinstance(mark, Path):
            assert all(0 <= x <= drawing.width for x, _ in mark.points)


def test_nothing_takes_no_time() -> None:
    assert "rank 0" in texts(draw(chart(end=0.0)))


def test_a_trace_has_processes_streams_events_and_arrows() -> None:
    send = Event(name="0F0", process=0, stream="compute", start=0.0, end=1.0, category="F", args={"bytes": 4})
    take = Event(name="1F0", process=1, stream="compute", start=1.5, end=2.0)
    found = json.loads(chrome_trace(["rank 0", "rank 1"], [send, take], [Arrow(name="0F0", source=send, target=take)]))
    events = found["traceEvents"]
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["rank 0", "rank 1"]
    done = [one for one in events if one["ph"] == "X"]
    assert [(one["pid"], one["ts"], one["dur"]) for one in done] == [(0, 0.0, 1e6), (1, 1.5e6, 0.5e6)]
    assert done[0]["args"] == {"bytes": 4}
    begin, end = (one for one in events if one["ph"] in "sf")
    assert (begin["pid"], begin["ts"], end["pid"], end["ts"], end["bp"]) == (0, 1e6, 1, 1.5e6, "e")
    assert begin["id"] == end["id"]
