"""Searches of layouts in a child process, so that the page answers while one runs."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from shardwise.hardware import Cluster
from shardwise.layout import Choices, Layout, stack_of
from shardwise.model import Architecture, Job
from shardwise.present.explorer.page_wording import PAGE_LABELS, page_wording
from shardwise.present.explorer.state import State, layout_text
from shardwise.price import Problem
from shardwise.search import Plan, make_plan
from shardwise.search.vectorised.search_layouts import PricedLayout, SearchResult, search_layouts
from shardwise.values import ShardwiseError
from shardwise.values.argument_labels import label_arguments

MOST_KEPT = 24  # results, some 50 KB each
MOST_S = 180.0  # of one search: ten times what 16,384 devices take
SEARCHING: Mapping[str, Any] = {"state": "searching", "best": None, "problems": []}
Values = tuple[Any, Any, Any]  # model, cluster and job


class SearchReports(Protocol):
    """What searches of settings have found so far."""

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """Return what is known of a setting, and see to it that the rest will be."""


class Searches:
    """What searches have found so far, by the setting of a state. Only the setting that was asked for last is searched next."""

    def __init__(self, most_s: float = MOST_S) -> None:
        self.most_s = most_s
        self.results: OrderedDict[State, Mapping[str, Any]] = OrderedDict()
        self.wanted: tuple[State, Values] | None = None
        self.changed = threading.Condition()
        self.closed = False
        self.child: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """What is known of a setting; where that is not all of it, its search is the next."""
        with self.changed:
            report = self.results.get(setting, SEARCHING)
            if setting in self.results:
                self.results.move_to_end(setting)
            else:
                self.wanted = (setting, values)
                self.changed.notify_all()
            return report

    def wait(self, setting: State, values: Values, seconds: float) -> Mapping[str, Any]:
        """The same once its search has come to an end, or after so many seconds."""
        self.ask(setting, values)
        with self.changed:
            self.changed.wait_for(lambda: self.results.get(setting, SEARCHING)["state"] != "searching", timeout=seconds)
            return self.results.get(setting, SEARCHING)

    def close(self) -> None:
        """Stop the search and its process."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self._kill()
        self.thread.join()
        self._drop()

    def _run(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self.wanted is not None)
                if self.closed:
                    return
                assert self.wanted is not None
                setting, values = self.wanted
                self.wanted = None
                self._keep(setting, SEARCHING)
            self._search(setting, values)

    def _search(self, setting: State, values: Values) -> None:
        """Have the child search; what it does not end in time is ended."""
        child = self._started()
        timer = threading.Timer(self.most_s, self._kill)
        timer.daemon = True
        timer.start()
        try:
            for message in self._messages(child, values):
                with self.changed:
                    self._keep(setting, message)
        except (OSError, EOFError, pickle.UnpicklingError):
            self._drop()
            problem = f"the search took more than {self.most_s:g} s; `shardwise plan` has no such limit"
            with self.changed:
                self._keep(setting, {**self.results.get(setting, SEARCHING), "state": "done", "problems": [problem]})
        finally:
            timer.cancel()

    def _messages(self, child: subprocess.Popen[bytes], values: Values) -> Iterator[Mapping[str, Any]]:
        """The child's reports of a job, until it is done. Raises `EOFError` where it ends before that."""
        assert child.stdin is not None
        assert child.stdout is not None
        pickle.dump(values, child.stdin)
        child.stdin.flush()
        state = "searching"
        while state == "searching":
            message = pickle.load(child.stdout)
            state = message["state"]
            yield message

    def _started(self) -> subprocess.Popen[bytes]:
        if self.child is None:
            command = [sys.executable, "-m", "shardwise.present.explorer.background_search"]
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self.child

    def _kill(self) -> None:
        """End the process; whoever reads from it finds the end of the stream."""
        child = self.child
        if child is not None:
            child.kill()

    def _drop(self) -> None:
        """Give up a process, so that the next search has a new one."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            with suppress(BrokenPipeError):
                child.communicate()

    def _keep(self, setting: State, report: Mapping[str, Any]) -> None:
        self.results[setting] = report
        self.results.move_to_end(setting)
        while len(self.results) > MOST_KEPT:
            self.results.popitem(last=False)
        self.changed.notify_all()


MOST_POINTS = 300  # layouts beside the front: more are no picture


def report_searches(model: Architecture, cluster: Cluster, job: Job) -> Iterator[dict[str, Any]]:
    """What searches of a job find, as they find it: the plan that `shardwise plan` takes, then the front."""
    try:
        chosen = make_plan(Problem(model, cluster, job))
    except ShardwiseError as error:
        yield {"state": "done", "best": None, "problems": list(error.problems)}
        return
    best = _best(chosen)
    yield {"state": "searching", "best": best, "problems": []}
    problem = Problem(model, cluster, job).with_defaults()
    choices = Choices().limit_to_stack(stack_of(problem.cluster), model, job, problem.cluster.scale_up_size)
    result = search_layouts(problem, choices=choices)
    yield {"state": "done", "best": best, "problems": [], **_front(result)}


def report_search_again(chosen: Plan) -> dict[str, Any]:
    """The same for a plan that is there: its search again, for the front."""
    choices = Choices().limit_to_stack(stack_of(chosen.cluster), chosen.model, chosen.job, chosen.cluster.scale_up_size)
    result = search_layouts(chosen.problem, choices=choices)
    return {"state": "done", "best": _best(chosen), "problems": [], **_front(result)}


def _best(chosen: Plan) -> dict[str, Any]:
    others = [{**_point(other.layout, other.estimate.step_time_s, other.estimate.memory_bytes), "reason": other.reason}
              for other in chosen.alternatives]  # fmt: skip
    return {**_point(chosen.layout, chosen.estimate.step_time_s, chosen.estimate.memory_bytes), "alternatives": others}


def _point(layout: Layout, step_time_s: float, memory_bytes: float) -> dict[str, Any]:
    return {
        "layout": layout_text(layout),
        "text": str(layout),
        "step_time_s": step_time_s,
        "memory_bytes": memory_bytes,
    }


def _front(result: SearchResult) -> dict[str, Any]:
    """The Pareto front of time and memory, and of each way to factor the devices the fastest that fits."""
    every = sorted(result.by_factorisation, key=lambda priced: priced.step_time_s)
    some = every[:: max(1, len(every) // MOST_POINTS)][:MOST_POINTS]
    return {
        "front": _points(result.pareto), "points": _points(some), "num_layouts": result.num_layouts,
        "num_fitting": result.num_fitting, "num_factorisations": len(every),
    }  # fmt: skip


def _points(rows: Sequence[PricedLayout]) -> list[dict[str, Any]]:
    return [_point(priced.layout, priced.step_time_s, priced.memory_bytes) for priced in rows]


def main() -> None:
    """Search until the explorer closes the stream; what is wrong with a job is said in the words of the page."""
    while True:
        try:
            model, cluster, job = pickle.load(sys.stdin.buffer)
        except (EOFError, KeyboardInterrupt):
            return
        with label_arguments(PAGE_LABELS):
            for message in report_searches(model, cluster, job):
                message["problems"] = [page_wording(problem) for problem in message["problems"]]
                pickle.dump(message, sys.stdout.buffer)
                sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
