"""Measured runs of an experiment as rows that `shardwise calibrate --runs` and `validate --rows` read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardwise.layout import stack_of
from shardwise.measure.calibrate.logged_runs import ledger_rows_file
from shardwise.measure.calibrate.user_runs import MeasuredPeak, RunAsRow, append_row, run_to_row
from shardwise.measure.experiments.candidates import Candidate
from shardwise.measure.experiments.ledger import LedgerRow
from shardwise.values import InputError


def write_calibration_rows(ledger: Path, rows: Mapping[str, LedgerRow], candidates: Mapping[str, Candidate]) -> int:
    """Write the measured runs of candidates that a row can express, in place of the rows before, and return their number."""
    file = ledger_rows_file(ledger)
    file.unlink(missing_ok=True)
    measured = [_to_row(rows[name], candidate) for name, candidate in candidates.items() if name in rows]
    expressible = [row for row in measured if row is not None]
    for row in expressible:
        append_row(file, row)
    return len(expressible)


def _to_row(row: LedgerRow, candidate: Candidate) -> RunAsRow | None:
    """Return a run as a row; None for one that was not measured, has no plan, or runs on a machine without a name."""
    measured, problem, layout = row.measurement, candidate.problem, candidate.layout
    stack = None if problem is None else stack_of(problem.cluster)
    if row.state != "done" or measured is None or problem is None or layout is None or stack is None:
        return None
    peak = None if measured.memory_bytes is None else MeasuredPeak(measured.memory_bytes, "as logged")
    try:
        return run_to_row(
            problem, layout, stack.name, measured.step_time_s, name=row.configuration.fingerprint, peak=peak
        )
    except InputError:
        return None
