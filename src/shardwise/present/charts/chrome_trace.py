"""Traces in the JSON format of Chrome and Perfetto: a process for each worker, a thread for each stream, arrows for messages.

Source: "Trace Event Format", Chromium: complete events (X), metadata (M), flow events (s, f); times in microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

US = 1e6  # microseconds of a second


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a stream of a process does from start to end, in seconds; `args` are shown beside it."""

    name: str
    process: int
    stream: str
    start: float
    end: float
    category: str = ""
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrow:
    """A message from inside of one event (its end) to another (its start)."""

    name: str
    source: Event
    target: Event


def chrome_trace(processes: Sequence[str], events: Iterable[Event], arrows: Iterable[Arrow] = ()) -> str:
    """The trace as JSON; `processes` are the names of processes 0, 1, ..., in the order in which they are shown."""
    events = list(events)
    streams = {name: number for number, name in enumerate(dict.fromkeys(event.stream for event in events))}
    found: list[dict[str, Any]] = []
    for number, name in enumerate(processes):
        found += [_named("process_name", number, name=name), _named("process_sort_index", number, sort_index=number)]
        found += [_named("thread_name", number, thread, name=stream) for stream, thread in streams.items()]
    found += [
        {
            "name": event.name, "cat": event.category, "ph": "X", "pid": event.process, "tid": streams[event.stream],
            "ts": event.start * US, "dur": (event.end - event.start) * US, "args": dict(event.args),
        }
        for event in events
    ]  # fmt: skip
    for number, arrow in enumerate(arrows):
        shared = {"name": arrow.name, "cat": "message", "id": number}
        source, target = arrow.source, arrow.target
        ends = {"ph": "s", "pid": source.process, "tid": streams[source.stream], "ts": source.end * US}
        begins = {"ph": "f", "bp": "e", "pid": target.process, "tid": streams[target.stream], "ts": target.start * US}
        found += [{**shared, **ends}, {**shared, **begins}]
    return json.dumps({"traceEvents": found, "displayTimeUnit": "ms"})


def _named(what: str, process: int, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}
