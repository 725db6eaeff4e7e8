"""A copy of the repository in which mutants are made and their tests run, in processes that have the libraries loaded."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mutant_rooms import files_of_tests
from mutation import Mutation

PACKAGE = "src/shardwise"
NOT_LOADED = re.compile(r"ImportError while loading conftest '.*/tests/(.*)conftest\.py'")
COPIED = (
    "src", "tests", "docs", "examples", "benchmarks", "pyproject.toml", "mkdocs.yml", "constraints.txt", "README.md",
    "CONTRIBUTING.md", "CHANGELOG.md", "CITATION.cff", "LICENSE", "Makefile", ".ci", ".github", ".gitignore",
    ".pre-commit-config.yaml",
)  # fmt: skip


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


class Tree:
    """A copy of the repository, and the server of its processes."""

    def __init__(self, repository: Path, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source, target = repository / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, target)
        self._server: subprocess.Popen[str] | None = None

    def end(self) -> None:
        """End the server and what it runs."""
        if self._server is not None:
            self._server.terminate()
            self._server.wait()
            with self._server:  # closes its pipes
                self._server = None

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._server is None:
            environment = {**os.environ, "PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
            self._server = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("pytest_server.py"))], cwd=self.folder, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            )  # fmt: skip
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(request), file=self._server.stdin, flush=True)
        line = self._server.stdout.readline()
        if not line:
            raise InterruptedError("the server of the tests has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
        """What becomes of some tests, and the first that failed."""
        answer = self._ask({"tests": [f"tests/{test}" for test in tests], "limit_s": limit_s})
        status, output = answer["status"], answer["output"]
        if status is None:
            return "hung", ""
        failed = next((line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
        if not failed and (conftest := NOT_LOADED.search(output)):
            failed = f"ERROR tests/{next(test for test in tests if test.startswith(conftest[1]))}"
        if status not in (0, 1) and not failed:
            sys.exit(f"error: pytest did not run the tests (exit status {status}):\n{output[-2000:]}")
        return ("lived" if status == 0 else "died"), failed.partition(" - ")[0]

    def judge(self, mutant: Mutant, limit_s: float, *, killer: str = "") -> Outcome:
        """Make a mutant, run its room's tests, undo it, and see that the test which failed passes without it.

        The file of `killer`, the test that failed in an earlier run, comes first.
        """
        path = self.folder / PACKAGE / mutant.file
        source = path.read_text(encoding="utf-8")
        files = files_of_tests(mutant.file, self.folder / "tests")
        files.sort(key=lambda file: file != killer.partition("tests/")[2].partition("::")[0])
        started = time.monotonic()
        try:
            _write(path, mutant.mutation.applied(source))
            outcome, test = self.run(files, limit_s)
        finally:
            _write(path, source)
        if outcome == "died":
            self.check(test.partition("tests/")[2], limit_s)
        mutation = mutant.mutation
        return Outcome(
            file=mutant.file, line=mutation.line, before=mutation.before, after=mutation.after, mutated_line=mutant.mutated_line,
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
