"""What notebooks show of each type of value: the function that makes its tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.measure import Reconciliation
from shardwise.pipeline import Timeline
from shardwise.present.charts.measurement_charts import shown_reconciliation
from shardwise.present.charts.plan_charts import (
    shown_comparison,
    shown_estimate,
    shown_explanation,
    shown_memory,
    shown_plan,
)
from shardwise.present.charts.step_charts import shown_simulation, shown_timeline
from shardwise.present.charts.sweep_charts import shown_search, shown_sweep
from shardwise.present.rendering.notebook import NotebookDisplay
from shardwise.price import Estimate, Simulation
from shardwise.search import Comparison, Explanation, LayoutMemory, LossSearch, Plan, Swept
from shardwise.values import Displayable

DISPLAYS: Mapping[type[Displayable], Callable[[Any], NotebookDisplay]] = {
    Estimate: shown_estimate,
    Simulation: shown_simulation,
    Timeline: shown_timeline,
    Comparison: shown_comparison,
    LayoutMemory: shown_memory,
    Explanation: shown_explanation,
    LossSearch: shown_search,
    Plan: shown_plan,
    Swept: shown_sweep,
    Reconciliation: shown_reconciliation,
}


def display_of(value: Displayable) -> NotebookDisplay:
    """Return what a notebook shows of a value."""
    return DISPLAYS[type(value)](value)
