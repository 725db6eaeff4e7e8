"""A report: the page's own modules and one payload in a single HTML file, which asks for nothing and runs no other script."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from html import escape
from typing import Any, Literal

from shardwise.present.explorer.background_search import searched
from shardwise.present.explorer.explain_number import explained
from shardwise.present.explorer.explorer import QUESTIONS
from shardwise.present.explorer.number_provenance import NUMBERS
from shardwise.present.explorer.opened_plan import known_of
from shardwise.present.explorer.page_files import bundled, pages
from shardwise.present.explorer.request import Asked, asked
from shardwise.search import Plan
from shardwise.values import MEMORY_TERMS, TIME_TERMS, ShardwiseError

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
    found = searched(plan) if plan.search else None
    of = asked(known.start, known, found)
    title = f"{plan.model.name} on {plan.cluster.name}"
    payload = {"views": {name: _view(of, name) for name in VIEWS}, "why": _provenance(of)}
    return _page(title, {"schema": SCHEMA, "kind": "plan", "title": title, "payload": payload})


def _view(of: Asked, name: str) -> dict[str, Any]:
    """A view without its controls, or why there is none."""
    if name == "pareto" and of.found is None:
        return {"problems": ["a plan of one given layout: nothing was searched"]}
    try:
        found = QUESTIONS[name](of)
    except ShardwiseError as error:
        return {"problems": list(error.problems)}
    return {key: value for key, value in found.items() if key != "controls"}


def _provenance(of: Asked) -> dict[str, Any]:
    """Of each number that a reader may ask about."""
    priced = of.plan.estimate
    shown = [f"time.{name}" for name in TIME_TERMS if priced.time[name]]
    shown += [f"memory.{name}" for name in MEMORY_TERMS if priced.memory[name]]
    return {name: explained(of, name) for name in (*NUMBERS, *shown)}


def _page(title: str, payload: Mapping[str, Any]) -> str:
    files = pages()
    modules = {path[1:-3]: page.text for path, page in files.items() if path.endswith(".js")}
    script = bundled(modules, "report")
    style = files["/colours.css"].text + files["/style.css"].text
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
    )
    # "<" is written as an escape, so that no text of the payload ends the element that it is in.
    data = json.dumps(payload, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="content-security-policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} · shardwise</title>\n<style>\n{style}</style>\n</head>\n"
        '<body>\n<header id="head"></header>\n<main id="content" class="report"></main>\n'
        f'<script id="payload" type="application/json">\n{data}\n</script>\n<script>\n{script}\n</script>\n</body>\n</html>\n'
    )
