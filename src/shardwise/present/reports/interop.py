"""Reports of an exported plan, of a launch that was read, and of converted weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.model import num_params
from shardwise.model.parameters_and_flops import num_trained_params
from shardwise.present.rendering.numbers import count, num_bytes, seconds, share
from shardwise.present.rendering.report import (
    Block,
    Cell,
    Line,
    Number,
    Report,
    Row,
    Section,
    Status,
    Table,
    facts_table,
)
from shardwise.present.reports.wording import INTERVAL, fit_cell, format_interval
from shardwise.values import format_count

if TYPE_CHECKING:
    from shardwise.interop import ConvertedModel, ExportedLaunch, PricedLaunch
    from shardwise.interop.read_launch import ParsedLaunch
    from shardwise.model import Architecture


MAX_UNKNOWN_LINES = 8  # unknown options of a launch that have a line each; more of them share one


def export_report(launch: ExportedLaunch) -> Report | str:
    """Report the files by name and what to know of them; a launch that was not written is its files' texts."""
    remarks = [f"not expressible: {text}" for text in launch.not_expressible]
    remarks += [f"note: {text}" for text in launch.warnings]
    if launch.folder is None:
        texts = [f"==> {name} <==\n{text.rstrip()}" for name, text in launch.files.items()]
        return "\n\n".join([*texts, "\n".join(remarks)])
    written = [f"wrote {launch.folder.rstrip('/')}/{name}" for name in launch.files]
    title = f"{launch.target}, {launch.version}"
    return [Section([*written, *remarks, f"start it on {launch.starts_on}: {launch.command}"], title=title)]


def launch_report(launch: PricedLaunch) -> Report:
    """Report a launch that was read: what it is, its cost, what was not understood, and what would be faster."""
    plan, parsed = launch.plan, launch.parsed
    title = (
        f"{plan.model.name} ({format_count(num_params(plan.model))} parameters) on {plan.cluster.name}, as {parsed.target.title} "
        f"{parsed.target.version} would run it"
    )
    assumptions = [f"  {note}" for note in plan.estimate.notes if note not in plan.estimate.caveats]
    return [
        Section([facts_table(_facts(launch))], title=title),
        Section(
            [f"  {', '.join(parsed.unread)}"] if parsed.unread else [],
            title="options that no plan depends on",
            detail=True,
        ),
        Section(assumptions, title="what the prediction rests on", detail=True),
        _changes(launch),
    ]


def _facts(launch: PricedLaunch) -> Iterator[tuple[str, Cell | Line]]:
    plan, parsed = launch.plan, launch.parsed
    job, estimate = plan.job, plan.estimate
    yield (
        "job",
        Line((
            count(job.global_batch_tokens, "job.global_batch_tokens"), " tokens per batch, sequences of ",
            count(job.seq_len, "job.seq_len"), f", precision {job.precision}",
        )),
    )  # fmt: skip
    if plan.model.lora_rank:
        yield "adapters", _adapters(plan.model)
    yield "layout", str(plan.layout)
    yield "memory", fit_cell(estimate) if parsed.memory_is_known else _unknown_fit(launch)
    step = seconds(estimate.step_time_s, "estimate.step_time_s", estimate.interval90, "prediction")
    interval = f" ({INTERVAL} {format_interval(estimate.interval90)})" if estimate.interval90 else ""
    yield "step", Line((step, interval, ", MFU ", share(estimate.mfu, "estimate.mfu")))
    yield "bound by", estimate.bound
    for name, effect in parsed.not_priced.items():
        yield "not priced", Status(f"{name} changes {effect}, which is left out", "note")
    for note in (*parsed.notes, *estimate.caveats):
        yield "note", Status(note, "note")
    if len(parsed.unknown) > MAX_UNKNOWN_LINES:
        yield "not understood", Status(f"{len(parsed.unknown)} {_unknown_options(parsed)}", "bad")
        return
    for name in parsed.unknown:
        yield (
            "not understood",
            Status(f"{name} is not an option of {parsed.target.title} {parsed.target.version}", "bad"),
        )


def _unknown_options(parsed: ParsedLaunch) -> str:
    """Return what many unknown options are, in one line."""
    return f"are not options of {parsed.target.title} {parsed.target.version}: {', '.join(parsed.unknown)}"


def _adapters(model: Architecture) -> str:
    """Return the rank, the targets and the trained parameters of low-rank adapters."""
    trained = format_count(num_trained_params(model))
    return f"LoRA of rank {model.lora_rank} on {', '.join(model.lora_targets)}: {trained} trained parameters, all others frozen"


def _unknown_fit(launch: PricedLaunch) -> Cell | Line:
    """Return the memory without a verdict, and the options because of which there is none."""
    names = ", ".join(name for name, effect in launch.parsed.not_priced.items() if effect == "memory")
    estimate = launch.plan.estimate
    return Line((
        num_bytes(estimate.memory_bytes, "estimate.memory_bytes"), " of ",
        num_bytes(estimate.memory_capacity_bytes, "estimate.memory_capacity_bytes"),
        f" without what {names} changes: whether it fits is not known",
    ))  # fmt: skip


def _changes(launch: PricedLaunch) -> Section:
    """Return each change as options with their values, the step and the memory with them."""
    before = launch.plan.estimate
    if not launch.parsed.target.is_written:
        return Section(
            [f"launches of {launch.parsed.target.title} are not written, so that no changes of its options are tried"]
        )
    if not launch.better:
        verdict = "is predicted to be faster by a hundredth or more" if before.fits else "fits"
        return Section([f"no layout that was tried {verdict}: the search's choice, and changes of one choice"])
    rows: list[Row] = []
    for index, change in enumerate(launch.better):
        options = ", ".join(_option_text(name, value) for name, value in change.options.items())
        after = change.estimate
        gain = f"{after.step_time_s / before.step_time_s - 1:+.1%}" if before.fits else ""
        rows.append((
            seconds(after.step_time_s, f"better.{index}.step_time_s"), gain,
            num_bytes(after.memory_bytes, f"better.{index}.memory_bytes"), options,
        ))  # fmt: skip
    table = Table(rows=tuple(rows), right=(0, 1, 2), head=False, indent=2)
    return Section([table], title="faster, by prediction" if before.fits else "what fits")


def _option_text(name: str, value: object) -> str:
    """Return an option with its value; True is one without a value, None one that is left out."""
    if value is True or value is None:
        return name if value else f"without {name}"
    return f"{name}={','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"


def convert_report(converted: ConvertedModel) -> Report:
    """Report what was converted, from what to what, and what begins with it."""
    model = converted.architecture
    written = (
        f" parameters) of {converted.source}, in {converted.dtype}: {converted.format.title} in {converted.folder}"
    )
    lines: list[Block] = [
        Line((f"{model.name} (", _num_params(model), written)),
        f"begin with it: {converted.begin}",
    ]
    if not converted.has_checksums:
        lines.append("not verified: safetensors has no checksums, so a damaged weight of the source is not seen")
    return [Section(lines)]


def _num_params(model: Architecture) -> Number:
    total = num_params(model)
    return Number(format_count(total), total, "", "model.num_params")
