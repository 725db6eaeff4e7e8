"""Results of serving benchmarks, and the factors on predictions that they lead to.

Read are the JSON of `vllm bench serve --save-result`, the lines of SGLang's `bench_serving --output-file`, and genai-perf's
`profile_export_genai_perf.json`: each run's medians of TTFT and TPOT, its mean lengths, and its concurrency or rate.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardwise.serve import ServingLayout, ServingProblem, Workload, estimate_serving
from shardwise.serve.serving_calibration import ServingCalibration
from shardwise.values import InputError
from shardwise.values.input_files import FileMessages, read_text
from shardwise.values.input_texts import parse_json, parse_json_line

MS_PER_S = 1000.0
# Spread of an engine's factor from one machine or release to the next, and of single results around it: the published rows.
FACTOR_SPREAD, RESULT_SPREAD = 0.15, 0.08


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """One run of a benchmark: mean lengths, either a concurrency or a rate, and median latencies in seconds."""

    isl: float
    osl: float
    concurrency: float | None
    rate_per_s: float | None
    ttft_s: float
    tpot_s: float

    @property
    def workload(self) -> Workload:
        """The workload of the run."""
        return Workload(
            isl=max(round(self.isl), 1), osl=max(round(self.osl), 1), concurrency=self.concurrency,
            rate_per_s=None if self.concurrency is not None else self.rate_per_s,
        )  # fmt: skip


MESSAGES = FileMessages(fix="JSON of a serving benchmark is required")


def read_bench_results(path: str | os.PathLike[str]) -> tuple[BenchResult, ...]:
    """Return the runs in a file: one JSON value, or one a line.

    Raises `InputError` for a file that is none of the three tools', with the keys that are missing.
    """
    name = os.fspath(path)
    text = read_text(name, MESSAGES)
    lines = [line for line in text.splitlines() if line.strip()]
    try:
        values = [parse_json_line(line) for line in lines]
    except ValueError:  # one value over several lines
        values = [parse_json(text, name, MESSAGES)]
    if not values:
        raise InputError(f"{os.fspath(path)}: empty; JSON of a serving benchmark is required")
    return tuple(_parse(value, os.fspath(path)) for value in values)


def _parse(value: Any, label: str) -> BenchResult:
    if not isinstance(value, Mapping):
        raise InputError(f"{label}: found {type(value).__name__}; an object with the results of one run is required")
    return _parse_genai_perf(value, label) if "time_to_first_token" in value else _parse_bench_serve(value, label)


def _parse_bench_serve(value: Mapping[str, Any], label: str) -> BenchResult:
    """Return the result of vLLM's or SGLang's benchmark, which name their keys alike."""
    required = ("completed", "total_input_tokens", "total_output_tokens", "median_ttft_ms", "median_tpot_ms")
    numbers = {key: _number(value, key, label) for key in _require(value, required, label)}
    if numbers["completed"] < 1:
        raise InputError(f"{label}: completed is {numbers['completed']:g}; at least 1 completed request is required")
    concurrency, rate = _optional(value.get("max_concurrency")), _optional(value.get("request_rate"))
    return _checked(
        BenchResult(
            isl=numbers["total_input_tokens"] / numbers["completed"],
            osl=numbers["total_output_tokens"] / numbers["completed"],
            concurrency=concurrency, rate_per_s=rate, ttft_s=numbers["median_ttft_ms"] / MS_PER_S,
            tpot_s=numbers["median_tpot_ms"] / MS_PER_S,
        ),
        label, "max_concurrency or a finite request_rate",
    )  # fmt: skip


def _parse_genai_perf(value: Mapping[str, Any], label: str) -> BenchResult:
    required = ("time_to_first_token", "inter_token_latency", "input_sequence_length", "output_sequence_length")
    statistics = _require(value, required, label)
    config = value.get("input_config", {})
    stimulus = config.get("perf_analyzer", {}).get("stimulus", config) if isinstance(config, Mapping) else {}
    return _checked(
        BenchResult(
            isl=_number(statistics["input_sequence_length"], "avg", label),
            osl=_number(statistics["output_sequence_length"], "avg", label),
            concurrency=_optional(stimulus.get("concurrency")), rate_per_s=_optional(stimulus.get("request_rate")),
            ttft_s=_number(statistics["time_to_first_token"], "p50", label) / MS_PER_S,
            tpot_s=_number(statistics["inter_token_latency"], "p50", label) / MS_PER_S,
        ),
        label, "input_config with a concurrency or a request_rate",
    )  # fmt: skip


def _require(value: Mapping[str, Any], keys: Sequence[str], label: str) -> dict[str, Any]:
    missing = [key for key in keys if key not in value]
    if missing:
        raise InputError(
            f"{label}: {', '.join(missing)} missing; the JSON of vllm bench serve, of SGLang's bench_serving or of genai-perf "
            "is required"
        )
    return {key: value[key] for key in keys}


def _number(value: Any, key: str, label: str) -> float:
    number = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise InputError(f"{label}: {key} is {number!r}; a number is required")
    return float(number)


def _optional(value: Any) -> float | None:
    """Return a positive finite number, or None: benchmarks write "inf" for requests that are all sent at once."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return None
    return float(value)


def _checked(result: BenchResult, label: str, required: str) -> BenchResult:
    if result.concurrency is None and result.rate_per_s is None:
        raise InputError(f"{label}: found neither a concurrency nor a rate; {required} is required")
    if result.ttft_s <= 0 or result.tpot_s <= 0:
        raise InputError(
            f"{label}: TTFT is {result.ttft_s:g} s and TPOT {result.tpot_s:g} s; both above 0 are required"
        )
    return result


def calibrate_serving(
    problem: ServingProblem, layout: ServingLayout, results: Sequence[BenchResult]
) -> ServingCalibration:
    """Return the factors on a problem's predictions that measurements of a layout lead to.

    They are drawn towards 1: n results count n / (n + 0.28). The problem's own workload is not read. Raises `InputError` without
    results, and for a layout or a rate that the problem does not allow.
    """
    if not results:
        raise InputError("calibrate: found no results; those of at least one run of a serving benchmark are required")
    pass_factor = _mean_factor(replace(problem, calibration=None), layout, results, "tpot_s")
    calibration = ServingCalibration(pass_factor=pass_factor, num_results=len(results))
    # A pass is a part of a first token: its factor is taken out before that of first tokens is.
    first_token_factor = _mean_factor(replace(problem, calibration=calibration), layout, results, "ttft_s")
    return replace(calibration, first_token_factor=first_token_factor)


def _mean_factor(problem: ServingProblem, layout: ServingLayout, results: Sequence[BenchResult], latency: str) -> float:
    """Return the mean ratio of what was measured of a latency to its predictions, drawn towards 1."""
    logarithms = [
        math.log(getattr(result, latency) / getattr(estimate, latency).value)
        for result in results
        for estimate in [estimate_serving(replace(problem, workload=result.workload), layout)]
    ]
    share = len(results) / (len(results) + (RESULT_SPREAD / FACTOR_SPREAD) ** 2)
    return math.exp(share * float(np.mean(logarithms)))
