"""A user's cluster calibrated with runs and micro-benchmarks from files, and written as a cluster file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

from shardwise.hardware import get_stack, load_measured_cluster
from shardwise.hardware.cluster_files import format_cluster_toml
from shardwise.measure.calibrate.logged_runs import read_logged_run
from shardwise.measure.calibrate.published_runs.run_table import read_rows
from shardwise.measure.calibrate.user_cluster_fit import UserClusterFit, fit_user_cluster
from shardwise.values import InputError, Progress, ignore_progress, pluralize, run_all
from shardwise.values.argument_labels import argument_label

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasurementFiles:
    """Files that a cluster is calibrated with: a CSV file of runs, runs by launch and log, a file of micro-benchmarks."""

    runs: PathLike | None = None
    logged_runs: Sequence[Sequence[PathLike]] = ()
    bench: PathLike | None = None

    def describe(self, fit: UserClusterFit) -> str:
        """Return what a fit to these files is made of, in words."""
        names = [self.runs] if self.runs is not None else []
        names += [files[-1] for files in self.logged_runs]
        run_files = ", ".join(Path(name).name for name in names)
        parts = [f"{pluralize(len(fit.runs), 'run')} of {run_files}"] if run_files else []
        if self.bench is not None:
            parts.append(f"{pluralize(len(fit.benches), 'micro-benchmark')} of {Path(self.bench).name}")
        return f"fitted to {' and '.join(parts)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterCalibration:
    """A fit with the name of the calibrated cluster and what it was fitted to; `out` is the file that was written, if any.

    >>> import shardwise as sw
    >>> import pathlib, tempfile
    >>> bench = pathlib.Path(tempfile.mkdtemp(), "bench.jsonl")
    >>> _ = bench.write_text('{"bench": "memory", "bytes": 4e9, "seconds": 1.6e-3}')
    >>> calibration = sw.calibrate("h100:8", bench=bench)
    >>> calibration.name, calibration.source
    ('h100:8', 'fitted to 1 micro-benchmark of bench.jsonl')
    """

    fit: UserClusterFit
    name: str
    source: str
    out: str | None = None


def calibrate_cluster(
    cluster: PathLike, files: MeasurementFiles, *, stack: str | None = None, name: str | None = None,
    out: PathLike | None = None, progress: Progress = ignore_progress,
) -> ClusterCalibration:  # fmt: skip
    """Fit the constants of a cluster to the measurements, and write it to `out` as a .toml file if that is given.

    Without a `stack` it is the one that most rows name. Raises `InputError` with everything that is wrong.
    """
    if files.runs is None and files.bench is None and not files.logged_runs:
        labels = " nor ".join(argument_label(field) for field in ("runs", "logged_runs", "bench"))
        raise InputError(f"calibrate: found neither {labels}; one of them, or several, is required")
    measured, known_stack, rows, target, logged = run_all(
        lambda: load_measured_cluster(os.fspath(cluster)),
        lambda: get_stack(stack) if stack else None,
        lambda: read_rows(os.fspath(files.runs), argument_label("runs")) if files.runs is not None else (),
        lambda: None if out is None else _cluster_file(os.fspath(out)),
        lambda: run_all(*(partial(read_logged_run, run, cluster) for run in files.logged_runs)),
    )
    bench = None if files.bench is None else os.fspath(files.bench)
    fit = fit_user_cluster(measured, rows, bench, known_stack, progress, logged=logged)
    calibration = ClusterCalibration(
        fit=fit, name=name or (target.stem if target else measured.nominal.name), source=files.describe(fit),
        out=None if out is None else os.fspath(out),
    )  # fmt: skip
    if target:
        _write_cluster(target, calibration)
    return calibration


def _cluster_file(text: str) -> Path:
    """Return the file to write. Raises `InputError` for a name that no verb would read as a cluster."""
    if not text.strip().lower().endswith(".toml"):
        raise InputError(
            f"{argument_label('out')}: found {text!r}; a name that ends in .toml is required, such as my-cluster.toml"
        )
    return Path(text.strip())


def _write_cluster(file: Path, calibration: ClusterCalibration) -> None:
    fit = calibration.fit
    remarks = {
        constant.name: f"± {constant.after_deviation:.2g}" + ("" if constant.identified else ", not identified")
        for constant in fit.constants
    }
    nominal = replace(fit.user_cluster.nominal, name=calibration.name)
    measured = fit.calibration(f"{calibration.source}, {date.today()}")
    try:
        file.write_text(format_cluster_toml(nominal, measured, remarks), encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(
            f"{argument_label('out')}: cannot write {file}: {reason}; a path that can be written is required"
        ) from None
