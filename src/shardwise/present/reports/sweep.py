"""Reports of plans over a range of values, and of plans to a target loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from shardwise.batch_size import LossTarget, NoiseScale
from shardwise.present.charts.sweep_charts import BILLION, absent, what_is_planned
from shardwise.present.rendering.report import Block, Report, Row, Section, Status, Table
from shardwise.present.reports.wording import INTERVAL, plan_summary
from shardwise.price import PRICE_FIELD, Estimate
from shardwise.search import LossSearch, SweepPoint, Swept, grid_points
from shardwise.search.explain.explanation import critical_batch_text
from shardwise.search.loss_time import Doubling, LossPoint, LossTime, NoiseSensitivity
from shardwise.search.plan_sweep import find_knee, step_time_parts, waiting_share
from shardwise.search.sweep_values import format_value
from shardwise.values import (
    format_binary,
    format_bytes,
    format_count,
    format_days,
    format_percent,
    format_seconds,
    format_usd,
    pluralize,
)

NO_PLAN = "-"
LOST = (0.9, 0.5)  # efficiencies whose loss is said: a tenth, and half; a choice
OF_ESTIMATE: Mapping[str, Callable[[Estimate], str]] = {
    "step": lambda one: format_seconds(one.step_time_s),
    "tokens/s per device": lambda one: f"{one.tokens_per_s_per_device:,.0f}",
    "MFU": lambda one: f"{one.mfu:.1%}",
    "exposed": lambda one: format_percent(step_time_parts(one)["exposed communication"] / one.step_time_s),
    "bubble": lambda one: format_percent(step_time_parts(one)["bubble"] / one.step_time_s),
    "memory": lambda one: format_bytes(one.memory_bytes),
    "bound by": lambda one: one.bound,
}
OF_POINT: Mapping[str, Callable[[SweepPoint], str]] = {
    "a step": lambda one: _sweep_usd(one.usd_per_step),
    "1B tokens": lambda one: _sweep_usd(None if one.usd_per_token is None else one.usd_per_token * BILLION),
    "days": lambda one: format_days(one.plan.run.days) if one.plan and one.plan.run else NO_PLAN,
    "the run": lambda one: _sweep_usd(one.plan.run.usd) if one.plan and one.plan.run else NO_PLAN,
}


def _sweep_usd(value: float | None) -> str:
    return NO_PLAN if value is None else format_usd(value)


def sweep_report(swept: Swept) -> Report:
    """Headline, for a grid its MFUs, the table, what bounds scaling, the layouts, what has no plan, notes."""
    what, job = what_is_planned(swept)
    names = " and ".join(f"{sweep.name} over {pluralize(len(sweep.values), 'value')}" for sweep in swept.sweeps)
    left = list(_left(swept))
    return [
        Section([f"  {names}", *_interval(swept)], title=f"{what}, {job}"),
        *([Section([_mfus(swept)])] if len(swept.sweeps) > 1 else []),
        Section([sweep_table(swept)]),
        Section(list(_knees(swept))),
        Section([_layouts(swept)], title="layouts"),
        *([Section(left, title=f"stopped after {len(swept.points)} of {swept.num_points} points; not planned:")] if left else []),
        Section([*_notes(swept.points), *_prices(swept.points)]),
    ]  # fmt: skip


def _interval(swept: Swept) -> Iterator[str]:
    """How far a prediction may be off, as factors of each step."""
    found = [point.plan.estimate for point in swept.points if point.plan and point.plan.estimate.interval90]
    ratios = [end / one.step_time_s for one in found for end in one.interval90 or ()]
    if ratios:
        yield f"  {INTERVAL}: {min(ratios):.2f} to {max(ratios):.2f} times each step"


def sweep_table(swept: Swept) -> Table:
    """A line for each point; columns that nothing is known of are left out."""
    points, names = swept.points, [sweep.name for sweep in swept.sweeps]
    columns: list[tuple[str, list[str]]] = [
        (name, [format_value(point.at[name]) for point in points]) for name in names
    ]
    columns += [
        (name, [form(point.plan.estimate) if point.plan else NO_PLAN for point in points])
        for name, form in OF_ESTIMATE.items()
    ]
    columns[len(names)] = (
        "step",
        [format_seconds(p.plan.estimate.step_time_s) if p.plan else absent(p) for p in points],
    )
    if "gpus" in names:
        found = _efficiencies(swept)
        columns.insert(len(names) + 2, ("efficiency", [f"{found[p.name]:.1%}" if p.plan else NO_PLAN for p in points]))
    columns += [(name, [form(point) for point in points]) for name, form in OF_POINT.items()]
    kept = [(name, cells) for name, cells in columns if name in names or set(cells) != {NO_PLAN}]
    rows: list[Row] = [tuple(name for name, _ in kept), *zip(*(cells for _, cells in kept), strict=True)]
    right = [number for number, (name, _) in enumerate(kept) if name not in ("bound by", "model")]
    return Table(rows=tuple(rows), right=right)


def _efficiencies(swept: Swept) -> dict[str, float]:
    """Tokens/s of a device over those with the first number of devices that has a plan, by the point's name."""
    return {
        point.name: point.plan.estimate.tokens_per_s_per_device / first
        for _, points in swept.series("gpus")
        for first in [one.plan.estimate.tokens_per_s_per_device for one in points if one.plan][:1]
        for point in points
        if point.plan
    }


def _mfus(swept: Swept) -> Table:
    """MFU of a grid: a row for each value of the first sweep, a column for each of the second."""
    first, second = swept.sweeps
    at = {tuple(point.at.values()): point for point in swept.points}
    rows: list[Row] = [(f"MFU by {first.name} and {second.name}", *map(format_value, second.values))]
    for value in first.values:
        found = [at.get((value, other)) for other in second.values]
        rows.append(
            (format_value(value), *(f"{p.plan.estimate.mfu:.1%}" if p and p.plan else absent(p) for p in found))
        )
    return Table(rows=tuple(rows), right=range(1, len(rows[0])))


def _knees(swept: Swept) -> Iterator[str]:
    """Where each series stops to scale, and where compute takes most throughout; from where on efficiency is lost."""
    name = swept.along.name
    efficiencies = _efficiencies(swept) if name == "gpus" else {}
    for at, points in swept.series() if swept.along.is_ordered else ():
        planned = [point for point in points if point.plan]
        if len(planned) < 2:
            continue
        found = find_knee(points)
        said = (
            f"knee at {name}={format_value(found.point.at[name])}: {found.reason}" if found else _no_knee(planned, name)
        )
        where = ", ".join(f"{other}={format_value(value)}" for other, value in at.items())
        lost = [
            f"below {part:.0%} at {name}={format_value(first.at[name])}"
            for part in LOST
            for first in [point for point in planned if efficiencies.get(point.name, 1.0) < part][:1]
        ]
        yield (f"{where}: " if where else "") + said + (f"; efficiency falls {', '.join(lost)}" if lost else "")


def _no_knee(planned: Sequence[SweepPoint], name: str) -> str:
    """What bounds all of the steps, and how much of them devices wait at most."""
    found = [(waiting_share(point.plan.estimate), point) for point in planned if point.plan]
    most, where = max(found, key=lambda pair: pair[0])
    assert where.plan
    return (
        f"no knee: every step is bound by {where.plan.estimate.bound}; exposed communication and bubble are at most "
        f"{most:.0%} of it, at {name}={format_value(where.at[name])}"
    )


def _layouts(swept: Swept) -> Table:
    """Of each point its layout, or why it has none."""
    rows: list[Row] = []
    for point in swept.points:
        first, *others = (str(point.plan.layout) if point.plan else str(point.error)).split("\n")
        rows += [(point.name, first), *(("", other) for other in others)]
    return Table(rows=tuple(rows), head=False, indent=2)


def _left(swept: Swept) -> Iterator[str]:
    """What was not planned where the sweep was stopped."""
    done = [dict(point.at) for point in swept.points]
    for at in grid_points(swept.sweeps):
        if dict(at) not in done:
            yield f"  {', '.join(f'{name}={format_value(value)}' for name, value in at.items())}"


def _notes(points: Sequence[SweepPoint]) -> Iterator[str]:
    """What estimates say about themselves, with the points where not all say it."""
    planned = [(point.name, point.plan.estimate.notes) for point in points if point.plan]
    said: dict[str, list[str]] = {}
    for name, notes in planned:
        for note in notes:
            said.setdefault(note, []).append(name)
    for note, names in said.items():
        yield f"  note: {note}" if len(names) == len(planned) else f"  note: {'; '.join(names)}: {note}"


def _prices(points: Sequence[SweepPoint]) -> Iterator[str]:
    """Which chips have no sourced price."""
    chips = {point.case.cluster.chip.name: point.case.cluster.chip for point in points}
    dearer = ", ".join(sorted(name for name, chip in chips.items() if chip.price_usd_per_hour is None))
    if dearer:
        yield f"  note: no sourced {PRICE_FIELD} of {dearer}: dollars are left out (--set chip.{PRICE_FIELD}=VALUE)"


NO_POINT = "-"
HEAD = ("batch", "of B_crit", "step", "MFU", "token time", "tokens to loss", "loss time", "chip-hours", "cost")


def to_loss_report(found: LossSearch, doublings: Sequence[Doubling]) -> Report:
    """The best batch of each cluster, the choice with its side of the critical batch, doublings, how sure it is, the plan."""
    assert found.chosen is not None
    assert found.plan is not None
    mark = found.points[found.chosen]
    assert mark.time is not None
    place = f"{mark.cluster} with batches of {format_binary(mark.batch_tokens)} tokens"
    return [
        Section(list(_head(found)), title=_title(found)),
        Section([_points(found.best, mark)], title="the best batch of each cluster"),
        Section([f"chosen: {place}, {found.reason}", f"  {critical_batch_text(mark.time, found.target)}"]),
        Section(list(_diagonal(found))),
        Section([doublings_table(doublings)], title="the next doubling of the chosen plan"),
        Section(list(_sensitivity(found))),
        Section([_points(found.points, mark)], title="every batch on every cluster", name="every batch", detail=True),
        Section(list(_problems(found))),
        plan_summary(found.plan),
    ]


def _title(found: LossSearch) -> str:
    job = next(point.plan.job for point in found.points if point.plan)
    model = next(point.plan.model.name for point in found.points if point.plan)
    loss = "the loss" if found.target.loss is None else f"a loss of {found.target.loss:g}"
    return f"{model} to {loss}: {len(found.points)} pairs of cluster and batch, sequences of {job.seq_len:,}, {job.precision}"


def _head(found: LossSearch) -> Iterator[Block]:
    yield f"  {noise_text(found.target.noise)}"
    yield f"  {tokens_text(found.target)}"
    yield "  token time: of those tokens whatever the loss; loss time: to the loss, with the tokens that each batch takes to it"
    if "published law" in found.target.noise.source:
        law = "the noise scale is that of another data set, and may be off by several times: measure it with a run of your own"
        yield Status(f"  note: {law}", "note")


def noise_text(noise: NoiseScale) -> str:
    """The noise scale with its interval and source, in a line."""
    around = (
        f", 90% interval {format_count(noise.interval90[0])} to {format_count(noise.interval90[1])}"
        if noise.interval90
        else ""
    )
    return f"noise scale {format_count(noise.tokens)} tokens{around}: {noise.source}; taken to stay as it is during the run"


def tokens_text(target: LossTarget) -> str:
    """What times and dollars are of, in a line."""
    if target.tokens is None:
        return "times and dollars are of a billion of the fewest tokens, E_min: with --tokens they are of the whole run"
    batch = "the fewest" if target.batch_tokens is None else f"with batches of {format_count(target.batch_tokens)}"
    return f"{format_count(target.tokens)} tokens to the loss, {batch}"


def _points(points: Iterable[LossPoint], mark: LossPoint) -> Table:
    rows: list[Row] = [("  cluster", *HEAD)]
    for point in points:
        rows.append((("* " if point is mark else "  ") + point.cluster, *_cells(point)))
    return Table(rows=tuple(rows), right=range(1, len(HEAD) + 1))


def _cells(point: LossPoint) -> Sequence[str]:
    if point.plan is None or point.time is None:
        return (format_binary(point.batch_tokens), NO_POINT, "no plan", *[NO_POINT] * (len(HEAD) - 3))
    time = point.time
    return (
        format_binary(point.batch_tokens), f"{time.batch_over_noise:.2g}", format_seconds(time.step_time_s),
        f"{point.plan.estimate.mfu:.1%}", format_seconds(time.token_s), format_count(time.tokens),
        format_seconds(time.loss_s), format_count(time.chip_hours), _loss_usd(time),
    )  # fmt: skip


def _loss_usd(time: LossTime) -> str:
    return NO_POINT if time.usd is None else format_usd(time.usd)


def _diagonal(found: LossSearch) -> Iterator[Block]:
    """Batch and devices doubled together, as far as they were planned: token time halves, loss time does not."""
    points = [(point, point.time) for point in found.diagonal if point.time]
    if len(points) < 2:
        return
    yield "batch and devices together, from one line to the next:"
    rows: list[Row] = [("devices", "batch", "of B_crit", "token time", "", "loss time", "", "chip-hours", "")]
    for (point, time), (_, before) in zip(points, [(None, None), *points], strict=False):
        token, loss, hours = _changes(time, before)
        rows.append(
            (
                f"{point.num_devices:,}", format_binary(point.batch_tokens), f"{time.batch_over_noise:.2g}",
                format_seconds(time.token_s), token, format_seconds(time.loss_s), loss, format_count(time.chip_hours), hours,
            )
        )  # fmt: skip
    yield Table(rows=tuple(rows), right=range(len(rows[0])), indent=2)


def _changes(now: LossTime, before: LossTime | None) -> Sequence[str]:
    """How token time, loss time and chip-hours change from one line to the next."""
    if before is None:
        return "", "", ""
    return tuple(f"×{getattr(now, name) / getattr(before, name):.2f}" for name in ("token_s", "loss_s", "chip_hours"))


def doublings_table(doublings: Sequence[Doubling]) -> Table:
    """What twice the batch, the devices or both does to the times and to the dollars."""
    rows: list[Row] = [("twice the", "cluster", "batch", "token time", "loss time", "dollars")]
    for one in doublings:
        ratios = [
            NO_POINT if ratio is None else f"×{ratio:.2f}" for ratio in (one.token_ratio, one.loss_ratio, one.usd_ratio)
        ]
        rows.append((one.doubled, one.cluster, format_binary(one.batch_tokens), *ratios))
    return Table(rows=tuple(rows), right=range(2, len(rows[0])), indent=2)


def _sensitivity(found: LossSearch) -> Iterator[str]:
    """What another noise scale would have chosen."""
    assert found.chosen is not None
    mark = found.points[found.chosen]
    of = "the interval's ends" if found.target.noise.interval90 else "half and twice the noise scale"
    if found.sensitivity:
        yield f"the choice at {of}:"
        yield from (f"  {_other(one, mark, found.goal)}" for one in found.sensitivity)


def _other(one: NoiseSensitivity, mark: LossPoint, goal: str) -> str:
    tokens = format_count(one.noise_tokens)
    if one.cluster is None or one.batch_tokens is None:
        return f"{tokens}: nothing meets the limits"
    if (one.cluster, one.batch_tokens) == (mark.cluster, mark.batch_tokens):
        return f"{tokens}: the same"
    worse = (
        ""
        if one.regret is None
        else f"; the chosen plan takes {one.regret:.0%} more {'time' if goal == 'time' else 'dollars'}"
    )
    return f"{tokens}: {one.cluster} with batches of {format_binary(one.batch_tokens)}{worse}"


def _problems(found: LossSearch) -> Iterator[str]:
    for point in found.points:
        if point.problem:
            yield f"no plan of {point.cluster} with batches of {format_binary(point.batch_tokens)}: {point.problem}"
