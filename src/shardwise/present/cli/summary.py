"""What a reader of a plan wants to know first: the layout, whether it fits, how long a step takes, what bounds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.hardware import LOCAL, LOCAL_NOTE
from shardwise.layout import layout_degrees, num_micro_batches
from shardwise.model import DEFAULT_OPTIMIZER, num_params
from shardwise.present.cli.interval import step_text
from shardwise.present.cli.layout_words import layout_words
from shardwise.present.cli.run_report import run_text
from shardwise.present.cli.section import Cell, Marked, Section, lines_table
from shardwise.price import Estimate
from shardwise.search import Plan
from shardwise.values import COMMUNICATION_TERMS, format_bytes, format_count, format_seconds, pluralize


def summary(plan: Plan, smallest_change: str | None = None) -> Section:
    """The job, and a line for each thing that a reader decides by. `smallest_change` makes a layout fit that does not."""
    job = plan.job
    head = (
        f"{plan.model.name} ({format_count(num_params(plan.model))} parameters) on {plan.cluster.name} "
        f"({pluralize(plan.cluster.num_devices, 'device')}), {job.global_batch_tokens:,} tokens per batch, "
        f"sequences of {job.seq_len:,}, precision {job.precision}"
        + (f", updated by {job.optimizer}" if job.optimizer != DEFAULT_OPTIMIZER else "")
    )
    return Section([lines_table([*_decided_by(plan, smallest_change), *notes(plan)])], title=head)


def _decided_by(plan: Plan, smallest_change: str | None) -> Iterator[tuple[str, Cell]]:
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
    yield "step", _seconds(plan)
    yield "", f"{estimate.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {estimate.mfu:.1%}"
    overlap = overlap_text(plan.job.overlap_convention, plan.exposed_share)
    yield "bound by", f"{estimate.bound} ({estimate.bound_share:.0%} of the step); {overlap}{_lost_s(estimate)}"
    if plan.run:
        yield "run", run_text(plan.run)


def _lost_s(estimate: Estimate) -> str:
    """Seconds of a step that exposed communication and the pipeline's bubble take."""
    exposed, bubble = sum(estimate.time[axis] for axis in COMMUNICATION_TERMS), estimate.time["bubble"]
    found = f", {format_seconds(exposed)}" if exposed else ""
    return found + (f"; pipeline bubble {format_seconds(bubble)}" if bubble else "")


def fit_cell(estimate: Estimate) -> Marked:
    """Bytes of the fullest device, of how many, and whether they fit."""
    held = f"{format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_capacity_bytes)}"
    if estimate.fits:
        return Marked(f"{held} (fits, {estimate.margin:.0%} free)", "good")
    over = estimate.memory_bytes - estimate.memory_capacity_bytes
    return Marked(f"{held} (DOES NOT FIT, {format_bytes(over)} too much)", "bad")


def _seconds(plan: Plan) -> str:
    """The step as predicted, or a bound on it, named as what they are."""
    calibration, estimate = plan.cluster.calibration, plan.estimate
    if calibration is None:
        return f"{format_seconds(estimate.step_time_s)}, a lower bound"
    return f"{step_text(estimate.step_time_s, estimate.interval90)} predicted for {calibration.stack}"


def overlap_text(convention: str, exposed: float | None) -> str:
    """How much of the communication is exposed: what a convention says, or the share of an estimate with measured constants."""
    return f"overlap convention {convention}" if exposed is None else f"{exposed:.0%} of communication exposed"


def notes(plan: Plan) -> Iterator[tuple[str, Cell]]:
    """What changes how the numbers are to be taken: of the machine, of the estimate, of the batch, of other software."""
    if plan.cluster.chip.name == LOCAL:
        yield "note", f"{LOCAL_NOTE} (show chips cpu), not this machine: for that give your own .toml file"
    for note in plan.estimate.caveats:
        yield "note", Marked(note, "note")
    if "sequences" in plan.estimate.waste:
        idle, nearest = plan.estimate.waste["sequences"], plan.estimate.waste["nearest_full_batch_tokens"]
        yield "note", f"{idle:.1%} of the replicas' time is idle: the nearest full batch is {nearest:,.0f} tokens"
    if plan.search and plan.search.elsewhere:
        yield "note", plan.search.elsewhere
