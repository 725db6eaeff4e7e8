"""What the payload of every view begins with."""

from __future__ import annotations

from typing import Any

from shardwise.present.explore.asked import Asked
from shardwise.present.explore.state import write_query


def head(asked: Asked) -> dict[str, Any]:
    """What every view has: the whole address, the layout in words, and what a search found so far."""
    state = asked.state
    return {
        "view": state.view, "query": write_query(state), "layout_text": str(asked.layout),
        "model_name": asked.model.name, "cluster_name": asked.cluster.name, "search": _search(asked), "problems": [],
        "has_run": asked.known.run is not None,
    }  # fmt: skip


def _search(asked: Asked) -> dict[str, Any] | None:
    """How far the search is and the best it found; the front is a view's own."""
    found = asked.found
    if found is None:
        return None
    best = found["best"]
    shown = best and {name: best[name] for name in ("layout", "text", "step_time_s", "memory_bytes")}
    return {"state": found["state"], "best": shown, "problems": found["problems"]}
