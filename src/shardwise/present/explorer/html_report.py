"""HTML reports: the page's own modules and one payload in a single file, which requests nothing and runs no other script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from shardwise.present.explorer.background_search import report_search_again
from shardwise.present.explorer.explain_number import list_number_names, provenance_payload
from shardwise.present.explorer.explorer import answer_payload, with_report
from shardwise.present.explorer.opened_plan import resolver_of_plan
from shardwise.present.explorer.page_files import inline_page
from shardwise.present.explorer.page_wording import PAGE_LABELS
from shardwise.present.explorer.request import ViewRequest, resolve_request
from shardwise.present.explorer.result_charts import add_charts
from shardwise.present.registry import payload_of, report_of
from shardwise.present.rendering.page_report import PageReport, panels, report_to_json
from shardwise.present.rendering.report import Report
from shardwise.search import Plan
from shardwise.values.errors import label_arguments

SCHEMA = "shardwise.report/1"
Kind = Literal["plan", "explain", "reconcile", "validate", "sweep"]
VIEWS = ("overview", "timeline", "roofline", "pareto", "schedule", "notation")  # of a plan, in this order
PANEL_TITLES = {"reconcile": "Measured against predicted"}  # of the first panel
__all__ = ["SCHEMA", "Kind", "plan_report", "report", "result_report"]


def report(kind: Kind, title: str, payload: Mapping[str, Any], sections: PageReport = ()) -> str:
    """Return the HTML report of a payload that a command prints with `--json`: its sections as the page draws them."""
    values = {"schema": SCHEMA, "kind": kind, "title": title, "payload": payload, "report": report_to_json(sections)}
    return _page(title, values)


def result_report(kind: Kind, title: str, result: Any) -> str:
    """Return the HTML report of a verb's result: its payload, and its report as panels, with charts of the payload."""
    payload, sections = payload_of(result), panels(cast(Report, report_of(result)), PANEL_TITLES.get(kind, ""))
    return report(kind, title, payload, add_charts(kind, payload, sections))


def plan_report(plan: Plan) -> str:
    """Return the HTML report of a plan: every view of the explorer, with the provenance of each number."""
    resolver = resolver_of_plan(plan)
    search = report_search_again(plan) if plan.search else None
    request = resolve_request(resolver.start, resolver, search)
    title = f"{plan.model.name} on {plan.cluster.name}"
    priced = request.plan.estimate
    why = {name: provenance_payload(request, name) for name in list_number_names(priced.time, priced.memory)}
    payload = {"views": {name: _view(request, name) for name in VIEWS}, "why": why}
    return _page(title, {"schema": SCHEMA, "kind": "plan", "title": title, "payload": payload})


def _view(request: ViewRequest, name: str) -> dict[str, Any]:
    """Return a view with its report and without its controls."""
    if name == "pareto" and request.search is None:
        return with_report(name, {"problems": ["a plan of one layout: nothing was searched"]})
    with label_arguments(PAGE_LABELS):
        payload = answer_payload(name, request)
    payload.pop("controls", None)
    return with_report(name, payload)


def _page(title: str, payload: Mapping[str, Any]) -> str:
    body = '<header id="head"></header>\n<main id="content" class="report"></main>\n'
    return inline_page(title, body, "report", payload, payload_id="payload")
