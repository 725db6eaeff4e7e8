"""The folder of a sweep over batches: what it is of, its runs, and the line of each that has ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.batch.runs import FILE, BatchRun, read_runs
from shardwise.errors import InputError
from shardwise.measurement.folder import RunFolder, read_json, replace_text, write_json
from shardwise.measurement.log import read_log
from shardwise.measurement.target import LossTarget
from shardwise.train.batch_sweep.design import Trial

SCHEMA = "shardwise.batch_sweep/1"
ERROR = "error: "
LONGEST = 200  # characters


@dataclass(frozen=True, slots=True)
class SweepFolder:
    """Where a sweep keeps what."""

    path: Path

    @property
    def runs(self) -> Path:
        return self.path / FILE

    def run_of(self, trial: Trial) -> RunFolder:
        """The folder of a run."""
        return RunFolder(self.path / "runs" / trial.name)

    def output_of(self, trial: Trial) -> Path:
        """What a run prints."""
        return self.path / "runs" / f"{trial.name}.txt"

    def begin(self, of: Mapping[str, Any]) -> tuple[BatchRun, ...]:
        """Make the folder, or go on with the sweep in it: the runs that it has. Raises `InputError` for one of something else."""
        file, where = self.path / "sweep.json", f"the sweep in {self.path}"
        said = json.loads(json.dumps({"schema": SCHEMA, **of}))
        if file.exists():
            before = read_json(file)
            differs = [name for name in {**before, **said} if before.get(name) != said.get(name)]
            if differs:
                raise InputError(
                    *(
                        f"{name}: found {_short(said.get(name))}; {where} has {_short(before.get(name))}, which is required: "
                        "give the same, or another --out"
                        for name in differs
                    )
                )
        elif self.path.is_dir() and any(path.name != "lock" for path in self.path.iterdir()):
            raise InputError(f"--out: {self.path} holds other files; an empty folder, or that of a sweep, is required")
        else:
            self.path.joinpath("runs").mkdir(parents=True, exist_ok=True)
            write_json(file, said)
        return read_runs(self.path) if self.runs.exists() else ()

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the line of a run: a file that is read is whole at any moment."""
        before = self.runs.read_text(encoding="utf-8") if self.runs.exists() else ""
        replace_text(self.runs, before + json.dumps(line) + "\n")


def _short(value: object) -> str:
    """A value in a message; of a long one, such as a plan, its hash."""
    text = str(value)
    return text if len(text) <= LONGEST else f"one of hash {hashlib.sha256(text.encode('utf-8')).hexdigest()[:12]}"


def line_of(trial: Trial, losses: Sequence[float], target_loss: float, failed: str | None) -> dict[str, Any]:
    """The line of a run that has ended: its steps and tokens to the loss, null where it was not reached, and its last smoothed
    loss.

    >>> line_of(Trial(8, 1e-3, 0, 99), [3.0] * 30, 2.0, None)["steps"] is None
    True
    """
    target = LossTarget(target_loss)
    for loss in losses:
        target.add(loss)
    steps = None if failed else target.steps
    return {
        "batch_tokens": trial.batch_tokens, "learning_rate": trial.learning_rate, "seed": trial.seed, "steps": steps,
        "tokens": None if steps is None else steps * trial.batch_tokens, "loss": target.smoothed, "target_loss": target_loss,
        "failed": failed,
    }  # fmt: skip


def losses_of(folder: RunFolder) -> list[float]:
    """The losses of the steps of a run; none where it has not begun."""
    return [record.loss for record in read_log(folder.log).steps] if folder.log.exists() else []


def reason_of(output: Path, code: int) -> str:
    """Why a run failed: the error that it printed last, or its exit code with its last line."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.exists() else []
    said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    last = "".join(f": {line}" for line in lines[-1:])
    return said[-1] if said else f"ended with exit code {code}{last}"
