"""Reports of the page's views, made of their payloads: every number is read at its path, so that it is the one of `--json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.present.explorer.notation_report import notation_report
from shardwise.present.explorer.page_sections import FIGURE_TITLES, panel, quiet
from shardwise.present.explorer.plan_reports import memory_report, overview_report, problems_section
from shardwise.present.explorer.search_reports import batch_report, pareto_report
from shardwise.present.explorer.serving_report import serving_report
from shardwise.present.explorer.step_reports import roofline_report, schedule_report, timeline_report
from shardwise.present.rendering.page_report import PageReport
from shardwise.present.rendering.payload_text import Payload

REPORTS: Mapping[str, Callable[[Payload], PageReport]] = {
    "overview": overview_report, "timeline": timeline_report, "roofline": roofline_report, "pareto": pareto_report,
    "notation": notation_report, "memory": memory_report, "schedule": schedule_report, "batch": batch_report,
    "serving": serving_report,
}  # fmt: skip


def view_report(question: str, payload: Payload) -> PageReport:
    """Return the report of a view or a figure, or why it has none; empty for questions of a dialog."""
    if question not in REPORTS:
        return ()
    if payload.get("problems") and question not in ("overview", "memory"):
        if question not in FIGURE_TITLES:
            return [problems_section(payload)]
        return [panel(FIGURE_TITLES[question], quiet(payload["problems"][0]), half=question != "timeline")]
    return REPORTS[question](payload)
