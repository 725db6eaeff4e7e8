"""The explorer: questions of the page, their answers and the cache of answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.present.explorer.background_search import Searches, Values
from shardwise.present.explorer.batch_view import batch
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.copy_as import copy
from shardwise.present.explorer.explain_number import why
from shardwise.present.explorer.notation_view import notation
from shardwise.present.explorer.opened_plan import Known
from shardwise.present.explorer.plan_views import memory, overview, pareto, run
from shardwise.present.explorer.request import Asked, asked, head
from shardwise.present.explorer.state import VIEWS, State, parse_query, write_query
from shardwise.present.explorer.step_views import roofline, schedule, timeline
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


SCHEMA = "shardwise.explore/1"


class ExplorePayload(TypedDict):
    schema: Literal["shardwise.explore/1"]
    view: str
    query: str
    problems: list[str]
    answer: dict[str, Any]


ExplorePayload.__doc__ = (
    "A view of a state, which `query` is the address of: why it cannot be shown, if so, and what the page draws. Where a command "
    "prints the same numbers, `answer` has that command's payload under the command's name."
)


def explore_payload(explorer: Explorer, query: str) -> dict[str, Any]:
    """The versioned payload of a state's view. Raises `ShardwiseError` for a state that cannot be."""
    state = explorer.state(query)
    answer = explorer.answer(state.view, write_query(state))
    return {
        "schema": SCHEMA, "view": state.view, "query": answer["query"], "problems": answer["problems"], "answer": answer,
    }  # fmt: skip
