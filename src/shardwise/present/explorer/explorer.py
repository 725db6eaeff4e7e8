"""The explorer: questions of the page, their answers and the cache of answers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.present.explorer.background_search import SearchReports, Values
from shardwise.present.explorer.batch_view import batch
from shardwise.present.explorer.book_tasks import TASKS, task_names_payload, task_payload
from shardwise.present.explorer.controls import controls
from shardwise.present.explorer.copy_as import copy
from shardwise.present.explorer.explain_number import why
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.page_reports import view_report
from shardwise.present.explorer.page_wording import PAGE_LABELS, page_wording
from shardwise.present.explorer.plan_views import memory, overview, pareto, run
from shardwise.present.explorer.request import ViewRequest, head, resolve_request
from shardwise.present.explorer.serving_view import serving
from shardwise.present.explorer.state import VIEWS, State, parse_query, write_query
from shardwise.present.explorer.step_views import roofline, schedule, timeline
from shardwise.present.explorer.weight_sharding_view import notation
from shardwise.present.rendering.page_report import report_to_json
from shardwise.values import MissingValueError, ShardwiseError, lookup
from shardwise.values.errors import label_arguments

MAX_REQUESTS = 32  # of layouts with their plans, some 100 KB each

QUESTIONS: Mapping[str, Callable[[ViewRequest], dict[str, Any]]] = {
    "overview": overview, "timeline": timeline, "roofline": roofline, "pareto": pareto, "notation": notation,
    "memory": memory, "schedule": schedule, "batch": batch, "serving": serving, "run": run, "why": why, "copy": copy,
}  # fmt: skip


def answer_payload(question: str, request: ViewRequest) -> dict[str, Any]:
    """Return the payload of a question; problems in its place if the layout cannot run, or the view cannot show it."""
    try:
        payload = QUESTIONS[question](request)
    except ShardwiseError as error:
        common = head(request) | {"controls": controls(request)} if question in VIEWS else {}
        payload = common | {"problems": list(error.problems), "is_known": not isinstance(error, MissingValueError)}
    if question != "copy" and payload.get("problems"):  # launches of frameworks have these frameworks' flags
        payload["problems"] = [page_wording(problem) for problem in payload["problems"]]
    return payload


def with_report(question: str, payload: dict[str, Any]) -> dict[str, Any]:
    """Return a payload with its report, if the question has one."""
    report = view_report(question, payload)
    return payload | {"report": report_to_json(report)} if report else payload


class Explorer:
    """Answers to the page's questions, with a cache of requests. Without `searches` nothing is searched."""

    def __init__(self, resolver: NameResolver, searches: SearchReports | None = None) -> None:
        self.resolver, self.searches = resolver, searches
        self.requests: OrderedDict[State, ViewRequest] = OrderedDict()

    def state(self, query: str) -> State:
        """Return the state of an address: without a query that of the opened plan, with a task alone its start.

        Raises `InputError`.
        """
        state = parse_query(query) if query else self.resolver.start
        if state.task is None:
            return state
        task = lookup(TASKS, state.task, "task")
        return task.start_state() if state == State(task=task.name) else state

    def answer(self, question: str, query: str) -> dict[str, Any]:
        """Return the payload of a question; problems in its place if the layout cannot run, or the view cannot show it.

        Problems are in the page's wording. Raises `ShardwiseError` for an invalid address and an unknown name.
        """
        with label_arguments(PAGE_LABELS):
            lookup(QUESTIONS, question, "question")
            state = self.state(query)
            request = self.resolve(state)
            payload = answer_payload(question, request)
            if question in VIEWS:
                task = None if state.task is None else TASKS[state.task]
                payload |= {
                    "tasks": task_names_payload(),
                    "task": None if task is None else task_payload(task, request),
                }
        return with_report(question, payload)

    def resolve(self, state: State) -> ViewRequest:
        """Return the request of a state, from the cache if its layout was asked about lately."""
        search = None
        # The same search and plan, whether an address leaves the usual job out or not.
        state = self.resolver.with_usual_job(state)
        if self.searches:
            search = self.searches.ask(state.setting, self._values(state))
        request = resolve_request(state, self.resolver, search)
        key = replace(request.state, view="overview", details=(), task=None)
        cached = self.requests.pop(key, None)
        if cached is not None:
            request.take_results(cached)
        self.requests[key] = request
        while len(self.requests) > MAX_REQUESTS:
            self.requests.popitem(last=False)
        return request

    def _values(self, state: State) -> Values:
        return self.resolver.model(state), self.resolver.cluster(state), self.resolver.job(state)


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
    """Return the versioned payload of a state's view. Raises `ShardwiseError` for an invalid state."""
    state = explorer.state(query)
    answer = explorer.answer(state.view, write_query(state))
    return {
        "schema": SCHEMA, "view": state.view, "query": answer["query"], "problems": answer["problems"], "answer": answer,
    }  # fmt: skip
