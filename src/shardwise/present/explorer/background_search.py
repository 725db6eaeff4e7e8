"""Searches of layouts in a child process, so that the page answers while one runs."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from shardwise.hardware import Cluster
from shardwise.layout import Choices, Layout, stack_of
from shardwise.model import Architecture, Job
from shardwise.present.explorer.child_process import (
    ChildEndedError,
    ChildProcess,
    receive_from_parent,
    send_to_parent,
)
from shardwise.present.explorer.page_wording import PAGE_LABELS, page_wording
from shardwise.present.explorer.state import State, layout_text
from shardwise.price import Problem
from shardwise.search import Plan, make_plan
from shardwise.search.plan import Alternative
from shardwise.search.vectorised.search_layouts import PricedLayout, SearchResult, search_layouts
from shardwise.search.verdicts import no_plan_reason
from shardwise.values import Progress, ShardwiseError, ignore_progress
from shardwise.values.errors import label_arguments

MAX_REPORTS = 24  # some 50 KB each
MAX_SEARCH_S = 180.0  # ten times what 16,384 devices take
# How a search ended: "nothing fits" is a result; after "refused" (a problem of the job) and "stopped" (by the limit of time, or
# with its process) it is not known which layout is the best, nor whether one fits.
Outcome = Literal["searching", "found", "nothing fits", "refused", "stopped"]
SEARCHING: Mapping[str, Any] = {
    "state": "searching", "outcome": "searching", "best": None, "problems": [], "num_priced": None, "num_candidates": None,
}  # fmt: skip
PRICED_TASK = "layouts priced"  # of the search's progress
REPORT_EVERY_S = 0.5  # between two reports of how many layouts are priced
Values = tuple[Any, Any, Any]  # model, cluster and job


class SearchReports(Protocol):
    """Reports of searches by their setting."""

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """Return the report of a setting so far, and have its search end."""


class Searches:
    """Reports of searches by the setting of a state. Of the settings that wait only the last one is searched."""

    def __init__(self, max_search_s: float = MAX_SEARCH_S) -> None:
        self.max_search_s = max_search_s
        self.results: OrderedDict[State, Mapping[str, Any]] = OrderedDict()
        self.next_search: tuple[State, Values] | None = None
        self.changed = threading.Condition()
        self.closed = False
        self.child: ChildProcess | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """Return the report of a setting so far; without any, its search is the next."""
        with self.changed:
            report = self.results.get(setting, SEARCHING)
            if setting in self.results:
                self.results.move_to_end(setting)
            else:
                self.next_search = (setting, values)
                self.changed.notify_all()
            return report

    def last_report(self, setting: State) -> Mapping[str, Any] | None:
        """Return the report of a setting so far; None before its search."""
        with self.changed:
            return self.results.get(setting)

    def wait(self, setting: State, values: Values, seconds: float) -> Mapping[str, Any]:
        """Return the report of a setting once its search has ended, or after so many seconds."""
        self.ask(setting, values)
        with self.changed:
            self.changed.wait_for(lambda: self.results.get(setting, SEARCHING)["state"] != "searching", timeout=seconds)
            return self.results.get(setting, SEARCHING)

    def close(self) -> None:
        """Stop the search and its process."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        if self.child is not None:
            self.child.kill()
        self.thread.join()
        self._drop()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.next_search is not None)
                if self.closed:
                    return
                assert self.next_search is not None
                setting, values = self.next_search
                self.next_search = None
                self._keep(setting, SEARCHING)
            self._search(setting, values)

    def _search(self, setting: State, values: Values) -> None:
        """Have the child search, and end it after `max_search_s`."""
        self.child = child = self.child or ChildProcess(__name__)
        with child.limit_time(self.max_search_s) as timed_out:
            try:
                for message in _search_messages(child, values):
                    with self.changed:
                        self._keep(setting, message)
            except ChildEndedError:
                self._drop()
                with self.changed:
                    report = self.results.get(setting, SEARCHING)
                    problem = _stopped_text(report, self.max_search_s if timed_out.is_set() else None)
                    self._keep(setting, {**report, "state": "done", "outcome": "stopped", "problems": [problem]})

    def _drop(self) -> None:
        """Give up the process, so that the next search starts a new one."""
        child, self.child = self.child, None
        if child is not None:
            child.close()

    def _keep(self, setting: State, report: Mapping[str, Any]) -> None:
        self.results[setting] = report
        self.results.move_to_end(setting)
        while len(self.results) > MAX_REPORTS:
            self.results.popitem(last=False)
        self.changed.notify_all()


def _search_messages(child: ChildProcess, values: Values) -> Iterator[Mapping[str, Any]]:
    """Yield the child's reports of a job until it is done. Raises `ChildEndedError` if the child ends before."""
    child.send(values)
    state = "searching"
    while state == "searching":
        message = child.receive()
        state = message["state"]
        yield message


def _stopped_text(report: Mapping[str, Any], limit_s: float | None) -> str:
    """Return why a search was stopped, how far it was, and what is not known therefore; `limit_s` None: its process ended."""
    reason = "its process ended before its answer" if limit_s is None else f"it took more than {limit_s:g} s"
    if report["best"] is not None:
        return (
            f"the search of the front was stopped: {reason}; the best layout was found before, the front is not known"
        )
    priced, total = report["num_priced"], report["num_candidates"]
    progress = (
        "how many layouts were priced is not known"
        if priced is None
        else f"{priced:,} of {total:,} layouts were priced"
    )
    return f"the search was stopped: {reason}; {progress}; whether a layout fits is not known. `shardwise plan` has no limit"


MAX_POINTS = 300  # layouts drawn next to the front


def report_searches(
    model: Architecture, cluster: Cluster, job: Job, progress: Progress = ignore_progress
) -> Iterator[dict[str, Any]]:
    """Yield reports of a job's searches: the plan that `shardwise plan` chooses, then the Pareto front too."""
    try:
        chosen = make_plan(Problem(model, cluster, job), progress=progress)
    except ShardwiseError as error:
        outcome: Outcome = "nothing fits" if no_plan_reason(error) == "nothing fits" else "refused"
        yield {**SEARCHING, "state": "done", "outcome": outcome, "problems": list(error.problems)}
        return
    best = _best(chosen)
    yield {**SEARCHING, "best": best}
    problem = Problem(model, cluster, job).with_defaults()
    choices = Choices().limit_to_stack(stack_of(problem.cluster), model, job, problem.cluster.scale_up_size)
    # The best layout is known by now: only the first search reports how many layouts it has priced.
    result = search_layouts(problem, choices=choices, progress=ignore_progress)
    yield _finished(best, result)


def report_search_again(chosen: Plan) -> dict[str, Any]:
    """Return the report of a plan: it searches again for the Pareto front."""
    choices = Choices().limit_to_stack(stack_of(chosen.cluster), chosen.model, chosen.job, chosen.cluster.scale_up_size)
    result = search_layouts(chosen.problem, choices=choices)
    return _finished(_best(chosen), result)


def _finished(best: Mapping[str, Any], result: SearchResult) -> dict[str, Any]:
    return {**SEARCHING, "state": "done", "outcome": "found", "best": best, **_front(result)}


def _best(chosen: Plan) -> dict[str, Any]:
    alternatives = [
        {**_planned_point(alternative), "reason": alternative.reason} for alternative in chosen.alternatives
    ]
    return {**_planned_point(chosen), "alternatives": alternatives}


def _planned_point(planned: Plan | Alternative) -> dict[str, Any]:
    return _point(planned.layout, planned.estimate.step_time_s, planned.estimate.memory_bytes)


def _point(layout: Layout, step_time_s: float, memory_bytes: float) -> dict[str, Any]:
    return {
        "layout": layout_text(layout),
        "text": str(layout),
        "step_time_s": step_time_s,
        "memory_bytes": memory_bytes,
    }


def _front(result: SearchResult) -> dict[str, Any]:
    """Return the Pareto front of time and memory, and the fastest fitting layout of factorisations of the devices."""
    fastest = sorted(result.by_factorisation, key=lambda priced: priced.step_time_s)
    sample = fastest[:: max(1, len(fastest) // MAX_POINTS)][:MAX_POINTS]
    return {
        "front": _points(result.pareto), "points": _points(sample), "num_layouts": result.num_layouts,
        "num_fitting": result.num_fitting, "num_factorisations": len(fastest),
    }  # fmt: skip


def _points(layouts: Sequence[PricedLayout]) -> list[dict[str, Any]]:
    return [_point(priced.layout, priced.step_time_s, priced.memory_bytes) for priced in layouts]


def main() -> None:
    """Search until the explorer closes the stream; problems of a job are in the page's wording."""
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            model, cluster, job = receive_from_parent()
            with label_arguments(PAGE_LABELS):
                for message in report_searches(model, cluster, job, _report_priced()):
                    message["problems"] = [page_wording(problem) for problem in message["problems"]]
                    send_to_parent(message)


def _report_priced() -> Progress:
    """Return a progress that sends how many layouts are priced, now and then: all that is known if the search is stopped."""
    sent_s = -REPORT_EVERY_S

    def progress(task: str, done: int = 0, total: int = 0) -> None:
        nonlocal sent_s
        if task == PRICED_TASK and time.monotonic() - sent_s >= REPORT_EVERY_S:
            sent_s = time.monotonic()
            send_to_parent({**SEARCHING, "num_priced": done, "num_candidates": total})

    return progress
