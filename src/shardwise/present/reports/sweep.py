"""Reports of plans over a range of values, and of plans to a target loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shardwise.batch_size import LossTarget, NoiseScale
from shardwise.present.charts.sweep_charts import BILLION, absent, what_is_planned
from shardwise.present.rendering.numbers import count, num_bytes, percent, seconds, share, significant, usd
from shardwise.present.rendering.report import Block, Cell, Number, Report, Row, Section, Status, Table, cell_text
from shardwise.present.reports.wording import INTERVAL, plan_summary, price_year_notes
from shardwise.price import PRICE_FIELD
from shardwise.search import LossSearch, Plan, SweepPoint, Swept, grid_points
from shardwise.search.explain.explanation import critical_batch_text
from shardwise.search.loss_time import Doubling, LossPoint, LossTime, NoiseSensitivity
from shardwise.search.plan_sweep import SweptValues, find_knee, step_time_parts, waiting_share
from shardwise.search.sweep_values import SweepValue, format_value
from shardwise.values import (
    format_binary,
    format_count,
    format_days,
    pluralize,
)

NO_PLAN = "-"
EFFICIENCIES = (0.9, 0.5)  # below which the report says that efficiency falls: a tenth lost, and half; a choice


def _part_share(plan: Plan, part: str) -> Number:
    estimate = plan.estimate
    return percent(step_time_parts(estimate)[part] / estimate.step_time_s)


def _days(plan: Plan, path: str) -> Cell:
    run = plan.run
    return Number(format_days(run.days), run.days, "days", f"{path}.days", run.days_interval90) if run else NO_PLAN


def _run_usd(point: SweepPoint, path: str) -> Cell:
    run = point.plan.run if point.plan else None
    return usd(run.usd if run else None, f"{path}.usd", run.usd_interval90 if run else None)


def _billion_tokens(point: SweepPoint, path: str) -> Cell:
    price, interval = point.usd_per_token, point.usd_per_token_interval90
    return usd(
        None if price is None else price * BILLION, interval=interval and (interval[0] * BILLION, interval[1] * BILLION)
    )


# Columns of a point with a plan; the second argument is the place of the point in the payload.
PLAN_COLUMNS: Mapping[str, Callable[[Plan, str], Cell]] = {
    "step": lambda plan, path: seconds(plan.estimate.step_time_s, f"{path}.step_time_s"),
    "tokens/s per device": lambda plan, path: count(
        plan.estimate.tokens_per_s_per_device, f"{path}.tokens_per_s_per_device", "tokens/s"
    ),
    "MFU": lambda plan, path: share(plan.estimate.mfu, f"{path}.mfu"),
    "exposed": lambda plan, path: _part_share(plan, "exposed communication"),
    "bubble": lambda plan, path: _part_share(plan, "bubble"),
    "memory": lambda plan, path: num_bytes(plan.estimate.memory_bytes, f"{path}.memory_bytes"),
    "bound by": lambda plan, path: plan.estimate.bound,
}
POINT_COLUMNS: Mapping[str, Callable[[SweepPoint, str], Cell]] = {
    "a step": lambda point, path: usd(point.usd_per_step, f"{path}.usd_per_step", point.usd_per_step_interval90),
    "1B tokens": _billion_tokens,
    "days": lambda point, path: _days(point.plan, path) if point.plan else NO_PLAN,
    "the run": _run_usd,
}


def sweep_report(swept: Swept) -> Report:
    """Report headline, for a grid its MFUs, the table, what bounds scaling, the layouts, what has no plan, notes."""
    subject, job = what_is_planned(swept)
    names = " and ".join(f"{sweep.name} over {pluralize(len(sweep.values), 'value')}" for sweep in swept.sweeps)
    unplanned = list(_unplanned(swept))
    return [
        Section([f"  {names}", *_interval(swept)], title=f"{subject}, {job}"),
        *([Section([_mfus(swept)])] if len(swept.sweeps) > 1 else []),
        Section([sweep_table(swept)]),
        Section(list(_knees(swept))),
        Section([_layouts(swept)], title="layouts"),
        *([Section(unplanned, title=f"{swept.interruption}; not planned:")] if unplanned else []),
        Section([*_notes(swept.points), *_prices(swept.points)]),
    ]


def _interval(swept: Swept) -> Iterator[str]:
    """Yield how far a prediction may be off, as factors of each step, and of the dollars and days that follow from it."""
    plans = [point.plan for point in swept.points if point.plan]
    steps = _end_ratios((plan.estimate.step_time_s, plan.estimate.interval90) for plan in plans)
    runs = _end_ratios((plan.run.days, plan.run.days_interval90) for plan in plans if plan.run)
    if steps:
        yield f"  {INTERVAL}: {steps} times each step and its dollars" + (
            f", {runs} times the days of the run" if runs else ""
        )


def _end_ratios(intervals: Iterable[tuple[float, tuple[float, float] | None]]) -> str:
    """Return the ends of intervals over their values, the lowest and the highest; "" where there are none."""
    ratios = [end / value for value, interval in intervals for end in interval or ()]
    return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""


def sweep_table(swept: Swept) -> Table:
    """Return a line for each point; columns that nothing is known of are left out."""
    points, names = swept.points, [sweep.name for sweep in swept.sweeps]
    paths = [f"points.{number}" for number in range(len(points))]
    columns: list[tuple[str, list[Cell]]] = [
        (name, [_swept_value(point.at[name], f"{path}.at.{name}") for point, path in zip(points, paths, strict=True)])
        for name in names
    ]
    columns += [
        (
            name,
            [
                cell(point.plan, path) if point.plan else absent(point) if name == "step" else NO_PLAN
                for point, path in zip(points, paths, strict=True)
            ],
        )
        for name, cell in PLAN_COLUMNS.items()
    ]
    if "gpus" in names:
        ratios = _efficiencies(swept)
        columns.insert(
            len(names) + 2, ("efficiency", [share(ratios[point.name]) if point.plan else NO_PLAN for point in points])
        )
    columns += [
        (name, [cell(point, path) for point, path in zip(points, paths, strict=True)])
        for name, cell in POINT_COLUMNS.items()
    ]
    columns = [(name, cells) for name, cells in columns if name in names or set(map(cell_text, cells)) != {NO_PLAN}]
    rows: list[Row] = [tuple(name for name, _ in columns), *zip(*(cells for _, cells in columns), strict=True)]
    right = [number for number, (name, _) in enumerate(columns) if name not in ("bound by", "model")]
    return Table(rows=tuple(rows), right=right)


def _swept_value(value: SweepValue, path: str) -> Cell:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return Number(format_value(value), float(value), path=path) if is_number else format_value(value)


def _efficiencies(swept: Swept) -> dict[str, float]:
    """Return tokens/s of a device over those with the first number of devices that has a plan, by the point's name."""
    return {
        point.name: point.plan.estimate.tokens_per_s_per_device / first
        for _, points in swept.series("gpus")
        for first in [planned.plan.estimate.tokens_per_s_per_device for planned in points if planned.plan][:1]
        for point in points
        if point.plan
    }


def _mfus(swept: Swept) -> Table:
    """Return MFU of a grid: a row for each value of the first sweep, a column for each of the second."""
    first, second = swept.sweeps
    places = {tuple(point.at.values()): number for number, point in enumerate(swept.points)}
    rows: list[Row] = [(f"MFU by {first.name} and {second.name}", *map(format_value, second.values))]
    for value in first.values:
        cells = [_mfu(swept, places.get((value, second_value))) for second_value in second.values]
        rows.append((format_value(value), *cells))
    return Table(rows=tuple(rows), right=range(1, len(rows[0])))


def _mfu(swept: Swept, number: int | None) -> Cell:
    point = None if number is None else swept.points[number]
    return share(point.plan.estimate.mfu, f"points.{number}.mfu") if point and point.plan else absent(point)


def _knees(swept: Swept) -> Iterator[str]:
    """Yield where each series stops to scale, and where compute takes most throughput; from where on efficiency is lost."""
    name = swept.along.name
    efficiencies = _efficiencies(swept) if name == "gpus" else {}
    for fixed_values, points in swept.series() if swept.along.is_ordered else ():
        planned = [point for point in points if point.plan]
        if len(planned) < 2:
            continue
        knee = find_knee(points)
        text = f"knee at {name}={format_value(knee.point.at[name])}: {knee.reason}" if knee else _no_knee(planned, name)
        if not knee and not swept.is_complete:
            text = f"{pluralize(len(swept.points), 'point')} of {swept.num_points} planned, in these {text}"
        series_name = _values_text(fixed_values)
        falls = [
            f"below {part:.0%} at {name}={format_value(first.at[name])}"
            for part in EFFICIENCIES
            for first in [point for point in planned if efficiencies.get(point.name, 1.0) < part][:1]
        ]
        text += f"; efficiency falls {', '.join(falls)}" if falls else ""
        yield f"{series_name}: {text}" if series_name else text


def _no_knee(planned: Sequence[SweepPoint], name: str) -> str:
    """Return what bounds all of the steps, and how much of them devices wait at most."""
    shares = [(waiting_share(point.plan.estimate), point) for point in planned if point.plan]
    largest_share, point = max(shares, key=lambda pair: pair[0])
    assert point.plan
    return (
        f"no knee: every step is bound by {point.plan.estimate.bound}; exposed communication and bubble are at most "
        f"{largest_share:.0%} of it, at {name}={format_value(point.at[name])}"
    )


def _layouts(swept: Swept) -> Table:
    """Return the layout of each point, or why it has none."""
    rows: list[Row] = []
    for point in swept.points:
        lines = (str(point.plan.layout) if point.plan else str(point.error)).split("\n")
        rows += zip([point.name, *[""] * (len(lines) - 1)], lines, strict=True)
    return Table(rows=tuple(rows), head=False, indent=2)


def _unplanned(swept: Swept) -> Iterator[str]:
    """Yield what was not planned where the sweep was stopped."""
    planned = [dict(point.at) for point in swept.points]
    for swept_values in grid_points(swept.sweeps):
        if dict(swept_values) not in planned:
            yield f"  {_values_text(swept_values)}"


def _values_text(swept_values: SweptValues) -> str:
    return ", ".join(f"{name}={format_value(value)}" for name, value in swept_values.items())


def _notes(points: Sequence[SweepPoint]) -> Iterator[str]:
    """Yield what estimates say about themselves, with the points where not all say it."""
    planned = [(point.name, point.plan.estimate.notes) for point in points if point.plan]
    points_by_note: dict[str, list[str]] = {}
    for name, notes in planned:
        for note in notes:
            points_by_note.setdefault(note, []).append(name)
    for note, names in points_by_note.items():
        yield f"  note: {note}" if len(names) == len(planned) else f"  note: {'; '.join(names)}: {note}"


def _prices(points: Sequence[SweepPoint]) -> Iterator[str]:
    """Yield which chips have no sourced price."""
    chips = {point.case.cluster.chip.name: point.case.cluster.chip for point in points}
    unpriced = ", ".join(sorted(name for name, chip in chips.items() if chip.price_usd_per_hour is None))
    if unpriced:
        yield f"  note: no sourced {PRICE_FIELD} of {unpriced}: dollars are left out (--set chip.{PRICE_FIELD}=VALUE)"


HEAD = ("batch", "of B_crit", "step", "MFU", "token time", "tokens to loss", "loss time", "chip-hours", "cost")


def to_loss_report(search: LossSearch) -> Report:
    """Report the best batch of each cluster, the choice, its side of the critical batch, doublings, how sure it is, the plan."""
    assert search.chosen is not None
    assert search.plan is not None
    chosen = search.points[search.chosen]
    assert chosen.time is not None
    places = {id(point): number for number, point in enumerate(search.points)}
    best = [places[id(point)] for point in search.best]
    return [
        Section(list(_head(search)), title=_title(search)),
        Section([_points(search, best)], title="the best batch of each cluster"),
        Section(
            [f"chosen: {chosen.name} tokens, {search.reason}", f"  {critical_batch_text(chosen.time, search.target)}"]
        ),
        Section(list(_diagonal(search))),
        Section(
            [doublings_table(search.doublings, "doublings"), *_unplanned_doublings(search.doublings)],
            title="the next doubling of the chosen plan",
        ),
        Section(list(_sensitivity(search))),
        Section(
            [_points(search, range(len(search.points)))], title="every batch on every cluster", name="every batch",
            detail=True,
        ),
        Section(list(_problems(search))),
        plan_summary(search.plan, path="plan."),
    ]  # fmt: skip


def _title(search: LossSearch) -> str:
    plan = next(point.plan for point in search.points if point.plan)
    loss = "the loss" if search.target.loss is None else f"a loss of {search.target.loss:g}"
    pairs = f"{len(search.points)} pairs of cluster and batch"
    return f"{plan.model.name} to {loss}: {pairs}, sequences of {plan.job.seq_len:,}, {plan.job.precision}"


def _head(search: LossSearch) -> Iterator[Block]:
    yield f"  {noise_text(search.target.noise)}"
    yield f"  {tokens_text(search.target)}"
    yield "  token time: of those tokens whatever the loss; loss time: to the loss, with the tokens that each batch takes to it"
    ratios = _end_ratios((point.time.loss_s, point.time.loss_s_interval90) for point in search.points if point.time)
    if ratios:
        yield f"  {INTERVAL}: {ratios} times each time, its chip-hours and its cost"
    chips = {point.chip: point.plan.cluster.chip for point in search.points if point.plan}
    yield from (Status(f"  note: {note}", "note") for note in price_year_notes(chips.values()))
    if "published law" in search.target.noise.source:
        law = "the noise scale is that of another data set, and may be off by several times: measure it with a run of your own"
        yield Status(f"  note: {law}", "note")


def noise_text(noise: NoiseScale) -> str:
    """Return the noise scale with its interval and source, in a line."""
    interval = (
        f", 90% interval {format_count(noise.interval90[0])} to {format_count(noise.interval90[1])}"
        if noise.interval90
        else ""
    )
    return f"noise scale {format_count(noise.tokens)} tokens{interval}: {noise.source}; taken to stay as it is during the run"


def tokens_text(target: LossTarget) -> str:
    """Return what times and dollars are of, in a line."""
    if target.tokens is None:
        return "times and dollars are of a billion of the fewest tokens, E_min: with --tokens they are of the whole run"
    batch = "the fewest" if target.batch_tokens is None else f"with batches of {format_count(target.batch_tokens)}"
    return f"{format_count(target.tokens)} tokens to the loss, {batch}"


def _points(search: LossSearch, numbers: Iterable[int]) -> Table:
    rows: list[Row] = [("  cluster", *HEAD)]
    for number in numbers:
        point = search.points[number]
        mark = "* " if number == search.chosen else "  "
        rows.append((mark + point.cluster, *_cells(point, f"points.{number}")))
    return Table(rows=tuple(rows), right=range(1, len(HEAD) + 1))


def _cells(point: LossPoint, path: str) -> Sequence[Cell]:
    batch = _batch(point.batch_tokens, f"{path}.batch_tokens")
    if point.plan is None or point.time is None:
        return (batch, NO_PLAN, point.no_plan or "no plan", *[NO_PLAN] * (len(HEAD) - 3))
    time, time_path, interval = point.time, f"{path}.time", point.time.loss_s_interval90
    return (
        batch, _noise_ratio(time, time_path), seconds(time.step_time_s, f"{time_path}.step_time_s"),
        share(point.plan.estimate.mfu, f"{path}.mfu"),
        seconds(time.token_s, f"{time_path}.token_s", time.token_s_interval90, kind="prediction" if interval else "bound"),
        Number(format_count(time.tokens), time.tokens, "tokens", f"{time_path}.tokens"),
        seconds(time.loss_s, f"{time_path}.loss_s", interval, kind="prediction" if interval else "bound"),
        _chip_hours(time, time_path), usd(time.usd, f"{time_path}.usd", time.usd_interval90),
    )  # fmt: skip


def _batch(tokens: int, path: str) -> Number:
    return Number(format_binary(tokens), tokens, "tokens", path)


def _noise_ratio(time: LossTime, path: str) -> Number:
    return significant(time.batch_over_noise, f"{path}.batch_over_noise", digits=2)


def _chip_hours(time: LossTime, path: str) -> Number:
    hours = time.chip_hours
    return Number(format_count(hours), hours, "h", f"{path}.chip_hours", time.chip_hours_interval90)


def _diagonal(search: LossSearch) -> Iterator[Block]:
    """Yield batch and devices doubled together, as far as they were planned: token time halves, loss time does not."""
    places = {id(point): number for number, point in enumerate(search.points)}
    points = [(point, point.time) for point in search.diagonal if point.time]
    if len(points) < 2:
        return
    yield "batch and devices together, from one line to the next:"
    rows: list[Row] = [("devices", "batch", "of B_crit", "token time", "", "loss time", "", "chip-hours", "")]
    for (point, time), (_, before) in zip(points, [(None, None), *points], strict=False):
        token, loss, hours = _changes(time, before)
        path = f"points.{places[id(point)]}"
        rows.append(
            (
                count(point.num_devices, f"{path}.num_devices"), _batch(point.batch_tokens, f"{path}.batch_tokens"),
                _noise_ratio(time, f"{path}.time"), seconds(time.token_s, f"{path}.time.token_s"), token,
                seconds(time.loss_s, f"{path}.time.loss_s"), loss, _chip_hours(time, f"{path}.time"), hours,
            )
        )  # fmt: skip
    yield Table(rows=tuple(rows), right=range(len(rows[0])), indent=2)


def _changes(now: LossTime, before: LossTime | None) -> Sequence[str]:
    """Return how token time, loss time and chip-hours change from one line to the next."""
    if before is None:
        return "", "", ""
    return tuple(f"×{getattr(now, name) / getattr(before, name):.2f}" for name in ("token_s", "loss_s", "chip_hours"))


def doublings_table(doublings: Sequence[Doubling], path: str) -> Table:
    """Return what twice the batch, the devices or both does to times and dollars; `path` is the place of the list."""
    rows: list[Row] = [("twice the", "cluster", "batch", "token time", "loss time", "dollars")]
    for index, doubling in enumerate(doublings):
        place = f"{path}.{index}"
        ratios = [
            Number(NO_PLAN if ratio is None else f"×{ratio:.2f}", ratio, "", f"{place}.{name}")
            for name in ("token_ratio", "loss_ratio", "usd_ratio")
            for ratio in [getattr(doubling, name)]
        ]
        batch = _batch(doubling.batch_tokens, f"{place}.batch_tokens")
        rows.append((doubling.doubled, doubling.cluster, batch, *ratios))
    return Table(rows=tuple(rows), right=range(2, len(rows[0])), indent=2)


def _unplanned_doublings(doublings: Sequence[Doubling]) -> Iterator[str]:
    """Yield why a doubling has no numbers."""
    yield from (
        f"  no plan of twice the {doubling.doubled}: {doubling.problem}" for doubling in doublings if doubling.problem
    )


def _sensitivity(search: LossSearch) -> Iterator[str]:
    """Yield what another noise scale would have chosen."""
    assert search.chosen is not None
    chosen = search.points[search.chosen]
    ends = "the interval's ends" if search.target.noise.interval90 else "half and twice the noise scale"
    if search.sensitivity:
        yield f"the choice at {ends}:"
        yield from (f"  {_choice_text(choice, chosen, search.goal)}" for choice in search.sensitivity)


def _choice_text(choice: NoiseSensitivity, chosen: LossPoint, goal: str) -> str:
    tokens = format_count(choice.noise_tokens)
    if choice.cluster is None or choice.batch_tokens is None:
        return f"{tokens}: nothing meets the limits"
    if (choice.cluster, choice.batch_tokens) == (chosen.cluster, chosen.batch_tokens):
        return f"{tokens}: the same"
    worse = (
        ""
        if choice.regret is None
        else f"; the chosen plan takes {choice.regret:.0%} more {'time' if goal == 'time' else 'dollars'}"
    )
    return f"{tokens}: {choice.cluster} with batches of {format_binary(choice.batch_tokens)}{worse}"


def _problems(search: LossSearch) -> Iterator[str]:
    for point in search.points:
        if point.problem:
            yield f"no plan of {point.name}: {point.problem}"
