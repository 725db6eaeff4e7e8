"""Why a simulated step and its estimate differ, in words. The estimate is the step time that plans and reports print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwise.price.estimate import Estimate
from shardwise.price.simulation.simulated_step import SimulatedStep
from shardwise.price.simulation.stage_passes import LIST
from shardwise.values import COMMUNICATION_TERMS, format_seconds

SAME_SHARE = 0.005  # of the estimate: steps that differ by less are the same; a choice
NAMED_SHARE = 0.1  # of the largest change: terms that change by less are not named; a choice
KERNEL_TERMS = ("forward", "backward", "recompute", "optimizer")


def describe_difference(step: SimulatedStep, time: Mapping[str, float], estimate: Estimate) -> str:
    """Return by how much a simulated step is longer or shorter than its estimate, in which terms, and why.

    `time`: seconds of the simulated step by term. "" where they are the same within half a percent.
    """
    change_s = step.step_time_s - estimate.step_time_s
    if abs(change_s) < SAME_SHARE * estimate.step_time_s:
        return ""
    changes = {
        term: time.get(term, 0.0) - estimate.time.get(term, 0.0) for term in dict.fromkeys((*time, *estimate.time))
    }
    largest_s = max(map(abs, changes.values()))
    named = sorted(
        (term for term, seconds in changes.items() if abs(seconds) >= NAMED_SHARE * largest_s),
        key=lambda term: -abs(changes[term]),
    )
    terms = ", ".join(
        f"{_term_name(term)} {'+' if changes[term] > 0 else '−'}{format_seconds(abs(changes[term]))}" for term in named
    )
    side = "longer" if change_s > 0 else "shorter"
    share = abs(change_s) / estimate.step_time_s
    return f"the simulated step is {share:.1%} {side} than the estimate ({terms}): {'; '.join(_reasons(step, estimate, named))}"


def _term_name(term: str) -> str:
    return f"exposed {term}" if term in (*COMMUNICATION_TERMS, "control", "host") else term


def _reasons(step: SimulatedStep, estimate: Estimate, terms: list[str]) -> Iterator[str]:
    """Yield a reason for each kind of term that differs."""
    kinds = {"kernels" if term in KERNEL_TERMS else "bubble" if term == "bubble" else "transfers" for term in terms}
    if "transfers" in kinds:
        waits = "where the instruction list does" if step.overlap == LIST else f"by the convention {step.overlap}"
        yield f"the simulation waits for transfers {waits}, the estimate exposes {_exposed(step, estimate)}"
    if "bubble" in kinds:
        yield "the simulation plays every pass of each stage, the estimate takes stages and messages as alike"
    if "kernels" in kinds and step.contention > 1.0:
        yield f"kernels take {step.contention:g} times as long beside transfers"
    elif "kernels" in kinds:
        yield "the simulation's kernels are those of the rank that waits least, the estimate's those of the slowest stage"


def _exposed(step: SimulatedStep, estimate: Estimate) -> str:
    pricing = step.pricing
    if pricing.cluster.calibration is None:
        return f"what the convention {pricing.job.overlap_convention} does"
    return f"{estimate.exposed_share:.0%} of communication, by the share that runs of the stack expose on average"
