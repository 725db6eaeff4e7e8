"""Processes that begin as copies of a server that has PyTorch loaded already, and their ranks likewise.

Loading it takes nine tenths of the time of a short run.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from harness import server

from shardwise.measure.experiments import job_process
from shardwise.present import command_line
from shardwise.run import launcher


class Copy:
    """A process that begins as a copy of the server, in a process group of its own: what `subprocess.Popen` gives of it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._process = server().Process(target=target, args=arguments)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return int(self._process.pid)

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.exitcode

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Piped(Copy):
    """A process that runs `main()` with these words and this environment; `stdout` and `stderr` are pipes of its own."""

    def __init__(self, main: Callable[[], int | None], words: Sequence[str], environment: Mapping[str, str]) -> None:
        pipes = [server().Pipe(duplex=False) for _ in range(2)]
        ends = [theirs for _, theirs in pipes]
        super().__init__(_begin, main, list(words), dict(environment), *ends)
        for theirs in ends:
            theirs.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(ours.fileno()), encoding="utf-8") for ours, _ in pipes)
        for ours, _ in pipes:
            ours.close()


class CopiedAttempt(Copy):
    """In place of `subprocess.Popen`: the process that runs an attempt of an experiment, whose command is a copy as well."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        super().__init__(_attempt, command[-1], dict(env))

    def wait(self, timeout: float | None = None) -> int:
        return super().wait()


def _attempt(folder: str, environment: Mapping[str, str]) -> None:
    os.environ.update(environment)
    job_process.subprocess = CopiedCommand  # type: ignore[attr-defined]
    job_process.run_attempt(folder)


class CopiedCommand:
    """In place of the module `subprocess`: `python -m shardwise WORDS` begins as a copy of this process."""

    DEVNULL = subprocess.DEVNULL
    Popen: Any

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: str, stdout: Any, **_: Any) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.chdir(cwd)
            try:
                with open(stdout.name, "ab") as file:
                    _begin(partial(command_line.main, command[3:]), command[3:], env, file, file)
            except SystemExit as error:
                sys.stdout.flush()
                os._exit(error.code if isinstance(error.code, int) else 1)
            finally:
                os._exit(1)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


CopiedCommand.Popen = CopiedCommand


def _begin(
    main: Callable[[], int | None], words: Sequence[str], environment: Mapping[str, str], out: Any, err: Any
) -> None:
    os.setsid()
    for stream, descriptor in ((out, 1), (err, 2)):
        os.dup2(stream.fileno(), descriptor)
    out.close()
    err.close()
    os.environ.update(environment)
    sys.argv = [sys.argv[0], *words]
    copy_ranks()
    sys.exit(main())


def copy_ranks() -> None:
    """Start the ranks that this process launches as copies of it from now on."""
    launcher.subprocess = Copied  # type: ignore[attr-defined]


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
