"""NeMo's trainers on Lightning: `metric: value` between bars, of four digits; and their tags."""

from __future__ import annotations

import re

from shardwise.measurement.logs.logged import LogFormat, LoggedStep, Tag
from shardwise.measurement.logs.points import Point, step_of

# A field that is read has a bar behind it: without one it was cut off.
_FIELD = re.compile(r"\| ([\w ]{1,64}): ([\d.]{1,32}(?:e[+-]?\d{1,3})?)(?= \|)")


def _step(text: str) -> LoggedStep | None:
    said = {match[1]: float(match[2]) for match in _FIELD.finditer(text) if match[2].count(".") < 2}
    if "global_step" not in said or "train_step_timing in s" not in said:
        return None
    return step_of(Point(int(said["global_step"]), said), FORMAT)


FORMAT = LogFormat(
    name="nemo", title="NeMo",
    source="NeMo 2.6 (8cfedd72), lightning/pytorch/callbacks/progress_printer.py; utils/exp_manager.py, TimingCallback; "
    "lightning/pytorch/strategies/megatron_strategy.py, training_step; plugins/data_sampler.py; callbacks/flops_callback.py",
    markers=(b"train_step_timing in s:",), step=_step,
    tags={
        "train_step_timing in s": Tag("step_time_s"), "tokens_per_sec_per_gpu": Tag("tokens_per_s"),
        "global_batch_size": Tag("batch_seqs"), "reduced_train_loss": Tag("loss"), "TFLOPS_per_GPU": Tag("tflops"),
        "max_memory_reserved": Tag("memory_bytes"),
    },
)  # fmt: skip
