"""Megatron-LM, and what logs as it does (Megatron Bridge, Megatron-DeepSpeed): milliseconds of a step and the global batch."""

from __future__ import annotations

import re

from shardwise.measurement.logs.logged import MIB, LogFormat, LoggedStep, Tag, above_zero, number, of_unit

# A field ends with a bar; what has none was cut off.
_ITERATION = re.compile(r"\biteration\s{1,16}(\d{1,12})/\s{0,16}\d{1,12} \|")
_FIELD = {
    name: re.compile(pattern + r":\s{0,16}(\S{1,32}) \|")
    for name, pattern in {
        "milliseconds": r"elapsed time per iteration \(ms\)",
        "tflops": r"throughput per GPU \(TFLOP/s/GPU\)",
        "batch": r"global batch size",
        "loss": r"\blm loss",
    }.items()
}
_MEMORY = re.compile(r"max reserved: ([\d.]{1,32})(?:\s|$)")


def _step(text: str) -> LoggedStep | None:
    found = _ITERATION.search(text)
    said = {name: match[1] for name, field in _FIELD.items() if (match := field.search(text))}
    seconds = of_unit(said.get("milliseconds"), 1e-3)
    if not found or seconds is None:
        return None
    batch = above_zero(said.get("batch"))
    return LoggedStep(
        step=int(found[1]), step_time_s=seconds, tflops=above_zero(said.get("tflops")), loss=number(said.get("loss")),
        batch_seqs=None if batch is None else int(batch),
    )  # fmt: skip


def _memory(text: str) -> float | None:
    found = _MEMORY.search(text)
    return of_unit(found[1], MIB) if found else None


FORMAT = LogFormat(
    name="megatron", title="Megatron-LM",
    source="Megatron-LM d98e8a64 (core 0.20.0), megatron/training/training.py, training_log; utils/common_utils.py; Megatron "
    "Bridge 0.3.1, training/utils/train_utils.py, training_log",
    markers=(b"elapsed time per iteration (ms):",), step=_step, memory_marker=b"max reserved:", memory=_memory,
    tags={
        "iteration-time": Tag("step_time_s"), "batch-size": Tag("batch_seqs"), "lm loss": Tag("loss"),
        "throughput": Tag("tflops"), "throughput/tflops/device": Tag("tflops"),  # of Megatron-LM, of Megatron Bridge
        # What the allocator has reserved at the time, which it hardly gives back; Megatron Bridge has the peak.
        "mem-reserved-bytes": Tag("memory_bytes"), "memory/mem-max-reserved-gigabytes": Tag("memory_bytes", 1e9),
    },
)  # fmt: skip
