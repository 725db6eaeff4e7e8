"""A user's runs by their launches and logs, or by the ledger of an experiment: as observations for a fit, and as rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.hardware import match_stack
from shardwise.measure.calibrate.published_runs.run_table import RunRow, read_rows
from shardwise.measure.calibrate.user_runs import (
    MeasuredPeak,
    PricedRun,
    RunAsRow,
    append_row,
    run_from_log,
    run_to_row,
)
from shardwise.measure.run_analysis import PathLike, run_from_files
from shardwise.measure.utilisation import RecordedRow, UtilisationReport, read_measured_log
from shardwise.price import Problem, loss_kind
from shardwise.values import InputError, argument_label


def read_logged_run(files: Sequence[PathLike], cluster: PathLike) -> PricedRun:
    """Read a run: the files that say what ran (a plan or a launch) and its log; or the folder of a run, which has both.

    Raises `InputError` for files that say too little.
    """
    label = argument_label("logged_runs")
    *sources, log = [os.fspath(path) for path in files]
    if not sources and not (Path(log) / "plan.json").is_file():
        raise InputError(f"{label}: found {log} alone; what ran, a plan or a launch, and behind it the log is required")
    setup, measured = read_measured_log([Path(log)], run_from_files(sources or [str(Path(log) / "plan.json")], cluster))
    if setup.layout is None or measured.step_time_s is None:
        raise InputError(f"{label}: {log} has no time of a step, and nothing says its batch")
    problem = Problem(setup.model, setup.cluster, setup.job)
    return run_from_log(log, problem, setup.layout, match_stack(setup.software), measured.step_time_s)


LEDGER_ENDING = ".jsonl"


def ledger_rows_file(ledger: Path) -> Path:
    """Return the file beside the ledger of an experiment that has its measured runs as rows, as of its last driver's end.

    >>> ledger_rows_file(Path("runs/ledger.jsonl")).as_posix()
    'runs/ledger.calibrate.csv'
    """
    return ledger.with_name(f"{ledger.stem}.calibrate.csv")


def read_run_rows(path: PathLike, label: str) -> tuple[RunRow, ...]:
    """Return the rows of a CSV file, or of the measured runs of an experiment by its ledger. Raises `InputError`."""
    file = Path(path)
    if file.suffix.lower() == LEDGER_ENDING and file.is_file():
        rows = ledger_rows_file(file)
        if not rows.is_file():
            raise InputError(
                f"{label}: {file} has no measured run as a row, as {rows} is missing; the ledger of an experiment of layouts on "
                "a stack, of which a run is done, is required"
            )
        return read_rows(os.fspath(rows), label)
    return read_rows(os.fspath(path), label)


def record_row(report: UtilisationReport, file: PathLike) -> UtilisationReport:
    """Append a run to a CSV file, and return its report with the row. Raises `InputError` for a run that no row can express."""
    row = _row_of_run(report, ", ".join(map(str, report.measured.paths)))
    append_row(Path(file), row)
    return replace(report, row=RecordedRow(file=os.fspath(file), lost_fields=row.lost_fields))


def _row_of_run(report: UtilisationReport, name: str) -> RunAsRow:
    setup, measured = report.setup, report.measured
    if setup.layout is None or measured.step_time_s is None:
        sources = f"{argument_label('layout')}, {argument_label('plan')} or {argument_label('launch')}"
        raise InputError(f"row: a run without a layout or the time of a step; {sources} is required")
    job = replace(setup.job, loss=loss_kind(setup.cluster, setup.job))
    log = measured.log
    peak = None if log is None or log.memory_bytes is None else MeasuredPeak(log.memory_bytes, log.format.memory_kind)
    problem = Problem(setup.model, setup.cluster, job)
    return run_to_row(problem, setup.layout, setup.software, measured.step_time_s, name=name, peak=peak)
