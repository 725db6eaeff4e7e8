"""Processes that begin as copies of a server that has PyTorch loaded already, and their ranks likewise.

Loading it takes nine tenths of the time of a short run.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from harness import server

from shardwise.train import launch


class Copy:
    """A process that runs `main()` with these words and this environment, in a process group of its own: what `subprocess.Popen`
    gives of it. `stdout` and `stderr` are pipes; others that write to them are its ranks alone."""

    def __init__(self, main: Callable[[], int | None], words: Sequence[str], environment: Mapping[str, str]) -> None:
        context = server()
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        ends = [theirs for _, theirs in pipes]
        self._process = context.Process(target=_begin, args=(main, list(words), dict(environment), *ends))
        self._process.start()
        for theirs in ends:
            theirs.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(ours.fileno()), encoding="utf-8") for ours, _ in pipes)
        for ours, _ in pipes:
            ours.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Until it has ended: its exit code."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _begin(
    main: Callable[[], int | None], words: Sequence[str], environment: Mapping[str, str], out: Any, err: Any
) -> None:
    os.setsid()
    for own, number in ((out, 1), (err, 2)):
        os.dup2(own.fileno(), number)
        own.close()
    os.environ.update(environment)
    sys.argv = [sys.argv[0], *words]
    copy_ranks()
    sys.exit(main())


def copy_ranks() -> None:
    """From now on ranks that this process launches begin as copies of it."""
    launch.subprocess = Copied  # type: ignore[attr-defined]


class Copied:
    """In place of the module `subprocess`: a rank begins as a copy of the launcher, and not as a Python of its own."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _run(command, env)

    Popen: Any

    def wait(self) -> None:
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Copied.Popen = Copied


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    """What `python -m MODULE FLAGS` does, with what a process that was started would not have inherited undone."""
    _, _, module, *flags = command
    try:
        os.closerange(3, 256)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ.update(env)
        sys.argv = [module, *flags]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the module is loaded already
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        os._exit(1)  # a rank ends itself (`rank.ended`)
