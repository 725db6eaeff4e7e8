"""Plans of one problem are searched once in a process: a third of all searches of the suite had been made before.

Functions that plan find a function here that remembers what `search` gives for equal arguments. Tests of the search itself
import it from where it is, and are not concerned. A test that changes what a search reads uses the fixture `fresh_searches`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.search.vectorised.search_layouts import SearchResult

REMEMBERED: dict[str, SearchResult] = {}


def install() -> None:
    """Let plans be searched by a function that remembers. Imports the package, which a mutant may have broken, only now."""
    from shardwise.search import nearest_fitting_layout, planner
    from shardwise.search.vectorised.search_layouts import search_layouts

    def remembered_search(*problem: Any, progress: Callable[..., None] | None = None, **choices: Any) -> SearchResult:
        """Return what `search` gives, of an equal problem what it gave before."""
        key = repr((problem, sorted(choices.items())))
        if key not in REMEMBERED:
            shown = {} if progress is None else {"progress": progress}
            REMEMBERED[key] = search_layouts(*problem, **shown, **choices)
        return REMEMBERED[key]

    for module in (planner, nearest_fitting_layout):
        module.search_layouts = remembered_search  # type: ignore[attr-defined]
