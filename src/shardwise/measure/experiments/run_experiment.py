"""Run an experiment: its grid, its ledger, where it runs, and what is worth running next."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.measure.experiments.calibration_rows import write_calibration_rows
from shardwise.measure.experiments.candidates import Candidate, list_candidates
from shardwise.measure.experiments.driver import ExperimentDriver, RunChooser
from shardwise.measure.experiments.expected_information import ExpectedInformation
from shardwise.measure.experiments.grid_file import ExperimentGrid, read_grid
from shardwise.measure.experiments.ledger import Ledger
from shardwise.measure.experiments.ledger_lines import ACTIVE, LedgerLine, SessionLine, utc_now
from shardwise.measure.experiments.ledger_summary import ExperimentStatus, summarise_ledger
from shardwise.measure.experiments.listed_order import ListedOrder
from shardwise.measure.experiments.places import make_backend, read_time
from shardwise.measure.experiments.run_targets import make_target
from shardwise.run.faults.stop_request import StopRequest
from shardwise.search.plan import software_versions
from shardwise.values import InputError, Progress, argument_label, ignore_progress, pluralize

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentRequest:
    """An experiment as a user asks for it: the file of its grid, its ledger, where it runs, and settings of that place."""

    grid: PathLike
    ledger: PathLike
    place: str = "processes"
    settings: Mapping[str, str]


def run_experiment(
    request: ExperimentRequest, report: Callable[[str], None] = print, progress: Progress = ignore_progress
) -> ExperimentStatus:
    """Go on with an experiment until its best configurations are known or its budget is spent, and return its state.

    `report` gets a line for each attempt that has ended. Raises `InputError` with everything that is wrong, also while another
    process writes the ledger, and `SystemExit` after a signal; the same call then goes on.
    """
    if not Path(request.ledger).name or Path(request.ledger).is_dir():
        raise InputError(
            f"{argument_label('ledger')}: found {os.fspath(request.ledger)!r}, a folder; a file such as runs/ledger.jsonl is "
            "required"
        )
    grid = read_grid(request.grid)
    if (most_s := read_time(request.settings)) is not None:
        grid = replace(grid, time_limit_s=most_s)
    scheduler_folder = Path(request.ledger).with_name(f"{Path(request.ledger).stem}.scheduler")
    backend = make_backend(request.place, request.settings, scheduler_folder)
    candidates = list_candidates(grid, progress)
    target = make_target(grid, candidates)
    experiment = describe_experiment(grid)
    with Ledger(request.ledger) as ledger, StopRequest() as stop:
        require_same_experiment(ledger, grid, candidates)
        record_candidates(ledger, experiment, candidates)
        driver = ExperimentDriver(
            ledger=ledger, backend=backend, target=target, chooser=make_chooser(grid, candidates, experiment),
            experiment=experiment, versions=software_versions(), num_retries=grid.retries, report=report,
        )  # fmt: skip
        code = driver.run(stop)
        write_calibration_rows(ledger.path, ledger.rows, candidates)
    for command in getattr(backend, "commands", ()):
        report(f"submit: {command}")
    if code:
        report(f"stopped; the same command goes on from {os.fspath(request.ledger)}")
        raise SystemExit(code)
    return summarise_ledger(request.ledger)


def describe_experiment(grid: ExperimentGrid) -> dict[str, Any]:
    """Return what the ledger says about an experiment: its target, steps and budget."""
    budget = {name: value for name, value in asdict(grid.budget).items() if value is not None}
    return {"grid": grid.path, "target": grid.target, "steps": grid.steps, "start_s": grid.start_s, "budget": budget}


def require_same_experiment(ledger: Ledger, grid: ExperimentGrid, candidates: Mapping[str, Candidate]) -> None:
    """Raise `InputError` for a ledger without any configuration of the grid, and for one that still runs another.

    A grid may otherwise change between two drivers: what it no longer lists stays in the ledger.
    """
    rows, label = ledger.rows, argument_label("ledger")
    if rows and rows.keys().isdisjoint(candidates):
        written_for = ledger.sessions[-1].experiment.get("grid") if ledger.sessions else None
        of_grid = f" of {written_for}" if written_for else ""
        raise InputError(
            f"{label}: {ledger.path} has {pluralize(len(rows), 'configuration')}{of_grid}, none of which is in {grid.path}; the "
            "ledger of this grid, or a new file, is required"
        )
    strangers = [row for name, row in rows.items() if row.state in ACTIVE and name not in candidates]
    if strangers:
        raise InputError(
            f"{label}: {ledger.path}: {strangers[0].configuration.label} is under way and not in {grid.path}; the grid that it "
            "was started with is required until it has ended, or a new file"
        )


def record_candidates(ledger: Ledger, experiment: Mapping[str, Any], candidates: Mapping[str, Candidate]) -> None:
    """Record the start of a driver, and the configurations that the ledger does not have yet, with their predictions."""
    new = [
        LedgerLine(
            fingerprint=fingerprint, state="predicted", configuration=candidate.configuration, prediction=candidate.predict()
        )
        for fingerprint, candidate in candidates.items()
        if fingerprint not in ledger.rows
    ]  # fmt: skip
    ledger.append(SessionLine(written_at=utc_now(), experiment=experiment, versions=software_versions()), *new)


def make_chooser(
    grid: ExperimentGrid, candidates: Mapping[str, Candidate], experiment: Mapping[str, Any]
) -> RunChooser:
    """Return what decides which configuration is run next: what is expected to gain most, or without predictions the first."""
    if grid.problem is not None:
        return ExpectedInformation(candidates, grid.budget, experiment, grid.borderline)
    return ListedOrder(tuple(candidates), grid.budget, experiment)
