"""Worker processes that answer the page's questions, each within a time limit, so that others do not wait for a large question.

A worker that wants the report of a search asks the server's process for it, where all workers' searches run (`Searches`).
"""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from shardwise.present.explorer.background_search import SEARCHING, SearchReports, Values
from shardwise.present.explorer.child_process import (
    ChildEndedError,
    ChildProcess,
    receive_from_parent,
    send_to_parent,
)
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.page_wording import page_wording
from shardwise.present.explorer.state import State
from shardwise.values import ShardwiseError, format_problems

MAX_ANSWER_S = 10.0  # a drag's answer takes 0.03 s, the largest cluster's first one some seconds
MAX_WORKERS = 4  # some 100 MB each
MAX_MEMORY = 4 << 30  # bytes of address space that a worker may take
NOT_FINITE = "query: sizes whose costs are not finite; smaller ones are required"


class Answer(NamedTuple):
    """An answer as JSON and its HTTP status: 422 with the problems of an invalid state, 503 without an answer."""

    text: str
    status: int


class Answers(Protocol):
    """Interface of whatever answers questions about the state of a query."""

    def answer(self, question: str, query: str) -> Answer:
        """Return the answer."""


def dump_payload(payload: Any) -> str:
    """Return a payload as JSON. Raises `ValueError` for a number that is not finite, which JSON lacks."""
    return json.dumps(payload, allow_nan=False, separators=(",", ":"))


def problem_answer(problems: list[str], status: int, exit_code: int = 2) -> Answer:
    """Return the answer that says why there is none."""
    return Answer(format_problems(problems, exit_code, as_json=True), status)


class ExplorerAnswers:
    """Answers of an explorer in this process."""

    def __init__(self, explorer: Explorer) -> None:
        self.explorer = explorer

    def answer(self, question: str, query: str) -> Answer:
        """Return the answer: 422 with the problems for an invalid state, 500 for an error of the program."""
        try:
            payload = self.explorer.answer(question, query)
        except ShardwiseError as error:
            return problem_answer([page_wording(problem) for problem in error.problems], 422, error.exit_code)
        except (ArithmeticError, MemoryError, RecursionError):  # sizes that overflow
            return problem_answer([NOT_FINITE], 422)
        except Exception as error:  # the server goes on; its log has the traceback
            traceback.print_exc()
            problem = f"{question}: an error of Shardwise, {type(error).__name__}; please report it with this address"
            return problem_answer([problem], 500, exit_code=1)
        try:
            return Answer(dump_payload(payload), 200)
        except ValueError:
            return problem_answer([NOT_FINITE], 422)


class RunningSearches(SearchReports, Protocol):
    """Reports of searches that go on in this process."""

    def last_report(self, setting: State) -> Mapping[str, Any] | None:
        """Return the report of a setting so far; None before its search."""


class Worker(ChildProcess):
    """Process that answers questions, with the setting that it asked a search's report of last, and that report."""

    def __init__(self, resolver: NameResolver) -> None:
        super().__init__(__name__)
        self.setting: State | None = None
        self.report: Mapping[str, Any] | None = None
        with suppress(ChildEndedError):
            self.send(resolver)

    def ask(self, question: str, query: str, searches: RunningSearches) -> Answer:
        """Return the answer. Raises `ChildEndedError`.

        The report of the setting so far comes with the question, since the next question is mostly of the same setting.
        """
        report = searches.last_report(self.setting) if self.setting else None
        self.send((question, query, self._renewed(report)))
        while not isinstance(message := self.receive(), Answer):
            self.setting = message[0]
            self.send(self._renewed(searches.ask(*message)))
        return message

    def _renewed(self, report: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return a report of some 70 KB, or None if the worker has it."""
        if report is None or report is self.report:
            return None
        self.report = report
        return report


class AnswerWorkers:
    """Worker processes, started as they are needed, of which the one that was used last answers first: its caches are warm."""

    def __init__(
        self, resolver: NameResolver, searches: RunningSearches, num_workers: int | None = None,
        max_answer_s: float = MAX_ANSWER_S,
    ) -> None:  # fmt: skip
        self.resolver, self.searches, self.max_answer_s = resolver, searches, max_answer_s
        self.num_workers = num_workers or max(2, min(MAX_WORKERS, os.cpu_count() or 1))
        self.free = threading.Semaphore(self.num_workers)
        self.lock = threading.Lock()
        self.idle: list[Worker] = []
        self.busy: set[Worker] = set()
        self.closed = False

    def answer(self, question: str, query: str) -> Answer:
        """Return a worker's answer, once a worker is free; 503 if it takes too long or the worker ends."""
        with self.free:
            worker = self._take()
            if worker is None:
                return problem_answer(["the explorer is closed"], 503)
            with worker.limit_time(self.max_answer_s) as timed_out:
                try:
                    answer = worker.ask(question, query, self.searches)
                except ChildEndedError:
                    answer = None
            self._put_back(worker, alive=answer is not None and not timed_out.is_set())
        if answer is not None:
            return answer
        reason = f"it took more than {self.max_answer_s:g} s" if timed_out.is_set() else "its process ended"
        advice = "ask about smaller sizes, or use the command line"
        problem = f"{question}: stopped, because {reason}; the answer is not known; {advice}"
        return problem_answer([problem], 503)

    def close(self) -> None:
        """End all workers."""
        with self.lock:
            self.closed = True
            workers, self.idle = [*self.idle, *self.busy], []
        for worker in workers:
            worker.close()

    def _take(self) -> Worker | None:
        with self.lock:
            if self.closed:
                return None
            worker = self.idle.pop() if self.idle else Worker(self.resolver)
            self.busy.add(worker)
            return worker

    def _put_back(self, worker: Worker, *, alive: bool) -> None:
        with self.lock:
            self.busy.discard(worker)
            if alive and not self.closed:
                self.idle.append(worker)
                return
        worker.close()


class ParentSearches:
    """Reports of searches that the parent process has: the last one that it sent, of the last setting that was asked about."""

    def __init__(self) -> None:
        self.setting: State | None = None
        self.report: Mapping[str, Any] = SEARCHING

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """Return the report of a setting so far."""
        if (
            setting != self.setting or self.report["state"] == "searching"
        ):  # a search that waits may have been passed over
            send_to_parent((setting, values))
            self.setting = setting
            self.renew(receive_from_parent())
        return self.report

    def renew(self, report: Mapping[str, Any] | None) -> None:
        """Take a report of the last setting; None if it is the same as before."""
        if report is not None:
            self.report = report


def main() -> None:
    """Answer questions until the server closes the stream."""
    _limit_memory()
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        searches = ParentSearches()
        answers = ExplorerAnswers(Explorer(receive_from_parent(), searches))
        while True:
            question, query, report = receive_from_parent()
            searches.renew(report)
            send_to_parent(answers.answer(question, query))


def _limit_memory() -> None:
    """Limit the memory of this process, where the operating system can."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
