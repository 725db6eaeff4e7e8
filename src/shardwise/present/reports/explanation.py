"""Why a plan is what it is, as sections: the three steps of the story, and in detail the numbers behind them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwise.present.rendering.report import Block, Report, Row, Section, Status, Table
from shardwise.present.reports.memory import recompute_tables
from shardwise.present.reports.sweep import doublings_table, noise_text
from shardwise.present.reports.wording import format_step, overlap_text, run_lines
from shardwise.price.estimate import caveats as caveats_of
from shardwise.price.term_inputs import TermInput
from shardwise.search import Explanation
from shardwise.search.explain.explanation import LayoutTerm
from shardwise.search.explain.other_layouts import (
    BATCH_STEP,
    FIT_STEP,
    LEGAL_STEP,
    THROUGHPUT_STEP,
    LayoutComparison,
    TermDifference,
)
from shardwise.search.explain.playbook_steps import TermShare
from shardwise.search.verdicts import RESOLUTION
from shardwise.values import format_bytes, format_quantity, format_seconds, pluralize

BEYOND = "rejected at step {}"  # options that end there
MOST_NAMED = 1  # of runners-up and constants, in the short form


def explain_report(found: Explanation) -> Report:
    """The story; of one term only, where one was asked for."""
    if found.terms:
        return [_term(one) for one in found.terms]
    caveats = caveats_of(found.notes)
    head = f"{found.model} on {found.cluster}: {found.layout}"
    step = found.throughput
    sections = [
        Section([Status(f"  note: {note}", "note") for note in caveats], title=head),
        Section(
            [f"  note: {note}" for note in found.notes if note not in caveats], name="what it rests on", detail=True
        ),
        Section(list(_fit(found))),
        Section([_tree(found.fit.memory, bytes_=True)], title="memory by term", detail=True),
        Section(
            list(recompute_tables(found.recompute, "recompute")),
            title="kept for the backward pass, and computed again",
            detail=True,
        ),
        Section(_options(found, (LEGAL_STEP, FIT_STEP)), title=BEYOND.format(1), detail=True),
        Section(list(_batch(found))),
        Section(_options(found, (BATCH_STEP,)), title=BEYOND.format(2), detail=True),
        Section(list(_throughput(found))),
        Section([_tree(step.time, bytes_=False)], title="time by term", detail=True),
        Section(
            _options(found, (THROUGHPUT_STEP,)),
            title="layouts that fit and reach the batch, compared with the plan",
            detail=True,
        ),
        Section(list(_critical_batch(found))),
        Section(_schedules(found), title="the same degrees under each schedule", detail=True),
        Section(_runners_up(found), title="runners-up, and why each lost", name="runners-up"),
        Section(list(_run(found)), title="what the whole run takes", detail=True),
        *_constants(found),
        *([_against(found.against, found.placement)] if found.against else []),
    ]
    return [one for one in sections if one.blocks or one.title == head]


def _fit(found: Explanation) -> Iterator[Block]:
    fit = found.fit
    verdict = f"yes, {fit.margin:.0%} free" if fit.fits else f"NO, {-fit.margin:.0%} too much"
    held = f"{format_bytes(fit.memory_bytes)} of {format_bytes(fit.memory_capacity_bytes)} on the fullest device"
    yield Status(f"1. does it fit? {verdict}: {held}", "good" if fit.fits else "bad")
    yield (
        f"   weights, gradients and optimizer are {format_bytes(fit.state_bytes)}: the memory of "
        f"{pluralize(fit.devices_for_state, 'device')}, and there are {fit.num_devices:,}"
    )
    yield f"   how: {fit.held}"
    yield f"   recomputation: {fit.because}"
    yield f"   binding constraint: {fit.binding}"
    if fit.smallest_change:
        yield f"   smallest change that fits: {fit.smallest_change}"


def _batch(found: Explanation) -> Iterator[str]:
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


def _throughput(found: Explanation) -> Iterator[str]:
    step = found.throughput
    yield (
        f"3. what bounds throughput? {step.bound}: a step of {format_step(step.step_time_s, step.interval90)}, "
        f"{step.tokens_per_s_per_device:,.0f} tokens/s per device, MFU {step.mfu:.1%}, HFU {step.hfu:.1%}"
    )
    hidden = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in step.hidden.items())
    yield f"   hidden behind compute: {hidden or 'nothing'} ({overlap_text(step.overlap, step.exposed)})"


def _tree(shares: Iterable[TermShare], *, bytes_: bool) -> Table:
    form = format_bytes if bytes_ else format_seconds
    rows: tuple[Row, ...] = tuple((one.term, form(one.value), f"{one.share:.1%}", one.formula) for one in shares)
    return Table(rows=rows, right=(1, 2), head=False, indent=2)


def _options(found: Explanation, steps: tuple[int, ...]) -> list[Block]:
    """The options that end at one of the steps, each with its layout."""
    lines: list[Block] = []
    for one in found.options:
        if one.step in steps:
            seconds = "" if one.step_time_s is None else f"{format_seconds(one.step_time_s)}, "
            lines += [f"  {one.what}: {seconds}{one.verdict}", f"    {one.layout}"]
    return lines


def _critical_batch(found: Explanation) -> Iterator[Block]:
    """The side of the critical batch, and what the next doubling gains; of plans with a noise scale."""
    if found.critical_batch is not None:
        one = found.critical_batch
        yield f"4. does the batch pay? {one.because}"
        yield f"   {noise_text(one.target.noise)}"
        of = "the run" if one.target.tokens is not None else "a billion of the fewest tokens"
        yield (
            f"   of {of}: loss time {format_seconds(one.time.loss_s)}; token time, whatever the loss, "
            f"{format_seconds(one.time.token_s)}"
        )
        yield "   the next doubling:"
        yield doublings_table(one.doublings)
        yield from (f"   twice the {each.doubled}: {each.problem}" for each in one.doublings if each.problem)


def _schedules(found: Explanation) -> list[Block]:
    """The same degrees under every schedule, for a plan with a pipeline."""
    rows: list[Row] = [("schedule", "step", "bubble", "memory", "")]
    for one in found.schedules:
        name = one.schedule + (f", {one.num_virtual_stages} virtual stages" if one.num_virtual_stages > 1 else "")
        if one.step_time_s is None or one.bubble_s is None or one.memory_bytes is None:
            rows.append((name, "", "", "", f"cannot run: {one.verdict}"))
        else:
            numbers = format_seconds(one.step_time_s), format_seconds(one.bubble_s), format_bytes(one.memory_bytes)
            rows.append((name, *numbers, one.verdict))
    return [Table(rows=tuple(rows), right=(1, 2, 3), indent=2)] if found.schedules else []


def _runners_up(found: Explanation) -> list[Block]:
    """Each with its reason; in the short form the first, and all whose step predictions do not tell from the plan's."""
    rows: list[Row] = []
    for other in found.runners_up:
        rows += [(format_seconds(other.step_time_s), other.layout), ("", other.reason), ("", other.verdict)]
    limit = found.throughput.step_time_s * (1 + RESOLUTION)
    ties = [number for number, other in enumerate(found.runners_up, 1) if other.step_time_s <= limit]
    brief = 3 * max([MOST_NAMED, *ties])
    return [Table(rows=tuple(rows), right=(0,), head=False, indent=2, brief=brief)] if rows else []


def _run(found: Explanation) -> Iterator[Block]:
    if found.run:
        yield from (f"  {line}" for line in run_lines(found.run))
        rows: tuple[Row, ...] = tuple((one.name, f"{one.value:,.6g}", one.unit, one.source) for one in found.run.inputs)
        yield Table(rows=rows, right=(1,), head=False, indent=4)


def _constants(found: Explanation) -> Iterator[Section]:
    rows: list[Row] = []
    for one in found.constants:
        overtaken = f"{one.overtaken_by} would be faster" if one.overtaken_by else ""
        outcome = "; ".join(filter(None, ("" if one.fits else "the plan does not fit", overtaken)))
        value = f"{one.value:.4g}" if one.meaning else ""
        rows.append((one.name, f"{one.change:+.2%}", format_seconds(one.step_time_s), value, one.meaning, outcome))
    shown = [row if any(row[5] for row in rows) else row[:5] for row in rows]
    yield Section(
        [Table(rows=tuple(shown), right=(1, 2), head=False, indent=2, brief=MOST_NAMED)],
        title="which constant moves the answer most? each made a tenth worse", name="the other constants",
    )  # fmt: skip
    sources = dict.fromkeys(one.source for one in found.constants if one.source)
    yield Section(
        [f"  source of the constants with a value: {source}" for source in sources], detail=True, name="their source"
    )


def _against(other: LayoutComparison, placement: str) -> Section:
    lines: list[Block] = [
        f"  {other.verdict}: {format_seconds(other.estimate.step_time_s)}, {format_bytes(other.estimate.memory_bytes)}"
    ]
    if other.filled:
        lines.append(f"  not said, and chosen as a search does: {other.filled}")
    if other.smallest_change:
        lines.append(f"  smallest change that fits: {other.smallest_change}")
    lines.append(f"  placement {other.placement}; the plan's is {placement}")
    lines += [_differences("time", other.time, bytes_=False), _differences("memory", other.memory, bytes_=True)]
    return Section(lines, title=f"against {other.layout}")


def _differences(tree: str, terms: Mapping[str, TermDifference], *, bytes_: bool) -> Table:
    form = format_bytes if bytes_ else format_seconds
    rows: list[Row] = [(tree, "plan", "other", "other - plan")]
    for name, one in terms.items():
        sign = "+" if one.change > 0 else "-" if one.change < 0 else ""
        rows.append((name, form(one.plan), form(one.other), sign + form(abs(one.change))))
    return Table(rows=tuple(rows), right=(1, 2, 3), indent=2)


def _term(one: LayoutTerm) -> Section:
    form = format_bytes if one.unit == "B" else format_seconds
    hidden = f"; {format_seconds(one.hidden_s)} more are hidden behind compute" if one.hidden_s else ""
    lines: list[Block] = [
        f"  {form(one.value)}, {one.share:.1%} of the whole{hidden}",
        f"  {one.words}: {one.formula}",
        f"  source: {one.source}",
    ]
    lines += ["  read off the derivation"] if one.derived else []
    for read in one.derived:
        lines += [f"    {read.what}: {read.value:,.0f}", f"      = {read.expression}"]
    rows: tuple[Row, ...] = tuple((given.symbol, _number(given), given.meaning) for given in one.inputs if given.value)
    lines += ["  inputs", Table(rows=rows, right=(1,), head=False, indent=4)]
    return Section(lines, title=f"{one.name} of {one.layout}")


def _number(given: TermInput) -> str:
    if not given.unit:
        return f"{given.value:,g}"
    return format_seconds(given.value) if given.unit == "s" else format_quantity(given.value, given.unit)
