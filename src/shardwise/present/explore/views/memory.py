"""The memory widget: sizes of a model and degrees, each on a slider, and what they take of a device; the cluster follows.

The widget is that of Tazi et al., The Ultra-Scale Playbook, 2025 ("Memory usage breakdown"), with pipelines, context and expert
parallelism, recipes and optimizers beside it; its numbers are those of `shardwise memory`.
"""

from __future__ import annotations

from typing import Any

from shardwise.present.explore.asked import Asked
from shardwise.present.explore.controls import controls
from shardwise.present.explore.controls.control import Edit
from shardwise.present.explore.views.head import head
from shardwise.search import memory_payload
from shardwise.values import ShardwiseError

# Those of the widget that the catalogue has; the smallest Llama 3.2 in place of a tiny one.
PRESETS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b", "llama-3-405b")


def memory(asked: Asked) -> dict[str, Any]:
    """The payload of `shardwise memory`, and what can be changed."""
    shown = head(asked) | {
        "controls": controls(asked, free=True),
        "memory": None,
        "presets": _presets(asked),
        "problems": list(asked.problems),
    }
    if asked.problems:
        return shown
    try:
        return shown | {"memory": memory_payload(asked.model, asked.cluster, [(asked.job, asked.plan.layout)], [])}
    except ShardwiseError as error:
        return shown | {"problems": list(error.problems)}


def _presets(asked: Asked) -> list[dict[str, Any]]:
    """Models to begin with: their own sizes, on the layout at hand."""
    own: Edit = {key: None for key, _ in asked.state.changes if key.startswith("model.")}
    return [{"value": name, "edit": {**own, "model": name}} for name in PRESETS]
