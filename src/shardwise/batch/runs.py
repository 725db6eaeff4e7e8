"""The runs of a sweep over batches, as they are written: a line of JSON for each, or a table of values in CSV.

A folder of a sweep has `runs.jsonl`, a line for each run: {"batch_tokens", "learning_rate", "seed", "steps", "tokens", "loss",
"target_loss", "failed"}; `steps` is null where the loss was not reached, `failed` null or the reason. A CSV file has the columns
batch_tokens and steps, and may have seed.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.batch.rows import json_rows, not_an_object, number_in, read_text
from shardwise.errors import InputError, require

FILE = "runs.jsonl"  # of a sweep's folder
NOT_REACHED = "the loss was not reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRun:
    """One run of a sweep: its batch, its steps to the loss (None where it did not reach it, which `failed` says), its seed.

    >>> run = BatchRun(batch_tokens=4096, steps=1200, seed=1)
    >>> run.tokens, run.reached
    (4915200, True)
    """

    batch_tokens: float
    steps: float | None
    seed: int = 0
    learning_rate: float | None = None
    target_loss: float | None = None
    failed: str | None = None

    @property
    def reached(self) -> bool:
        """Whether the run reached the loss."""
        return self.steps is not None

    @property
    def tokens(self) -> float | None:
        """Tokens to the loss: B · S; None where it was not reached."""
        return None if self.steps is None else self.batch_tokens * self.steps


def read_runs(path: str | Path) -> tuple[BatchRun, ...]:
    """The runs of a sweep's folder, of its `runs.jsonl`, or of a CSV file. Raises `InputError` with every line that is wrong.

    Of the runs of a batch with one seed that differ in their learning rate, all are there: `best_runs` has the best of them.
    """
    where = Path(path)
    where = where / FILE if where.is_dir() else where
    text = read_text(where, f"the folder of a sweep with a {FILE}, or a CSV file with batch_tokens and steps,")
    rows = _of_csv(text, where) if where.suffix.lower() == ".csv" else json_rows(text, where)
    found, problems = [], []
    for place, row in rows:
        run, wrong = _run(row, place)
        found += [run] if run else []
        problems += wrong
    require(problems)
    if not found:
        raise InputError(f"{where}: found no runs; a line for each run is required")
    return tuple(found)


def best_runs(runs: tuple[BatchRun, ...]) -> tuple[BatchRun, ...]:
    """Of the runs of each batch and seed the one that reached the loss in the fewest steps, by batch and seed.

    A batch and seed of which no run reached the loss keeps one that did not.

    >>> [run.steps for run in best_runs((BatchRun(batch_tokens=8, steps=30), BatchRun(batch_tokens=8, steps=20)))]
    [20]
    """
    best: dict[tuple[float, int], BatchRun] = {}
    for run in sorted(runs, key=lambda one: math.inf if one.steps is None else one.steps):
        best.setdefault((run.batch_tokens, run.seed), run)
    return tuple(best[key] for key in sorted(best))


def _of_csv(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in ("batch_tokens", "steps") if name not in (reader.fieldnames or ())]
    if missing:
        raise InputError(
            f"{path}: found the columns {', '.join(reader.fieldnames or ()) or 'none'}; batch_tokens and steps are required"
        )
    for row in reader:
        yield f"{path}:{reader.line_num}", {key: value or None for key, value in row.items() if key}


def _run(row: Any, place: str) -> tuple[BatchRun | None, list[str]]:
    """The run of a row, or what is wrong with it."""
    if not isinstance(row, Mapping):
        return None, [not_an_object(row, place)]
    problems: list[str] = []
    batch = number_in(row, "batch_tokens", place, problems, required=True)
    steps = number_in(row, "steps", place, problems)
    others = {name: number_in(row, name, place, problems) for name in ("learning_rate", "target_loss")}
    seed = row.get("seed") or 0
    if not str(seed).lstrip("-").isdigit():
        problems.append(f"{place}: seed is {seed!r}; a whole number is required")
    if problems or batch is None:
        return None, problems
    failed = row.get("failed") or (None if steps is not None else NOT_REACHED)
    return BatchRun(batch_tokens=batch, steps=steps, seed=int(seed), failed=failed, **others), []
