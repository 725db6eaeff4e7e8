"""Ask every framework whether what is exported to it is what was planned: `make export-check`.

    python benchmarks/export_check/run.py [TARGET ...] [--count 100] [--sources FOLDER] [--folder FOLDER]

README.md beside this file says what each judge does. A table at the end has a row for each script of each judge. The exit
status is 0 if all of them passed, 1 if a framework refuses a launch or builds another model, and 2 if none did but a judge was
not run, because its environment or its sources could not be had.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from judges import JUDGES, Script, framework_arguments, make_environment

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
MAX_LINES = 12  # of a script that failed, besides its last


class Result(NamedTuple):
    """Outcome of one script of a judge: `summary` is its last line, or why there is none."""

    target: str
    subject: str
    outcome: str
    summary: str
    seconds: float = 0.0


def check(name: str, count: int, sources: Path | None, root: Path) -> Iterator[Result]:
    """Yield the results of a judge's scripts."""
    judge, folder = JUDGES[name], root / name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        python = make_environment(judge, folder)
        places = framework_arguments(judge, python, folder, sources)
    except (OSError, subprocess.SubprocessError) as error:
        yield from (Result(name, script.subject, NOT_RUN, describe_error(error)) for script in judge.scripts)
        return
    for script in judge.scripts:
        start = time.perf_counter()
        if script.reads_launches and (problem := write_launches(script.writer, name, count, folder / "launches")):
            yield Result(name, script.subject, FAILED, problem, time.perf_counter() - start)
            continue
        outcome, summary = run_script(
            python, script_words(script, places, count, folder), folder / f"{Path(script.file).stem}.log"
        )
        yield Result(name, script.subject, outcome, summary, time.perf_counter() - start)


def script_words(script: Script, places: Sequence[str], count: int, folder: Path) -> list[str]:
    """Return the words of a script's command, without the interpreter."""
    options = [word.format(count=count) for word in script.arguments]
    launches = [str(folder / "launches")] if script.reads_launches else []
    return [*script.interpreter_options, str(HERE / script.file), *places, *options, *launches]


def write_launches(writer: str, name: str, count: int, folder: Path) -> str | None:
    """Write random launches to a folder, each read back first; return why that failed, or None."""
    shutil.rmtree(folder, ignore_errors=True)
    paths = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    words = [sys.executable, str(HERE / writer), name, str(count), str(folder)]
    done = subprocess.run(words, env=paths, capture_output=True, text=True)
    return None if done.returncode == 0 else f"not written: {last_line(done.stderr)}"


def run_script(python: Path, words: Sequence[str], log: Path) -> tuple[str, str]:
    """Return a script's outcome and its last line. Its output goes to a file; of one that failed the begin is printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run([str(python), *words], env=environment, stdout=output, stderr=subprocess.STDOUT)
    text = log.read_text(encoding="utf-8", errors="replace")
    if done.returncode:
        lines = [line for line in text.splitlines() if is_problem(line)]
        print(*lines[:MAX_LINES], f"all of it: {log}", sep="\n", flush=True)
    return PASSED if done.returncode == 0 else FAILED, last_line(text)


def is_problem(line: str) -> bool:
    """Return whether a line is neither of a model that is as here nor of one that is not exported."""
    return bool(line.strip()) and "as here" not in line and "not exported" not in line and "not written" not in line


def last_line(text: str) -> str:
    """Return the last line of an output that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no output")


def describe_error(error: Exception) -> str:
    """Return why a command failed, in a line."""
    output = getattr(error, "output", None)
    return last_line(output) if output else " ".join(str(error).split())


def print_table(results: Sequence[Result]) -> None:
    """Print a row for each result."""
    rows = [("target", "judged", "outcome", "s", "result")]
    rows += [(row.target, row.subject, row.outcome, f"{row.seconds:.0f}", row.summary[:100]) for row in results]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    print()
    for row in rows:
        cells = [row[0].ljust(widths[0]), row[1].ljust(widths[1]), row[2].ljust(widths[2]), row[3].rjust(widths[3])]
        print("  ".join([*cells, row[4]]))


def exit_status(results: Sequence[Result]) -> int:
    """Return 1 if a judge failed, 2 if none failed but one was not run, else 0."""
    outcomes = {result.outcome for result in results}
    return 1 if FAILED in outcomes else 2 if NOT_RUN in outcomes else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(JUDGES)}; all of them without one")
    parser.add_argument("--count", type=int, default=100, help="launches, and narrow models, of each (default: 100)")
    parser.add_argument("--sources", type=Path, help="a folder with checkouts (Megatron-LM, maxtext, axolotl, ...)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "out" / "export-check",
        help="environments, checkouts and launches (default: out/export-check)",
    )  # fmt: skip
    arguments = parser.parse_args()
    unknown = [name for name in arguments.targets if name not in JUDGES]
    if unknown:
        parser.error(f"found {', '.join(unknown)}; one of {', '.join(JUDGES)} is required")
    results: list[Result] = []
    for name in arguments.targets or JUDGES:
        print(f"{name} ...", flush=True)
        for result in check(name, arguments.count, arguments.sources, arguments.folder.resolve()):
            results.append(result)
            print(f"{name}: {result.subject} {result.outcome}: {result.summary}", flush=True)
    print_table(results)
    return exit_status(results)


if __name__ == "__main__":
    sys.exit(main())
