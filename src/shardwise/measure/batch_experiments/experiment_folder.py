"""The folder of an experiment on the batch size: a line of JSON for each run that has ended, beside the folders of the runs."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.measure.experiments.backends import num_cores
from shardwise.records import RunFolder, StepLog, read_json, read_log
from shardwise.search.sweep_values import parse_sweep
from shardwise.values import (
    InputError,
    argument_label,
    parse_count,
    raise_problems,
    read_text,
    write_json_atomic,
    write_text_atomic,
)

PathLike = str | os.PathLike[str]
BatchSizes = str | Sequence[int | str]


def require_arguments(request: object, required: Mapping[str, str]) -> None:
    """Raise `InputError` that names every field of a request that is missing; `required` says what each takes."""
    missing = [name for name in required if not getattr(request, name)]
    raise_problems([f"{argument_label(name)}: found none; {required[name]}, is required" for name in missing])


def parse_batches(batches: BatchSizes) -> tuple[int, ...]:
    """Return batches in tokens, in the order given. Raises `InputError`.

    >>> parse_batches("1Ki:4Ki:x2"), parse_batches("512,4Ki"), parse_batches([512, "4Ki"])
    ((1024, 2048, 4096), (512, 4096), (512, 4096))
    """
    text = batches if isinstance(batches, str) else ",".join(map(str, batches))
    return tuple(int(value) for value in parse_sweep(f"batch={text}", argument_label("batches")).values)


CHECKPOINT_EVERY = 500  # steps: what is lost of each run by those that are killed
LONGEST_TEXT = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentFolder:
    """Paths of an experiment of a `kind`, such as "sweep"; `lines` is the name of the file with a line per ended run."""

    path: Path
    kind: str
    schema: str
    lines: str

    @property
    def identity(self) -> Path:
        """File that identifies the experiment: what all of its runs have in common."""
        return self.path / f"{self.kind}.json"

    @property
    def runs(self) -> Path:
        """File with a line of JSON for each run that has ended."""
        return self.path / self.lines

    def run_of(self, name: str) -> RunFolder:
        """Return the folder of a run."""
        return RunFolder(self.path / "runs" / name)

    @property
    def ledger(self) -> Path:
        """File with a line for each change of state of a run."""
        return self.path / "ledger.jsonl"

    def require_usable(self, identity: Mapping[str, Any]) -> None:
        """Raise `InputError` for a folder with anything but the same experiment; nothing is changed."""
        if self.identity.exists():
            self._require_same(identity)
        elif self.path.is_dir() and any(not path.name.startswith(self.ledger.name) for path in self.path.iterdir()):
            raise InputError(
                f"--out: {self.path} holds other files; an empty folder, or that of a {self.kind}, is required"
            )

    def open_or_resume(self, identity: Mapping[str, Any]) -> None:
        """Create the folder, or check that it holds the same experiment. Raises `InputError` if it does not."""
        self.require_usable(identity)
        if not self.identity.exists():
            self.path.joinpath("runs").mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.identity, self._payload(identity))

    def _payload(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        return dict(json.loads(json.dumps({"schema": self.schema, **identity})))

    def _require_same(self, identity: Mapping[str, Any]) -> None:
        payload, recorded = self._payload(identity), read_json(self.identity)
        folder_text = f"the {self.kind} in {self.path}"
        differing = [name for name in {**recorded, **payload} if recorded.get(name) != payload.get(name)]
        if differing:
            raise InputError(
                *(
                    f"{name}: found {_short(payload.get(name))}; {folder_text} has {_short(recorded.get(name))}, which is "
                    "required: give the same, or another --out"
                    for name in differing
                )
            )

    def add(self, line: Mapping[str, Any]) -> None:
        """Append the line of a run. The file is replaced as a whole, so that a reader never sees half a line."""
        previous_lines = read_text(self.runs) if self.runs.exists() else ""
        write_text_atomic(self.runs, previous_lines + json.dumps(line) + "\n")

    def num_ended(self) -> int:
        """Return the number of runs that have ended."""
        return len(read_text(self.runs).splitlines()) if self.runs.exists() else 0

    def log_of(self, name: str) -> StepLog | None:
        """Return the log of a run; None if it has not started."""
        log = self.run_of(name).log
        return read_log(log) if log.exists() else None

    def losses_of(self, name: str) -> list[float]:
        """Return the losses of the steps of a run; none if it has not started."""
        log = self.log_of(name)
        return [] if log is None else [record.loss for record in log.steps]


def _short(value: object) -> str:
    """Return the text of a value for a message; a hash if it is long, such as a plan."""
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"one of hash {hashlib.sha256(text.encode('utf-8')).hexdigest()[:12]}"


@dataclass(frozen=True, slots=True)
class ProcessBudget:
    """Number of runs at a time, and of threads of each."""

    num_processes: int
    num_threads: int

    @classmethod
    def of(cls, processes: int | str | None, num_ranks: int) -> ProcessBudget:
        """Divide the cores of this host among runs of `num_ranks` ranks; `processes` runs at a time, if given.
        Raises `InputError`."""
        cores = num_cores()
        num_processes = (
            parse_count(processes, label=argument_label("processes")) if processes else max(cores // num_ranks, 1)
        )
        return cls(num_processes=num_processes, num_threads=max(cores // (num_processes * num_ranks), 1))
