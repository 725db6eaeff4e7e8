"""States in, payloads out; what is kept between questions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardwise.present.explore.asked import Asked, asked
from shardwise.present.explore.controls import controls
from shardwise.present.explore.known import Known
from shardwise.present.explore.searches import Searches, Values
from shardwise.present.explore.state import VIEWS, State, parse_query
from shardwise.present.explore.views.batch import batch
from shardwise.present.explore.views.copy import copy
from shardwise.present.explore.views.head import head
from shardwise.present.explore.views.memory import memory
from shardwise.present.explore.views.notation import notation
from shardwise.present.explore.views.overview import overview
from shardwise.present.explore.views.pareto import pareto
from shardwise.present.explore.views.roofline import roofline
from shardwise.present.explore.views.run import run
from shardwise.present.explore.views.schedule import schedule
from shardwise.present.explore.views.timeline import timeline
from shardwise.present.explore.views.why import why
from shardwise.values import ShardwiseError, lookup

KEPT = 32  # layouts with their plans, some 100 KB each

# By the name that a page asks for.
QUESTIONS: Mapping[str, Callable[[Asked], dict[str, Any]]] = {
    "overview": overview, "timeline": timeline, "roofline": roofline, "pareto": pareto, "notation": notation,
    "memory": memory, "schedule": schedule, "batch": batch, "run": run, "why": why, "copy": copy,
}  # fmt: skip


class Explorer:
    """Answers the page's questions about what is known. Without `searches` nothing is searched."""

    def __init__(self, known: Known, searches: Searches | None = None) -> None:
        self.known, self.searches = known, searches
        self.kept: OrderedDict[State, Asked] = OrderedDict()

    def state(self, query: str) -> State:
        """The state of an address; without a query that of the opened plan. Raises `InputError`."""
        return parse_query(query) if query else self.known.start

    def answer(self, question: str, query: str) -> dict[str, Any]:
        """The payload of a question; of a layout that cannot run, or a view that cannot show it, the problems in its place.

        Raises `ShardwiseError` for a state that cannot be: an address or a name that is none.
        """
        ask = lookup(QUESTIONS, question, "question")
        found = self.asked(self.state(query))
        try:
            return ask(found)
        except ShardwiseError as error:
            shown = head(found) | {"controls": controls(found)} if question in VIEWS else {}
            return shown | {"problems": list(error.problems)}

    def asked(self, state: State) -> Asked:
        """The values of a state; those of a few layouts are kept, with their plans."""
        known, found = self.known, None
        if self.searches:
            found = self.searches.ask(state.setting, self._values(state))
        key = replace(state, view="overview", details=())
        kept = self.kept.pop(key, None)
        if kept is None or state.layout is None:
            kept = asked(state, known, found)
        again = kept.again(replace(state, layout=kept.layout), found)
        self.kept[key] = again
        while len(self.kept) > KEPT:
            self.kept.popitem(last=False)
        return again

    def _values(self, state: State) -> Values:
        return self.known.model(state), self.known.cluster(state), self.known.job(state)
