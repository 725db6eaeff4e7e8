"""Timelines and traces, from values that know nothing of schedules."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

from shardwise.draw.timeline import IDLE, Row, Span, TimelineChart, draw_timeline
from shardwise.draw.trace import Arrow, Event, chrome_trace

from .page import SVG


def chart(end: float = 4.0) -> TimelineChart:
    spans = (
        Span(start=0.0, end=1.0, fills=(1,), labels=("0",)),
        Span(start=2.0, end=4.0, fills=(1, 0), labels=("1", "0")),
    )
    curve = ((0.0, 1.0), (2.0, 2.0), (4.0, 0.0))
    rows = (
        Row(label="rank 0", note="25% idle", spans=spans, curve=curve),
        Row(label="rank 1", note="", spans=(), curve=()),
    )
    return TimelineChart(
        title="two",
        subtitle="a subtitle",
        end=end,
        rows=rows,
        legend=((1, "forward"), (0, "backward")),
        curve_title="held",
    )


def test_spans_lie_where_they_are_in_time() -> None:
    root = ElementTree.fromstring(draw_timeline(chart()))
    rects = [one.attrib for one in root.iter(f"{SVG}rect")]
    idle, other = [one for one in rects if one["fill"] == IDLE and float(one["height"]) == 30.0]
    scale = float(idle["width"]) / 4.0
    assert idle["width"] == other["width"]
    first, upper, lower = [one for one in rects if one.get("stroke") == "#ffffff"]
    assert float(first["width"]) == scale
    assert float(upper["x"]) == float(lower["x"]) == float(idle["x"]) + 2 * scale
    assert float(upper["height"]) == float(lower["height"]) == 15.0
    assert float(lower["y"]) - float(upper["y"]) == 15.0
    texts = [one.text for one in root.iter(f"{SVG}text")]
    for text in ("two", "a subtitle", "rank 0", "25% idle", "forward", "backward", "idle", "held", "2"):
        assert text in texts


def test_everything_is_inside_of_the_picture() -> None:
    root = ElementTree.fromstring(draw_timeline(chart()))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter(f"{SVG}rect"):
        if "x" in one.attrib:
            assert 0 <= float(one.attrib["x"]) <= float(one.attrib["x"]) + float(one.attrib["width"]) <= width
            assert 0 <= float(one.attrib["y"]) <= height
    for line in root.iter(f"{SVG}polyline"):
        assert all(0 <= float(x) <= width for x in re.findall(r"([\d.]+),", line.attrib["points"]))


def test_nothing_takes_no_time() -> None:
    assert "rank 0" in draw_timeline(chart(end=0.0))


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
