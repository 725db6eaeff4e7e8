"""Our own: `log.jsonl` in the folder of a run of `shardwise train` (`measurement.log`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.measurement.log import INSPECTED, LOSS, SECONDS
from shardwise.measurement.logs.lines import json_line
from shardwise.measurement.logs.logged import GIB, LogFormat, LoggedStep, above_zero, number, of_unit, percent

MEMORY = "memory/max_reserved(GiB)"  # of a GPU; of a CPU there is the whole process, with its interpreter


def _step(text: str) -> LoggedStep | None:
    line = json_line(text)
    said = {name: str(value) for name, value in line.items()} if line else {}
    step, seconds = number(said.get("step")), above_zero(said.get(SECONDS))
    if line is None or step is None or seconds is None:
        return None
    timed = {} if line.get(INSPECTED) else _rates(said, seconds)
    return LoggedStep(
        step=int(step), loss=number(said.get(LOSS)),
        memory_bytes=of_unit(said.get(MEMORY), GIB), **timed,
    )  # fmt: skip


def _rates(said: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """What a step took, where nobody watched it, which takes time."""
    tokens = above_zero(said.get("num_tokens"))
    return {
        "step_time_s": seconds, "tokens_per_s": above_zero(said.get("throughput(tps)")),
        "tflops": above_zero(said.get("tflops")), "mfu": percent(said.get("mfu(%)")),
        "batch_tokens": None if tokens is None else int(tokens),
    }  # fmt: skip


FORMAT = LogFormat(
    name="shardwise", title="shardwise train", source="shardwise, measurement/log.py",
    markers=(f'"{SECONDS}"'.encode(),), step=_step,
)  # fmt: skip
