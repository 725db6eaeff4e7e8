"""Plans of one problem are searched once in a process: a third of all searches of the suite had been made before.

Functions that plan find a function here that remembers what `search` gives for equal arguments. Tests of the search itself
import it from where it is, and are not concerned. A test that changes what a search reads uses the fixture `fresh_searches`.
"""

from __future__ import annotations

from typing import Any

from shardwise.search import nearest_fitting_layout, planner
from shardwise.search.vectorised.search_layouts import SearchResult, search
from shardwise.values.progress import Progress, silent

REMEMBERED: dict[str, SearchResult] = {}


def remembered_search(*problem: Any, progress: Progress = silent, **choices: Any) -> SearchResult:
    """Return what `search` gives, of an equal problem what it gave before."""
    key = repr((problem, sorted(choices.items())))
    if key not in REMEMBERED:
        REMEMBERED[key] = search(*problem, progress=progress, **choices)
    return REMEMBERED[key]


def install() -> None:
    """Let plans be searched by `remembered_search`."""
    for module in (planner, planner, nearest_fitting_layout):
        module.search = remembered_search  # type: ignore[attr-defined]
