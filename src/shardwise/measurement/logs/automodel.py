"""NeMo Automodel: the lines of its `training.jsonl`, and what it gives to W&B."""

from __future__ import annotations

from shardwise.measurement.logs.logged import GIB, LogFormat, Tag

FORMAT = LogFormat(
    name="automodel", title="NeMo Automodel",
    source="nemo-automodel 0.7.0, recipes/llm/train_ft.py, _run_train_optim_step; components/loggers/metric_logger.py",
    tags={
        "tps_per_gpu": Tag("tokens_per_s"), "num_tokens_per_step": Tag("batch_tokens"), "loss": Tag("loss"),
        "mfu": Tag("mfu", 0.01), "mem": Tag("memory_bytes", GIB),
    },
    telling="tps_per_gpu", memory_kind="allocated",
)  # fmt: skip
