"""MaxText: what it prints of each step; the tags of its `metrics_file`, of TensorBoard and of W&B."""

from __future__ import annotations

import re

from shardwise.measurement.logs.logged import GIB, LogFormat, LoggedStep, Tag, above_zero, number, of_unit

_STEP = re.compile(r"completed step: (\d{1,12}), seconds: ([\d.]{1,32}),")
_FIELD = re.compile(r"(TFLOP/s/device|Tokens/s/device|\bloss): ([^,\s]{1,32}),")
_MEMORY = re.compile(r"Total (?:estimated )?memory size: ([\d.]{1,32}) GB,")
RAMP = "[Rampup Batch Size Phase]"  # steps of a smaller batch, whose time is another


def _step(text: str) -> LoggedStep | None:
    found, said = _STEP.search(text), dict(_FIELD.findall(text))
    if not found or above_zero(found[2]) is None:
        return None
    return LoggedStep(
        step=int(found[1]), step_time_s=None if RAMP in text else above_zero(found[2]),
        tokens_per_s=above_zero(said.get("Tokens/s/device")), tflops=above_zero(said.get("TFLOP/s/device")),
        loss=number(said.get("loss")),
    )  # fmt: skip


def _memory(text: str) -> float | None:
    found = _MEMORY.search(text)
    return of_unit(found[1], GIB) if found else None  # bytes_to_gb divides by 1024**3


FORMAT = LogFormat(
    name="maxtext", title="MaxText",
    source="MaxText e591f30c, src/maxtext/common/metric_logger.py; utils/max_utils.py, print_compiled_memory_stats",
    markers=(b"completed step:",), step=_step, memory_marker=b"memory size:", memory=_memory,
    memory_kind="as XLA estimates it",
    tags={
        "perf/step_time_seconds": Tag("step_time_s"), "perf/per_device_tokens_per_sec": Tag("tokens_per_s"),
        "perf/per_device_tflops_per_sec": Tag("tflops"), "learning/loss": Tag("loss"),
    },
)  # fmt: skip
