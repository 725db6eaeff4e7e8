"""Reports of experiments: the state of a ledger, and what has been measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import count, fixed, seconds, share, usd
from shardwise.present.rendering.report import Block, Cell, Line, Number, Report, Row, Section, Status, Table
from shardwise.present.reports.wording import interval_remark
from shardwise.values import format_seconds, pluralize

if TYPE_CHECKING:
    from shardwise.measure import ExperimentReport, ExperimentStatus
    from shardwise.measure.experiments.ledger_summary import BestRun, CauseCount, ExperimentCost

BEST_TITLE = "best so far"
MOST_GROUPS = 12  # rows of the short form
MOST_PAIRS = 100  # rows of predicted and measured steps


def status_report(status: ExperimentStatus) -> Report:
    """Report the states, the best of each group, the cost of what has run and of what is left, and why others were not run."""
    sections = [
        Section(list(_state_lines(status)), title=f"{status.ledger}: {pluralize(sum(status.states.values()), 'configuration')}"),
        Section([group_table(status)] if status.groups else [], title=BEST_TITLE),
        Section(list(_cause_lines(status.skipped, "skipped")), title="skipped"),
        Section(list(_cause_lines(status.failures, "failures")), title="attempts that failed"),
    ]  # fmt: skip
    return [section for section in sections if section.blocks]


def experiment_report(report: ExperimentReport) -> Report:
    """Report the best configuration of each model and number of nodes, scaling, and the state with its skips and failures."""
    head, *sections_below = (_under(section, "status") for section in status_report(report.status))
    causes = [section for section in sections_below if section.title != BEST_TITLE]
    sections = [
        head,
        Section([_best_table(report)] if report.best else [], title="best configuration by model and nodes"),
        Section([_scaling_table(report)] if report.scaling else [], title="scaling", detail=True),
        Section([_pairs_table(report)] if report.pairs else [], title="predicted against measured", detail=True),
        *causes,
    ]
    return [section for section in sections if section.blocks]


def _best_table(report: ExperimentReport) -> Table:
    rows: list[Row] = [("model", "nodes", "devices", "configurations", "best", "step", "tokens/s per device", "MFU")]
    for index, cell in enumerate(report.best):
        path = f"best.{index}"
        best: tuple[Cell, ...] = (
            cell.label, seconds(cell.step_time_s, f"{path}.step_time_s", kind="measured"),
            count(cell.tokens_per_s_per_device, f"{path}.tokens_per_s_per_device"), share(cell.mfu, f"{path}.mfu"),
        )  # fmt: skip
        rows.append(
            (
                cell.model_name, count(cell.num_nodes, f"{path}.num_nodes"), count(cell.num_devices, f"{path}.num_devices"),
                count(cell.num_configurations, f"{path}.num_configurations"),
                *(best if cell.step_time_s is not None else (cell.failure, "-", "-", "-")),
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=(1, 2, 3, 5, 6, 7), indent=2, brief=MOST_GROUPS)


def _scaling_table(report: ExperimentReport) -> Table:
    rows: list[Row] = [("model", "devices", "tokens/s per device", "efficiency")]
    for index, point in enumerate(report.scaling):
        path = f"scaling.{index}"
        rate = count(point.tokens_per_s_per_device, f"{path}.tokens_per_s_per_device")
        devices = count(point.num_devices, f"{path}.num_devices")
        rows.append((point.model_name, devices, rate, share(point.efficiency, f"{path}.efficiency")))
    return Table(rows=tuple(rows), right=(1, 2, 3), indent=2)


def _pairs_table(report: ExperimentReport) -> Table:
    rows: list[Row] = [("configuration", "measured", "predicted before", "off")]
    for index, pair in enumerate(report.pairs[:MOST_PAIRS]):
        path = f"pairs.{index}"
        off = pair.predicted_s / pair.measured_s - 1.0
        measured = seconds(pair.measured_s, f"{path}.measured_s", kind="measured")
        rows.append(
            (
                pair.label,
                measured,
                _predicted_cell(pair.predicted_s, pair.interval90, path),
                Number(f"{off:+.1%}", off, "%"),
            )
        )
    return Table(rows=tuple(rows), right=(1, 2, 3), indent=2)


def _under(section: Section, key: str) -> Section:
    """Return a section whose numbers are under a key of the payload."""
    return replace(section, blocks=[_block_under(block, key) for block in section.blocks])


def _block_under(block: Block, key: str) -> Block:
    if isinstance(block, Table):
        return replace(block, rows=tuple(tuple(_cell_under(cell, key) for cell in row) for row in block.rows))
    return Line(tuple(_cell_under(part, key) for part in block.parts)) if isinstance(block, Line) else block


def _cell_under(cell: Cell, key: str) -> Cell:
    if isinstance(cell, Line):
        return Line(tuple(_cell_under(part, key) for part in cell.parts))
    return replace(cell, path=f"{key}.{cell.path}") if isinstance(cell, Number) and cell.path else cell


def _state_lines(status: ExperimentStatus) -> Iterator[Block]:
    states: list[Cell] = []
    for state, number in status.states.items():
        states += [", " if states else "  ", count(number, f"states.{state}"), f" {state}"]
    yield Line(tuple(states)) if states else "  no configuration yet"
    yield Line(
        (
            "  ",
            *_cost_cells(status.spent, "spent"),
            " spent in ",
            count(status.num_attempts, "num_attempts"),
            " attempts",
        )
    )
    if status.left.num_runs:
        runs = count(status.left.num_runs, "left.num_runs")
        yield Line(("  ", *_cost_cells(status.left, "left"), " predicted for the ", runs, " that are left"))
    judged = status.coverage
    if judged.num_runs:
        inside, runs = count(judged.num_inside, "coverage.num_inside"), count(judged.num_runs, "coverage.num_runs")
        yield Line(("  ", inside, " of ", runs, " measured steps in the 90% intervals that were predicted before"))
    if status.torn_bytes:
        yield Status(f"  note: the last line was cut off after {status.torn_bytes:,} bytes, and is left out", "note")


def _cost_cells(cost: ExperimentCost, path: str) -> tuple[Cell, ...]:
    hours = fixed(cost.device_hours, 2, f"{path}.device_hours", "h")
    return (hours, " device-hours") if cost.usd is None else (hours, " device-hours, ", usd(cost.usd, f"{path}.usd"))


def group_table(status: ExperimentStatus) -> Table:
    """Return a row for each group: its best measured configuration, and what is left of it."""
    rows: list[Row] = [("group", "best", "step", "predicted before", "configurations", "done", "left", "")]
    for index, group in enumerate(status.groups):
        best, path = group.best, f"groups.{index}"
        label, step, before = ("-", "-", "-") if best is None else _best_cells(best, f"{path}.best")
        verdict = Status("known", "good") if group.settled else "nothing left" if not group.num_left else "open"
        rows.append(
            (
                group.group or "all", label, step, before, count(group.num_configurations, f"{path}.num_configurations"),
                count(group.num_done, f"{path}.num_done"), count(group.num_left, f"{path}.num_left"), verdict,
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=range(2, 7), indent=2, brief=MOST_GROUPS)


def _best_cells(best: BestRun, path: str) -> tuple[Cell, Cell, Cell]:
    before = "-" if best.predicted_s is None else _predicted_cell(best.predicted_s, best.interval90, path)
    return best.label, seconds(best.step_time_s, f"{path}.step_time_s", kind="measured"), before


def _predicted_cell(predicted_s: float, interval: tuple[float, float] | None, path: str) -> Cell:
    return Line(
        (
            seconds(predicted_s, f"{path}.predicted_s", interval, kind="prediction"),
            interval_remark(interval, format_seconds),
        )
    )


def _cause_lines(causes: Sequence[CauseCount], path: str) -> Iterator[Block]:
    rows = tuple(
        (count(cause.count, f"{path}.{index}.count"), cause.cause, cause.example) for index, cause in enumerate(causes)
    )
    if rows:
        yield Table(rows=rows, right=(0,), head=False, indent=2)
