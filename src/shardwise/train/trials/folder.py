"""The folder of runs that belong together: what they are of, their own folders, and a line for each that has ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import InputError
from shardwise.measurement.folder import RunFolder, read_json, replace_text, write_json
from shardwise.measurement.log import Log, read_log

ERROR = "error: "
LONGEST = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsFolder:
    """Where runs of one kind (`kind`, such as "sweep") keep what; `lines` is the name of the file with a line for each."""

    path: Path
    kind: str
    schema: str
    lines: str

    @property
    def identity(self) -> Path:
        """What the runs are of."""
        return self.path / f"{self.kind}.json"

    @property
    def runs(self) -> Path:
        """A line of JSON for each run that has ended."""
        return self.path / self.lines

    def run_of(self, name: str) -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.path / "runs" / name)

    def output_of(self, name: str) -> Path:
        """What a run prints."""
        return self.path / "runs" / f"{name}.txt"

    def begin(self, of: Mapping[str, Any]) -> None:
        """Make the folder, or go on with the runs in it. Raises `InputError` for a folder with runs of something else."""
        said = json.loads(json.dumps({"schema": self.schema, **of}))
        if self.identity.exists():
            self._require_same(said)
        elif self.path.is_dir() and any(path.name != "lock" for path in self.path.iterdir()):
            raise InputError(
                f"--out: {self.path} holds other files; an empty folder, or that of a {self.kind}, is required"
            )
        else:
            self.path.joinpath("runs").mkdir(parents=True, exist_ok=True)
            write_json(self.identity, said)

    def _require_same(self, said: Mapping[str, Any]) -> None:
        before, where = read_json(self.identity), f"the {self.kind} in {self.path}"
        differs = [name for name in {**before, **said} if before.get(name) != said.get(name)]
        if differs:
            raise InputError(
                *(
                    f"{name}: found {_short(said.get(name))}; {where} has {_short(before.get(name))}, which is required: give "
                    "the same, or another --out"
                    for name in differs
                )
            )

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the line of a run: a file that is read is whole at any moment."""
        before = self.runs.read_text(encoding="utf-8") if self.runs.exists() else ""
        replace_text(self.runs, before + json.dumps(line) + "\n")

    def num_done(self) -> int:
        """The runs that have ended."""
        return len(self.runs.read_text(encoding="utf-8").splitlines()) if self.runs.exists() else 0

    def log_of(self, name: str) -> Log | None:
        """The log of a run; None where it has not begun."""
        log = self.run_of(name).log
        return read_log(log) if log.exists() else None

    def losses_of(self, name: str) -> list[float]:
        """The losses of the steps of a run; none where it has not begun."""
        log = self.log_of(name)
        return [] if log is None else [record.loss for record in log.steps]


def _short(value: object) -> str:
    """A value in a message; of a long one, such as a plan, its hash."""
    text = str(value)
    return text if len(text) <= LONGEST else f"one of hash {hashlib.sha256(text.encode('utf-8')).hexdigest()[:12]}"


def reason_of(output: Path, code: int) -> str:
    """Why a run failed: the error that it printed last, or its exit code with its last line."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    last = "".join(f": {line}" for line in lines[-1:])
    return said[-1] if said else f"ended with exit code {code}{last}"
