"""Predictions against published runs, as sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardwise.measure.calibrate.prediction_errors import (
    ErrorStatistics,
    EvaluatedRun,
    count_refuted_fits,
    count_skipped,
    error_tables,
    guess_error_cause,
    largest_errors,
    memory_error_tables,
)
from shardwise.measure.calibrate.published_runs.run_table import unreadable_cells
from shardwise.present.cli.section import Report, Row, Section, Table
from shardwise.values import format_seconds

WORST = 10


def validate_report(judged: Sequence[EvaluatedRun]) -> Report:
    """Errors of step times and of memory by group, the largest of them, and what has no prediction."""
    times, memory = error_tables(judged), memory_error_tables(judged)
    predicted = sum(one.prediction is not None for one in judged)
    head = (
        f"{len(judged)} runs, {predicted} with a prediction; those of quality A and A- count, weighted 1/duplicates; "
        "inside: in the 90% interval"
    )
    sections = [Section([head])]
    if times["overall"]:
        sections.append(Section([_table("step time, |predicted / measured - 1|", times)]))
        largest = [line for one in largest_errors(judged, WORST) for line in _worst(one)]
        sections.append(Section(largest, title="largest errors"))
    else:
        sections.append(Section(["no run that counts has both a prediction and a measured step time"]))
    if memory["overall"]:
        shown = {name: memory[name] for name in ("overall", "measured", "source")}
        sections.append(Section([_table("peak memory", shown)]))
    return [*sections, Section(list(_refuted(judged))), Section(list(_unreadable(judged))), *_skipped(judged)]


def _table(title: str, tables: Mapping[str, Mapping[str, ErrorStatistics]]) -> Table:
    columns = ("rows", "weight", "mean", "median", "p90", "worst", "bias", "inside")
    rows: list[Row] = [(title, *columns)]
    for name, table in tables.items():
        for value, one in table.items():
            shares = (f"{share:.1%}" for share in (one.mean, one.median, one.p90, one.worst))
            inside = "" if one.coverage is None else f"{one.coverage:.1%}"
            rows.append(
                (f"  {name:<10}{value}", str(one.num_rows), f"{one.weight:.0f}", *shares, f"{one.bias:+.1%}", inside)
            )
    return Table(rows=tuple(rows), right=range(1, 9), line="{:<42}" + "{:>8}" * len(columns))


def _worst(one: EvaluatedRun) -> Iterator[str]:
    assert one.prediction is not None
    case, seconds = one.prediction.case, one.row.step_time_s or 0.0
    yield (
        f"  {one.row.id:<28} {one.error or 0.0:>+7.1%}  {format_seconds(one.prediction.estimate.step_time_s)} for "
        f"{format_seconds(seconds)}; {case.architecture.name} on {case.cluster.name}"
    )
    yield f"      {case.layout}"
    yield f"      {guess_error_cause(one)}"


def _refuted(judged: Sequence[EvaluatedRun]) -> Iterator[str]:
    stated, over, far = count_refuted_fits(judged)
    if stated:
        yield (
            f"{over} of {stated} runs that say what they recompute would not fit by the memory model, though they ran, "
            f"{far} by more than a tenth"
        )


def _unreadable(judged: Sequence[EvaluatedRun]) -> Iterator[str]:
    found = unreadable_cells(one.row for one in judged)
    if found:
        row, column, text = found[0]
        yield f"{len(found)} measured cells are not numbers above 0 and are ignored: {row}, {column}: found {text[:40]!r}"


def _skipped(judged: Sequence[EvaluatedRun]) -> Iterator[Section]:
    kinds = count_skipped(judged)
    if kinds:
        rows: tuple[Row, ...] = tuple((kind, str(rows), f"({scored})") for kind, (rows, scored) in kinds.items())
        table = Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<44}{:>5} {}")
        yield Section([table], title="without a prediction (of those, how many would count)")
