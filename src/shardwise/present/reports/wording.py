"""Sentences that reports share: intervals, a layout in words, a whole run, the summary of a plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.hardware import LOCAL, LOCAL_NOTE, Chip
from shardwise.layout import Layout, layout_degrees, num_micro_batches
from shardwise.model import DEFAULT_OPTIMIZER, Architecture, Job, num_params
from shardwise.model.job import usual_whole_batch
from shardwise.present.rendering.numbers import count, ends, seconds, share, usd
from shardwise.present.rendering.report import Cell, Line, Number, Row, Section, Status, Table, Tone, facts_table
from shardwise.price import Estimate, Limits, Run
from shardwise.price.device_memory import MemoryVerdict, describe_margin
from shardwise.search import Plan, PublishedComparison, PublishedLayout, advise_batch, describe_lead, describe_runs
from shardwise.values import (
    COMMUNICATION_TERMS,
    SECONDS_PER_DAY,
    format_bytes,
    format_count,
    format_days,
    format_energy,
    format_seconds,
    format_usd,
    pluralize,
)

if TYPE_CHECKING:
    from shardwise.search.explain.playbook_steps import StepThroughput

INTERVAL = "90% prediction interval"
# Answers to "does it fit?", with their tone.
FIT_ANSWERS: Mapping[MemoryVerdict, tuple[str, Tone]] = {
    "fits": ("yes", "good"), "tight": ("TIGHT", "note"), "does not fit": ("NO", "bad"),
}  # fmt: skip
MAX_NAMED_TENSORS = 3  # of a kernel or an instruction


def format_step(step_time_s: float, interval90: tuple[float, float] | None) -> str:
    """Return a step's time, with its interval where it is a prediction."""
    interval = f" ({INTERVAL} {format_interval(interval90)})" if interval90 else ""
    return format_seconds(step_time_s) + interval


def format_interval(interval90: tuple[float, float]) -> str:
    """Return the ends of an interval of seconds."""
    return " to ".join(map(format_seconds, interval90))


def format_rate_interval(rate: float, estimate: Estimate, form: Callable[[float], str]) -> str:
    """Return the ends of the interval of a rate, which is the higher the shorter the step: "" for a bound."""
    if estimate.interval90 is None:
        return ""
    return " to ".join(form(rate * estimate.step_time_s / seconds) for seconds in reversed(estimate.interval90))


# By ZeRO stage. Names of Megatron-LM and of PyTorch's FSDP2, whose weights stay gathered or not after a forward pass.
SHARDED = {
    0: "gradients all-reduced",
    1: "distributed optimizer (ZeRO-1)",
    2: "FSDP, weights gathered once per step (ZeRO-2)",
    3: "FSDP, weights gathered for each pass (ZeRO-3)",
}


def layout_words(layout: Layout) -> str:
    """Return the degrees that are above 1, the data parallelism with what of it is sharded, and what is recomputed.

    >>> layout_words(Layout.parse("tp=8 pp=4 fsdp=16 zero_stage=1 num_virtual_stages=5"))
    'TP 8 with sequence parallelism, PP 4 (interleaved, VPP 5), DP 16, distributed optimizer (ZeRO-1), no recomputation'
    """
    return ", ".join(_layout_parts(layout))


def _layout_parts(layout: Layout) -> Iterator[str]:
    if layout.tp > 1:
        variants = " with sequence parallelism" * layout.sequence_parallel + ", overlapped" * layout.async_tp
        yield f"TP {layout.tp}{variants}"
    if layout.cp > 1:
        yield f"CP {layout.cp}"
    if layout.pp > 1:
        virtual = f", VPP {layout.num_virtual_stages}" if layout.num_virtual_stages > 1 else ""
        yield f"PP {layout.pp} ({layout.schedule}{virtual})"
    if layout.ep > 1:
        yield f"EP {layout.ep}" + (f" with ETP {layout.expert_tp}" if layout.expert_tp > 1 else "")
    copies = f" ({layout.dp} replicas of {layout.fsdp} shards)" if layout.dp > 1 and layout.fsdp > 1 else ""
    yield f"DP {layout.num_replicas}{copies}"
    if layout.num_replicas > 1 or layout.zero_stage:
        yield SHARDED[layout.zero_stage]
    layers = f" of {layout.recompute_layers} layers of each stage" if layout.recompute_layers is not None else ""
    yield "no recomputation" if layout.recompute == "none" else f"recompute {layout.recompute}{layers}"


def tensor_names(names: Sequence[str]) -> str:
    """Return the first names of tensors, and how many more there are."""
    more = len(names) - MAX_NAMED_TENSORS
    return ", ".join(names[:MAX_NAMED_TENSORS]) + (f" and {more} more" if more > 0 else "")


def run_line(run: Run, path: str) -> Line:
    """Return the run in one line: tokens, days with interruptions, chip-hours, dollars; `path` is the run's in the payload."""
    days = Number(format_days(run.days), run.days, "days", f"{path}.days", run.days_interval90)
    hours = Number(format_count(run.chip_hours), run.chip_hours, "h", f"{path}.chip_hours", run.chip_hours_interval90)
    parts: list[Cell] = [
        Number(format_count(run.tokens), run.tokens, "tokens", f"{path}.tokens"), " tokens in ",
        *ends(days, format_days).parts, ", ", hours, " chip-hours",
    ]  # fmt: skip
    if run.usd is not None:
        parts += [", ", *ends(usd(run.usd, f"{path}.usd", run.usd_interval90), format_usd).parts]
    return Line((*parts, *(["; in parentheses the 90% intervals"] if run.days_interval90 else [])))


def run_lines(run: Run) -> Iterator[str]:
    """Yield the run: days, what interruptions take of them, chip-hours, dollars, energy."""
    days = f"{run.days:.1f}" if run.ideal_days >= 1 else format_days(run.days)
    yield (
        f"{format_count(run.tokens)} tokens are {pluralize(run.num_steps, 'step')}: {format_days(run.ideal_days)} without "
        f"interruptions, {days} with them{interval_remark(run.days_interval90, format_days)}"
    )
    yield _goodput(run)
    if run.mtbf_s is not None and run.checkpoint_interval_s is not None:
        yield (
            f"an interruption each {format_seconds(run.mtbf_s)}, {run.num_interruptions:,.1f} in all; "
            f"a checkpoint of {format_bytes(run.checkpoint_bytes)} each {format_seconds(run.checkpoint_interval_s)}, "
            f"written in {format_seconds(run.checkpoint_s)}"
        )
    yield f"{format_count(run.chip_hours)} chip-hours, {_dollars(run)}"
    yield from _phases(run)
    yield _energy(run)


def _phases(run: Run) -> Iterator[str]:
    """Yield the phases of a run whose batch changes, with the mean of their steps."""
    if run.phases:
        mean_s = run.ideal_days * SECONDS_PER_DAY / sum(phase.num_steps for phase in run.phases)
        yield f"a mean step of {format_seconds(mean_s)}, {format_count(run.tokens / run.num_steps)} tokens; by batch:"
    for phase in run.phases:
        dollars = "" if phase.usd is None else f", {format_usd(phase.usd)}"
        yield (
            f"  {phase.batch_tokens:,} tokens: {pluralize(math.ceil(phase.num_steps), 'step')} of "
            f"{format_seconds(phase.step_time_s)}, {format_days(phase.days)}{dollars}"
        )


def spare_lines(limits: Limits, run: Run | None) -> Iterator[str]:
    """Yield what a run that meets its limits leaves of them."""
    if run is not None and limits.deadline_s is not None:
        deadline = limits.deadline_s / SECONDS_PER_DAY
        at_worst = _missed_at_worst(run.days_interval90, deadline, format_days)
        yield f"meets the deadline of {format_days(deadline)} with {format_days(deadline - run.days)} to spare{at_worst}"
    if run is not None and run.usd is not None and limits.budget_usd is not None:
        at_worst = _missed_at_worst(run.usd_interval90, limits.budget_usd, format_usd)
        spare = format_usd(limits.budget_usd - run.usd)
        yield f"within the budget of {format_usd(limits.budget_usd)} with {spare} to spare{at_worst}"


def _missed_at_worst(interval: tuple[float, float] | None, limit: float, form: Callable[[float], str]) -> str:
    """Return that the upper end of an interval misses a limit which the prediction meets; "" where it does not."""
    return (
        f"; the upper end of its 90% interval, {form(interval[1])}, misses it"
        if interval and interval[1] > limit
        else ""
    )


def price_year_notes(chips: Iterable[Chip]) -> Iterator[str]:
    """Yield that prices of different years are compared, with each chip's date, or that a price has no date."""
    dates = {chip.name: chip.price_date for chip in chips if chip.price_usd_per_hour is not None}
    if len({date[:4] if date else None for date in dates.values()}) > 1:
        listed = ", ".join(f"{name} {date or 'without a date'}" for name, date in dates.items())
        yield f"the prices are of different years ({listed}): dollars do not compare as chip-hours and days do"


def _goodput(run: Run) -> str:
    lost = ", ".join(f"{share:.2%} to {cause}" for cause, share in run.lost.items())
    return f"goodput {run.goodput:.1%} (lost: {lost})"


def _dollars(run: Run) -> str:
    if run.usd is None:
        return "dollars left out: no sourced price_usd_per_hour (--set chip.price_usd_per_hour=VALUE)"
    price = _input_value(run, "price_usd_per_hour")
    date = f" ({run.price_date})" if run.price_date else ""
    return f"{format_usd(run.usd)}{interval_remark(run.usd_interval90, format_usd)} at ${price:.2f} a chip-hour{date}"


def _energy(run: Run) -> str:
    if run.energy_mwh is None:
        return "energy left out: no sourced power_w (--set chip.power_w=VALUE)"
    energy = format_energy(run.energy_mwh) + interval_remark(run.energy_mwh_interval90, format_energy)
    return f"{energy} (chips of {_input_value(run, 'power_w'):,.0f} W, PUE {run.reliability.pue:g})"


def interval_remark(interval: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    """Return the ends of an interval as a remark behind its number; "" for a lower bound."""
    return "" if interval is None else f" (90%: {form(interval[0])} to {form(interval[1])})"


def _input_value(run: Run, name: str) -> float:
    return next((value.value for value in run.inputs if value.name == name), 0.0)


def default_batch_text(job: Job, architecture: Architecture) -> str:
    """Return what stands behind a batch that a user left out; a multiple of the usual one is said to be that."""
    usual = usual_whole_batch(architecture, job.seq_len)
    multiple = job.global_batch_tokens // usual
    if multiple <= 1:
        return " (default: usual for a model of this size)"
    return f" (default: {multiple} times {usual:,}, usual for a model of this size, to fill the layout)"


def job_text(job: Job, architecture: Architecture, defaults: Collection[str]) -> str:
    """Return batch and sequence of a job; those that a user left out are said to be defaults."""
    batch = default_batch_text(job, architecture) if "batch_tokens" in defaults else ""
    seq_len = " (default)" if "seq_len" in defaults else ""
    return f"{job.global_batch_tokens:,} tokens per batch{batch}, sequences of {job.seq_len:,}{seq_len}"


def plan_summary(plan: Plan, smallest_change: str | None = None, path: str = "") -> Section:
    """Return the job, and a line for each thing that a reader decides by.

    `smallest_change` makes a layout fit that does not. `path` is the plan's in the payload, with a dot behind it.
    """
    job = plan.job
    head = (
        f"{plan.model.name} ({format_count(num_params(plan.model))} parameters) on {plan.cluster.name} "
        f"({pluralize(plan.cluster.num_devices, 'device')}), {job_text(job, plan.model, plan.defaults)}, "
        f"precision {job.precision}"
        + (f", updated by {job.optimizer}" if job.optimizer != DEFAULT_OPTIMIZER else "")
        + ("; the layout is the one that `plan` chooses" if "layout" in plan.defaults else "")
    )
    return Section([facts_table([*_summary_rows(plan, smallest_change, path), *notes(plan)])], title=head)


def _summary_rows(plan: Plan, smallest_change: str | None, path: str) -> Iterator[tuple[str, Cell]]:
    layout, estimate = plan.layout, plan.estimate
    micro_batches = pluralize(num_micro_batches(plan.job, layout_degrees(layout)), "micro-batch")
    yield "layout", str(replace(layout, placement=None))
    yield "", layout_words(layout)
    yield (
        "batch",
        (
            f"{pluralize(layout.num_replicas, 'replica')}, "
            f"{micro_batches} of {pluralize(layout.micro_batch_seqs, 'sequence')} each"
        ),
    )
    yield "memory", fit_cell(estimate)
    if smallest_change:
        yield "", f"smallest change that fits: {smallest_change}"
    yield "step", _step_line(plan, path)
    yield "", Line(throughput_parts(estimate, f"{path}estimate"))
    overlap = overlap_text(plan.job.overlap_convention, plan.exposed_share)
    yield (
        "bound by",
        Line(
            (
                f"{estimate.bound} (", share(estimate.bound_share, digits=0),
                f" of the step); {overlap}{_format_exposed(estimate)}",
            )
        ),
    )  # fmt: skip
    if plan.run:
        yield "run", run_line(plan.run, f"{path}run")
    if plan.published:
        yield "published", _published_line(plan, plan.published, path)


def _published_line(plan: Plan, published: PublishedComparison, path: str) -> Line:
    """Return the published runs near a plan, what it does unlike all of them, and the step of the nearest layout."""
    for index, layout in enumerate(published.layouts):
        if layout.step_time_s is not None and layout.lead is not None:
            step = seconds(layout.step_time_s, f"{path}published.layouts.{index}.step_time_s")
            fit_text = "" if layout.fits else ", and does not fit"
            nearest = f"; the nearest, {layout.layout_text}, would take "
            return Line(
                (published_text(plan, published), nearest, step, f" here, {describe_lead(layout.lead)}{fit_text}")
            )
    return Line((published_text(plan, published),))


def published_text(plan: Plan, published: PublishedComparison) -> str:
    """Return which published runs a plan is compared with, and what it does unlike all of them."""
    text = describe_runs(published, plan.model.name, plan.cluster.chip.name)
    return f"{text}; unlike all of them the plan has {', '.join(published.unlike)}" if published.unlike else text


def published_table(published: PublishedComparison, path: str) -> Table:
    """Return each published layout as priced for the plan's job: step, layout, difference, and what was measured of it."""
    rows: list[Row] = []
    for index, layout in enumerate(published.layouts):
        step: Cell = "refused"
        if layout.step_time_s is not None:
            step = seconds(layout.step_time_s, f"{path}published.layouts.{index}.step_time_s")
        rows += [(step, layout.layout_text), ("", layout.problem or layout.difference)]
        rows += [("", f"not of the plan's stack: {layout.lacks}")] if layout.lacks else []
        rows.append(("", Line(tuple(_measured_parts(layout, f"{path}published.layouts.{index}")))))
    return Table(rows=tuple(rows), right=(0,), head=False, indent=2)


def _measured_parts(layout: PublishedLayout, path: str) -> Iterator[Cell]:
    """Yield what was measured of a published layout's nearest run, and how many runs have the layout."""
    run = layout.run
    yield f"{pluralize(layout.num_runs, 'run')}; the nearest, {run.id}, measured "
    yield count(run.tokens_per_s_per_device, f"{path}.run.tokens_per_s_per_device", "tokens/s")
    if layout.best_tokens_per_s_per_device > run.tokens_per_s_per_device:
        yield " (the fastest "
        yield count(layout.best_tokens_per_s_per_device, f"{path}.best_tokens_per_s_per_device", "tokens/s")
        yield ")"
    yield (
        f" tokens/s per device: {run.model_name} on {run.num_devices:,} {run.chip}, {run.num_seqs:,} sequences of "
        f"{run.seq_len:,}, {run.precision}, {run.software}"
    )


def throughput_parts(estimate: Estimate | StepThroughput, path: str) -> tuple[Cell, ...]:
    """Return tokens/s and MFU, as parts of a line; `path` is the place of both in the payload."""
    rate = count(estimate.tokens_per_s_per_device, f"{path}.tokens_per_s_per_device", "tokens/s")
    return rate, " tokens/s per device, MFU ", share(estimate.mfu, f"{path}.mfu")


def _format_exposed(estimate: Estimate) -> str:
    """Return the seconds of a step that exposed communication and the pipeline's bubble take."""
    exposed, bubble = sum(estimate.time[axis] for axis in COMMUNICATION_TERMS), estimate.time["bubble"]
    exposed_text = f", {format_seconds(exposed)}" if exposed else ""
    return exposed_text + (f"; pipeline bubble {format_seconds(bubble)}" if bubble else "")


def fit_cell(estimate: Estimate) -> Status:
    """Return the bytes of the fullest device, of how many, and whether they fit."""
    usage = f"{format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_capacity_bytes)}"
    if estimate.fits:
        return Status(
            f"{usage} ({describe_margin(estimate.margin, estimate.verdict)})", FIT_ANSWERS[estimate.verdict][1]
        )
    over = estimate.memory_bytes - estimate.memory_capacity_bytes
    return Status(f"{usage} (DOES NOT FIT, {format_bytes(over)} too much)", "bad")


def _step_line(plan: Plan, path: str) -> Line:
    """Return the step as predicted, or a bound on it, named as what they are."""
    calibration, estimate = plan.cluster.calibration, plan.estimate
    if calibration is None:
        step = seconds(estimate.step_time_s, f"{path}estimate.step_time_s", kind="bound")
        return Line((step, ", a lower bound"))
    return Line((*step_parts(estimate, f"{path}estimate"), f" predicted for {calibration.stack}"))


def step_parts(estimate: Estimate | StepThroughput, path: str) -> tuple[Cell, ...]:
    """Return a step's time, with its interval where it is a prediction, as parts of a line."""
    interval = estimate.interval90
    step = seconds(estimate.step_time_s, f"{path}.step_time_s", interval, kind="prediction" if interval else "bound")
    if interval is None:
        return (step,)
    low, high = (seconds(end, f"{path}.interval90.{number}") for number, end in enumerate(interval))
    return step, f" ({INTERVAL} ", low, " to ", high, ")"


def overlap_text(convention: str, exposed: float | None) -> str:
    """Return how much communication is exposed: what a convention says, or the share of an estimate with measured constants."""
    return f"overlap convention {convention}" if exposed is None else f"{exposed:.0%} of communication exposed"


def notes(plan: Plan) -> Iterator[tuple[str, Cell]]:
    """Yield what qualifies the numbers: of the machine, of the estimate, of the batch, of other software."""
    if plan.cluster.chip.name == LOCAL:
        yield "note", f"{LOCAL_NOTE} (show chips cpu), not this machine: for that give your own .toml file"
    for note in plan.estimate.caveats:
        yield "note", Status(note, "note")
    if "sequences" in plan.estimate.waste:
        idle, nearest = plan.estimate.waste["sequences"], plan.estimate.waste["nearest_full_batch_tokens"]
        yield "note", f"{idle:.1%} of the replicas' time is idle: the nearest full batch is {nearest:,.0f} tokens"
    advice = advise_batch(plan)
    if advice:
        yield "note", Status(advice.reason, "note")
    if plan.search and plan.search.elsewhere:
        yield "note", plan.search.elsewhere
