"""Report of plans on several clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from shardwise.present.rendering.numbers import count, ends, seconds, share, usd
from shardwise.present.rendering.plain_text import render_block
from shardwise.present.rendering.report import Cell, Line, Number, Report, Row, Section, Table
from shardwise.present.reports.wording import INTERVAL, job_text, price_year_notes
from shardwise.price import Run
from shardwise.search import Comparison, Plan, describe_near_misses
from shardwise.search.compare_clusters import Contender
from shardwise.values import Progress, format_count, format_days, format_energy, format_usd, ignore_progress

ABSENT = "-"
Column = Callable[[Contender, str], Cell]  # of a contender, and its place in the payload


def _of_plan(cell: Callable[[Plan, str], Cell]) -> Column:
    return lambda contender, path: cell(contender.plan, path) if contender.plan else ABSENT


def _step(contender: Contender, path: str) -> Cell:
    if contender.plan is None:
        return contender.no_plan or "nothing fits"
    return seconds(contender.plan.estimate.step_time_s, f"{path}.step_time_s")


def _of_run(cell: Callable[[Run, str], Cell]) -> Column:
    return lambda contender, path: cell(contender.run, path) if contender.run else ABSENT


def _interval(contender: Contender, path: str) -> Cell:
    if contender.interval90 is None:
        return ABSENT
    low, high = (seconds(end, f"{path}.interval90.{number}") for number, end in enumerate(contender.interval90))
    return Line((low, " to ", high))


def _days(run: Run, path: str) -> Cell:
    form: Callable[[float], str] = "{:,.1f}".format if run.days >= 1 else format_days
    return ends(Number(form(run.days), run.days, "days", f"{path}.days", run.days_interval90), form)


def _price(plan: Plan, path: str) -> Cell:
    """Return the dollars of a chip-hour, and when they were read."""
    chip = plan.cluster.chip
    if chip.price_usd_per_hour is None:
        return ABSENT
    return f"${chip.price_usd_per_hour:.2f}/h" + (f" ({chip.price_date})" if chip.price_date else "")


def _energy(run: Run, path: str) -> Cell:
    text = ABSENT if run.energy_mwh is None else format_energy(run.energy_mwh)
    return ends(Number(text, run.energy_mwh, "MWh", f"{path}.energy_mwh", run.energy_mwh_interval90), format_energy)


def _cost(run: Run, path: str) -> Cell:
    return ends(usd(run.usd, f"{path}.usd", run.usd_interval90), format_usd)


def _yes_or_no(met: bool | None) -> str:
    return ABSENT if met is None else "yes" if met else "NO"


COLUMNS: Mapping[str, Column] = {
    "devices": lambda contender, path: count(contender.num_devices, f"{path}.num_devices"),
    "step": _step,
    "stack": lambda contender, path: contender.stack or ABSENT,
    INTERVAL: _interval,
    "MFU": _of_plan(lambda plan, path: share(plan.estimate.mfu, f"{path}.mfu")),
    "days": _of_run(_days),
    "chip-hours": _of_run(
        lambda run, path: Number(
            format_count(run.chip_hours), run.chip_hours, "h", f"{path}.chip_hours", run.chip_hours_interval90
        )
    ),
    "price": _of_plan(_price),
    "cost": _of_run(_cost),
    "energy": _of_run(_energy),
    "in time": lambda contender, path: _yes_or_no(contender.in_time),
    "in budget": lambda contender, path: _yes_or_no(contender.within_budget),
}


def comparison_report(comparison: Comparison) -> Report:
    """Report the table with what qualifies its figures, the choice with its reason, each cluster's layout, what is absent."""
    assert comparison.chosen is not None
    chosen = comparison.contenders[comparison.chosen]
    layouts = tuple((contender.cluster, _layout_text(contender)) for contender in comparison.contenders)
    return [
        *_default_job(comparison),
        Section([comparison_table(comparison), *_notes(comparison, caveats=True)]),
        Section([f"chosen: {chosen.cluster}, {comparison.reason}"]),
        Section([Table(rows=layouts, head=False, indent=2)], title="layouts"),
        Section(list(_absent(comparison))),
        Section(list(_notes(comparison, caveats=False)), title="what the predictions rest on", detail=True),
    ]


def _default_job(comparison: Comparison) -> Iterator[Section]:
    """Yield the job where a part of it was left out and assumed."""
    plan = comparison.plan
    if plan is not None and plan.defaults:
        yield Section([f"{plan.model.name}, {job_text(plan.job, plan.model, plan.defaults)}, {plan.job.precision}"])


def comparison_table(comparison: Comparison) -> Table:
    """Return a line for each cluster, the chosen one marked; columns of limits that were not given are left out."""
    limits = comparison.limits
    left_out = {"in time": limits.deadline_s is None, "in budget": limits.budget_usd is None}
    left_out |= {INTERVAL: not any(contender.interval90 for contender in comparison.contenders)}
    left_out |= dict.fromkeys(
        ("days", "chip-hours", "price", "cost", "energy"), not any(contender.run for contender in comparison.contenders)
    )
    names = [name for name in COLUMNS if not left_out.get(name)]
    rows: list[Row] = [("  cluster", *names)]
    for number, contender in enumerate(comparison.contenders):
        mark = "* " if number == comparison.chosen else "  "
        cells = (COLUMNS[name](contender, f"clusters.{number}") for name in names)
        rows.append((mark + contender.cluster, *cells))
    return Table(rows=tuple(rows), right=range(1, len(rows[0])))


def _notes(comparison: Comparison, *, caveats: bool) -> Iterator[str]:
    """Yield what each estimate says about itself, its caveats or the rest; a note that several share is said once."""
    clusters: dict[str, list[str]] = {}
    for contender in comparison.contenders:
        for note in contender.notes:
            if contender.plan and caveats == (note in contender.plan.estimate.caveats):
                clusters.setdefault(note, []).append(contender.cluster)
    yield from (f"  note: {', '.join(names)}: {note}" for note, names in clusters.items())
    if caveats:
        yield from _mixed(comparison)


def _mixed(comparison: Comparison) -> Iterator[str]:
    predicted = {contender.stack is not None for contender in comparison.contenders if contender.plan}
    if len(predicted) > 1:
        yield "  note: some of these steps are predictions and some bounds, which do not compare"
    if any(contender.run for contender in comparison.contenders):
        chips = {contender.chip: contender.plan.cluster.chip for contender in comparison.contenders if contender.plan}
        yield from (f"  note: {note}" for note in price_year_notes(chips.values()))


def _layout_text(contender: Contender) -> str:
    return str(contender.plan.layout) if contender.plan else (contender.problem or "")


def _absent(comparison: Comparison) -> Iterator[str]:
    for contender in comparison.contenders:
        if contender.run and contender.run.missing:
            missing = ", ".join(contender.run.missing)
            yield f"{contender.cluster}: no sourced {missing} of {contender.chip}, so what follows from it is left out"


def missed_limits_text(comparison: Comparison, progress: Progress = ignore_progress) -> str:
    """Return why no cluster was chosen: the reason, the table, what each misses, and what would meet the limits."""
    table = render_block(comparison_table(comparison))
    return "\n".join((comparison.reason, "", table, "", *describe_near_misses(comparison, progress)))
