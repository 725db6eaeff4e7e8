"""Launch the ranks of the small trainer as `shardwise train` does, and read what they print while they run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from train.copies import Piped

from shardwise.present import command_line
from shardwise.run import launcher
from shardwise.values.errors import ShardwiseError, format_problems

TESTS = Path(__file__).parents[1]
USUAL = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
FOREVER_S = 900.0  # that what is sure to happen may take, on however loaded a machine: nothing is measured by it


class Launched:
    """A launcher and its ranks, in a process group of their own. What they print is gathered as it comes."""

    started: ClassVar[list[Launched]] = []

    def __init__(self, process: Piped | subprocess.Popen[str]) -> None:
        self.process = process
        self.started.append(self)
        self.out, self.lines = "", list[str]()
        self._news, self._open = threading.Condition(), True
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._open = False
            self._news.notify_all()

    def kill(self) -> None:
        """Kill all processes and close their pipes, so that a failed test leaves nothing open for the next one."""
        for pid in descendants(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    @property
    def err(self) -> str:
        return "\n".join(self.lines)

    def says(self, text: str) -> str:
        """Wait for a line with the text and return it; fail if all processes end before."""
        return self.matches(re.escape(text)).string

    def matches(self, pattern: str) -> re.Match[str]:
        """Wait for the pattern and return the match; fail if all processes end before."""
        with self._news:
            assert self._news.wait_for(lambda: self._found(pattern) or not self._open, FOREVER_S), self.err
        match = self._found(pattern)
        assert match, f"{pattern!r} is not in:\n{self.err}"
        return match

    def _found(self, pattern: str) -> re.Match[str] | None:
        return next((match for line in self.lines if (match := re.search(pattern, line))), None)

    def ended(self) -> int:
        """Wait for the launcher and all its ranks; return the launcher's exit code."""
        with self._news:
            assert self._news.wait_for(lambda: not self._open, FOREVER_S), self.err  # all of them have the pipe open
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        with self.process.stdout as out, self.process.stderr:
            self.out = out.read()
        return self.process.wait()


def launch_ranks(flags: Sequence[str], ranks: int = 2, **environment: str) -> Launched:
    """Ranks of the small trainer, as `shardwise train` starts them."""
    return launch_copy(launch_stand_ins, [str(ranks), *flags], **environment)


def launch_command(*words: str) -> Launched:
    """A command of `shardwise`, with the ranks of the engine where it is to have some."""
    return launch_copy(run_command, words)


def launch_copy(main: Callable[[], int | None], words: Sequence[str], **environment: str) -> Launched:
    """What runs in a process that need not load PyTorch first."""
    return Launched(Piped(main, words, {**USUAL, **environment}))


def launch_stand_ins() -> int:
    launcher.LEAVE_S = 2.0
    ranks, *flags = sys.argv[1:]
    try:
        return launcher.run_ranks(flags, int(ranks), "train.stand_in")
    except ShardwiseError as error:
        print(format_problems(error.problems, error.exit_code, as_json="--json" in flags), file=sys.stderr)
        return error.exit_code


def run_command() -> int:
    return command_line.main(sys.argv[1:])


def torchrun(flags: Sequence[str], ranks: int = 2, **environment: str) -> Launched:
    """As torchrun starts them."""
    run = ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    return started_by_torchrun([*run, "--local-addr", "localhost", "-m", "train.stand_in", *flags], **environment)


def started_by_torchrun(words: Sequence[str], **environment: str) -> Launched:
    """torchrun, in a process that need not load PyTorch first; its ranks are Pythons of their own."""
    return launch_copy(run_torchrun, words, PYTHONPATH=os.pathsep.join([str(TESTS), *sys.path]), **environment)


def run_torchrun() -> None:
    from torch.distributed.run import main  # for those alone that run it

    main(sys.argv[1:])


def descendants(pid: int) -> list[int]:
    """Return the processes below a process, of all generations; torchrun gives each rank a session of its own."""
    children = [process for process in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(process) == pid]
    return children + [descendant for child in children for descendant in descendants(child)]


def parent_of(pid: int) -> int | None:
    """The process that has started a process (proc_pid_stat(5), field 4); None where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def pids_of(out: Path) -> list[int]:
    """The processes of the ranks of a run, by their number."""
    peers: list[dict[str, Any]] = json.loads((out / "lock").read_text())
    return [peer["pid"] for peer in peers]
