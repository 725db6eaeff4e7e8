"""Which of many single mutations of the planner and the engine their tests notice.

    python benchmarks/mutants.py [--count 100] [--seed 0] [--processes 2] [--limit 1800] [--again] [--out FILE]

Draws `count` mutations of the sources of the rooms below, makes each in a copy of the tree, and runs the tests of its room there
until one fails; that one is run again without the mutant, where it has to pass. Each outcome is a line of `--out`: a run that was
interrupted goes on where it stopped, and what lies in a line that has changed since is run anew (`--again`: survivors are, too).
Prints what lived, with its reason where `mutants.toml` has one for the file and the mutated line. The exit status is 1 where less
than 90% died.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mutation import Mutation, compiles, mutations

REPOSITORY = Path(__file__).parents[1]
PACKAGE = "src/shardwise"
COPIED = ("src", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "README.md", "LICENSE", "Makefile")
REASONS = Path(__file__).with_name("mutants.toml")
REQUIRED_SHARE = 0.9
LIMIT_S = 1800.0  # several times as long as the tests of any room take on two cores
# A room of the package and the tests that have to notice what changes there, quick ones first; the first prefix that fits.
ROOMS: Mapping[str, tuple[str, ...]] = {
    "sharding": ("unit/sharding", "derivation", "verify", "property/test_reshard.py", "property/test_expressions.py", "golden"),
    "network": ("unit/network", "unit/cost", "golden", "cli/test_show.py", "cli/test_collective.py"),
    "model": ("unit/model", "derivation", "unit/cost", "unit/layout", "property/test_gradients.py", "property/test_structures.py",
              "crosscheck/test_transformers.py", "train/test_model.py"),
    "layout": ("unit/layout", "derivation", "unit/lowering", "unit/cost", "planning/test_pins.py", "property/test_structures.py",
               "property/test_derivation.py", "property/test_search.py"),
    "derive": ("unit/derive", "derivation", "unit/lowering", "unit/cost", "property/test_structures.py",
               "property/test_expressions.py", "property/test_derivation.py", "verify"),
    "lowering": ("unit/lowering", "derivation", "property/test_traffic.py", "unit/cost", "planning/test_instructions.py",
                 "train/test_model.py", "distributed/test_captured.py"),
    "schedule": ("unit/schedule", "unit/cost", "unit/layout", "property/test_search.py"),
    "cluster": ("unit/cluster", "unit/cost", "golden", "cli/test_show.py", "unit/calibrate"),
    "cost": ("unit/cost", "golden", "unit/test_choices.py", "unit/test_api.py", "planning", "property/test_search.py"),
    "books": ("unit/books", "golden", "unit/test_api.py"),
    "planning": ("planning", "unit/test_api.py", "cli/test_cli.py", "cli/test_product.py"),
    "search": ("unit/search", "planning", "unit/test_choices.py", "property/test_search.py"),
    "engine/numpy": ("derivation", "property/test_structures.py", "property/test_derivation.py", "verify"),
    "engine/torch": ("train/test_gradients.py", "train/test_experts.py", "train/test_model.py", "train/test_recompute.py",
                     "train/test_memory.py", "train/test_gpu_shapes.py", "train/test_huggingface.py",
                     "distributed/test_equality.py"),
    "symbolic.py": ("unit/test_symbolic.py", "unit/layout", "unit/cost"),
    "precision.py": ("unit/cost", "unit/test_choices.py", "train/test_memory.py"),
    "job.py": ("unit/test_job.py", "unit/cost", "planning"),
    "loss.py": ("unit/cost", "planning", "unit/test_choices.py"),
    "issuing.py": ("unit/test_choices.py", "unit/lowering", "unit/cost"),
    "data": ("data", "train", "cli/test_tokenize.py"),
    "train": ("train", "distributed", "cli/test_train.py"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mutant:
    """A mutation of a file of the package, and the how manyth of this change to such a line it is."""

    file: str
    mutation: Mutation
    mutated_line: str
    nth: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """What it is, wherever the line has moved to."""
        return self.file, self.mutation.before, self.mutation.after, self.mutated_line, self.nth

    @property
    def change(self) -> str:
        return described(self.mutation.before, self.mutation.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the tests made of a mutant: `died`, `lived`, or `hung` (they took longer than a room's tests may: it died)."""

    file: str
    line: int
    before: str
    after: str
    mutated_line: str
    outcome: str
    seconds: float
    test: str = ""
    nth: int = 0

    @property
    def key(self) -> tuple[object, ...]:
        """That of its mutant."""
        return self.file, self.before, self.after, self.mutated_line, self.nth


def described(before: str, after: str) -> str:
    """A change on one line; of a long one what is around the first place where the two differ."""
    texts = [" ".join(before.split()).replace("'", '"'), after.replace("'", '"')]
    if sum(map(len, texts)) > 120:
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
        texts = [f"... {text[max(same - 20, 0) : same + 40]} ..." for text in texts]
    return "  ->  ".join(texts)


def room_of(file: str) -> str | None:
    """The room of a file of the package, by its path below it."""
    return next((room for room in ROOMS if file == room or file.startswith(f"{room}/")), None)


def drawn(package: Path, count: int, seed: int) -> list[Mutant]:
    """So many mutants of all places of all rooms, the same for the same sources."""
    sources = {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))
    }
    places = [(file, one) for file, source in sources.items() if room_of(file) for one in mutations(source)]
    random.Random(seed).shuffle(places)
    valid = ((file, one) for file, one in places if compiles(one.applied(sources[file])))
    return [_mutant(file, one, sources[file]) for file, one in itertools.islice(valid, count)]


def _mutant(file: str, mutation: Mutation, source: str) -> Mutant:
    line = mutation.mutated_line(source)
    change = mutation.before, mutation.after
    before = (one for one in mutations(source) if one.begin < mutation.begin and (one.before, one.after) == change)
    return Mutant(file, mutation, line, sum(one.mutated_line(source) == line for one in before))


class Tree:
    """A copy of the repository in which mutants are made and tests are run."""

    def __init__(self, repository: Path, folder: Path, processes: int) -> None:
        self.folder, self.processes = folder, processes
        for name in COPIED:
            source, target = repository / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, target)

    def run(self, tests: Sequence[str], limit_s: float | None = None) -> tuple[str, str]:
        """What becomes of some tests, and the first that failed."""
        paths = [f"tests/{one}" for one in tests if (self.folder / "tests" / one.partition("::")[0]).exists()]
        options = ["-q", "-x", "-p", "no:cacheprovider", "-n", str(self.processes)]
        command = [sys.executable, "-m", "pytest", *options, *paths]
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "src")}
        process = subprocess.Popen(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
        except BaseException as error:  # its own group: the tests' processes end with it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return "hung", ""
            raise
        failed = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        if process.returncode not in (0, 1) and not failed:
            sys.exit(f"error: pytest did not run the tests (exit status {process.returncode}):\n{output[-2000:]}")
        return ("lived" if process.returncode == 0 else "died"), failed.partition(" - ")[0]

    def judge(self, mutant: Mutant, limit_s: float) -> Outcome:
        """Make a mutant, run its room's tests, undo it, and see that the test which failed passes without it."""
        path = self.folder / PACKAGE / mutant.file
        source = path.read_text(encoding="utf-8")
        started = time.monotonic()
        try:
            _write(path, mutant.mutation.applied(source))
            outcome, test = self.run(ROOMS[room_of(mutant.file) or ""], limit_s)
        finally:
            _write(path, source)
        if outcome == "died":
            self.check(test.partition("tests/")[2], limit_s)
        own = mutant.mutation
        return Outcome(
            file=mutant.file, line=own.line, before=own.before, after=own.after, mutated_line=mutant.mutated_line,
            outcome=outcome, seconds=round(time.monotonic() - started, 1), test=test, nth=mutant.nth,
        )  # fmt: skip

    def check(self, test: str, limit_s: float) -> None:
        """Run a test without a mutant. Exits where it fails: no mutant is to die of that."""
        outcome, failed = self.run([test], limit_s)
        if outcome != "lived":
            sys.exit(f"error: {failed or test} fails without a mutant; mend it first")


def _write(path: Path, source: str) -> None:
    """A source, without what was compiled of the one before: a change within a second of the same length would not be seen."""
    path.write_text(source, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def read_outcomes(out: Path) -> dict[tuple[object, ...], Outcome]:
    """Outcomes of earlier runs by mutant; a line that was cut short counts for nothing."""
    outcomes: dict[tuple[object, ...], Outcome] = {}
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else ():
        try:
            one = Outcome(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        outcomes[one.key] = one
    return outcomes


def judged(
    mutants: Sequence[Mutant], tree: Tree, out: Path, *, again: bool, limit_s: float = LIMIT_S
) -> Iterator[Outcome]:
    """The outcome of each mutant, from the file or from running its tests; what is run is added to the file."""
    known = read_outcomes(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:
        cut_short = file.tell() and not out.read_text(encoding="utf-8").endswith("\n")
        file.write("\n" if cut_short else "")
        for number, mutant in enumerate(mutants, start=1):
            found = known.get(mutant.key)
            if found is None or (again and found.outcome == "lived"):
                found = tree.judge(mutant, limit_s)
                print(json.dumps(asdict(found)), file=file, flush=True)
            where = f"{PACKAGE}/{mutant.file}:{mutant.mutation.line}"
            progress = f"{number}/{len(mutants)} {found.outcome:<5} {found.seconds:6.1f} s"
            print(f"{progress}  {where}  {mutant.change}", file=sys.stderr)
            yield found


def read_reasons(path: Path) -> dict[tuple[str, str], str]:
    """Why mutants cannot be noticed, by file and mutated line."""
    kept = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {(one["file"], one["line"]): one["reason"] for one in kept.get("equivalent", [])}


def report(found: Sequence[Outcome], reasons: Mapping[tuple[str, str], str]) -> str:
    """How many died, and what lived, without a reason first."""
    lived = [one for one in found if one.outcome == "lived"]
    lines = [f"{len(found) - len(lived)} of {len(found)} mutants died ({1 - len(lived) / max(len(found), 1):.0%})"]
    for one in sorted(lived, key=lambda one: (one.file, one.mutated_line) in reasons):
        reason = reasons.get((one.file, one.mutated_line), "no reason is known: a test is missing")
        change = described(one.before, one.after)
        lines += [f"{PACKAGE}/{one.file}:{one.line}  {change}", f"    {one.mutated_line}", f"    {reason}"]
    return "\n".join(lines)


def main() -> int:
    """Print what lived; the exit status says whether enough died."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a mutant counts as hung")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "mutants.jsonl")
    arguments = parser.parse_args()
    mutants = drawn(REPOSITORY / PACKAGE, arguments.count, arguments.seed)
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(REPOSITORY, Path(folder), arguments.processes)
        try:
            found.extend(judged(mutants, tree, arguments.out, again=arguments.again, limit_s=arguments.limit))
        except KeyboardInterrupt:
            print(f"interrupted; the same command goes on from {arguments.out}", file=sys.stderr)
            return 130
    print(report(found, read_reasons(REASONS)))
    return 0 if sum(one.outcome != "lived" for one in found) >= REQUIRED_SHARE * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
