"""Run verbs on mutated inputs: none may end in a traceback, take more than ten seconds or a gigabyte.

    python -m fuzzing.fuzz --count 10000 --seed 1            # in this process
    python -m fuzzing.fuzz --count 500 --processes           # each in a process of its own
    python -m fuzzing.fuzz --only 1234 --seed 1              # one case again, with its output

Every case follows from the seed and its number. Run it in the folder `tests`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fuzzing.mutations import mutate_file, mutate_words
from fuzzing.seeds import SPELT, Command, write_seeds

from shardwise.present.command_line import main as shardwise_main

LIMIT_S, LIMIT_BYTES = 10.0, 10**9
WAIT_S = 60.0  # for a process, whose seconds on the CPU are counted: the machine may be busy
EXIT_CODES = {0, 1, 2, 3}
WORDS_ALONE = 0.3  # of all cases: nothing but the command line is mutated


class Case(NamedTuple):
    """A command line in a folder with its files; `change` says what was mutated."""

    number: int
    words: list[str]
    folder: Path
    change: str


class Outcome(NamedTuple):
    """How a case ended: its exit code, or what was wrong with it."""

    case: Case
    code: int | None
    problem: str
    seconds: float
    output: str


class TooLong(BaseException):
    """Raised by the alarm; no `except Exception` holds it up."""


@contextlib.contextmanager
def make_case(seeds: Path, commands: Sequence[Command], seed: int, number: int) -> Iterator[Case]:
    """Copy what a case reads, and mutate it."""
    draw = random.Random(f"{seed}:{number}")
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        if draw.random() < WORDS_ALONE:
            words = shlex.split(draw.choice(SPELT))
            changed = mutate_words(words, draw)
            yield Case(number, changed, folder, "words")
            return
        command = draw.choices(commands, [command.weight for command in commands])[0]
        for entry in {Path(path).parts[0] for path in (*command.reads, *command.words.split())}:
            source = seeds / entry
            if source.is_dir():
                shutil.copytree(source, folder / entry)
            elif source.is_file():
                shutil.copy(source, folder / entry)
        words = command.words.split()
        path = draw.choice(list(command.reads))
        change = f"{path}: {mutate_file(folder / path, draw)}"
        if draw.random() < 0.1 and command.words.split()[0] != "explore":  # which may start to serve
            words = mutate_words(words, draw)
            change += ", words"
        yield Case(number, words, folder, change)


def run_in_process(case: Case) -> Outcome:
    """Run a case in this process."""

    def stop(*_: object) -> None:
        raise TooLong

    output, code, problem = io.StringIO(), None, ""
    started, peak = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        with contextlib.chdir(case.folder), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            code = shardwise_main(case.words)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0
    except TooLong:
        problem = f"more than {LIMIT_S:g} s: {_place()}"
    except BaseException:
        problem = traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) * 1024
    return _judge(case, code, problem, time.monotonic() - started, grown, output.getvalue())


def _place() -> str:
    frames = traceback.extract_tb(sys.exc_info()[2])
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-12:]))


def run_as_process(case: Case) -> Outcome:
    """Run a case in a process of its own."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "shardwise", *case.words], cwd=case.folder, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output,
        )  # fmt: skip
        signal.signal(signal.SIGALRM, lambda *_: process.kill())
        signal.setitimer(signal.ITIMER_REAL, WAIT_S)
        _, status, usage = os.wait4(process.pid, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode("utf-8", errors="replace")
    code = process.returncode
    waited = f"after {time.monotonic() - started:.0f} s"
    problem = text if "Traceback (most recent" in text else f"killed by signal {-code} {waited}" if code < 0 else ""
    seconds = usage.ru_utime + usage.ru_stime
    if not problem and seconds > LIMIT_S:
        problem = f"{seconds:.1f} s on the CPU"
    return _judge(case, code, problem, seconds, usage.ru_maxrss * 1024, text)


def _judge(case: Case, code: int | None, problem: str, seconds: float, num_bytes: int, output: str) -> Outcome:
    if not problem and code not in EXIT_CODES:
        problem = f"exit code {code}"
    if not problem and code == 2 and not output.strip():
        problem = "no message"
    if not problem and num_bytes > LIMIT_BYTES:
        problem = f"{num_bytes:,} bytes"
    return Outcome(case, code, problem, seconds, output)


def fuzz(
    folder: Path, seed: int, numbers: Sequence[int], *, as_processes: bool = False, complete: bool = True
) -> Iterator[Outcome]:
    """Yield the outcome of each case; `complete` seeds take 20 s to write."""
    commands = write_seeds(folder / "seeds", complete=complete)
    for number in numbers:
        for is_last in (as_processes, True):
            with make_case(folder / "seeds", commands, seed, number) as case:
                outcome = (run_as_process if as_processes else run_in_process)(case)
            # the machine may be busy: what took long is tried once more
            if is_last or not outcome.problem.startswith("more than"):
                yield outcome
                break


def main() -> None:
    """Print each problem, and how all cases ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int)
    parser.add_argument("--processes", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    numbers = range(arguments.start, arguments.start + arguments.count) if arguments.only is None else [arguments.only]
    codes: Counter[object] = Counter()
    verbs: Counter[str] = Counter()
    slowest, num_problems = 0.0, 0
    with tempfile.TemporaryDirectory(prefix="fuzz-seeds-") as folder:
        for outcome in fuzz(Path(folder), arguments.seed, numbers, as_processes=arguments.processes):
            codes[outcome.code] += 1
            verbs[outcome.case.words[0] if outcome.case.words else ""] += 1
            slowest = max(slowest, outcome.seconds)
            if outcome.problem or arguments.only is not None:
                num_problems += bool(outcome.problem)
                command = shlex.join(outcome.case.words)[:300]
                print(
                    f"#{outcome.case.number} {command} [{outcome.case.change}] {outcome.seconds:.1f} s\n{outcome.problem[-2500:]}"
                )
                print(outcome.output[-1500:] if arguments.only is not None else "", flush=True)
    peak = (
        resource.getrusage(resource.RUSAGE_CHILDREN if arguments.processes else resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    print(
        f"{len(numbers):,} cases, {num_problems} problems; exit codes {dict(codes)}; slowest {slowest:.1f} s; "
        f"peak {peak / 1e9:.2f} GB"
    )
    print(f"verbs: {dict(verbs.most_common())}")
    sys.exit(1 if num_problems else 0)


if __name__ == "__main__":
    main()
