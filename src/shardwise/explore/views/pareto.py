"""Time against memory of the layouts that were searched, and the layout at hand among them."""

from __future__ import annotations

from typing import Any

from shardwise.errors import ShardwiseError
from shardwise.explore.asked import Asked
from shardwise.explore.searches import SEARCHING


def pareto(asked: Asked) -> dict[str, Any]:
    """What the search found so far (see `searching.found_for`), and the time and memory of the layout at hand."""
    return {
        "search": dict(asked.found or SEARCHING),
        "memory_capacity_bytes": asked.cluster.chip.memory_bytes,
        "own": _own(asked),
    }


def _own(asked: Asked) -> dict[str, Any] | None:
    try:
        asked.require_legal()
        priced = asked.plan.estimate
    except ShardwiseError:
        return None
    return {"text": str(asked.layout), "step_time_s": priced.step_time_s, "memory_bytes": priced.memory_bytes}
