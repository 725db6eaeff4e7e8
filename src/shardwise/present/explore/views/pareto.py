"""Time against memory of the layouts that were searched, and the layout at hand among them."""

from __future__ import annotations

from typing import Any

from shardwise.present.explore.asked import Asked
from shardwise.present.explore.fields import EXACT, Field, Fields, fields_payload
from shardwise.present.explore.kinds import kind_of
from shardwise.present.explore.searches import SEARCHING
from shardwise.values import ShardwiseError


def pareto(asked: Asked) -> dict[str, Any]:
    """What the search found so far (see `searching.found_for`), and the time and memory of the layout at hand."""
    return {
        "search": dict(asked.found or SEARCHING),
        "memory_capacity_bytes": asked.cluster.chip.memory_bytes,
        "own": _own(asked),
        "fields": fields_payload(_fields(asked)),
    }


def _fields(asked: Asked) -> Fields:
    step = Field(
        "seconds of one optimizer step", "the sum of the terms of time", "s", "price/step_time.py", kind_of(asked)
    )
    memory = Field("bytes of a device of the fullest stage", "the sum of the terms of memory", "B", "price/device_memory.py",
                   kind_of(asked, memory=True))  # fmt: skip
    counted = "search/vectorised/search_layouts.py: every legal layout of the job is priced or bounded"
    return {
        "search.num_layouts": Field("legal layouts of the job", "Π choices less those that break a rule", "", counted, EXACT),
        "search.num_fitting": Field("those that fit a device's memory", "memory ≤ capacity", "", counted, EXACT),
        "search.front.*.step_time_s": step, "search.front.*.memory_bytes": memory,
    }  # fmt: skip


def _own(asked: Asked) -> dict[str, Any] | None:
    try:
        asked.require_legal()
        priced = asked.plan.estimate
    except ShardwiseError:
        return None
    return {"text": str(asked.layout), "step_time_s": priced.step_time_s, "memory_bytes": priced.memory_bytes}
