"""Calibration of a serving launch: its benchmark's results beside predictions, the factors, and the file that keeps them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.hardware import Cluster
from shardwise.interop.serving.read_serving import ReadServing
from shardwise.measure.serving.bench_results import BenchResult, calibrate_serving
from shardwise.serve import ServingCalibration, ServingFormats, ServingLayout, ServingProblem, estimate_serving
from shardwise.serve.serving_calibration import CALIBRATION_SCHEMA
from shardwise.values import InputError, Payload, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedResult:
    """Result of a benchmark with the predictions of its latencies before and after the calibration, in seconds."""

    result: BenchResult
    predicted_ttft_s: float
    predicted_tpot_s: float
    calibrated_ttft_s: float
    calibrated_tpot_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedServing:
    """Factors on the predictions of an engine on a cluster, and the results that they rest on."""

    problem: ServingProblem
    layout: ServingLayout
    calibration: ServingCalibration
    results: tuple[ComparedResult, ...]


def calibrate_launch(reading: ReadServing, cluster: Cluster, results: Sequence[BenchResult]) -> CalibratedServing:
    """Return the factors that results of a launch's benchmark lead to on a cluster.

    Raises `InputError` for a launch whose model is not known, and for what the cluster does not allow.
    """
    launch = reading.launch
    if launch.architecture is None or not reading.model_is_known:
        raise InputError(
            f"launch: the model of {launch.checkpoint[:80]!r} is not known; one of the catalogue is required, without options "
            "that change it"
        )
    if not results:
        raise InputError("calibrate: found no results; those of at least one run of a serving benchmark are required")
    fraction = launch.batch_limits.memory_fraction or reading.engine.memory_fraction
    problem = ServingProblem(
        architecture=launch.architecture, cluster=cluster, workload=results[0].workload, engine=launch.engine,
        formats=launch.formats, batch_limits=replace(launch.batch_limits, memory_fraction=fraction),
    )  # fmt: skip
    calibration = calibrate_serving(problem, launch.layout, results)
    compared = []
    for result in results:
        before, after = (
            estimate_serving(replace(problem, workload=result.workload, calibration=factors), launch.layout)
            for factors in (None, calibration)
        )
        compared.append(
            ComparedResult(
                result=result, predicted_ttft_s=before.ttft_s.value, predicted_tpot_s=before.tpot_s.value,
                calibrated_ttft_s=after.ttft_s.value, calibrated_tpot_s=after.tpot_s.value,
            )
        )  # fmt: skip
    return CalibratedServing(
        problem=problem, layout=launch.layout, calibration=calibration, results=tuple(compared)
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedServingRecord(Payload):
    """Calibration of an engine on a chip, which `serve estimate` and `serve plan` take, and the results that it rests on."""

    SCHEMA = CALIBRATION_SCHEMA
    engine: str
    chip: str
    model_name: str
    layout_text: str
    formats: ServingFormats
    calibration: ServingCalibration
    results: Sequence[ComparedResult]

    @classmethod
    def of(cls, calibrated: CalibratedServing) -> CalibratedServingRecord:
        """Return the record of a calibration."""
        problem = calibrated.problem
        return cls(
            engine=problem.engine, chip=problem.cluster.chip.name, model_name=problem.architecture.name,
            layout_text=str(calibrated.layout), formats=problem.formats, calibration=calibrated.calibration,
            results=calibrated.results,
        )  # fmt: skip


def write_serving_calibration(calibrated: CalibratedServing, path: str | os.PathLike[str]) -> None:
    """Write a calibration as JSON. Raises `InputError` if the file cannot be written."""
    text = json.dumps(to_json(CalibratedServingRecord.of(calibrated)), indent=2) + "\n"
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"calibration: cannot write {path}: {error.strerror}; choose a writable path") from None
