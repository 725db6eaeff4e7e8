"""nanotron: fields of `tag: value` between bars, of three digits, with decimal prefixes."""

from __future__ import annotations

import re

from shardwise.measurement.logs.logged import MIB, LogFormat, LoggedStep, Tag, above_zero, number, of_unit

_ITERATION = re.compile(r"\biteration: (\d{1,12}) / \d{1,12} \|")
# A field that is read has a bar behind it: without one it was cut off.
_FIELD = re.compile(r"\b([a-z_]{1,64}): (-?[\d.]{1,32}(?:e[+-]?\d{1,3})?)([KMGTPE]?)(?= \|)")
_PREFIXES = dict(zip(("", "K", "M", "G", "T", "P", "E"), (1000.0**power for power in range(7)), strict=True))
_PEAK = re.compile(r"Peak reserved: ([\d.]{1,32})MiB")
TIMES = ("elapsed_time_per_iteration_ms", "time_per_iteration_ms")  # of 0.4, and of later commits


def _step(text: str) -> LoggedStep | None:
    found = _ITERATION.search(text)
    said = {match[1]: str(float(match[2]) * _PREFIXES[match[3]]) for match in _FIELD.finditer(text) if number(match[2])}
    seconds = of_unit(next((said[name] for name in TIMES if name in said), None), 1e-3)
    if not found or seconds is None or "tokens_per_sec_per_gpu" not in said:
        return None
    return LoggedStep(
        step=int(found[1]), step_time_s=seconds, tokens_per_s=above_zero(said["tokens_per_sec_per_gpu"]),
        loss=number(said.get("lm_loss")), tflops=above_zero(said.get("model_tflops_per_gpu")),
        memory_bytes=above_zero(said.get("cuda_max_memory_reserved")),
    )  # fmt: skip


def _memory(text: str) -> float | None:
    found = _PEAK.search(text)
    return of_unit(found[1], MIB) if found else None


FORMAT = LogFormat(
    name="nanotron", title="nanotron", source="nanotron 0.4, trainer.py, train_step_logs; logging.py, LoggerWriter, log_memory",
    markers=(b"tokens_per_sec_per_gpu:",), step=_step, memory_marker=b"Peak reserved:", memory=_memory,
    tags={
        **dict.fromkeys(TIMES, Tag("step_time_s", 1e-3)), "tokens_per_sec_per_gpu": Tag("tokens_per_s"),
        "global_batch_size": Tag("batch_seqs"), "lm_loss": Tag("loss"), "model_tflops_per_gpu": Tag("tflops"),
        "cuda_max_memory_reserved": Tag("memory_bytes"),
    },
)  # fmt: skip
