"""Report of why a plan is what it is: the three steps of the story, and in detail the numbers behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from shardwise.present.rendering.numbers import count, num_bytes, seconds, share, significant
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Status, Table
from shardwise.present.reports.memory import recompute_tables
from shardwise.present.reports.sweep import doublings_table, noise_text
from shardwise.present.reports.wording import (
    FIT_ANSWERS,
    job_text,
    overlap_text,
    published_table,
    published_text,
    run_lines,
    step_parts,
    throughput_parts,
)
from shardwise.price.device_memory import describe_margin
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

REJECTED = "rejected at step {}"  # title of the options that drop out there
MAX_NAMED = 1  # runners-up and constants in the short form
NumberOf = Callable[[float, str], Number]  # of a value and its place in the payload


def explain_report(explanation: Explanation) -> Report:
    """Report the story; of one term only, where it was asked for."""
    if explanation.terms:
        return [_term(term, f"terms.{index}") for index, term in enumerate(explanation.terms)]
    caveats = caveats_of(explanation.notes)
    head = _head(explanation)
    step = explanation.throughput
    sections = [
        Section([Status(f"  note: {note}", "note") for note in caveats], title=head),
        Section(
            [f"  note: {note}" for note in explanation.notes if note not in caveats],
            name="what it rests on",
            detail=True,
        ),
        Section(list(_fit(explanation))),
        Section([_tree(explanation.fit.memory, num_bytes, "fit.memory")], title="memory by term", detail=True),
        Section(
            list(recompute_tables(explanation.recompute, "recompute")),
            title="kept for the backward pass, and computed again",
            detail=True,
        ),
        Section(_options(explanation, (LEGAL_STEP, FIT_STEP)), title=REJECTED.format(1), detail=True),
        Section(list(_batch(explanation))),
        Section(_options(explanation, (BATCH_STEP,)), title=REJECTED.format(2), detail=True),
        Section(list(_throughput(explanation))),
        Section([_tree(step.time, seconds, "throughput.time")], title="time by term", detail=True),
        Section(
            _options(explanation, (THROUGHPUT_STEP,)),
            title="layouts that fit and reach the batch, compared with the plan",
            detail=True,
        ),
        Section(list(_critical_batch(explanation))),
        Section(_schedules(explanation), title="the same degrees under each schedule", detail=True),
        Section(_runners_up(explanation), title="runners-up, and why each lost", name="runners-up"),
        Section(_published(explanation), title="published runs near this plan, with their layouts priced for its job"),
        Section(list(_run(explanation)), title="what the whole run takes", detail=True),
        *_constants(explanation),
        *([_comparison(explanation.against, explanation.placement)] if explanation.against else []),
    ]
    return [section for section in sections if section.blocks or section.title == head]


def _head(explanation: Explanation) -> str:
    """Return the subject; of a job that was left out what was assumed."""
    plan = explanation.plan
    job = f", {job_text(plan.job, plan.model, plan.defaults)}" if plan.defaults else ""
    return f"{explanation.model} on {explanation.cluster}{job}: {explanation.layout}"


def _fit(explanation: Explanation) -> Iterator[Block]:
    fit = explanation.fit
    answer, mark = FIT_ANSWERS[fit.verdict]
    room = describe_margin(fit.margin, fit.verdict).partition(", ")[2]
    usage = f"{format_bytes(fit.memory_bytes)} of {format_bytes(fit.memory_capacity_bytes)} on the fullest device"
    yield Status(f"1. does it fit? {answer}, {room}: {usage}", mark)
    yield Line(
        (
            "   weights, gradients and optimizer are ", num_bytes(fit.state_bytes, "fit.state_bytes"), ": the memory of ",
            f"{pluralize(fit.devices_for_state, 'device')}, and there are ", count(fit.num_devices, "fit.num_devices"),
        )
    )  # fmt: skip
    yield f"   how: {fit.held}"
    yield f"   recomputation: {fit.because}"
    yield f"   binding constraint: {fit.binding}"
    if fit.smallest_change:
        yield f"   smallest change that fits: {fit.smallest_change}"


def _batch(explanation: Explanation) -> Iterator[Block]:
    batch = explanation.batch
    yield Line(
        (
            "2. does it reach the batch? ", count(batch.global_batch_tokens, "batch.global_batch_tokens"), " tokens are ",
            count(batch.num_seqs, "batch.num_seqs"), " sequences",
        )
    )  # fmt: skip
    yield Line(
        (
            "   ", count(batch.num_replicas, "batch.num_replicas"), " replicas, at most ",
            count(batch.seqs_per_replica, "batch.seqs_per_replica"), " sequences each: ",
            count(batch.num_micro_batches, "batch.num_micro_batches"), " micro-batches of ",
            count(batch.micro_batch_seqs, "batch.micro_batch_seqs"),
        )
    )  # fmt: skip
    yield Line(
        (
            f"   {batch.because}; at most ",
            count(batch.most_replicas, "batch.most_replicas"),
            " replicas have work",
        )
    )
    if explanation.batch_advice:
        yield f"   {explanation.batch_advice.reason}"
    for name, value in batch.waste.items():
        is_batch = name == "nearest_full_batch_tokens"
        yield (
            f"   a batch without waste: {value:,.0f} tokens" if is_batch else f"   waste by uneven {name}: {value:.1%}"
        )


def _throughput(explanation: Explanation) -> Iterator[Block]:
    step = explanation.throughput
    yield Line(
        (
            f"3. what bounds throughput? {step.bound}: a step of ", *step_parts(step, "throughput"), ", ",
            *throughput_parts(step, "throughput"), ", HFU ", share(step.hfu, "throughput.hfu"),
        )
    )  # fmt: skip
    hidden = ", ".join(f"{axis} {format_seconds(value)}" for axis, value in step.hidden.items())
    yield f"   hidden behind compute: {hidden or 'nothing'} ({overlap_text(step.overlap, step.exposed)})"


def _tree(shares: Iterable[TermShare], number: NumberOf, path: str) -> Table:
    rows: tuple[Row, ...] = tuple(
        (
            term.term,
            number(term.value, f"{path}.{index}.value"),
            share(term.share, f"{path}.{index}.share"),
            term.formula,
        )
        for index, term in enumerate(shares)
    )
    return Table(rows=rows, right=(1, 2), head=False, indent=2)


def _options(explanation: Explanation, steps: tuple[int, ...]) -> list[Block]:
    """Return the options that end at one of the steps, each with its layout."""
    lines: list[Block] = []
    for index, option in enumerate(explanation.options):
        if option.step in steps:
            time: tuple[Cell, ...] = ()
            if option.step_time_s is not None:
                time = (seconds(option.step_time_s, f"options.{index}.step_time_s"), ", ")
            lines += [Line((f"  {option.what}: ", *time, option.verdict)), f"    {option.layout}"]
    return lines


def _critical_batch(explanation: Explanation) -> Iterator[Block]:
    """Yield the side of the critical batch, and what the next doubling gains; of plans with a noise scale."""
    critical = explanation.critical_batch
    if critical is not None:
        yield f"4. does the batch pay? {critical.because}"
        yield f"   {noise_text(critical.target.noise)}"
        subject = "the run" if critical.target.tokens is not None else "a billion of the fewest tokens"
        yield Line(
            (
                f"   of {subject}: loss time ", seconds(critical.time.loss_s, "critical_batch.time.loss_s"),
                "; token time, whatever the loss, ", seconds(critical.time.token_s, "critical_batch.time.token_s"),
            )
        )  # fmt: skip
        yield "   the next doubling:"
        yield doublings_table(critical.doublings, "critical_batch.doublings")
        yield from (
            f"   twice the {doubling.doubled}: {doubling.problem}"
            for doubling in critical.doublings
            if doubling.problem
        )


def _schedules(explanation: Explanation) -> list[Block]:
    """Return the same degrees under every schedule, for a plan with a pipeline."""
    rows: list[Row] = [("schedule", "step", "bubble", "memory", "")]
    for index, option in enumerate(explanation.schedules):
        stages = option.num_virtual_stages
        name = option.schedule + (f", {stages} virtual stages" if stages > 1 else "")
        if option.step_time_s is None or option.bubble_s is None or option.memory_bytes is None:
            rows.append((name, "", "", "", f"cannot run: {option.verdict}"))
        else:
            path = f"schedules.{index}"
            step, bubble = (
                seconds(option.step_time_s, f"{path}.step_time_s"),
                seconds(option.bubble_s, f"{path}.bubble_s"),
            )
            rows.append((name, step, bubble, num_bytes(option.memory_bytes, f"{path}.memory_bytes"), option.verdict))
    return [Table(rows=tuple(rows), right=(1, 2, 3), indent=2)] if explanation.schedules else []


def _runners_up(explanation: Explanation) -> list[Block]:
    """Return each with its reason; in the short form the first, and all whose step predictions do not tell from the plan's."""
    rows: list[Row] = []
    for index, runner_up in enumerate(explanation.runners_up):
        step = seconds(runner_up.step_time_s, f"runners_up.{index}.step_time_s")
        rows += [(step, runner_up.layout), ("", runner_up.reason), ("", runner_up.verdict)]
    limit = explanation.throughput.step_time_s * (1 + RESOLUTION)
    ties = [number for number, layout in enumerate(explanation.runners_up, 1) if layout.step_time_s <= limit]
    brief = 3 * max([MAX_NAMED, *ties])
    return [Table(rows=tuple(rows), right=(0,), head=False, indent=2, brief=brief)] if rows else []


def _published(explanation: Explanation) -> list[Block]:
    published = explanation.published
    if published is None:
        return []
    return [f"  {published_text(explanation.plan, published)}", published_table(published, "")]


def _run(explanation: Explanation) -> Iterator[Block]:
    if explanation.run:
        yield from (f"  {line}" for line in run_lines(explanation.run))
        rows: tuple[Row, ...] = tuple(
            (
                value.name, Number(f"{value.value:,.6g}", value.value, value.unit, f"run.inputs.{index}.value"),
                value.unit, value.source,
            )
            for index, value in enumerate(explanation.run.inputs)
        )  # fmt: skip
        yield Table(rows=rows, right=(1,), head=False, indent=4)


def _constants(explanation: Explanation) -> Iterator[Section]:
    rows: list[Row] = []
    for index, constant in enumerate(explanation.constants):
        path = f"constants.{index}"
        overtaken = f"{constant.overtaken_by} would be faster" if constant.overtaken_by else ""
        outcome = "; ".join(filter(None, ("" if constant.fits else "the plan does not fit", overtaken)))
        value = significant(constant.value, f"{path}.value") if constant.meaning else ""
        change = Number(f"{constant.change:+.2%}", constant.change, "%", f"{path}.change")
        step = seconds(constant.step_time_s, f"{path}.step_time_s")
        rows.append((constant.name, change, step, value, constant.meaning, outcome))
    if not any(row[5] for row in rows):
        rows = [row[:5] for row in rows]
    yield Section(
        [Table(rows=tuple(rows), right=(1, 2), head=False, indent=2, brief=MAX_NAMED)],
        title="which constant moves the answer most? each made a tenth worse", name="the other constants",
    )  # fmt: skip
    sources = dict.fromkeys(constant.source for constant in explanation.constants if constant.source)
    yield Section(
        [f"  source of the constants with a value: {source}" for source in sources], detail=True, name="their source"
    )


def _comparison(comparison: LayoutComparison, placement: str) -> Section:
    estimate, path = comparison.estimate, "against.estimate"
    lines: list[Block] = [
        Line(
            (
                f"  {comparison.verdict}: ", seconds(estimate.step_time_s, f"{path}.step_time_s"), ", ",
                num_bytes(estimate.memory_bytes, f"{path}.memory_bytes"),
            )
        )
    ]  # fmt: skip
    if comparison.filled:
        lines.append(f"  not said, and chosen as a search does: {comparison.filled}")
    if comparison.smallest_change:
        lines.append(f"  smallest change that fits: {comparison.smallest_change}")
    lines.append(f"  placement {comparison.placement}; the plan's is {placement}")
    lines += [_differences("time", comparison.time, seconds), _differences("memory", comparison.memory, num_bytes)]
    return Section(lines, title=f"against {comparison.layout}")


def _differences(tree: str, terms: Mapping[str, TermDifference], number: NumberOf) -> Table:
    rows: list[Row] = [(tree, "plan", "other", "other - plan")]
    for name, term in terms.items():
        path = f"against.{tree}.{name}"
        sign = "+" if term.change > 0 else "-" if term.change < 0 else ""
        size = number(abs(term.change), f"{path}.change")
        change = Number(sign + size.text, term.change, size.unit, size.path)
        rows.append((name, number(term.plan, f"{path}.plan"), number(term.other, f"{path}.other"), change))
    return Table(rows=tuple(rows), right=(1, 2, 3), indent=2)


def _term(term: LayoutTerm, path: str) -> Section:
    number = num_bytes if term.unit == "B" else seconds
    hidden: tuple[Cell, ...] = ()
    if term.hidden_s:
        hidden = ("; ", seconds(term.hidden_s, f"{path}.hidden_s"), " more are hidden behind compute")
    value = number(term.value, f"{path}.value")
    lines: list[Block] = [
        Line(("  ", value, ", ", share(term.share, f"{path}.share"), " of the whole", *hidden)),
        f"  {term.words}: {term.formula}",
        f"  source: {term.source}",
    ]
    lines += ["  read off the derivation"] if term.derived else []
    for index, derived in enumerate(term.derived):
        count_path = f"{path}.derived.{index}.value"
        lines += [Line((f"    {derived.what}: ", count(derived.value, count_path))), f"      = {derived.expression}"]
    rows: tuple[Row, ...] = tuple(
        (term_input.symbol, _input_number(term_input, f"{path}.inputs.{index}.value"), term_input.meaning)
        for index, term_input in enumerate(term.inputs)
        if term_input.value
    )
    lines += ["  inputs", Table(rows=rows, right=(1,), head=False, indent=4)]
    return Section(lines, title=f"{term.name} of {term.layout}")


def _input_number(term_input: TermInput, path: str) -> Number:
    if not term_input.unit:
        text = f"{term_input.value:,g}"
    elif term_input.unit == "s":
        text = format_seconds(term_input.value)
    else:
        text = format_quantity(term_input.value, term_input.unit)
    return Number(text, term_input.value, term_input.unit, path)
