"""MaxText: what it prints of each step, or the JSON lines of its `metrics_file`."""

from __future__ import annotations

import re

from shardwise.measurement.logs.lines import json_line
from shardwise.measurement.logs.logged import GIB, LogFormat, LoggedStep, above_zero, number, of_unit

_STEP = re.compile(r"completed step: (\d{1,12}), seconds: ([\d.]{1,32}),")
_FIELD = re.compile(r"(TFLOP/s/device|Tokens/s/device|\bloss): ([^,\s]{1,32}),")
_MEMORY = re.compile(r"Total (?:estimated )?memory size: ([\d.]{1,32}) GB,")
RAMP = "[Rampup Batch Size Phase]"  # steps of a smaller batch, whose time is another


def _step(text: str) -> LoggedStep | None:
    if "perf/step_time_seconds" in text:
        return _of_metrics(text)
    found, said = _STEP.search(text), dict(_FIELD.findall(text))
    if not found or above_zero(found[2]) is None:
        return None
    return LoggedStep(
        step=int(found[1]), step_time_s=None if RAMP in text else above_zero(found[2]),
        tokens_per_s=above_zero(said.get("Tokens/s/device")), tflops=above_zero(said.get("TFLOP/s/device")),
        loss=number(said.get("loss")),
    )  # fmt: skip


def _of_metrics(text: str) -> LoggedStep | None:
    line = json_line(text)
    said = {name: str(value) for name, value in line.items()} if line else {}
    step, seconds = number(said.get("step")), above_zero(said.get("perf/step_time_seconds"))
    if step is None or seconds is None:
        return None
    return LoggedStep(
        step=int(step), step_time_s=seconds, tokens_per_s=above_zero(said.get("perf/per_device_tokens_per_sec")),
        tflops=above_zero(said.get("perf/per_device_tflops_per_sec")), loss=number(said.get("learning/loss")),
    )  # fmt: skip


def _memory(text: str) -> float | None:
    found = _MEMORY.search(text)
    return of_unit(found[1], GIB) if found else None  # bytes_to_gb divides by 1024**3


FORMAT = LogFormat(
    name="maxtext", title="MaxText",
    source="MaxText e591f30c, src/maxtext/common/metric_logger.py; utils/max_utils.py, print_compiled_memory_stats",
    markers=(b"completed step:", b'"perf/step_time_seconds"'), step=_step, memory_marker=b"memory size:", memory=_memory,
    memory_kind="as XLA estimates it",
)  # fmt: skip
