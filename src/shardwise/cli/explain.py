"""`shardwise explain`: why this plan, and why not another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import parse_layout_text

if TYPE_CHECKING:
    from shardwise.cost.recorded import Input
    from shardwise.planning.explain.against import Against, Difference
    from shardwise.planning.explain.report import Explanation
    from shardwise.planning.explain.story import Share
    from shardwise.planning.explain.terms import Term

EPILOG = """examples:
  shardwise explain plan.json
  shardwise explain plan.json --against "tp=8 pp=8 fsdp=8"
  shardwise explain plan.json --term memory.activations"""


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "explain", help="say why a plan is what it is, and how another layout compares",
        description="Say why a plan is what it is: does it fit, does it reach the batch, what bounds its throughput.",
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("plan", metavar="FILE", help="a plan that `plan --out` wrote")
    parser.add_argument("--against", type=str, metavar="TEXT", help='another layout, such as "tp=8 pp=4 fsdp=16"')
    parser.add_argument("--term", metavar="NAME", help="one term only, such as memory.activations or time.tp")
    parser.add_argument("--json", action="store_true", help="print the payload as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The explanation, as text or as JSON."""
    from shardwise.planning.codec import load_plan
    from shardwise.planning.explain import explain
    from shardwise.planning.explain.payload import explanation_payload
    from shardwise.search.plan import nearest_fitting

    plan = load_plan(arguments.plan)
    against = arguments.against
    other = None if against is None else parse_layout_text(against, plan.model, plan.job, "--against")
    found = explain(
        plan, lambda layout: nearest_fitting(plan.model, plan.cluster, plan.job, layout, arguments.progress),
        other=other, term_name=arguments.term,
    )  # fmt: skip
    return json.dumps(explanation_payload(found, plan), indent=2) if arguments.json else report(found)


def report(found: Explanation) -> str:
    """The story as text; of one term only, where one was asked for."""
    if found.terms:
        return "\n\n".join("\n".join(_term(one)) for one in found.terms)
    head = [f"{found.model} on {found.cluster}: {found.layout}", *(f"  note: {note}" for note in found.notes)]
    sections = [
        head,
        _fit(found),
        _batch(found),
        _throughput(found),
        _runners_up(found),
        _run(found),
        _constants(found),
    ]
    sections += [_against(found.against, found.placement) if found.against else ()]
    return "\n\n".join("\n".join(lines) for lines in map(tuple, sections) if lines)


def _fit(found: Explanation) -> Iterator[str]:
    from shardwise.planning.explain.options import FIT, LEGAL
    from shardwise.units import format_bytes

    fit = found.fit
    verdict = f"yes, {fit.margin:.0%} free" if fit.fits else f"NO, {-fit.margin:.0%} too much"
    yield (
        f"1. does it fit? {verdict}: {format_bytes(fit.memory_bytes)} of {format_bytes(fit.memory_capacity_bytes)} "
        "on the fullest device"
    )
    yield (
        f"   weights, gradients and optimizer are {format_bytes(fit.state_bytes)}: {fit.devices_for_state:,} devices hold as "
        f"much, there are {fit.num_devices:,}"
    )
    yield f"   how: {fit.held}"
    yield f"   {fit.regime}: {fit.because}"
    yield f"   binding constraint: {fit.binding}"
    if fit.smallest_change:
        yield f"   smallest change that fits: {fit.smallest_change}"
    yield from _tree(fit.memory, bytes_=True)
    yield from _options(found, (LEGAL, FIT), "what does not get past this step")


def _batch(found: Explanation) -> Iterator[str]:
    from shardwise.planning.explain.options import BATCH

    batch = found.batch
    yield f"2. does it reach the batch? {batch.global_batch_tokens:,} tokens are {batch.num_seqs:,} sequences"
    yield (
        f"   {batch.num_replicas:,} replicas, at most {batch.seqs_per_replica:,} sequences each: "
        f"{batch.num_micro_batches:,} micro-batches of {batch.micro_batch_seqs:,}"
    )
    yield f"   {batch.because}; at most {batch.most_replicas:,} replicas have work"
    for name, value in batch.waste.items():
        plain = name == "nearest_full_batch_tokens"
        yield f"   a batch without waste: {value:,.0f} tokens" if plain else f"   waste by uneven {name}: {value:.1%}"
    yield from _options(found, (BATCH,), "what does not get past this step")


def _throughput(found: Explanation) -> Iterator[str]:
    from shardwise.cli.interval import step_text
    from shardwise.cli.report import overlap_text
    from shardwise.planning.explain.options import THROUGHPUT
    from shardwise.units import format_seconds

    step = found.throughput
    yield (
        f"3. what bounds throughput? {step.bound}: a step of {step_text(step.step_time_s, step.interval90)}, "
        f"{step.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {step.mfu:.1%}, HFU {step.hfu:.1%}"
    )
    yield from _tree(step.time, bytes_=False)
    hidden = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in step.hidden.items())
    yield f"   hidden behind compute: {hidden or 'nothing'} ({overlap_text(step.overlap, step.exposed)})"
    yield from _options(found, (THROUGHPUT,), "what gets this far, against the plan")
    yield from _schedules(found)


def _schedules(found: Explanation) -> Iterator[str]:
    """The same degrees under every schedule, for a plan with a pipeline."""
    from shardwise.units import format_bytes, format_seconds

    if found.schedules:
        yield "   the same degrees under each schedule: step, of which bubble, memory"
    for one in found.schedules:
        name = one.schedule + (f", {one.num_virtual_stages} virtual stages" if one.num_virtual_stages > 1 else "")
        if one.step_time_s is None or one.bubble_s is None or one.memory_bytes is None:
            yield f"     {name:<31}cannot run: {one.verdict}"
        else:
            yield (
                f"     {name:<31}{format_seconds(one.step_time_s):>8} {format_seconds(one.bubble_s):>8} "
                f"{format_bytes(one.memory_bytes):>8}  {one.verdict}"
            )


def _options(found: Explanation, steps: tuple[int, ...], title: str) -> Iterator[str]:
    """The options that end at one of the steps."""
    from shardwise.units import format_seconds

    ending = [one for one in found.options if one.step in steps]
    if ending:
        yield f"   {title}"
    for one in ending:
        seconds = "" if one.step_time_s is None else f"{format_seconds(one.step_time_s)}, "
        yield f"     {one.what}: {seconds}{one.verdict}"
        yield f"       {one.layout}"


def _run(found: Explanation) -> Iterator[str]:
    from shardwise.cli.run_report import run_lines

    if found.run:
        yield "what the whole run takes"
        yield from (f"   {line}" for line in run_lines(found.run))
        for one in found.run.inputs:
            yield f"     {one.name:<34}{one.value:>14,.6g} {one.unit:<11} {one.source}"


def _tree(shares: Iterable[Share], *, bytes_: bool) -> Iterator[str]:
    from shardwise.units import format_bytes, format_seconds

    form = format_bytes if bytes_ else format_seconds
    for one in shares:
        yield f"   {one.term:<12}{form(one.value):>10}  {one.share:6.1%}  {one.formula}"


def _runners_up(found: Explanation) -> Iterator[str]:
    from shardwise.units import format_seconds

    for number, other in enumerate(found.runners_up):
        if not number:
            yield "runners-up, and why each lost"
        yield f"   {format_seconds(other.step_time_s):>8}  {other.layout}"
        yield f"             {other.reason}"
        yield f"             {other.verdict}"


def _constants(found: Explanation) -> Iterator[str]:
    from shardwise.units import format_seconds

    yield "which constant moves the answer most? each made a tenth worse"
    for one in found.constants:
        overtaken = f"; {one.overtaken_by} would be faster" if one.overtaken_by else ""
        outcome = "" if one.fits else "; the plan does not fit"
        means = f"   {one.value:<9.4g} {one.meaning}" if one.meaning else ""
        yield f"   {one.name:<26}{one.change:+7.2%}  {format_seconds(one.step_time_s):>8}{means}{outcome}{overtaken}"
    for source in dict.fromkeys(one.source for one in found.constants if one.source):
        yield f"   source of the constants with a value: {source}"


def _against(other: Against, placement: str) -> Iterator[str]:
    from shardwise.units import format_bytes, format_seconds

    yield f"against {other.layout}"
    yield f"   {other.verdict}: {format_seconds(other.estimate.step_time_s)}, {format_bytes(other.estimate.memory_bytes)}"
    if other.smallest_change:
        yield f"   smallest change that fits: {other.smallest_change}"
    yield f"   placement {other.placement}; the plan's is {placement}"
    yield from _differences("time", other.time, bytes_=False)
    yield from _differences("memory", other.memory, bytes_=True)


def _differences(tree: str, terms: Mapping[str, Difference], *, bytes_: bool) -> Iterator[str]:
    from shardwise.units import format_bytes, format_seconds

    form = format_bytes if bytes_ else format_seconds
    yield f"   {tree:<13}{'plan':>10}{'other':>11}{'other - plan':>15}"
    for name, one in terms.items():
        sign = "+" if one.change > 0 else "-" if one.change < 0 else " "
        yield f"     {name:<11}{form(one.plan):>10} {form(one.other):>10}{sign + form(abs(one.change)):>15}"


def _term(one: Term) -> Iterator[str]:
    from shardwise.units import format_bytes, format_seconds

    form = format_bytes if one.unit == "B" else format_seconds
    hidden = f"; {format_seconds(one.hidden_s)} more are hidden behind compute" if one.hidden_s else ""
    yield f"{one.name} of {one.layout}"
    yield f"   {form(one.value)}, {one.share:.1%} of the whole{hidden}"
    yield f"   {one.words}: {one.formula}"
    yield f"   source: {one.source}"
    if one.derived:
        yield "   read off the derivation"
    for read in one.derived:
        yield f"     {read.what}: {read.value:,.0f}"
        yield f"       = {read.expression}"
    yield "   inputs"
    for given in one.inputs:
        if given.value:
            yield f"     {given.symbol:<18} {_number(given):>{max(31 - max(18, len(given.symbol)), 1)}}  {given.meaning}"


def _number(given: Input) -> str:
    from shardwise.units import format_quantity, format_seconds

    if not given.unit:
        return f"{given.value:,g}"
    return format_seconds(given.value) if given.unit == "s" else format_quantity(given.value, given.unit)
