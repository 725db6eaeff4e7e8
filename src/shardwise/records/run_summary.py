"""Summary of a run from its log, as a payload and as text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple

from typing_extensions import TypedDict

from shardwise.records.step_log import CHECKPOINT_EVENT, EVENT, SLOW_EVENT, MfuFormula, StepLog
from shardwise.values import InputError, format_bytes, format_percent, format_seconds, pluralize

SCHEMA = "shardwise.run_summary/1"


class CheckpointsPayload(TypedDict):
    """Checkpoints of a run: the median bytes of their files, the median seconds until one was on the disk and in which the
    training waited for it, the share of the run's time in which it waited for any, and the plan's bytes and seconds of one."""

    number: int
    num_bytes: float
    write_s: float
    stall_s: float
    stalled: float
    planned_bytes: float
    planned_write_s: float


class SourcePayload(TypedDict):
    """A source of the data: its share of the sequences, how often each of its own has been taken, and the loss of its held-out
    text."""

    share: float
    epochs: float
    held_out_loss: float | str | None


class StartPayload(TypedDict):
    """A start of the run: the steps done before it, its layout and devices, the library of its fused kernels, and why the start
    before it ended, where whoever started the ranks again says so."""

    first_step: int
    layout_text: str
    num_devices: int
    kernels: str
    after: str


class SlowPayload(TypedDict):
    """Slow rank: the first step at which it was named, and its time over that of others with the same work."""

    rank: int
    host: str
    step: int
    factor: float


class SummaryPayload(TypedDict):
    """Summary of a run. Losses are nats per token; one that is not finite is its name, such as "nan". `step_time_s`
    and `data_s`, the wait for data in it, are medians."""

    schema: Literal["shardwise.run_summary/1"]
    steps: int
    first_loss: float | str
    last_loss: float | str
    held_out_loss: float | str | None
    unigram_entropy_nats: float
    step_time_s: float
    data_s: float
    tokens_per_s: float
    mfu: float | None
    hfu: float | None
    num_tokens: int
    seconds: float
    checkpoints: CheckpointsPayload | None
    sources: dict[str, SourcePayload]
    starts: list[StartPayload]
    slow: list[SlowPayload]
    log: str


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The summary of a run that has ended, as its file has it (`SummaryPayload`)."""

    payload: Mapping[str, Any]


def summary_payload(summary: RunSummary) -> Mapping[str, Any]:
    """Return the JSON of `shardwise train --json`."""
    return summary.payload


class SourceUsage(NamedTuple):
    """Share, epochs and held-out loss of a source, for its payload."""

    share: float
    epochs: float
    held_out_loss: float | None


class DataSummary(NamedTuple):
    """Statistics of a run's data: entropy of token frequencies, loss on held-out text, and use of the sources by name."""

    unigram_entropy_nats: float
    held_out_loss: float | None
    sources: Mapping[str, SourceUsage]


def summarise_run(
    log: StepLog, throughput: MfuFormula, data: DataSummary, *, log_path: str, planned: tuple[float, float]
) -> dict[str, Any]:
    """Return the `SummaryPayload` of a run; rates are those of the median step, as the first steps of a run are slower.

    `planned`: bytes of a checkpoint, and seconds to write it. Raises `InputError` for a log without steps.
    """
    if not log.steps:
        raise InputError(f"{log_path}: found no step; a run of at least one is required")
    first, last = log.steps[0], log.steps[-1]
    middle = sorted(log.timed_steps, key=lambda record: record.step_time_s)[(len(log.timed_steps) - 1) // 2]
    return {
        "schema": SCHEMA, "steps": last.step, "first_loss": _json_loss(first.loss), "last_loss": _json_loss(last.loss),
        "held_out_loss": _json_loss(data.held_out_loss), "unigram_entropy_nats": data.unigram_entropy_nats,
        "step_time_s": median(record.step_time_s for record in log.timed_steps),
        "data_s": median(record.seconds.get("data", 0.0) for record in log.timed_steps),
        "tokens_per_s": throughput.tokens_per_s(middle), "mfu": throughput.mfu(middle), "hfu": throughput.hfu(middle),
        "num_tokens": sum(record.num_tokens for record in log.steps),
        "seconds": sum(record.step_time_s for record in log.steps), "checkpoints": _checkpoints_payload(log, *planned),
        "sources": {
            name: {**usage._asdict(), "held_out_loss": _json_loss(usage.held_out_loss)}
            for name, usage in data.sources.items()
        },
        "starts": [_start_payload(header) for header in log.headers], "slow": _slow_ranks(log), "log": log_path,
    }  # fmt: skip


def _start_payload(header: Mapping[str, Any]) -> StartPayload:
    return {
        "first_step": header["first_step"], "layout_text": header["layout"], "num_devices": header["num_devices"],
        "kernels": header.get("kernels", "pytorch"), "after": header.get("after", ""),
    }  # fmt: skip


def _slow_ranks(log: StepLog) -> list[SlowPayload]:
    """Return each slow rank once per host; after a restart a rank may be on another host."""
    slow_ranks: dict[tuple[int, str], SlowPayload] = {}
    for event in log.events:
        for rank in event["ranks"] if event[EVENT] == SLOW_EVENT else ():
            slow_ranks.setdefault(
                (rank["rank"], rank["host"]),
                {"rank": rank["rank"], "host": rank["host"], "step": event["step"], "factor": rank["factor"]},
            )
    return list(slow_ranks.values())


def _checkpoints_payload(log: StepLog, planned_bytes: float, planned_write_s: float) -> dict[str, float] | None:
    saved = [event for event in log.events if event[EVENT] == CHECKPOINT_EVENT]
    if not saved:
        return None
    stall_s = [event["stall_s"] for event in saved]
    return {
        "number": len(saved), "num_bytes": median(event["num_bytes"] for event in saved),
        "write_s": median(event["write_s"] for event in saved), "stall_s": median(stall_s),
        "stalled": sum(stall_s) / (sum(stall_s) + sum(record.step_time_s for record in log.steps)),
        "planned_bytes": planned_bytes, "planned_write_s": planned_write_s,
    }  # fmt: skip


def _json_loss(loss: float | None) -> float | str | None:
    return str(loss) if loss is not None and not math.isfinite(loss) else loss


def format_summary(summary: Mapping[str, Any], *, as_json: bool) -> str:
    """Format the summary as JSON, or as text."""
    return json.dumps(summary, indent=2) if as_json else summary_text(summary)


def summary_text(summary: Mapping[str, Any]) -> str:
    """Format the summary as text."""
    lines = [
        f"{pluralize(summary['steps'], 'step')}, {summary['num_tokens']:,} tokens in {format_seconds(summary['seconds'])}",
        f"  loss       {_nats(summary['first_loss'])} at first, {_nats(summary['last_loss'])} at last",
    ]
    if summary["held_out_loss"] is not None:
        gained = summary["unigram_entropy_nats"] - float(summary["held_out_loss"])
        lines.append(
            f"  held out   {_nats(summary['held_out_loss'])}, {_difference_text(gained)} how often each token comes alone: "
            f"{_nats(summary['unigram_entropy_nats'])}"
        )
    lines += _source_lines(summary.get("sources", {}))
    utilisation = (
        f", MFU {format_percent(summary['mfu'])}, HFU {format_percent(summary['hfu'])}"
        if summary["mfu"] is not None
        else ""
    )
    lines.append(
        f"  median     {format_seconds(summary['step_time_s'])} a step, {summary['tokens_per_s']:,.0f} tokens/s{utilisation}"
    )
    if summary.get("checkpoints"):
        lines.append(f"  saved      {_checkpoints_text(summary['checkpoints'])}")
    lines += _event_lines(summary)
    return "\n".join([*lines, f"  log        {summary['log']}"])


def _event_lines(summary: Mapping[str, Any]) -> list[str]:
    """Format a line for each start but the first, and for each rank that was slow."""
    starts = [
        f"after step {start['first_step']:,}: {start['layout_text']} on {pluralize(start['num_devices'], 'device')}"
        f"{'; ' if start['after'] else ''}{start['after']}"
        for start in summary.get("starts", ())[1:]
    ]
    slow = [
        f"rank {rank['rank']} on {rank['host']}, at step {rank['step']:,} {rank['factor']:.2g} times as long as others with "
        "the same work"
        for rank in summary.get("slow", ())
    ]
    return [f"  restarted  {text}" for text in starts] + [f"  slow       {text}" for text in slow]


def _source_lines(sources: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Format a line for each source if there are several."""
    lines = []
    for name, source in sources.items() if len(sources) > 1 else ():
        loss = source["held_out_loss"]
        held_out = "" if loss is None else f", held out {_nats(loss)}"
        lines.append(
            f"  {name:<10} {format_percent(source['share'])} of the sequences, {source['epochs']:.2f} epochs{held_out}"
        )
    return lines


def _checkpoints_text(checkpoints: Mapping[str, Any]) -> str:
    return (
        f"{pluralize(checkpoints['number'], 'checkpoint')} of {format_bytes(checkpoints['num_bytes'])}, planned "
        f"{format_bytes(checkpoints['planned_bytes'])}; {format_seconds(checkpoints['write_s'])} to write, planned "
        f"{format_seconds(checkpoints['planned_write_s'])}; training waited {format_seconds(checkpoints['stall_s'])} for each, "
        f"{format_percent(checkpoints['stalled'])} of its time"
    )


def _difference_text(gained: float) -> str:
    return f"{-gained:.4f} above" if gained < 0 else f"{gained:.4f} below"


def _nats(loss: float | str) -> str:
    return f"{float(loss):.4f} nats per token"
