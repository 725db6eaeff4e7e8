"""Tables of an experiment's report: the best of each model and number of nodes, scaling, predictions beside measurements.

Source: Hugging Face, The Ultra-Scale Playbook, 2025, "Benchmarking thousands of configurations", whose heat map of the best
layouts by model and nodes these follow. From a ledger, or from a CSV file of published runs.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from shardwise.measure.calibrate.published_runs.prediction_from_row import RowPrediction, predict_cached
from shardwise.measure.calibrate.published_runs.run_table import RunRow, SkippedRow, read_rows
from shardwise.measure.experiments.ledger import LedgerContent, LedgerRow, read_ledger
from shardwise.measure.experiments.ledger_lines import (
    Configuration,
    Interval,
    LedgerLine,
    RunMeasurement,
    RunPrediction,
)
from shardwise.measure.experiments.ledger_summary import ExperimentStatus, summarise_content
from shardwise.values import Hidden, Payload
from shardwise.values.input_texts import parse_digits

MOST_PAIRS = 2000  # of predictions and measurements that a report draws, evenly over all
AXES_OF_LABEL = ("dp", "fsdp", "tp", "cp", "pp", "ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class BestConfiguration:
    """The best measured configuration of a model on a number of nodes.

    Without a measurement `label` is empty, and `failure` says in a few words why: a cause, or the state of most configurations.
    """

    model_name: str
    num_nodes: int
    num_devices: int
    num_configurations: int
    label: str
    step_time_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    failure: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """The fastest rate of a model on some devices; `efficiency` is that of a device over the one on the fewest devices."""

    model_name: str
    num_devices: int
    tokens_per_s_per_device: float
    efficiency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPair:
    """A measured step with the prediction before its run."""

    label: str
    group: str
    measured_s: float
    predicted_s: float
    interval90: Interval | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentReport(Payload):
    """Report of an experiment. `pairs` are at most 2,000 of the measured steps with a prediction, evenly over all."""

    SCHEMA = "shardwise.experiments_report/1"
    status: ExperimentStatus
    best: Sequence[BestConfiguration]
    scaling: Sequence[ScalingPoint]
    pairs: Sequence[PredictedPair]
    source: Annotated[str, Hidden()] = ""


def report_experiment(source: str | os.PathLike[str]) -> ExperimentReport:
    """Return the report of a ledger, or of a CSV file with the columns of the published runs.

    Raises `InputError` for a file that is neither.
    """
    path = os.fspath(source)
    return report_content(read_published_runs(path) if path.lower().endswith(".csv") else read_ledger(path), path)


def report_content(content: LedgerContent, path: str) -> ExperimentReport:
    """Return the report of what a ledger at `path` holds."""
    rows = list(content.rows.values())
    best = best_configurations(rows)
    return ExperimentReport(
        status=summarise_content(content, path), best=best, scaling=scaling_points(best), pairs=predicted_pairs(rows), source=path
    )  # fmt: skip


def model_of(row: LedgerRow) -> str:
    """Return the name of a row's model; its group where the settings name none."""
    return str(row.configuration.settings.get("model") or row.configuration.group or "all")


def best_configurations(rows: Iterable[LedgerRow]) -> tuple[BestConfiguration, ...]:
    """Return the best configuration of each model and number of devices, models in their order and devices rising."""
    members: dict[tuple[str, int, int], list[LedgerRow]] = {}
    for row in rows:
        key = model_of(row), row.configuration.num_nodes, row.configuration.num_devices
        members.setdefault(key, []).append(row)
    order = {model: number for number, model in enumerate(dict.fromkeys(model for model, _, _ in members))}
    keys = sorted(members, key=lambda key: (order[key[0]], key[1], key[2]))
    return tuple(_best_of(key, members[key]) for key in keys)


def _best_of(key: tuple[str, int, int], rows: Sequence[LedgerRow]) -> BestConfiguration:
    model, num_nodes, num_devices = key
    measured = [(row, row.measurement) for row in rows if row.state == "done" and row.measurement]
    best = max(measured, key=lambda pair: _rate(*pair), default=None)
    label, measurement = (best[0].configuration.label, best[1]) if best else ("", None)
    return BestConfiguration(
        model_name=model, num_nodes=num_nodes, num_devices=num_devices, num_configurations=len(rows), label=label,
        step_time_s=measurement.step_time_s if measurement else None, mfu=measurement.mfu if measurement else None,
        tokens_per_s_per_device=measurement.tokens_per_s_per_device if measurement else None,
        failure="" if best else _common_failure(rows),
    )  # fmt: skip


def _rate(row: LedgerRow, measurement: RunMeasurement) -> float:
    """Return what is compared within a model and its devices: tokens/s where all say it, else steps/s."""
    return measurement.tokens_per_s_per_device or 1.0 / measurement.step_time_s


def _common_failure(rows: Sequence[LedgerRow]) -> str:
    causes = [row.line.cause or row.state for row in rows]
    return max(dict.fromkeys(causes), key=causes.count)


def scaling_points(best: Sequence[BestConfiguration]) -> tuple[ScalingPoint, ...]:
    """Return the rates of each model over devices, of the best configurations."""
    points: list[ScalingPoint] = []
    for model in dict.fromkeys(cell.model_name for cell in best):
        rates: dict[int, float] = {}
        for cell in best:
            if cell.model_name == model and cell.tokens_per_s_per_device:
                rates[cell.num_devices] = max(rates.get(cell.num_devices, 0.0), cell.tokens_per_s_per_device)
        first = rates[min(rates)] if rates else 1.0
        points += [
            ScalingPoint(
                model_name=model,
                num_devices=devices,
                tokens_per_s_per_device=rates[devices],
                efficiency=rates[devices] / first,
            )
            for devices in sorted(rates)
        ]
    return tuple(points)


def predicted_pairs(rows: Iterable[LedgerRow]) -> tuple[PredictedPair, ...]:
    """Return measured steps with the predictions before them."""
    pairs = [
        PredictedPair(
            label=row.configuration.label, group=row.configuration.group, measured_s=row.measurement.step_time_s,
            predicted_s=before.step_time_s, interval90=before.interval90,
        )
        for row in rows
        if row.measurement and (before := row.predicted_before)
    ]  # fmt: skip
    stride = -(-len(pairs) // MOST_PAIRS) or 1
    return tuple(pairs[::stride])


def read_published_runs(path: str) -> LedgerContent:
    """Return published runs as a ledger of runs that were done, each with its prediction where it states enough for one.

    Rows without a measured step are left out. Raises `InputError`.
    """
    content = LedgerContent({}, [])
    for row in read_rows(path):
        seconds = row.step_time_s
        if seconds is not None:
            for line in _published_lines(row, seconds):
                content.add(line)
    return content


def _published_lines(row: RunRow, seconds: float) -> Sequence[LedgerLine]:
    prediction = _published_prediction(row)
    counts = {
        name: parse_digits(row.cell(name)) or 1 for name in ("n_devices", "chips_per_node", "seq_len", "global_batch")
    }
    devices = counts["n_devices"]
    degrees = " ".join(f"{axis}={row.cell(axis)}" for axis in AXES_OF_LABEL if row.cell(axis) not in ("", "1"))
    configuration = Configuration(
        settings={"run": row.id, "model": row.cell("model"), "chip": row.cell("chip")},
        group=f"{row.cell('model')} on {row.cell('chip')}:{devices}", label=degrees or row.id, num_devices=devices,
        num_nodes=-(-devices // counts["chips_per_node"]),
    )  # fmt: skip
    tokens = counts["global_batch"] * counts["seq_len"]
    rate = tokens / seconds / devices if row.cell("global_batch") and row.cell("seq_len") else None
    mfu = None if prediction is None else prediction.estimate.mfu * prediction.estimate.step_time_s / seconds
    before = None if prediction is None else _as_prediction(prediction)
    measurement = RunMeasurement(step_time_s=seconds, mfu=mfu, tokens_per_s_per_device=rate)
    name = configuration.fingerprint
    return (
        LedgerLine(fingerprint=name, state="predicted", configuration=configuration, prediction=before),
        LedgerLine(fingerprint=name, state="pending", attempt=1),
        LedgerLine(fingerprint=name, state="done", attempt=1, measurement=measurement),
    )


def _published_prediction(row: RunRow) -> RowPrediction | None:
    try:
        prediction = predict_cached(row.inputs)
    except SkippedRow:
        return None
    return prediction if isinstance(prediction, RowPrediction) else None


def _as_prediction(prediction: RowPrediction) -> RunPrediction:
    priced = prediction.estimate
    return RunPrediction(
        step_time_s=priced.step_time_s, interval90=priced.interval90, memory_bytes=priced.memory_bytes,
        capacity_bytes=priced.memory_capacity_bytes, fits=priced.verdict, mfu=priced.mfu,
    )  # fmt: skip
