"""Searches in the background: one process, the job that was asked for last, results kept by job."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from shardwise.present.explore.state import State

MOST_KEPT = 24  # results, some 50 KB each
MOST_S = 180.0  # of one search: ten times what 16,384 devices take
SEARCHING: Mapping[str, Any] = {"state": "searching", "best": None, "problems": []}
Values = tuple[Any, Any, Any]  # model, cluster and job


class Searches:
    """What searches have found so far, by the setting of a state. Only the setting that was asked for last is searched next."""

    def __init__(self, most_s: float = MOST_S) -> None:
        self.most_s = most_s
        self.found: OrderedDict[State, Mapping[str, Any]] = OrderedDict()
        self.wanted: tuple[State, Values] | None = None
        self.changed = threading.Condition()
        self.closed = False
        self.child: subprocess.Popen[bytes] | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """What is known of a setting; where that is not all of it, its search is the next."""
        with self.changed:
            found = self.found.get(setting, SEARCHING)
            if setting in self.found:
                self.found.move_to_end(setting)
            else:
                self.wanted = (setting, values)
                self.changed.notify_all()
            return found

    def wait(self, setting: State, values: Values, seconds: float) -> Mapping[str, Any]:
        """The same once its search has come to an end, or after so many seconds."""
        self.ask(setting, values)
        with self.changed:
            self.changed.wait_for(lambda: self.found.get(setting, SEARCHING)["state"] != "searching", timeout=seconds)
            return self.found.get(setting, SEARCHING)

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
                self._keep(setting, {**self.found.get(setting, SEARCHING), "state": "done", "problems": [problem]})
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
            command = [sys.executable, "-m", "shardwise.present.explore.searching"]
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

    def _keep(self, setting: State, found: Mapping[str, Any]) -> None:
        self.found[setting] = found
        self.found.move_to_end(setting)
        while len(self.found) > MOST_KEPT:
            self.found.popitem(last=False)
        self.changed.notify_all()
