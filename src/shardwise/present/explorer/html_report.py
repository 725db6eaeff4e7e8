"""A report: the page's own modules and one payload in a single HTML file, which asks for nothing and runs no other script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from shardwise.present.explorer.background_search import report_search_again
from shardwise.present.explorer.explain_number import explained
from shardwise.present.explorer.explorer import QUESTIONS
from shardwise.present.explorer.number_provenance import NUMBERS
from shardwise.present.explorer.opened_plan import known_of
from shardwise.present.explorer.page_files import inline_page
from shardwise.present.explorer.page_wording import PAGE_LABELS, page_wording
from shardwise.present.explorer.request import ViewRequest, resolve_request
from shardwise.search import Plan
from shardwise.values import MEMORY_TERMS, TIME_TERMS, ShardwiseError
from shardwise.values.argument_labels import label_arguments

SCHEMA = "shardwise.report/1"
Kind = Literal["plan", "explain", "reconcile", "validate", "sweep"]
VIEWS = ("overview", "timeline", "roofline", "pareto", "schedule", "notation")  # of a plan, in this order
__all__ = ["SCHEMA", "Kind", "plan_report", "report"]


def report(kind: Kind, title: str, payload: Mapping[str, Any]) -> str:
    """A report of what a command prints with `--json`, as the text of an HTML file."""
    return _page(title, {"schema": SCHEMA, "kind": kind, "title": title, "payload": payload})


def plan_report(plan: Plan) -> str:
    """A report of a plan: every view of the explorer, and where each number is from."""
    known = known_of(plan)
    search = report_search_again(plan) if plan.search else None
    request = resolve_request(known.start, known, search)
    title = f"{plan.model.name} on {plan.cluster.name}"
    payload = {"views": {name: _view(request, name) for name in VIEWS}, "why": _provenance(request)}
    return _page(title, {"schema": SCHEMA, "kind": "plan", "title": title, "payload": payload})


def _view(request: ViewRequest, name: str) -> dict[str, Any]:
    """A view without its controls, or why there is none."""
    if name == "pareto" and request.search is None:
        return {"problems": ["a plan of one layout: nothing was searched"]}
    try:
        with label_arguments(PAGE_LABELS):
            view = QUESTIONS[name](request)
    except ShardwiseError as error:
        return {"problems": [page_wording(problem) for problem in error.problems]}
    return {key: value for key, value in view.items() if key != "controls"}


def _provenance(request: ViewRequest) -> dict[str, Any]:
    """Of each number that a reader may ask about."""
    priced = request.plan.estimate
    shown = [f"time.{name}" for name in TIME_TERMS if priced.time[name]]
    shown += [f"memory.{name}" for name in MEMORY_TERMS if priced.memory[name]]
    return {name: explained(request, name) for name in (*NUMBERS, *shown)}


def _page(title: str, payload: Mapping[str, Any]) -> str:
    body = '<header id="head"></header>\n<main id="content" class="report"></main>\n'
    return inline_page(title, body, "report", payload, payload_id="payload")
