"""What notebooks show of each type of value: the function that makes its tables and charts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwise.measure.reconcile.reconciliation import Reconciliation
from shardwise.pipeline.timeline import Timeline
from shardwise.present.draw.notebook import Shown
from shardwise.present.pictures.estimate_charts import shown_estimate
from shardwise.present.pictures.pipeline_schedule_timeline import shown_timeline
from shardwise.present.pictures.plan_charts import shown_comparison, shown_explanation, shown_memory, shown_plan
from shardwise.present.pictures.plan_to_target_loss_charts import shown_search
from shardwise.present.pictures.reconciliation_charts import shown_reconciliation
from shardwise.present.pictures.simulated_step_timeline import shown_simulation
from shardwise.present.pictures.sweep_charts import shown_sweep
from shardwise.price.estimate import Estimate
from shardwise.price.simulation.result import Simulation
from shardwise.search.compare_clusters import Comparison
from shardwise.search.explain.explanation import Explanation
from shardwise.search.layout_memory import LayoutMemory
from shardwise.search.loss_time import LossSearch
from shardwise.search.plan import Plan
from shardwise.search.plan_sweep import Swept
from shardwise.values.displayable import Displayable

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
