"""A framework's launch as sections: what it is, what it costs, what was not understood, and what would be faster."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.interop.read_launch import PricedLaunch
from shardwise.model import num_params
from shardwise.present.rendering.report import Cell, Report, Row, Section, Status, Table, facts_table
from shardwise.present.reports.wording import fit_cell, format_step
from shardwise.values import format_bytes, format_count, format_seconds


def verdict_report(found: PricedLaunch) -> Report:
    """The launch with its cost, and what of its options would change that."""
    plan, heard = found.plan, found.parsed
    head = (
        f"{plan.model.name} ({format_count(num_params(plan.model))} parameters) on {plan.cluster.name}, as {heard.target.title} "
        f"{heard.target.version} would run it"
    )
    others = [f"  {note}" for note in plan.estimate.notes if note not in plan.estimate.caveats]
    return [
        Section([facts_table(_lines(found))], title=head),
        Section(
            [f"  {', '.join(heard.unread)}"] if heard.unread else [],
            title="options that no plan depends on",
            detail=True,
        ),
        Section(others, title="what the prediction rests on", detail=True),
        _changes(found),
    ]


def _lines(found: PricedLaunch) -> Iterator[tuple[str, Cell]]:
    plan, heard = found.plan, found.parsed
    job, estimate = plan.job, plan.estimate
    yield (
        "job",
        f"{job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}, precision {job.precision}",
    )
    yield "layout", str(plan.layout)
    yield "memory", fit_cell(estimate)
    yield "step", f"{format_step(estimate.step_time_s, estimate.interval90)}, MFU {estimate.mfu:.1%}"
    yield "bound by", estimate.bound
    for note in (*heard.notes, *estimate.caveats):
        yield "note", Status(note, "note")
    for name in heard.unknown:
        yield "not understood", Status(f"{name} is not an option of {heard.target.title} {heard.target.version}", "bad")


def _changes(found: PricedLaunch) -> Section:
    """Each change as options with their values, the step and the memory with them."""
    before = found.plan.estimate
    if not found.better:
        return Section(["no other layout is predicted to be faster by a hundredth or more"])
    rows: list[Row] = []
    for change in found.better:
        words = [name if value is True else f"without {name}" if value is None else f"{name}={_text(value)}"
                 for name, value in change.options.items()]  # fmt: skip
        after = change.estimate
        gain = f"{after.step_time_s / before.step_time_s - 1:+.1%}" if before.fits else ""
        rows.append((format_seconds(after.step_time_s), gain, format_bytes(after.memory_bytes), ", ".join(words)))
    table = Table(rows=tuple(rows), right=(0, 1, 2), head=False, indent=2)
    return Section([table], title="faster, by prediction" if before.fits else "what fits")


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
