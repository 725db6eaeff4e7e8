"""Which of many single mutations of the package their tests notice.

    python benchmarks/mutants.py [--count 100] [--seed 0] [--rooms lowering,engine/torch] [--processes 2] [--limit 1800]
                                 [--required 0.9] [--again] [--out FILE]
    python benchmarks/mutants.py --recheck 40 [--seed 0]

Draws `count` mutations of the sources of all rooms of `mutant_rooms.py`, or of those asked for, makes each in a copy of the
tree, and runs the tests of its room there until one fails; that one is run again without the mutant, where it has to pass. As
many copies are at work as there are processes. Each outcome is a line of `--out`, by default of `mutants.jsonl` beside this
file: a run that was interrupted goes on where it stopped, and what lies in a line that has changed since is run anew
(`--again`: survivors are, too). Prints what lived, with its reason where `mutants.toml` has one for the file and the mutated
line. The exit status is 1 where fewer died than are required.

`--recheck N` runs N recorded deaths again, drawn at random, after a change of the tests: each has to die again, and the test
that noticed it is recorded. Mutants of lines that have changed since are left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import queue
import random
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from mutant_rooms import ROOMS, room_of
from mutant_tree import PACKAGE, Mutant, Outcome, Tree, described
from mutation import compiles, mutations

REPOSITORY = Path(__file__).parents[1]
KEPT = Path(__file__).with_name("mutants.jsonl")
REASONS = Path(__file__).with_name("mutants.toml")
LIMIT_S = 1800.0  # several times as long as the tests of any room take


def drawn(package: Path, count: int, seed: int, rooms: Sequence[str] = ()) -> list[Mutant]:
    """Return `count` mutants of all places of some rooms, or of all.

    Their order is that of a hash of what each is: where sources change, the mutants of all other lines are drawn as before.
    """
    sources = _read_sources(package)
    places = list(_all_mutants(sources, rooms))
    places.sort(key=lambda mutant: sha256(repr((seed, *mutant.key)).encode()).digest())
    valid = (mutant for mutant in places if compiles(mutant.mutation.applied(sources[mutant.file])))
    return list(itertools.islice(valid, count))


def deaths(package: Path, outcomes: Mapping[tuple[object, ...], Outcome], count: int, seed: int) -> list[Mutant]:
    """Return `count` mutants of today's sources, drawn at random, that are recorded to have died."""
    died = {key for key, outcome in outcomes.items() if outcome.outcome != "lived"}
    mutants = [mutant for mutant in _all_mutants(_read_sources(package)) if mutant.key in died]
    return random.Random(seed).sample(mutants, min(count, len(mutants)))


def _read_sources(package: Path) -> dict[str, str]:
    return {
        path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))
    }


def _all_mutants(sources: Mapping[str, str], rooms: Sequence[str] = ()) -> Iterator[Mutant]:
    for file, source in sources.items():
        if room_of(file) in (rooms or ROOMS):
            yield from _mutants(file, source)


def _mutants(file: str, source: str) -> Iterator[Mutant]:
    """Those of a file, in order."""
    before: Counter[tuple[str, ...]] = Counter()
    for mutation in mutations(source):
        line = mutation.mutated_line(source)
        alike = mutation.before, mutation.after, line
        yield Mutant(file, mutation, line, before[alike])
        before[alike] += 1


def read_outcomes(out: Path) -> dict[tuple[object, ...], Outcome]:
    """Outcomes of earlier runs by mutant; a line that was cut short counts for nothing."""
    outcomes: dict[tuple[object, ...], Outcome] = {}
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else ():
        try:
            outcome = Outcome(**json.loads(line))
        except (json.JSONDecodeError, TypeError):
            continue
        outcomes[outcome.key] = outcome
    return outcomes


def judged(
    mutants: Sequence[Mutant],
    trees: Sequence[Tree],
    out: Path,
    *,
    again: bool,
    recheck: bool = False,
    limit_s: float = LIMIT_S,
) -> Iterator[Outcome]:
    """Yield the outcome of each mutant, from the file, or from running its tests in a free tree and adding it to the file.

    Survivors are run again where `again`, and all mutants where `recheck`.
    """
    known = read_outcomes(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    free: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        free.put(tree)

    def outcome(mutant: Mutant) -> Outcome:
        result = known.get(mutant.key)
        if result is not None and not recheck and not (again and result.outcome == "lived"):
            return result
        tree = free.get()
        try:
            result = tree.judge(mutant, limit_s, killer=result.test if result else "")
        finally:
            free.put(tree)
        with out.open("a", encoding="utf-8") as file:
            print(json.dumps(asdict(result)), file=file)
        return result

    _end_line(out)
    pool = ThreadPoolExecutor(len(trees))
    try:
        for number, (mutant, result) in enumerate(zip(mutants, pool.map(outcome, mutants), strict=True), start=1):
            where = f"{PACKAGE}/{mutant.file}:{mutant.mutation.line}"
            progress = f"{number}/{len(mutants)} {result.outcome:<5} {result.seconds:6.1f} s"
            print(f"{progress}  {where}  {mutant.change}", file=sys.stderr)
            yield result
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for tree in trees:
            tree.end()
        pool.shutdown()


def compact(out: Path) -> None:
    """Keep the last outcome of each mutant."""
    lines = [json.dumps(asdict(outcome)) for outcome in read_outcomes(out).values()]
    part = out.with_name(f"{out.name}.part")
    part.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    part.replace(out)


def _end_line(out: Path) -> None:
    """End a line that was cut short."""
    text = out.read_text(encoding="utf-8") if out.exists() else ""
    if text and not text.endswith("\n"):
        with out.open("a", encoding="utf-8") as file:
            print(file=file)


def read_reasons(path: Path) -> dict[tuple[str, str], str]:
    """Why mutants cannot be noticed, by file and mutated line."""
    kept = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {(entry["file"], entry["line"]): entry["reason"] for entry in kept.get("equivalent", [])}


def report(outcomes: Sequence[Outcome], reasons: Mapping[tuple[str, str], str]) -> str:
    """How many died, and what lived, without a reason first."""
    lived = [outcome for outcome in outcomes if outcome.outcome == "lived"]
    lines = [
        f"{len(outcomes) - len(lived)} of {len(outcomes)} mutants died ({1 - len(lived) / max(len(outcomes), 1):.0%})"
    ]
    for outcome in sorted(lived, key=lambda outcome: (outcome.file, outcome.mutated_line) in reasons):
        reason = reasons.get((outcome.file, outcome.mutated_line), "no reason is known: a test is missing")
        change = described(outcome.before, outcome.after)
        lines += [f"{PACKAGE}/{outcome.file}:{outcome.line}  {change}", f"    {outcome.mutated_line}", f"    {reason}"]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rooms", default="", help=f"comma-separated, of {', '.join(ROOMS)} (default: all)")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a mutant counts as hung")
    parser.add_argument("--required", type=float, default=0.9, help="share of mutants that have to die")
    parser.add_argument("--again", action="store_true", help="run the tests of survivors again")
    parser.add_argument("--recheck", type=int, metavar="N", help="run N recorded deaths again; all have to die")
    parser.add_argument("--out", type=Path, default=KEPT)
    arguments = parser.parse_args()
    arguments.rooms = [room for room in arguments.rooms.split(",") if room]
    if unknown := set(arguments.rooms) - set(ROOMS):
        parser.error(f"--rooms: unknown {', '.join(sorted(unknown))}; known are {', '.join(ROOMS)}")
    return arguments


def main() -> int:
    """Print what lived; the exit status says whether enough died."""
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers end with it
    package, recheck = REPOSITORY / PACKAGE, arguments.recheck is not None
    if recheck:
        mutants = deaths(package, read_outcomes(arguments.out), arguments.recheck, arguments.seed)
    else:
        mutants = drawn(package, arguments.count, arguments.seed, arguments.rooms)
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(arguments.processes)]
        trees = [Tree(REPOSITORY, folder) for folder in folders]
        try:
            options = {"again": arguments.again, "recheck": recheck, "limit_s": arguments.limit}
            outcomes.extend(judged(mutants, trees, arguments.out, **options))
        except KeyboardInterrupt:
            print(f"interrupted; the same command goes on from {arguments.out}", file=sys.stderr)
            return 130
    print(report(outcomes, read_reasons(REASONS)))
    compact(arguments.out)
    required = 1.0 if recheck else arguments.required
    return 0 if sum(outcome.outcome != "lived" for outcome in outcomes) >= required * len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
