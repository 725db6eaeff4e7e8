"""Folder of a training run: its files, what it is checked for, and the inputs of the run.

run.json         fingerprint of the data, and the versions of what ran it
plan.json        the plan that is run
recipe.json      the recipe
log.jsonl        a line for each step
measured.json    memory and collectives of one step, and the machine's speed before and after the run
summary.json     results, when the run has ended
noise.json       the gradient noise scale, if the run has ended and measured it
checkpoints/     and tensorboard/, where asked for
trace/           timelines of steps, a file for each rank (`records.step_inspection`), where asked for
lock             held by the system for the ranks of the run as long as one of them lives (`run.folder_lock`)
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.values import FileMessages, InputError, read_json_object, write_json_atomic

SCHEMA = "shardwise.run/1"
LOCK = "lock"
RUN_KEY = "run"  # value in a checkpoint: the run that wrote it (`run.trainer.run_identity`)
Payload = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInputs:
    """Inputs of a run, as payloads: its plan, its recipe, the fingerprint of its data, and versions by name."""

    plan: Payload
    recipe: Payload
    data_fingerprint: str
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of the files in the folder of a training run."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def noise(self) -> Path:
        return self.path / "noise.json"

    @property
    def measured(self) -> Path:
        return self.path / "measured.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def trace(self) -> Path:
        return self.path / "trace"

    @property
    def _run(self) -> Path:
        return self.path / "run.json"

    @property
    def contains_run(self) -> bool:
        return self._run.exists()

    def require_run(self) -> None:
        """Raise `InputError` if there is no run to resume."""
        if not self.contains_run:
            raise InputError(
                f"--resume: {self.path} holds no run; leave --resume out, or name the folder of one with --out"
            )

    def require_run_to_trace(self) -> None:
        """Raise `InputError` if there is no run that could have a trace."""
        if not self.contains_run:
            raise InputError(
                f"trace: {self.path} holds no run; the folder that `shardwise train --profile A:B --out` named is required"
            )

    def require_output_folder(self, *, resume: bool, force: bool) -> None:
        """Raise `InputError` if the folder cannot be written, or holds another run or other files. Touches nothing."""
        if resume:
            self.require_run()
        if self.contains_run and not (resume or force):
            raise InputError(
                f"{self.path} holds a run; --resume goes on with it, --force replaces it, or choose another --out"
            )
        if not self.contains_run and self.path.is_dir() and any(path.name != LOCK for path in self.path.iterdir()):
            raise InputError(f"{self.path} holds other files; an empty folder, or one that does not exist, is required")
        self._require_writable()

    def _require_writable(self) -> None:
        existing = next(path for path in (self.path, *self.path.absolute().parents) if path.exists())
        if not existing.is_dir():
            raise InputError(f"cannot write {self.path}: {existing} is a file; choose a folder with --out")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise InputError(f"cannot write {self.path}: permission denied; choose a writable path with --out")

    def create(self, inputs: RunInputs) -> None:
        """Create the folder of a new run, in place of an old run. Raises `InputError` if that is not possible."""
        try:
            for folder in (self.checkpoints, self.tensorboard, self.trace):
                shutil.rmtree(folder, ignore_errors=True)
            self.path.mkdir(parents=True, exist_ok=True)
            for file in (self.log, self.summary, self.measured, self.noise):
                file.unlink(missing_ok=True)
            self.write_inputs(inputs)
        except OSError as error:
            raise InputError(f"cannot write {self.path}: {error.strerror}; choose a writable path with --out") from None

    def write_inputs(self, inputs: RunInputs) -> None:
        """Write the inputs of a run; of a resumed run, those from now on."""
        write_json_atomic(self.plan, inputs.plan)
        write_json_atomic(self.recipe, inputs.recipe)
        write_json_atomic(
            self._run,
            {"schema": SCHEMA, "data_fingerprint": inputs.data_fingerprint, "versions": dict(inputs.versions)},
        )

    def read_inputs(self) -> RunInputs:
        """Return the plan, recipe, data fingerprint and versions of the run. Raises `InputError` for a folder without a run."""
        run = read_json(self._run)
        if run.get("schema") != SCHEMA:
            raise InputError(f"{self._run}: found schema {run.get('schema')!r}; {SCHEMA!r} is required")
        return RunInputs(
            plan=read_json(self.plan), recipe=read_json(self.recipe), data_fingerprint=str(run.get("data_fingerprint")),
            versions=run.get("versions", {}),
        )  # fmt: skip


def read_json(path: Path) -> Payload:
    """Read a JSON file of the folder. Raises `InputError` for one that is missing or damaged."""
    return read_json_object(path, FileMessages(fix="the folder of a run is required"), finite=True)
