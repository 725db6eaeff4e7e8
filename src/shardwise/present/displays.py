"""What notebooks show of each type of value: the function that makes its tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.measure import Reconciliation
from shardwise.pipeline import Timeline
from shardwise.present.draw.notebook import Shown
from shardwise.present.pictures.estimate_charts import shown_estimate
from shardwise.present.pictures.pipeline_schedule_timeline import shown_timeline
from shardwise.present.pictures.plan_charts import shown_comparison, shown_explanation, shown_memory, shown_plan
from shardwise.present.pictures.plan_to_target_loss_charts import shown_search
from shardwise.present.pictures.reconciliation_charts import shown_reconciliation
from shardwise.present.pictures.simulated_step_timeline import shown_simulation
from shardwise.present.pictures.sweep_charts import shown_sweep
from shardwise.price import Estimate, Simulation
from shardwise.search import Comparison, Explanation, LayoutMemory, LossSearch, Plan, Swept
from shardwise.values import Displayable

DISPLAYS: Mapping[type[Displayable], Callable[[Any], Shown]] = {
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


def display_of(value: Displayable) -> Shown:
    """Return what a notebook shows of a value."""
    return DISPLAYS[type(value)](value)
