"""Reports of micro-benchmarks, of fitted constants, and of predictions beside published runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shardwise.hardware import BENCH_ONLY_CONSTANTS, CONSTANTS
from shardwise.hardware.published_constants import spread_class
from shardwise.measure.calibrate.layout_ranking import FEWEST_LAYOUTS, KEY_COLUMNS, choice_statistics
from shardwise.measure.calibrate.prediction_errors import (
    ErrorStatistics,
    count_refuted_fits,
    count_skipped,
    count_tight_fits,
    error_tables,
    guess_error_cause,
    largest_errors,
    memory_error_tables,
)
from shardwise.measure.calibrate.published_fit import STRATA, fold_ranking, fold_statistics, repeat_noise
from shardwise.measure.calibrate.published_runs.run_table import unreadable_cells
from shardwise.measure.microbenchmarks.benchmark_lines import describe_line, format_rate
from shardwise.present.rendering.numbers import seconds, share, significant
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Table
from shardwise.values import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.measure import (
        BenchmarkResult,
        ClusterCalibration,
        EvaluatedRuns,
        MachineResult,
        PublishedFit,
        RankedLayouts,
    )
    from shardwise.measure.calibrate.cluster_calibration import UserClusterFit
    from shardwise.measure.calibrate.layout_ranking import LayoutGroup
    from shardwise.measure.calibrate.prediction_errors import EvaluatedRun


def bench_report(result: BenchmarkResult) -> Report:
    """Report each line with its rate and the spread of its repetitions, and what the file has."""
    rows: tuple[Row, ...] = tuple(
        (
            describe_line(line), seconds(line["seconds"], f"lines.{index}.seconds", kind="measured"), format_rate(line),
            f"spread {(line['high'] - line['low']) / line['seconds']:.0%}",
        )
        for index, line in enumerate(result.lines)
    )  # fmt: skip
    table = Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<44}{:>10}  {:<16} {}")
    blocks: list[Block] = [table] if rows else []
    blocks += [f"{result.num_known} more are in {result.out} already"] if result.num_known else []
    blocks += [f"{len(result.lines)} lines added to {result.out}"] if result.out else []
    return [Section(blocks, title=result.machine)]


def machine_report(result: MachineResult) -> Report:
    """Report the rates of a whole machine, and the constants that predictions for it use."""
    chip, calibration, rates = result.cluster.chip, result.calibration, result.rates
    peaks = ", ".join(f"{name} {rate / 1e9:,.0f} GFLOP/s" for name, rate in rates.flops_per_s.items())
    rows: tuple[Row, ...] = tuple(
        (
            name, significant(value, f"calibration.constants.{name}"),
            result.unmeasured.get(name, {**CONSTANTS, **BENCH_ONLY_CONSTANTS}[name].meaning),
        )
        for name, value in calibration.constants.items()
    )  # fmt: skip
    steps = ", ".join(f"{ratio:.2f} ({name})" for name, ratio in result.measured_over_predicted.items())
    low, high = calibration.spread["dense"]
    title = (
        f"{result.cluster.name}: {result.cluster.num_devices} processes, each with {format_bytes(chip.capacity_bytes)}"
    )
    links = f"; links: {format_bytes(rates.link_bytes_per_s)}/s" if rates.link_bytes_per_s else ""
    blocks: list[Block] = [
        f"  products: {peaks}; memory: {format_bytes(rates.memory_bytes_per_s)}/s{links}",
        f"  a kernel without work: {format_seconds(rates.kernel_gap_s)} after the one before, issued by the host in "
        f"{format_seconds(rates.host_issue_s)}",
        *([f"  peaks of {chip.catalog_name}; constants are shares of them"] if chip.base else []),
        Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<22}{:>10}  {}"),
        f"kernels take {result.in_step:.2f} times as long inside a step as alone, their starts {result.starts_in_step:.2f} "
        "times, which the constants contain",
        f"whole steps, measured over predicted: {steps}",
        f"90% prediction interval: {low:.2f} to {high:.2f} times a prediction",
    ]
    blocks += [f"written to {result.out}"] if result.out is not None else []
    return [Section(blocks, title=title)]


MAX_RESIDUALS = 20  # --json has all
UNIDENTIFIED = "not identified by these measurements"


def calibrate_report(calibration: ClusterCalibration) -> Report:
    """Report what was fitted to what, how far each constant moved, the errors before and after, and the spread."""
    fit = calibration.fit
    num_left = len(fit.residuals) - MAX_RESIDUALS
    left = [f"  and {num_left} smaller; --json has all"] if num_left > 0 else []
    return [
        Section(
            [f"set aside: {count} {reason}" for reason, count in fit.skipped.most_common()],
            title=f"{fit.user_cluster.nominal.name} under {fit.stack.name}: {calibration.source}",
        ),
        Section([_constants(fit)]),
        Section([_errors(fit)]),
        Section([_residuals(fit), *left]),
        Section(list(_spread(fit)), title="90% of measured step times lie between these factors times the prediction"),
        *([Section([f"wrote {calibration.out}"])] if calibration.out else []),
    ]


def _constants(fit: UserClusterFit) -> Table:
    rows: list[Row] = [("constant", "before", "after", "moved", "(in widths of its prior)")]
    for constant in fit.constants:
        path = f"constants.{constant.name}"
        before, after = (
            Number(f"{value:.3g} ± {deviation:.2g}", value, "", f"{path}.{name}")
            for name, value, deviation in (
                ("before", constant.before, constant.before_deviation), ("after", constant.after, constant.after_deviation)
            )
        )  # fmt: skip
        moved = Number(f"{constant.moved:+.1f}", constant.moved, "", f"{path}.moved")
        meaning = CONSTANTS[constant.name].meaning if constant.identified else UNIDENTIFIED
        rows.append((f"  {constant.name}", before, after, moved, meaning))
    return Table(rows=tuple(rows), right=(1, 2, 3), line="{:<21}{:>20}{:>20}{:>8}  {}")


def _errors(fit: UserClusterFit) -> Table:
    rows: list[Row] = [("|predicted / measured - 1|", "mean", "median", "worst", "bias")]
    for label, benches, key in (("runs", False, "runs"), ("micro-benchmarks", True, "benches")):
        for when, after in (("before", False), ("after", True)):
            errors = fit.errors(after, benches=benches)
            if errors:
                cells = _error_cells(errors, f"{key}.{when}", ("mean", "median", "worst"))
                rows.append((f"  {errors.num_rows} {label}, {when}", *cells))
    return Table(rows=tuple(rows), right=range(1, 5), line="{:<38}{:>8}{:>8}{:>8}{:>8}")


def _error_cells(errors: ErrorStatistics, path: str, names: Sequence[str]) -> tuple[Number, ...]:
    """Return sizes of errors by name, and the bias, which has a sign."""
    sizes = (share(getattr(errors, name), f"{path}.{name}") for name in names)
    return (*sizes, Number(f"{errors.bias:+.1%}", errors.bias, "%", f"{path}.bias"))


def _residuals(fit: UserClusterFit) -> Table:
    rows: list[Row] = [("predicted / measured - 1, largest first", "measured", "before", "after")]
    for index, residual in enumerate(fit.residuals[:MAX_RESIDUALS]):
        errors = (Number(f"{residual.error(after):+.1%}", residual.error(after), "%") for after in (False, True))
        measured = seconds(residual.measured_s, f"residuals.{index}.measured_s", kind="measured")
        rows.append((f"  {residual.id}", measured, *errors))
    return Table(rows=tuple(rows), right=range(1, 4), line="{:<56}{:>10}{:>10}{:>10}")


def _spread(fit: UserClusterFit) -> Iterator[Line]:
    for kind, (low, high) in fit.spread.items():
        count = sum(run.kind == kind for run in fit.runs)
        runs = f"{count or 'no'} {'run' if count == 1 else 'runs'}"
        factors = _range_cells((low, high), f"spread.{kind}")
        yield Line((f"  {kind:<8}", *factors, f"  ({runs} of this kind)"))


def _range_cells(interval: tuple[float, float], path: str) -> tuple[Cell, ...]:
    low, high = (Number(f"{factor:.2f}", factor, "x", f"{path}.{index}") for index, factor in enumerate(interval))
    return low, " to ", high


MAX_LARGEST_ERRORS = 10
ERROR_COLUMNS = ("rows", "weight", "mean", "median", "p90", "worst", "bias", "inside")


def validate_report(evaluated: EvaluatedRuns) -> Report:
    """Report the errors of step times and of memory by group, the largest of them, and what has no prediction."""
    runs = evaluated.runs
    times, memory = error_tables(runs), memory_error_tables(runs)
    num_predicted = sum(run.prediction is not None for run in runs)
    head = (
        f"{len(runs)} runs, {num_predicted} with a prediction; those of quality A and A- count, weighted 1/duplicates; "
        "inside: in the 90% interval"
    )
    sections = [Section([head])]
    if times["overall"]:
        sections.append(Section([_error_table("step time, |predicted / measured - 1|", times, "summary")]))
        largest = [line for run in largest_errors(runs, MAX_LARGEST_ERRORS) for line in _largest_error(run)]
        sections.append(Section(largest, title="largest errors"))
    else:
        sections.append(Section(["no run that counts has both a prediction and a measured step time"]))
    if memory["overall"]:
        tables = {name: memory[name] for name in ("overall", "measured", "source")}
        sections.append(Section([_error_table("peak memory", tables, "memory_summary")]))
    return [*sections, Section(list(_refuted_fits(runs))), Section(list(_unreadable(runs))), *_skipped(runs)]


def _error_table(title: str, tables: Mapping[str, Mapping[str, ErrorStatistics]], path: str) -> Table:
    rows: list[Row] = [(title, *ERROR_COLUMNS)]
    for name, table in tables.items():
        for value, errors in table.items():
            place = f"{path}.{name}.{value}"
            weight = Number(f"{errors.weight:.0f}", errors.weight, "", f"{place}.weight")
            cells = _error_cells(errors, place, ("mean", "median", "p90", "worst"))
            rows.append(
                (f"  {name:<10}{value}", _num_rows(errors, place), weight, *cells, _coverage_cell(errors, place))
            )
    return Table(rows=tuple(rows), right=range(1, 9), line="{:<42}" + "{:>8}" * len(ERROR_COLUMNS))


def _coverage_cell(errors: ErrorStatistics, path: str) -> Cell:
    return "" if errors.coverage is None else share(errors.coverage, f"{path}.coverage")


def _num_rows(errors: ErrorStatistics, path: str) -> Number:
    return Number(f"{errors.num_rows}", errors.num_rows, "", f"{path}.num_rows")


def _largest_error(run: EvaluatedRun) -> Iterator[str]:
    assert run.prediction is not None  # it has an error
    case, measured_s = run.prediction.case, run.row.step_time_s or 0.0
    yield (
        f"  {run.row.id:<28} {run.error or 0.0:>+7.1%}  {format_seconds(run.prediction.estimate.step_time_s)} for "
        f"{format_seconds(measured_s)}; {case.architecture.name} on {case.cluster.name}"
    )
    yield f"      {case.layout}"
    yield f"      {guess_error_cause(run)}"


def _refuted_fits(runs: Sequence[EvaluatedRun]) -> Iterator[str]:
    num_stated, num_over, num_far_over = count_refuted_fits(runs)
    if num_stated:
        yield (
            f"{num_over} of {num_stated} runs that say what they recompute would not fit by the memory model, though they ran, "
            f"{num_far_over} by more than a tenth; of {count_tight_fits(runs)} others memory would be tight"
        )


def _unreadable(runs: Sequence[EvaluatedRun]) -> Iterator[str]:
    cells = unreadable_cells(run.row for run in runs)
    if cells:
        row, column, text = cells[0]
        yield f"{len(cells)} measured cells are not numbers above 0 and are ignored: {row}, {column}: found {text[:40]!r}"


def _skipped(runs: Sequence[EvaluatedRun]) -> Iterator[Section]:
    kinds = count_skipped(runs)
    if kinds:
        rows: tuple[Row, ...] = tuple(
            (kind, Number(str(count), count, "", f"skipped.{kind}.rows"), f"({scored})")
            for kind, (count, scored) in kinds.items()
        )
        table = Table(rows=rows, right=(1,), head=False, indent=2, line="  {:<44}{:>5} {}")
        yield Section([table], title="without a prediction (of those, how many would count)")


FOLD_TITLES = {
    "fitted": "in sample", "model": "stack and chip known, model new", "source": "source and stack new",
    "lab": "lab and stack new", "three": "source and stack new, three of its runs given",
}  # fmt: skip
FOLD_COLUMNS = ("rows", "mean", "median", "p90", "worst", "bias", "inside")
FOLD_ROW = "{:<46}" + "{:>8}" * len(FOLD_COLUMNS)


def fold_report(fit: PublishedFit) -> Report:
    """Report the errors by fold and stratum, with coverage of the intervals, ranking of layouts, and noise of repeats."""
    noise_rows: tuple[Row, ...] = tuple(
        (
            f"  {kind}", _num_rows(noise, f"noise.{kind}"),
            *_error_cells(noise, f"noise.{kind}", ("mean", "median", "p90", "worst"))[:-1],
        )
        for kind, noise in repeat_noise(fit).items()
    )  # fmt: skip
    table = Table(rows=noise_rows, right=range(1, 6), head=False, line=FOLD_ROW.removesuffix("{:>8}" * 2))
    title = "repeated runs of one configuration, around their median (different releases, different days)"
    return [*(_fold(fit, fold) for fold in FOLD_TITLES), Section([table] if noise_rows else [], title=title)]


def _fold(fit: PublishedFit, fold: str) -> Section:
    step_times = {"fitted": fit.in_sample, **fit.folds}[fold]
    rows: list[Row] = [(FOLD_TITLES[fold], *FOLD_COLUMNS)]
    for name, stratum in STRATA.items():
        errors = fold_statistics(fit, fold, stratum)
        if errors:
            path = f"summary.{fold}.{name}"
            cells = _error_cells(errors, path, ("mean", "median", "p90", "worst"))
            rows.append((f"  {name}", _num_rows(errors, path), *cells, _coverage_cell(errors, path)))
    blocks: list[Block] = [Table(rows=tuple(rows), right=range(1, 8), line=FOLD_ROW)]
    if fold in fit.folds:
        blocks += _fold_intervals(fit, fold)
    ranking = fold_ranking(fit, step_times)
    if ranking:
        path = f"ranking.{fold}"
        blocks += [
            Line(
                (
                    "  layouts of one model on one machine that differ by over 10%: ",
                    share(ranking.ordered, f"{path}.ordered"), f" of {ranking.num_pairs} pairs ordered correctly;",
                )
            ),
            Line(
                (
                    "  taking the predicted best loses ", share(ranking.lost, f"{path}.lost"),
                    f" of the throughput on average ({ranking.num_groups} groups), ",
                    share(ranking.most_lost, f"{path}.most_lost", digits=0), " at most",
                )
            ),
        ]  # fmt: skip
    return Section(blocks)


def _fold_intervals(fit: PublishedFit, fold: str) -> Iterator[Line]:
    for kind, spread in fit.intervals.spread(fold).items():
        cells: list[Cell] = [f"  90% intervals, {kind}: "]
        for error_class in sorted(error_class for error_class in spread.scales if len(error_class) <= 1):
            name = spread_class(*error_class)
            path = f"spread.{fold}.{kind}.{name}"
            cells += ["; " if error_class else "", f"{name} ", *_range_cells(spread.interval(error_class), path)]
        yield Line((*cells, " times the prediction"))
    coverage = fit.intervals.coverage(fold)
    if coverage is not None:
        yield Line(
            ("  inside: in the interval that the other groups give, ", share(coverage, f"coverage.{fold}"), " of all")
        )


MAX_REGRETS = 10
RANKING_COLUMNS = ("groups", "pairs", "ordered", "best picked", "mean regret", "worst")
RANKING_ROW = "{:<24}{:>8}{:>8}{:>9}{:>13}{:>13}{:>8}"


class _RegrettedGroup(NamedTuple):
    group: LayoutGroup
    set_name: str


def groups_report(ranked: RankedLayouts) -> Report:
    """Report how well layouts are ranked in each set of rows, and the groups in which the pick loses most."""
    rows: list[Row] = [("", *RANKING_COLUMNS)]
    for name, groups in ranked.groups_by_set.items():
        statistics = choice_statistics(groups)
        if statistics:
            path = f"summary.{name}"
            counts = (
                Number(f"{getattr(statistics, field)}", getattr(statistics, field), "", f"{path}.{field}")
                for field in ("num_groups", "num_pairs", "picked")
            )
            num_groups, num_pairs, picked = counts
            ordered, mean_regret, worst_regret = (
                share(getattr(statistics, field), f"{path}.{field}")
                for field in ("ordered", "mean_regret", "worst_regret")
            )
            rows.append((name, num_groups, num_pairs, ordered, picked, mean_regret, worst_regret))
    head = (
        f"layouts compared: rows alike in {', '.join(KEY_COLUMNS)}; at least {FEWEST_LAYOUTS} layouts; the constants of the "
        "package"
    )
    return [
        Section([head]),
        Section([Table(rows=tuple(rows), right=range(1, 7), line=RANKING_ROW)]),
        Section(
            ["pairs: those that differ by over a tenth; regret: how much longer the pick takes than the best"]
        ),
        Section(list(_largest_regrets(ranked)), title="largest regrets"),
    ]  # fmt: skip


def _largest_regrets(ranked: RankedLayouts) -> Iterator[str]:
    regretted = [
        _RegrettedGroup(group, name)
        for name, groups in ranked.groups_by_set.items()
        for group in groups
        if group.regret > 0
    ]
    for group, name in sorted(regretted, key=lambda pair: -pair.group.regret)[:MAX_REGRETS]:
        family, _, model, chip, devices, seq_len, batch, _ = group.key
        yield f"  {group.regret:>6.1%}  {model} on {devices} {chip}, {batch} sequences of {seq_len} ({family}; {name})"
        yield f"          picked {group.pick}, best {group.best}"
