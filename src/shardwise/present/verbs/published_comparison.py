"""The nearest published runs beside a plan: what `measure` finds, priced by `search`."""

from __future__ import annotations

from shardwise import measure, search
from shardwise.search import Plan, PublishedComparison


def compare_with_published_runs(plan: Plan) -> PublishedComparison | None:
    """Return the nearest published runs with their layouts priced for a plan's job; None where there are none."""
    return search.compare_published_runs(plan, measure.nearest_published_runs(plan.problem))
