"""A whole run as text for people, in the reports of `plan`, `estimate` and `explain`."""

from __future__ import annotations

import math
from collections.abc import Iterator

from shardwise.price import Limits, Run
from shardwise.values import (
    SECONDS_PER_DAY,
    format_bytes,
    format_count,
    format_days,
    format_seconds,
    format_usd,
    pluralize,
)
from shardwise.values.units import format_energy


def run_text(run: Run) -> str:
    """The run in one line: days with interruptions, chip-hours, dollars."""
    dollars = f", {format_usd(run.usd)}" if run.usd is not None else ""
    return f"{format_count(run.tokens)} tokens in {format_days(run.days)}, {format_count(run.chip_hours)} chip-hours{dollars}"


def run_lines(run: Run) -> Iterator[str]:
    """The run: days, what interruptions take of them, chip-hours, dollars, energy."""
    days = f"{run.days:.1f}" if run.ideal_days >= 1 else format_days(run.days)
    yield (
        f"{format_count(run.tokens)} tokens are {pluralize(run.num_steps, 'step')}: {format_days(run.ideal_days)} without "
        f"interruptions, {days} with them"
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
    """The phases of a run whose batch changes, with the mean of their steps."""
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
    """What a run that meets its limits leaves of them."""
    if run is not None and limits.deadline_s is not None:
        deadline = limits.deadline_s / SECONDS_PER_DAY
        yield f"meets the deadline of {format_days(deadline)} with {format_days(deadline - run.days)} to spare"
    if run is not None and run.usd is not None and limits.budget_usd is not None:
        yield f"within the budget of {format_usd(limits.budget_usd)} with {format_usd(limits.budget_usd - run.usd)} to spare"


def _goodput(run: Run) -> str:
    lost = ", ".join(f"{share:.2%} to {cause}" for cause, share in run.lost.items())
    return f"goodput {run.goodput:.1%} (lost: {lost})"


def _dollars(run: Run) -> str:
    if run.usd is None:
        return "dollars left out: no sourced price_usd_per_hour (--set chip.price_usd_per_hour=VALUE)"
    price = _given(run, "price_usd_per_hour")
    return f"{format_usd(run.usd)} at ${price:.2f} a chip-hour" + (f" ({run.price_date})" if run.price_date else "")


def _energy(run: Run) -> str:
    if run.energy_mwh is None:
        return "energy left out: no sourced power_w (--set chip.power_w=VALUE)"
    return f"{format_energy(run.energy_mwh)} (chips of {_given(run, 'power_w'):,.0f} W, PUE {run.reliability.pue:g})"


def _given(run: Run, name: str) -> float:
    return next((one.value for one in run.inputs if one.name == name), 0.0)
