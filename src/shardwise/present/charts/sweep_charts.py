"""Charts of plans over a range of values, and of batches and clusters to a target loss."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.layout.layout import AXES
from shardwise.present.charts.chart import Axis, Category, Cell, Cells, Chart, Curve, LegendEntry, Panel, RuleLine
from shardwise.present.charts.common_charts import categories, column_panel, curve_chart
from shardwise.search import LossSearch, Plan, SweepPoint, Swept
from shardwise.search.loss_time import LossTime
from shardwise.search.payloads import accumulation_steps
from shardwise.search.plan_sweep import find_knee, step_time_parts
from shardwise.search.sweep_values import format_value
from shardwise.values import (
    MEMORY_TERMS,
    InputError,
    format_count,
)

WIDTH = 18  # characters of a line under a column
BILLION = 1e9  # tokens that dollars are shown for


def sweep_chart(swept: Swept) -> Chart:
    """Return panels over the values of one sweep, a map of a grid. Raises `InputError` where no point has a plan."""
    if not any(point.plan for point in swept.points):
        raise InputError("picture: no point of the sweep has a plan; one at least is required")
    return panel_chart(swept) if len(swept.sweeps) == 1 else heat_map(swept)


def what_is_planned(swept: Swept) -> tuple[str, str]:
    """Return model and cluster, then the job, that all points share; what is swept stands there in words."""
    case, names = swept.points[0].case, {sweep.name for sweep in swept.sweeps}
    model = "models" if "model" in names else case.model.name
    where = case.cluster.name.partition(":")[0] if "gpus" in names else case.cluster.name
    batches = {point.case.job.global_batch_tokens for point in swept.points}
    batch = f"{case.job.global_batch_tokens:,} tokens per batch" if len(batches) == 1 else "batches swept"
    if len(batches) > 1 and "batch" not in names:
        batch = f"{case.job.global_batch_tokens // case.cluster.num_devices:,} tokens per device and batch"
    lengths = f"sequences of {case.job.seq_len:,}" if "seq_len" not in names else "sequences swept"
    if "batch_tokens" in swept.defaults:
        usual = "usual for a model of this size"
        batch = f"{batch} (default: {usual})" if len(batches) == 1 else f"batches (default: {usual})"
    if "seq_len" in swept.defaults:
        is_same = len({point.case.job.seq_len for point in swept.points}) == 1
        lengths = f"{lengths} (default)" if is_same else "sequences of 4,096 or of the model's positions (default)"
    stack = predicted_for(swept)
    seconds = f"predicted for {stack}" if stack else "bounds: kernels and links at their best"
    return f"{model} on {where}", f"{batch}, {lengths}, {case.job.precision}, {seconds}"


def predicted_for(swept: Swept) -> str | None:
    """Return the software stack that the plans are predicted for; None where they are bounds."""
    plans = (point.plan for point in swept.points if point.plan)
    return next((plan.cluster.calibration.stack for plan in plans if plan.cluster.calibration), None)


def layout_lines(plan: Plan) -> tuple[str, ...]:
    """Return the layout in short lines: degrees above one, gradient accumulation and micro-batch, ZeRO stage, recomputation."""
    layout = plan.layout
    degrees = " ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)
    lines = [
        *textwrap.wrap(degrees or "one device", WIDTH),
        f"gas={accumulation_steps(plan)} mbs={layout.micro_batch_seqs}",
    ]
    lines += [f"ZeRO {layout.zero_stage}"] if layout.fsdp > 1 or layout.zero_stage else []
    if layout.recompute != "none":
        lines.append(f"recompute {layout.recompute}")
    return tuple(lines)


def absent(point: SweepPoint | None) -> str:
    """Return the reason why a point has no plan, in two or three words."""
    if point is None:
        return "not planned"
    return point.no_plan or ""


def panel_chart(swept: Swept) -> Chart:
    """Return step, MFU, dollars for each billion tokens, shares of the step's time, and memory, over the values of one sweep."""
    (sweep,), points = swept.sweeps, swept.points
    knee = find_knee(points) if sweep.is_ordered else None
    title, job = what_is_planned(swept)
    ends = f" from {format_value(sweep.values[0])} to {format_value(sweep.values[-1])}" if sweep.is_ordered else ""
    columns = (
        Category(
            label=format_value(point.at[sweep.name]), lines=layout_lines(point.plan) if point.plan else (absent(point),)
        )
        for point in points
    )
    x = Axis(title=f"{sweep.name}; under it the layout: gas micro-batches of mbs sequences", categories=tuple(columns))
    panels = _panels(x, points, joined=sweep.is_ordered, ideal=sweep.name == "gpus")
    if knee:
        rule = RuleLine(at=points.index(knee.point) + 0.5)
        labels = [f"knee: {knee.reason}", *[""] * (len(panels) - 1)]
        panels = [
            replace(panel, marks=(replace(rule, label=label), *panel.marks))
            for panel, label in zip(panels, labels, strict=True)
        ]
    return Chart(title=f"{title}: plans by {sweep.name}{ends}", subtitle=job, panels=tuple(panels))


def _panels(x: Axis, points: Sequence[SweepPoint], *, joined: bool, ideal: bool) -> list[Panel]:
    """Return the panels: dollars where the chip has a price, the ideal step where devices are swept and the batch is not."""

    def of(value: Callable[[Plan], float]) -> list[float | None]:
        return [value(point.plan) if point.plan else None for point in points]

    fixed = ideal and len({point.case.job.global_batch_tokens for point in points}) == 1
    reference: dict[str, Any] = {"reference": _ideal(points), "dashed": "linear scaling"} if fixed else {}
    dollars = [None if point.usd_per_token is None else point.usd_per_token * BILLION for point in points]
    capacity = {point.plan.estimate.memory_capacity_bytes for point in points if point.plan}
    limit: dict[str, Any] = {"limit": max(capacity), "dashed": "capacity"} if len(capacity) == 1 else {}
    memory = {name: of(lambda plan, name=name: plan.estimate.memory[name]) for name in MEMORY_TERMS}  # type: ignore[misc]
    curves = [
        ("step", "s", of(lambda plan: plan.estimate.step_time_s), reference),
        ("MFU", "%", of(lambda plan: plan.estimate.mfu), {}),
        ("dollars for a billion tokens", "$", dollars, {}),
    ]  # fmt: skip
    return [
        *(
            column_panel(x, title, unit, {title: values}, joined=joined, **compared)
            for title, unit, values, compared in curves
            if unit != "$" or any(value is not None for value in values)
        ),
        column_panel(x, "where the time of a step goes", "%", _shares(points)),
        column_panel(x, "memory of a device", "B", memory, **limit),
    ]


def _ideal(points: Sequence[SweepPoint]) -> tuple[float | None, ...]:
    """Return seconds of a step if every device were as fast as at the first point."""
    first = next((point for point in points if point.plan), None)
    if first is None or first.plan is None:
        return ()
    seconds = first.plan.estimate.step_time_s * first.case.cluster.num_devices
    return tuple(seconds / point.case.cluster.num_devices if point.plan else None for point in points)


def _shares(points: Sequence[SweepPoint]) -> Mapping[str, tuple[float | None, ...]]:
    timed_parts = [
        (step_time_parts(point.plan.estimate), point.plan.estimate.step_time_s) if point.plan else None
        for point in points
    ]
    names = next(timed[0] for timed in timed_parts if timed)
    return {name: tuple(timed[0][name] / timed[1] if timed else None for timed in timed_parts) for name in names}


def heat_map(swept: Swept) -> Chart:
    """Return the best MFU at every point of a grid, with the layout that reaches it.

    Source: the playbook, "Benchmarking thousands of configurations", its heat map of model sizes and nodes.
    """
    rows, columns = swept.sweeps
    points_by_values = {tuple(point.at.values()): point for point in swept.points}
    estimates = [point.plan.estimate.mfu for point in swept.points if point.plan]
    cells = tuple(
        _map_cell(number, place, points_by_values.get((row, column)), max(estimates, default=1.0))
        for number, row in enumerate(rows.values)
        for place, column in enumerate(columns.values)
    )
    title, job = what_is_planned(swept)
    stack = predicted_for(swept)
    scale = f"MFU, predicted for {stack}" if stack else "MFU at most, an upper bound"
    panel = Panel(
        x=Axis(title=columns.name, categories=categories(map(format_value, columns.values)), side="top"),
        y=Axis(title=rows.name, categories=categories(map(format_value, rows.values))), marks=(Cells(cells=cells),),
        size=(84.0, 34.0),
    )  # fmt: skip
    return Chart(
        title=f"{title}: best layouts by {rows.name} and {columns.name}", subtitle=job, panels=(panel,),
        legend=(LegendEntry(label=f"{scale}: 0% to {max(estimates, default=1.0):.1%}", colour="ink", sample="scale"),),
        note="–  no plan; the report says why" if len(estimates) < len(cells) else "",
    )  # fmt: skip


def _map_cell(row: int, column: int, point: SweepPoint | None, highest_mfu: float) -> Cell:
    """Return a point's MFU over its layout, in a colour as deep as its part of the highest, or the reason why it has no plan."""
    if point is None or point.plan is None:
        return Cell(row=row, column=column, colour="empty", lines=("–", absent(point)))
    mfu = point.plan.estimate.mfu
    return Cell(
        row=row, column=column, colour=f"shade:{mfu / highest_mfu:.4f}", lines=(f"{mfu:.1%}", *layout_lines(point.plan))
    )


def search_chart(search: LossSearch) -> Chart:
    """Return token time and loss time against devices where batch and devices double together; on one cluster, against batches.

    Source: Stratos, Compute-Bound Training, 2026, 2.2.1. Raises `InputError` where only one point has a plan.
    """
    along = [(point, point.time) for point in search.diagonal if point.time]
    if len(along) > 1:
        places = [float(point.num_devices) for point, _ in along]
        tokens_per_device = along[0][0].batch_tokens / along[0][0].num_devices
        axis = f"devices, each with {tokens_per_device:,.0f} tokens of the batch"
        return _chart(search, axis, places, [time for _, time in along], search.target.noise.tokens / tokens_per_device)
    cluster = search.points[search.chosen or 0].cluster
    times = [point.time for point in search.points if point.cluster == cluster and point.time]
    if len(times) < 2:
        raise InputError("picture: found one plan; at least two batches, or clusters of two sizes, are required")
    return _chart(
        search,
        f"batch on {cluster}, tokens",
        [float(time.batch_tokens) for time in times],
        times,
        search.target.noise.tokens,
    )


def _chart(search: LossSearch, axis: str, places: Sequence[float], times: Sequence[LossTime], knee: float) -> Chart:
    rows = sorted(zip(places, times, strict=True), key=lambda row: row[0])
    amount = "the run" if search.target.tokens is not None else "a billion of the fewest tokens"
    point = next(point for point in search.points if point.plan)
    assert point.plan is not None
    first, start = rows[0][0], rows[0][1].loss_s
    inside = rows[0][0] <= knee <= rows[-1][0]
    return curve_chart(
        title=f"{point.plan.model.name}: time of the tokens, and to the loss, of {amount}",
        subtitle=f"Noise scale {format_count(search.target.noise.tokens)} tokens, {search.target.noise.source}.",
        x=Axis(title=axis, log=True), y=Axis(title="time", unit="s", log=True),
        marks=(
            Curve(label="time to the loss", points=tuple((place, time.loss_s) for place, time in rows)),
            Curve(label="time of the tokens", points=tuple((place, time.token_s) for place, time in rows)),
            Curve(
                label="halved by each doubling", reference=True,
                points=tuple((place, start * first / place) for place, _ in rows),
            ),
            *([RuleLine(label="critical batch", at=knee)] if inside else []),
        ),
    )  # fmt: skip
