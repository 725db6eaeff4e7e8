"""Reports of what is done with a plan: a run of it, one rank alone, small meshes that verify it; and of token shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwise import run, verify
from shardwise.measure.reconcile.reconciliation import LARGEST_REST, REHEARSAL_TOLERANCE, is_judged
from shardwise.measure.reconcile.step_terms import MEMORY_TOLERANCE, TIME_TOLERANCE
from shardwise.present.rendering.numbers import count, num_bytes, seconds, share
from shardwise.present.rendering.report import (
    BAR_STEPS,
    Block,
    Cell,
    Line,
    Number,
    Report,
    Row,
    Section,
    ShareBar,
    Status,
    Table,
    sections_of_text,
)
from shardwise.present.reports.wording import INTERVAL, format_interval
from shardwise.records.run_summary import summary_text
from shardwise.step import count_collectives
from shardwise.values import format_bytes, format_seconds, pluralize

if TYPE_CHECKING:
    from shardwise.measure import Reconciliation, Rehearsal
    from shardwise.measure.reconcile.step_terms import (
        Attribution,
        CollectiveComparison,
        MemoryTerm,
        StepMemory,
        StepTime,
    )
    from shardwise.records.run_summary import RunSummary
    from shardwise.run import TokenizedCorpus
    from shardwise.verify import PlanVerification
    from shardwise.verify.training.plan_verification import MeshVerification

BAR_LEGEND = Table(
    rows=((ShareBar("#"), "predicted and measured", ShareBar("+"), "measured only", ShareBar("-"), "predicted only"),),
    head=False,
    indent=2,
)
MAX_DEPENDENCIES = 5  # that are named of a term; --json has all
MAX_MISCOUNTED = 10
LEAST_HIDDEN = 1e-3  # of a step: less is not worth a word
ROUNDING = 1e-9  # of the total: a smaller difference is only how sums round


def reconcile_report(reconciliation: Reconciliation) -> Report:
    """Report the verdict, the terms of the time, what was issued, and what to mend; in detail the terms of the memory."""
    plan, memory, collectives = reconciliation.plan, reconciliation.memory, reconciliation.collectives
    title = f"{plan.model.name}, {pluralize(plan.layout.num_devices, 'device')}: {plan.layout}, against {reconciliation.path}"
    verdict, *issued = _collective_lines(collectives)
    head: list[Block] = [f"  {remark}" for remark in reconciliation.remarks]
    head.append(f"  ran on {reconciliation.machine}{_steadiness(reconciliation)}")
    head += [_indented(line) for line in _step_verdict(reconciliation)]
    head += [_memory_line(memory), _indented(verdict)]
    sections = [
        Section(head, title=title),
        Section([_time_table(reconciliation.time), BAR_LEGEND], name="time of a step"),
        Section([_memory_table(memory), *_memory_outside_terms(memory)], name="memory of a device", detail=True),
        Section(issued, title="bytes of the collectives, planned and issued", detail=collectives.equal),
        Section([f"  {advice}" for advice in reconciliation.advice], title="to mend the plan's seconds"),
    ]
    return [section for section in sections if section.blocks]


def _indented(line: Line) -> Line:
    return Line(("  ", *line.parts))


def _steadiness(reconciliation: Reconciliation) -> str:
    if reconciliation.noisy or not reconciliation.changes:
        return ""
    return ", steady: " + ", ".join(f"{name} {change:+.0%}" for name, change in reconciliation.changes.items())


def _step_verdict(reconciliation: Reconciliation) -> Iterator[Line]:
    time = reconciliation.time
    yield Line(
        (
            "step ", seconds(time.predicted_s, "time.predicted_s", time.interval90, "prediction"), " predicted, ",
            seconds(time.measured_s, "time.measured_s", kind="measured"),
            f" measured (mean of the middle half of {time.num_steps} steps; 80% of them between ",
            seconds(time.low_s, "time.low_s", kind="measured"), " and ",
            seconds(time.high_s, "time.high_s", kind="measured"), ")",
        )
    )  # fmt: skip
    if time.interval90 is None:
        ratio = time.measured_s / time.predicted_s
        yield Line((f"the prediction is a bound: the step took {ratio:.2f} times as long",))
    else:
        verdict = "within" if time.within else "outside"
        yield Line((f"{verdict} the {INTERVAL}, {format_interval(time.interval90)}",))
    if reconciliation.attribution:
        yield from _attribution(reconciliation.attribution)
    elif not reconciliation.noisy:
        yield Line((f"no attribution: the step is as predicted, within {TIME_TOLERANCE:.0%}",))
    side = "under" if time.rest_share < LARGEST_REST else "above"
    yield Line(
        (
            "unexplained ", seconds(time.rest_s, "time.rest_s"), ", ", share(time.rest_share, "time.rest_share"),
            f" of the step ({side} {LARGEST_REST:.0%})",
        )
    )  # fmt: skip


def _attribution(attribution: Attribution) -> Iterator[Line]:
    times: tuple[Cell, ...] = ("not predicted",)
    if attribution.ratio is not None:
        ratio = Number(f"{attribution.ratio:.2f}", attribution.ratio, "x", "attribution.ratio")
        times = (ratio, " times its prediction")
    part = share(attribution.part, "attribution.part", digits=0)
    yield Line((f"attributed to {attribution.term.name}, ", *times, ", ", part, " of the step's error"))
    if attribution.depends_on:
        yield Line((f"  it depends on {', '.join(attribution.depends_on[:MAX_DEPENDENCIES])}",))


class _TermRow(NamedTuple):
    """A term with its predicted and measured value, and the paths of these, of the share and of the difference."""

    name: str
    predicted: float | None
    measured: float
    paths: tuple[str, str, str, str]
    note: str = ""


def _term_table(title: str, rows: Iterable[_TermRow], total: float, form: Callable[[float], str], unit: str) -> Table:
    """Return a table of the terms that are not empty; shares are of the measured `total`."""
    rows = [row for row in rows if row.predicted or row.measured]
    largest = max(max(row.predicted or 0.0, row.measured) for row in rows)
    cells: list[Row] = [(title, "predicted", "measured", "share", "difference", "", "")]
    for row in rows:
        predicted, measured, part, difference = row.paths
        text = form(row.measured) if row.measured >= 0 else f"-{form(-row.measured)}"
        cells.append(
            (
                f"  {row.name}",
                "" if row.predicted is None else Number(form(row.predicted), row.predicted, unit, predicted),
                Number(text, row.measured, unit, measured, kind="measured"), share(row.measured / total, part),
                _signed(row.measured - (row.predicted or 0.0), total, form, unit, difference), _bar(row, largest), row.note,
            )
        )  # fmt: skip
    return Table(rows=tuple(cells), right=(1, 2, 3, 4))


def _signed(difference: float, total: float, form: Callable[[float], str], unit: str, path: str) -> Number:
    rounded = 0.0 if abs(difference) < ROUNDING * total else difference
    return Number(("+" if rounded >= 0 else "-") + form(abs(rounded)), difference, unit, path)


def _bar(row: _TermRow, largest: float) -> ShareBar:
    predicted, measured = (
        round(BAR_STEPS * max(value or 0.0, 0.0) / largest) for value in (row.predicted, row.measured)
    )
    common, missing = min(predicted, measured), predicted - measured
    return ShareBar("#" * common + "+" * -missing + "-" * missing, row.name)


def _time_table(time: StepTime) -> Table:
    names = ("predicted_s", "measured_s", "share", "difference_s")
    rows = []
    for index, term in enumerate(time.terms):
        first, second, third, fourth = (f"time.terms.{index}.{name}" for name in names)
        is_hidden = term.hidden_s > LEAST_HIDDEN * time.predicted_s
        note = f"{format_seconds(term.hidden_s)} hidden" if is_hidden else ""
        rows.append(_TermRow(term.name, term.predicted_s, term.measured_s, (first, second, third, fourth), note))
    return _term_table("time of a step", rows, time.measured_s, format_seconds, "s")


def _memory_line(memory: StepMemory) -> Line:
    """Return the total, and which terms are not as predicted."""
    total = memory.total
    wrong = [term.name for term in (*memory.terms, total) if term.within is False]
    verdict = (
        f"NOT within {MEMORY_TOLERANCE:.0%}: {', '.join(wrong)}"
        if wrong
        else f"every term within {MEMORY_TOLERANCE:.0%}"
    )
    predicted = num_bytes(total.predicted, "memory.total.predicted")
    measured = num_bytes(total.measured, "memory.total.measured")
    return Line(("  memory ", predicted, " predicted, ", measured, f" measured; {verdict}"))


def _memory_table(memory: StepMemory) -> Table:
    paths = [*(f"memory.terms.{index}" for index in range(len(memory.terms))), "memory.total"]
    rows = [
        _TermRow(
            term.name, term.predicted, term.measured, (f"{path}.predicted", f"{path}.measured", "", ""), _verdict_text(term)
        )
        for path, term in zip(paths, (*memory.terms, memory.total), strict=True)
    ]  # fmt: skip
    return _term_table("memory of a device", rows, memory.total.measured, format_bytes, "B")


def _memory_outside_terms(memory: StepMemory) -> Iterator[Line]:
    if memory.undeclared_bytes:
        undeclared = num_bytes(memory.undeclared_bytes, "memory.undeclared_bytes")
        yield Line(("  workspace has ", undeclared, " of tensors that were made with the engine and that no term has"))
    if memory.runtime:
        runtime = num_bytes(memory.runtime, "memory.runtime")
        yield Line(("  besides tensors the plan has ", runtime, " for context, libraries and fragmentation"))
    if memory.allocated_bytes is not None and memory.reserved_bytes is not None:
        yield Line(
            (
                "  the device's allocator gave ", num_bytes(memory.allocated_bytes, "memory.allocated_bytes"), " and keeps ",
                num_bytes(memory.reserved_bytes, "memory.reserved_bytes"),
                ": what it rounds up, and what kernels take while they run",
            )
        )  # fmt: skip
    if memory.resident_bytes is not None:
        on_cpu = ", and on a CPU the tensors" if memory.allocated_bytes is None else ""
        resident = num_bytes(memory.resident_bytes, "memory.resident_bytes")
        yield Line(
            (
                "  the process has ", resident, f" of the host: libraries, the allocator's own, the data{on_cpu}",
            )
        )  # fmt: skip


def _verdict_text(term: MemoryTerm) -> str:
    """Return the verdict on a memory term. One that peaks elsewhere in the step is judged at its own peak."""
    tolerance = f"within {MEMORY_TOLERANCE:.0%}"
    verdict = "" if term.within is None else tolerance if term.within else f"NOT {tolerance}"
    if term.largest is None or term.largest <= term.measured * (1 + MEMORY_TOLERANCE):
        return verdict
    return f"{format_bytes(term.largest)} at its most, {verdict}"


def _collective_lines(comparison: CollectiveComparison) -> Iterator[Line]:
    """Yield the verdict on the collectives, bytes by axes, and those whose counts differ."""
    if not comparison.planned and not comparison.found:
        yield Line(("collectives of a step: none planned, none issued",))
        return
    verdict = "equal in kind, axes, format, bytes and count" if comparison.equal else "NOT as planned"
    if comparison.uneven and comparison.equal:
        verdict += ", but for the bytes of experts' rows, which routers decide"
    planned, issued = (count(getattr(comparison, name), f"collectives.{name}") for name in ("planned", "found"))
    yield Line(("collectives of a step: ", planned, " planned, ", issued, f" issued, {verdict}"))
    for axes in comparison.planned_bytes | comparison.found_bytes:
        planned_bytes, issued_bytes = (
            _bytes_over(axes, sizes, f"collectives.{name}")
            for name, sizes in (("planned_bytes", comparison.planned_bytes), ("found_bytes", comparison.found_bytes))
        )
        yield Line((f"  {f'over {axes}':<18}", planned_bytes, issued_bytes))
    for mismatch in comparison.miscounted[:MAX_MISCOUNTED]:
        kind, over, dtype, size, _ = mismatch.issued
        yield Line(
            (
                f"  {kind} over {', '.join(over)} of {format_bytes(size)} in {dtype}: {mismatch.planned} planned, "
                f"{mismatch.found} issued",
            )
        )
    num_left = len(comparison.miscounted) - MAX_MISCOUNTED
    if num_left > 0:
        yield Line((f"  and {num_left} more that differ; --json has all",))


def _bytes_over(axes: str, sizes: dict[str, int], path: str) -> Number:
    size = sizes.get(axes, 0)
    return Number(f"{format_bytes(size):>11}", size, "B", f"{path}.{axes}" if axes in sizes else "")


def rehearsal_report(rehearsal: Rehearsal) -> Report:
    """Report where the rank is, its groups, what it issued, what it held, and whether that is as planned."""
    plan, peak = rehearsal.plan, rehearsal.memory.total
    title = f"{plan.model.name}, rank {rehearsal.rehearsed.rank:,} of {rehearsal.ranks:,}: {plan.layout}"
    terms = [_rehearsed_term(term, peak, index) for index, term in enumerate(rehearsal.terms)]
    rows: tuple[Row, ...] = (("memory of the rank", "planned", "executed", "difference", ""), *terms)
    return [
        Section(list(_rehearsal_head(rehearsal)), title=title),
        Section(list(_group_tables(rehearsal))),
        Section(list(_collective_lines(rehearsal.collectives))),
        Section([Table(rows=rows, right=(1, 2, 3))]),
        Section([Status(_rehearsal_verdict(rehearsal), "good" if rehearsal.ok else "bad")]),
    ]


def _rehearsal_head(rehearsal: Rehearsal) -> Iterator[Block]:
    rehearsed = rehearsal.rehearsed
    num_micro_batches, num_planned = rehearsed.num_micro_batches, rehearsal.planned_micro_batches
    coordinate = " ".join(
        f"{axis}={place}"
        for axis, place in rehearsed.coordinate.items()
        if any(axis in axes for axes in rehearsed.groups)
    )
    yield f"  at {coordinate or 'no axis of several ranks'}"
    micro_batches = "micro-batch" if num_micro_batches == 1 else "micro-batches"
    planned = f" of the {num_planned}" if num_planned > num_micro_batches else ""
    yield Line(
        (
            "  a step of ", Number(f"{num_micro_batches}", num_micro_batches, "", "num_micro_batches"),
            f" {micro_batches}{planned}, rehearsed in ", Number(f"{rehearsed.seconds:.1f}", rehearsed.seconds, "s", "seconds"),
            " s",
        )
    )  # fmt: skip
    yield from (f"  {remark}" for remark in rehearsal.remarks)


def _group_tables(rehearsal: Rehearsal) -> Iterator[Table]:
    rows: list[Row] = [
        (f"  {', '.join(axes)}", f"{len(ranks):,}", _format_ranks(ranks))
        for axes, ranks in rehearsal.rehearsed.groups.items()
    ]
    if rows:
        yield Table(rows=(("its groups over", "ranks", ""), *rows), right=(1,))


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks at even distances in few words.

    >>> _format_ranks([3, 11, 19, 27]), _format_ranks([0, 1]), _format_ranks([0, 1, 8, 9])
    ('3 to 27 by 8', '0 and 1', '0, 1, 8, ..., 9')
    """
    if len(ranks) == 2:
        return f"{ranks[0]} and {ranks[1]}"
    step = ranks[1] - ranks[0]
    if list(ranks) == list(range(ranks[0], ranks[-1] + step, step)):
        return f"{ranks[0]} to {ranks[-1]}" + (f" by {step}" if step != 1 else "")
    return f"{', '.join(map(str, ranks[:3]))}, ..., {ranks[-1]}"


def _rehearsed_term(term: MemoryTerm, peak: MemoryTerm, index: int) -> Row:
    planned = "" if term.predicted is None else num_bytes(term.predicted, f"memory.terms.{index}.predicted")
    difference = f"{term.difference / term.predicted:+.2%}" if term.predicted else ""
    executed = num_bytes(term.compared_bytes, f"memory.executed.{term.name}")
    return f"  {term.name}", planned, executed, difference, "" if is_judged(term, peak) else "in the peak"


def _rehearsal_verdict(rehearsal: Rehearsal) -> str:
    if rehearsal.ok:
        return f"ok: the list of collectives is the planned one, memory within {REHEARSAL_TOLERANCE:.0%} by term"
    wrong_terms = [
        f"{term.name} is not predicted, so that nothing can be said of it"
        if term.predicted is None
        else f"{term.name} is not within {REHEARSAL_TOLERANCE:.0%}"
        for term in rehearsal.failed_terms
    ]
    wrong_list = [] if rehearsal.collectives.equal else ["the list of collectives is not the planned one"]
    undeclared = rehearsal.memory.undeclared_bytes
    if undeclared:
        wrong_terms.append(f"the engine was built with {format_bytes(undeclared)} of tensors that no term has")
    return f"NOT ok: {'; '.join(wrong_list + wrong_terms)}"


MAX_DIFFERENCES = 8  # collectives of a mesh that differ


def verification_report(verification: PlanVerification) -> Report:
    """Report for each small mesh how far it is off one process, the limits, and whether the layout trains right."""
    error_limits, rounding_limits = verify.ERROR_LIMITS, verify.ROUNDING_LIMITS
    precision, rounding = verification.meshes[0].precision.precision, verification.rounding
    limits = ("limit", "", *(f"{limit:.0e}" for limit in error_limits.values()), "")
    meshes = [_mesh_row(mesh, index) for index, mesh in enumerate(verification.meshes)]
    table = Table(rows=(("mesh", "ranks", *error_limits, "collectives"), *meshes, limits), right=(1, 2, 3, 4, 5))
    in_precision = [_rounding_row(mesh, index) for index, mesh in enumerate(verification.meshes)]
    rounding_table = Table(
        rows=(("mesh", *(name.replace("_", " ") for name in rounding)), *in_precision,
              ("limit", *(f"{rounding_limits[name]:g}" for name in rounding))),
        right=tuple(range(1, 1 + len(rounding))),
    )  # fmt: skip
    problems = [line for mesh in verification.meshes for line in _mesh_problems(mesh)]
    right = "the layout trains as one process does, and issues what the instruction list has"
    wrong = "the layout does NOT train as one process does, or issues other collectives than listed"
    return [
        Section([f"{verification.layout}, in small, against one process in float64"]),
        Section([table, *problems]),
        Section(
            [rounding_table], title=f"in {precision}: how many times as far from float64 as one process in {precision}"
        ),
        Section([Status(right, "good") if verification.ok else Status(wrong, "bad")]),
    ]


def _mesh_row(mesh: MeshVerification, index: int) -> Row:
    path, num_ranks = f"meshes.{index}", mesh.case.layout.num_devices
    num_collectives = count_collectives(mesh.case.instance, mesh.case.num_micro_batches).total()
    collectives = "differ" if mesh.differing else f"{num_collectives} of {num_collectives} as listed"
    errors = (
        Number(f"{error:.1e}", error, "", f"{path}.max_relative_error.{name}") for name, error in mesh.largest.items()
    )
    return _mesh_name(mesh), Number(str(num_ranks), num_ranks, "", f"{path}.num_processes"), *errors, collectives


def _rounding_row(mesh: MeshVerification, index: int) -> Row:
    ratios = (
        Number(f"{ratio:.2f}", ratio, "", f"meshes.{index}.rounding.ratios.{name}")
        for name, ratio in mesh.precision.ratios.items()
    )
    return _mesh_name(mesh), *ratios


def _mesh_name(mesh: MeshVerification) -> str:
    return " ".join(f"{axis}={degree}" for axis, degree in mesh.degrees.items()) or "one device"


def _mesh_problems(mesh: MeshVerification) -> Iterator[str]:
    """Yield what is not compared, which gradient and weight are farthest off, and the first collectives that differ."""
    name, errors = _mesh_name(mesh), mesh.errors
    if errors.without_gradient:
        yield f"{name}: without a gradient, and not compared: {', '.join(errors.without_gradient)}"
    for case_name, case_errors in ((name, errors), (f"{name}, long sequences", mesh.long_errors)):
        if not case_errors.ok:
            yield f"{case_name}: farthest off are the gradient of {case_errors.gradient} and the weight {case_errors.weight}"
    yield from (f"{name}: {text}" for text in mesh.differing[:MAX_DIFFERENCES])
    num_left = len(mesh.differing) - MAX_DIFFERENCES
    if num_left > 0:
        yield f"{name}: and {num_left} more"


def corpus_report(corpus: TokenizedCorpus) -> Report:
    """Report the tokenizer, and of each split its tokens, documents and shards."""
    index = corpus.index
    rows: list[Row] = []
    for name in run.SPLITS:
        split = index.split(name)
        if not split.shards:
            rows.append((name, f"{'none':<21}", ""))
            continue
        text = (
            f"of {pluralize(split.num_documents, 'document')}, {format_bytes(split.text_bytes)} of text "
            f"({split.text_bytes / split.num_tokens:.2f} bytes per token), in {pluralize(len(split.shards), 'shard')} of "
            f"{index.dtype}"
        )
        tokens = Number(f"{split.num_tokens:,} tokens", split.num_tokens, "tokens", f"{name}.num_tokens")
        rows.append((name, tokens, text))
    origin = "trained on this text" if corpus.is_tokenizer_trained else "of a file"
    title = f"tokenizer {origin}: {index.vocab_size:,} tokens, {index.end_token} ends a document"
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line="  {:<9} {:>21} {}")
    entropy = Number(f"{index.unigram_entropy_nats:.3f}", index.unigram_entropy_nats, "", "unigram_entropy_nats")
    return [Section([table, Line(("unigram entropy ", entropy, " nats per token"))], title=title)]


def summary_report(summary: RunSummary) -> Report:
    """Report what came out of a run, as its ranks print it too."""
    return sections_of_text(summary_text(summary.payload))
