"""Logs of training frameworks, one `LogFormat` for each, and `FORMATS`, all of them by name.

- torchtitan: lines have tokens/s of one device and no step time; tags have it. Means over `log_freq` steps.
- Megatron-LM, and what logs as it does (Megatron Bridge, Megatron-DeepSpeed): milliseconds of a step and the global batch.
- NeMo's trainers on Lightning: `metric: value` between bars, of four digits; and their tags.
- NeMo Automodel: the lines of its `training.jsonl`, and what it sends to W&B.
- nanotron: fields of `tag: value` between bars, of three digits, with decimal prefixes.
- MaxText: what it prints of each step; the tags of its `metrics_file`, of TensorBoard and of W&B.
- transformers' Trainer, which scripts of Accelerate and DeepSpeed start: the dictionary that it prints at the end of a run.
- Shardwise: `log.jsonl` in the folder of a run of `shardwise train`, and its TensorBoard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.records.logs.logged_steps import (
    GIB,
    MIB,
    LogFormat,
    LoggedStep,
    RunHeader,
    Tag,
    TaggedValues,
    parse_finite,
    parse_percent,
    parse_positive,
    parse_scaled,
    to_step,
)
from shardwise.records.step_log import INSPECTED
from shardwise.values.input_texts import parse_integer, parse_number

# Every field must be followed by a blank, and the last by its closing character, so that a truncated number is not read as a
# complete one. Bounded repeats keep a search short on any line.
_TORCHTITAN_STEP = re.compile(r"(?<!validate )\bstep:\s{0,16}(\d{1,12})\s")
_TORCHTITAN_FIELDS = {
    name: re.compile(rf"\b{name}:\s{{0,16}}{pattern}")
    for name, pattern in {
        "loss": r"(\S{1,32})\s", "memory": r"([\d.]{1,32})GiB\(", "tps": r"([\d,]{1,32})\s", "tflops": r"([\d,.]{1,32})\s",
        "mfu": r"([\d.]{1,32})%",
    }.items()
}  # fmt: skip


def _parse_torchtitan_step(text: str) -> LoggedStep | None:
    header = _TORCHTITAN_STEP.search(text)
    if not header:
        return None
    next_header = _TORCHTITAN_STEP.search(text, header.end())  # another rank's line behind this one
    line = text[header.end() - 1 : next_header.start() if next_header else None]
    fields = {name: match[1] for name, pattern in _TORCHTITAN_FIELDS.items() if (match := pattern.search(line))}
    tokens_per_s, loss = parse_positive(fields.get("tps")), parse_finite(fields.get("loss"))
    if tokens_per_s is None:
        return None
    return LoggedStep(
        step=parse_integer(header[1]), tokens_per_s=tokens_per_s, tflops=parse_positive(fields.get("tflops")),
        mfu=parse_percent(fields.get("mfu")),
        loss=loss if loss is None or loss >= 0 else None,  # ranks in front of a pipeline's last stage print -1
        memory_bytes=parse_scaled(fields.get("memory"), GIB),
    )  # fmt: skip


_TORCHTITAN_HEADER = {
    name: re.compile(pattern)
    for name, pattern in {
        "batch_seqs": r"\bglobal batch size (\d{1,12}),", "seq_len": r"\bsequence length (\d{1,12}),",
        "batch_tokens": r"\b(\d{1,15}) tokens per train step,",
    }.items()
}  # fmt: skip


def _parse_torchtitan_header(text: str) -> RunHeader | None:
    """Return batch and sequence of trainer.py's line; a torn one has not all of it. Later commits log tokens in place of both."""
    fields = {
        name: parse_integer(match[1]) for name, pattern in _TORCHTITAN_HEADER.items() if (match := pattern.search(text))
    }
    return RunHeader(**fields) if fields and all(fields.values()) else None


TORCHTITAN_TAGS = {
    "throughput(tps)": Tag("tokens_per_s"), "time_metrics/end_to_end(s)": Tag("step_time_s"), "tflops": Tag("tflops"),
    "mfu(%)": Tag("mfu", 0.01), "memory/max_reserved(GiB)": Tag("memory_bytes", GIB), "loss_metrics/global_avg_loss": Tag("loss"),
}  # fmt: skip
TORCHTITAN = LogFormat(
    name="torchtitan", title="torchtitan", source="torchtitan 0.2.2 and 0.3.0, components/metrics.py, MetricsProcessor.log",
    markers=(b"tps:",), excluded_markers=(b"validate step:",), step=_parse_torchtitan_step, tags=TORCHTITAN_TAGS,
    header_marker=b"Trainer is initialized with", header=_parse_torchtitan_header,
)  # fmt: skip

# A field without a closing bar was cut off.
_MEGATRON_ITERATION = re.compile(r"\biteration\s{1,16}(\d{1,12})/\s{0,16}\d{1,12} \|")
_MEGATRON_FIELDS = {
    name: re.compile(pattern + r":\s{0,16}(\S{1,32}) \|")
    for name, pattern in {
        "milliseconds": r"elapsed time per iteration \(ms\)",
        "tflops": r"throughput per GPU \(TFLOP/s/GPU\)",
        "batch": r"global batch size",
        "loss": r"\blm loss",
    }.items()
}
_MEGATRON_MEMORY = re.compile(r"max reserved: ([\d.]{1,32})(?:\s|$)")


def _parse_megatron_step(text: str) -> LoggedStep | None:
    header = _MEGATRON_ITERATION.search(text)
    fields = {name: match[1] for name, pattern in _MEGATRON_FIELDS.items() if (match := pattern.search(text))}
    seconds = parse_scaled(fields.get("milliseconds"), 1e-3)
    if not header or seconds is None:
        return None
    batch = parse_positive(fields.get("batch"))
    return LoggedStep(
        step=parse_integer(header[1]), step_time_s=seconds, tflops=parse_positive(fields.get("tflops")),
        loss=parse_finite(fields.get("loss")), batch_seqs=None if batch is None else int(batch),
    )  # fmt: skip


def _parse_megatron_memory(text: str) -> float | None:
    match = _MEGATRON_MEMORY.search(text)
    return parse_scaled(match[1], MIB) if match else None


MEGATRON = LogFormat(
    name="megatron", title="Megatron-LM",
    source="Megatron-LM d98e8a64 (core 0.20.0), megatron/training/training.py, training_log; utils/common_utils.py; Megatron "
    "Bridge 0.3.1, training/utils/train_utils.py, training_log",
    markers=(b"elapsed time per iteration (ms):",), step=_parse_megatron_step,
    memory_marker=b"max reserved:", memory=_parse_megatron_memory,
    tags={
        "iteration-time": Tag("step_time_s"), "batch-size": Tag("batch_seqs"), "lm loss": Tag("loss"),
        "throughput": Tag("tflops"), "throughput/tflops/device": Tag("tflops"),  # of Megatron-LM, of Megatron Bridge
        # Bytes that the allocator has reserved at the time, which it rarely releases; Megatron Bridge has the peak.
        "mem-reserved-bytes": Tag("memory_bytes"), "memory/mem-max-reserved-gigabytes": Tag("memory_bytes", 1e9),
    },
)  # fmt: skip

# A field without a closing bar was cut off.
_NEMO_FIELD = re.compile(r"\| ([\w ]{1,64}): ([\d.]{1,32}(?:e[+-]?\d{1,3})?)(?= \|)")


def _parse_nemo_step(text: str) -> LoggedStep | None:
    fields = {match[1]: parse_number(match[2]) for match in _NEMO_FIELD.finditer(text) if match[2].count(".") < 2}
    if "global_step" not in fields or "train_step_timing in s" not in fields:
        return None
    step = fields["global_step"]
    return to_step(TaggedValues(int(step), fields), NEMO)


NEMO = LogFormat(
    name="nemo", title="NeMo",
    source="NeMo 2.6 (8cfedd72), lightning/pytorch/callbacks/progress_printer.py; utils/exp_manager.py, TimingCallback; "
    "lightning/pytorch/strategies/megatron_strategy.py, training_step; plugins/data_sampler.py; callbacks/flops_callback.py",
    markers=(b"train_step_timing in s:",), step=_parse_nemo_step,
    tags={
        "train_step_timing in s": Tag("step_time_s"), "tokens_per_sec_per_gpu": Tag("tokens_per_s"),
        "global_batch_size": Tag("batch_seqs"), "reduced_train_loss": Tag("loss"), "TFLOPS_per_GPU": Tag("tflops"),
        "max_memory_reserved": Tag("memory_bytes"),
    },
)  # fmt: skip

AUTOMODEL = LogFormat(
    name="automodel", title="NeMo Automodel",
    source="nemo-automodel 0.7.0, recipes/llm/train_ft.py, _run_train_optim_step; components/loggers/metric_logger.py",
    tags={
        "tps_per_gpu": Tag("tokens_per_s"), "num_tokens_per_step": Tag("batch_tokens"), "loss": Tag("loss"),
        "mfu": Tag("mfu", 0.01), "mem": Tag("memory_bytes", GIB),
    },
    identifying_tag="tps_per_gpu", memory_kind="allocated",
)  # fmt: skip

_NANOTRON_ITERATION = re.compile(r"\biteration: (\d{1,12}) / \d{1,12} \|")
# A field without a closing bar was cut off.
_NANOTRON_FIELD = re.compile(r"\b([a-z_]{1,64}): (-?[\d.]{1,32}(?:e[+-]?\d{1,3})?)([KMGTPE]?)(?= \|)")
_NANOTRON_PREFIXES = dict(zip(("", "K", "M", "G", "T", "P", "E"), (1000.0**power for power in range(7)), strict=True))
_NANOTRON_MEMORY = re.compile(r"Peak reserved: ([\d.]{1,32})MiB")
NANOTRON_TIMES = ("elapsed_time_per_iteration_ms", "time_per_iteration_ms")  # of 0.4, and of later commits


def _parse_nanotron_step(text: str) -> LoggedStep | None:
    header = _NANOTRON_ITERATION.search(text)
    fields = {
        match[1]: str(parse_number(match[2]) * _NANOTRON_PREFIXES[match[3]])
        for match in _NANOTRON_FIELD.finditer(text)
        if parse_finite(match[2])
    }
    seconds = parse_scaled(next((fields[name] for name in NANOTRON_TIMES if name in fields), None), 1e-3)
    if not header or seconds is None or "tokens_per_sec_per_gpu" not in fields:
        return None
    return LoggedStep(
        step=parse_integer(header[1]), step_time_s=seconds, tokens_per_s=parse_positive(fields["tokens_per_sec_per_gpu"]),
        loss=parse_finite(fields.get("lm_loss")), tflops=parse_positive(fields.get("model_tflops_per_gpu")),
        memory_bytes=parse_positive(fields.get("cuda_max_memory_reserved")),
    )  # fmt: skip


def _parse_nanotron_memory(text: str) -> float | None:
    match = _NANOTRON_MEMORY.search(text)
    return parse_scaled(match[1], MIB) if match else None


NANOTRON = LogFormat(
    name="nanotron", title="nanotron", source="nanotron 0.4, trainer.py, train_step_logs; logging.py, LoggerWriter, log_memory",
    markers=(b"tokens_per_sec_per_gpu:",), step=_parse_nanotron_step,
    memory_marker=b"Peak reserved:", memory=_parse_nanotron_memory,
    tags={
        **dict.fromkeys(NANOTRON_TIMES, Tag("step_time_s", 1e-3)), "tokens_per_sec_per_gpu": Tag("tokens_per_s"),
        "global_batch_size": Tag("batch_seqs"), "lm_loss": Tag("loss"), "model_tflops_per_gpu": Tag("tflops"),
        "cuda_max_memory_reserved": Tag("memory_bytes"),
    },
)  # fmt: skip

_MAXTEXT_STEP = re.compile(r"completed step: (\d{1,12}), seconds: ([\d.]{1,32}),")
_MAXTEXT_FIELD = re.compile(r"(TFLOP/s/device|Tokens/s/device|\bloss): ([^,\s]{1,32}),")
_MAXTEXT_MEMORY = re.compile(r"Total (?:estimated )?memory size: ([\d.]{1,32}) GB,")
MAXTEXT_RAMP_UP = "[Rampup Batch Size Phase]"  # steps of a smaller batch, which take another time


def _parse_maxtext_step(text: str) -> LoggedStep | None:
    header, fields = _MAXTEXT_STEP.search(text), dict(_MAXTEXT_FIELD.findall(text))
    if not header or parse_positive(header[2]) is None:
        return None
    return LoggedStep(
        step=int(header[1]), step_time_s=None if MAXTEXT_RAMP_UP in text else parse_positive(header[2]),
        tokens_per_s=parse_positive(fields.get("Tokens/s/device")), tflops=parse_positive(fields.get("TFLOP/s/device")),
        loss=parse_finite(fields.get("loss")),
    )  # fmt: skip


def _parse_maxtext_memory(text: str) -> float | None:
    match = _MAXTEXT_MEMORY.search(text)
    return parse_scaled(match[1], GIB) if match else None  # bytes_to_gb divides by 1024**3


MAXTEXT = LogFormat(
    name="maxtext", title="MaxText",
    source="MaxText e591f30c, src/maxtext/common/metric_logger.py; utils/max_utils.py, print_compiled_memory_stats",
    markers=(b"completed step:",), step=_parse_maxtext_step, memory_marker=b"memory size:", memory=_parse_maxtext_memory,
    memory_kind="as XLA estimates it",
    tags={
        "perf/step_time_seconds": Tag("step_time_s"), "perf/per_device_tokens_per_sec": Tag("tokens_per_s"),
        "perf/per_device_tflops_per_sec": Tag("tflops"), "learning/loss": Tag("loss"),
    },
)  # fmt: skip

# A dictionary at the end of the run, whose numbers are texts from release 5 on: a mean over all steps, the first ones too.
_TRANSFORMERS_FIELD = re.compile(r"'(train_\w{1,32})': '?([-\d.e+]{1,32})'?[,}]")


def _parse_transformers_summary(text: str) -> LoggedStep | None:
    fields = dict(_TRANSFORMERS_FIELD.findall(text))
    seconds, steps_per_s = (parse_positive(fields.get(name)) for name in ("train_runtime", "train_steps_per_second"))
    if seconds is None or steps_per_s is None:
        return None
    num_steps = max(
        round(seconds * steps_per_s), 1
    )  # the rate has three or four digits, so the time over steps is more exact
    return LoggedStep(step=num_steps, step_time_s=seconds / num_steps, loss=parse_finite(fields.get("train_loss")))


TRANSFORMERS = LogFormat(
    name="transformers", title="transformers' Trainer",
    source="transformers 5.24.0, trainer_utils.py, speed_metrics; trainer_callback.py, ProgressCallback",
    markers=(b"'train_steps_per_second':",), step=_parse_transformers_summary,
)  # fmt: skip

# Memory is that of a GPU; a run on a CPU logs that of the whole process under another name.
SHARDWISE = LogFormat(
    name="shardwise", title="shardwise train", source="shardwise, records/step_log.py",
    tags={**TORCHTITAN_TAGS, "num_tokens": Tag("batch_tokens")}, identifying_tag="num_tokens", untimed=INSPECTED,
)  # fmt: skip

_FORMATS = (TORCHTITAN, MEGATRON, NEMO, AUTOMODEL, NANOTRON, MAXTEXT, TRANSFORMERS, SHARDWISE)
FORMATS: Mapping[str, LogFormat] = {log_format.name: log_format for log_format in _FORMATS}
