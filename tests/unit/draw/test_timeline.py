"""Timelines and traces, from values that are independent of schedules."""

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
    memory_curves = {0: ((0.0, 1.0), (2.0, 2.0), (4.0, 0.0))}
    if not end:
        spans, memory_curves = (), {0: ((0.0, 1.0),)}
    return timeline("two", "a subtitle", end, rows, spans, memory_curves, curves_title="held", legend=legend)


def rects(end: float = 4.0) -> list[Rect]:
    return [mark for mark in draw(chart(end)).marks if isinstance(mark, Rect)]


def test_spans_are_placed_by_their_times() -> None:
    idle, idle_below = [rect for rect in rects() if rect.fill == EMPTY and rect.height == 30.0]
    scale = idle.width / 4.0
    assert idle.width == idle_below.width
    first, upper, lower = [rect for rect in rects() if rect.stroke == PAPER]
    assert first.width == scale
    assert upper.x == lower.x == idle.x + 2 * scale
    assert upper.height == lower.height == 15.0
    assert lower.y - upper.y == 15.0
    assert (first.fill, upper.fill, lower.fill) == (BLUE, BLUE, ORANGE)


def test_a_stripe_runs_through_striped_spans() -> None:
    _, _, lower = [rect for rect in rects() if rect.stroke == PAPER]
    stripe, sample = [rect for rect in rects() if rect.height == 3.0]
    assert lower.x < stripe.x < stripe.x + stripe.width < lower.x + lower.width
    assert lower.y < stripe.y < stripe.y + stripe.height < lower.y + lower.height
    assert sample.y > lower.y + lower.height


def test_texts_of_a_timeline() -> None:
    drawing = draw(chart())
    check_texts(drawing)
    for text in ("two", "a subtitle", "rank 0", "25% idle", "forward", "backward", "idle", "held", "2", "4 s"):
        assert text in texts(drawing)


def test_marks_are_within_the_picture() -> None:
    drawing = draw(chart())
    for mark in drawing.marks:
        if isinstance(mark, Rect):
            assert 0 <= mark.x <= mark.x + mark.width <= drawing.width
            assert 0 <= mark.y <= mark.y + mark.height <= drawing.height
        if isinstance(mark, Path):
            assert all(0 <= x <= drawing.width for x, _ in mark.points)


def test_an_empty_timeline_is_drawn() -> None:
    assert "rank 0" in texts(draw(chart(end=0.0)))


def test_a_trace_has_processes_streams_events_and_arrows() -> None:
    send = Event(name="0F0", process=0, stream="compute", start=0.0, end=1.0, category="F", args={"bytes": 4})
    take = Event(name="1F0", process=1, stream="compute", start=1.5, end=2.0)
    trace = json.loads(chrome_trace(["rank 0", "rank 1"], [send, take], [Arrow(name="0F0", source=send, target=take)]))
    events = trace["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == ["rank 0", "rank 1"]
    complete_events = [event for event in events if event["ph"] == "X"]
    assert [(event["pid"], event["ts"], event["dur"]) for event in complete_events] == [
        (0, 0.0, 1e6),
        (1, 1.5e6, 0.5e6),
    ]
    assert complete_events[0]["args"] == {"bytes": 4}
    begin, end = (event for event in events if event["ph"] in "sf")
    assert (begin["pid"], begin["ts"], end["pid"], end["ts"], end["bp"]) == (0, 1e6, 1, 1.5e6, "e")
    assert begin["id"] == end["id"]
