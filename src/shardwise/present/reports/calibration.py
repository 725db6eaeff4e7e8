"""Reports of micro-benchmarks, of fitted constants, and of predictions beside published runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.hardware import BENCH_ONLY_CONSTANTS, CONSTANTS
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
from shardwise.measure.calibrate.user_cluster_fit import UserClusterFit
from shardwise.measure.microbenchmarks.benchmark_lines import describe_line, format_rate
from shardwise.measure.microbenchmarks.machine_benchmark import MachineResult
from shardwise.present.rendering.report import Block, Report, Row, Section, Table
from shardwise.values import format_bytes, format_seconds


def bench_report(lines: Sequence[Mapping[str, Any]], machine: str, before: int, out: str | None) -> Report:
    """Each line with its rate and how far its repetitions lie apart; `before` of them were measured earlier."""
    rows: tuple[Row, ...] = tuple(
        (describe_line(line), format_seconds(line["seconds"]), format_rate(line),
         f"spread {(line['high'] - line['low']) / line['seconds']:.0%}")
        for line in lines
    )  # fmt: skip
    told = [f"{before} more are in {out} already"] if before else []
    told += [f"{len(lines)} lines added to {out}"] if out else []
    return [
        Section(
            [
                *(
                    [Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<44}{:>10}  {:<16} {}")]
                    if rows
                    else []
                ),
                *told,
            ],
            title=machine,
        )
    ]


def machine_report(found: MachineResult, out: str | None) -> Report:
    """Rates of a whole machine, and the constants that predictions for it use."""
    chip, calibration = found.cluster.chip, found.calibration
    peaks = ", ".join(f"{name} {peak / 1e9:,.0f} GFLOP/s" for name, peak in chip.peak_flops_per_s.items())
    rows: tuple[Row, ...] = tuple(
        (name, f"{value:.4g}", {**CONSTANTS, **BENCH_ONLY_CONSTANTS}[name].meaning)
        for name, value in calibration.constants.items()
    )
    checked = ", ".join(f"{miss:.2f} (d_model {name})" for name, miss in found.measured_over_predicted.items())
    low, high = calibration.spread["dense"]
    title = f"{found.cluster.name}: {found.cluster.num_devices} processes, each with {format_bytes(chip.memory_bytes)}"
    lines: list[Block] = [
        f"  products: {peaks}; memory: {format_bytes(chip.memory_bytes_per_s)}/s",
        Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<22}{:>10}  {}"),
        f"whole steps, measured over predicted, which nothing is fitted to: {checked}",
        f"90% prediction interval: {low:.2f} to {high:.2f} times a prediction",
    ]
    return [Section([*lines, *([f"written to {out}"] if out is not None else [])], title=title)]


MOST_SHOWN = 20  # residuals; --json has all
UNIDENTIFIED = "not identified by these measurements"


def calibrate_report(found: UserClusterFit, source: str, out: str | None) -> Report:
    """What was fitted to what, how far each constant moved, what is off before and after, and the spread."""
    return [
        Section(
            [f"set aside: {count} {reason}" for reason, count in found.skipped.most_common()],
            title=f"{found.user_cluster.nominal.name} under {found.stack.name}: {source}",
        ),
        Section([_constants(found)]),
        Section([_errors(found)]),
        Section([_residuals(found), *_left(found)]),
        Section(list(_spread(found)), title="90% of measured step times lie between these factors times the prediction"),
        *([Section([f"wrote {out}"])] if out else []),
    ]  # fmt: skip


def _constants(found: UserClusterFit) -> Table:
    rows: list[Row] = [("constant", "before", "after", "moved", "(in widths of its prior)")]
    for one in found.constants:
        before, after = (f"{value:.3g} ± {deviation:.2g}" for value, deviation in (
            (one.before, one.before_deviation), (one.after, one.after_deviation)
        ))  # fmt: skip
        words = CONSTANTS[one.name].meaning if one.identified else UNIDENTIFIED
        rows.append((f"  {one.name}", before, after, f"{one.moved:+.1f}", words))
    return Table(rows=tuple(rows), right=(1, 2, 3), line="{:<21}{:>20}{:>20}{:>8}  {}")


def _errors(found: UserClusterFit) -> Table:
    rows: list[Row] = [("|predicted / measured - 1|", "mean", "median", "worst", "bias")]
    for what, benches in (("runs", False), ("micro-benchmarks", True)):
        for when, after in (("before", False), ("after", True)):
            one = found.errors(after, benches=benches)
            if one:
                shares = (f"{share:.1%}" for share in (one.mean, one.median, one.worst))
                rows.append((f"  {one.num_rows} {what}, {when}", *shares, f"{one.bias:+.1%}"))
    return Table(rows=tuple(rows), right=range(1, 5), line="{:<38}{:>8}{:>8}{:>8}{:>8}")


def _residuals(found: UserClusterFit) -> Table:
    rows: list[Row] = [("predicted / measured - 1, largest first", "measured", "before", "after")]
    for one in found.residuals[:MOST_SHOWN]:
        errors = (f"{one.error(after):+.1%}" for after in (False, True))
        rows.append((f"  {one.id}", format_seconds(one.measured_s), *errors))
    return Table(rows=tuple(rows), right=range(1, 4), line="{:<56}{:>10}{:>10}{:>10}")


def _left(found: UserClusterFit) -> Iterator[str]:
    left = len(found.residuals) - MOST_SHOWN
    if left > 0:
        yield f"  and {left} smaller; --json has all"


def _spread(found: UserClusterFit) -> Iterator[str]:
    for kind, (low, high) in found.spread.items():
        count = sum(one.kind == kind for one in found.runs)
        yield f"  {kind:<8}{low:.2f} to {high:.2f}  ({count or 'no'} {'run' if count == 1 else 'runs'} of this kind)"


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
