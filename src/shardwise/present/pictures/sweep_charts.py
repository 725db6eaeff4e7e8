"""Pictures of a sweep: panels of step, MFU, dollars, time and memory over its values; of a grid a map of MFU with the layouts."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.layout.layout import AXES
from shardwise.present.draw.heat_map import HeatMap
from shardwise.present.draw.notebook import Shown, Table
from shardwise.present.draw.panels import Column, Panel, PanelChart
from shardwise.search import Plan, SweepPoint, Swept
from shardwise.search.payloads import accumulation_steps
from shardwise.search.plan_sweep import find_knee, step_time_parts
from shardwise.search.sweep_values import format_value
from shardwise.values import MEMORY_TERMS, InputError, format_bytes, format_seconds

WIDTH = 18  # characters of a line under a column
BILLION = 1e9  # tokens that dollars are shown for


def sweep_chart(swept: Swept) -> PanelChart | HeatMap:
    """Panels over the values of one sweep, a map of a grid. Raises `InputError` where no point has a plan."""
    if not any(point.plan for point in swept.points):
        raise InputError("picture: no point of the sweep has a plan; one at least is required")
    return panel_chart(swept) if len(swept.sweeps) == 1 else heat_map(swept)


def shown_sweep(swept: Swept) -> Shown:
    """A sweep in a notebook: a row for each point, and its chart where any point has a plan."""
    names = [sweep.name for sweep in swept.sweeps]
    rows = tuple((*(format_value(point.at[name]) for name in names), *_said(point)) for point in swept.points)
    table = Table(head=(*names, "step", "MFU", "memory", "bound by", "layout"), rows=rows)
    title, job = what_is_planned(swept)
    return Shown(title=f"{title}, {job}", tables=(table,), charts=lambda: (sweep_chart(swept),))


def _said(point: SweepPoint) -> tuple[str, ...]:
    if point.plan is None:
        return absent(point), "", "", "", ""
    found = point.plan.estimate
    layout = str(point.plan.layout)
    return format_seconds(found.step_time_s), f"{found.mfu:.1%}", format_bytes(found.memory_bytes), found.bound, layout


def what_is_planned(swept: Swept) -> tuple[str, str]:
    """Model, cluster and job: what all points share, with the swept values in words."""
    case, names = swept.points[0].case, {sweep.name for sweep in swept.sweeps}
    model = "models" if "model" in names else case.model.name
    where = case.cluster.name.partition(":")[0] if "gpus" in names else case.cluster.name
    batches = {point.case.job.global_batch_tokens for point in swept.points}
    batch = f"{case.job.global_batch_tokens:,} tokens per batch" if len(batches) == 1 else "batches swept"
    if len(batches) > 1 and "batch" not in names:
        batch = f"{case.job.global_batch_tokens // case.cluster.num_devices:,} tokens per device and batch"
    lengths = f"sequences of {case.job.seq_len:,}" if "seq_len" not in names else "sequences swept"
    stack = predicted_for(swept)
    seconds = f"predicted for {stack}" if stack else "bounds: kernels and links at their best"
    return f"{model} on {where}", f"{batch}, {lengths}, {case.job.precision}, {seconds}"


def predicted_for(swept: Swept) -> str | None:
    """The software stack that the plans are predicted for; None where they are bounds."""
    plans = (point.plan for point in swept.points if point.plan)
    return next((plan.cluster.calibration.stack for plan in plans if plan.cluster.calibration), None)


def layout_lines(plan: Plan) -> tuple[str, ...]:
    """The layout in short lines: degrees above one, gradient accumulation and micro-batch, ZeRO stage, recomputation."""
    layout = plan.layout
    degrees = " ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES if getattr(layout, axis) > 1)
    found = [
        *textwrap.wrap(degrees or "one device", WIDTH),
        f"gas={accumulation_steps(plan)} mbs={layout.micro_batch_seqs}",
    ]
    found += [f"ZeRO {layout.zero_stage}"] if layout.fsdp > 1 or layout.zero_stage else []
    if layout.recompute != "none":
        found.append(f"recompute {layout.recompute}")
    return tuple(found)


def absent(point: SweepPoint | None) -> str:
    """Why a point has no plan, in two or three words."""
    if point is None:
        return "not planned"
    return "no legal layout" if str(point.error).startswith("no legal layout:") else "nothing fits"


def panel_chart(swept: Swept) -> PanelChart:
    """Step, MFU, dollars for each billion tokens, where the step's time goes, and memory, over the values of one sweep."""
    (sweep,), points = swept.sweeps, swept.points
    found = find_knee(points) if sweep.is_ordered else None
    title, job = what_is_planned(swept)
    ends = f" from {format_value(sweep.values[0])} to {format_value(sweep.values[-1])}" if sweep.is_ordered else ""
    return PanelChart(
        title=f"{title}: plans by {sweep.name}{ends}", subtitle=job,
        axis_title=f"{sweep.name}; under it the layout: gas micro-batches of mbs sequences",
        columns=tuple(
            Column(label=format_value(point.at[sweep.name]), lines=layout_lines(point.plan) if point.plan else (absent(point),))
            for point in points
        ),
        panels=tuple(_panels(points, joined=sweep.is_ordered, ideal=sweep.name == "gpus")),
        mark=points.index(found.point) if found else None, mark_label=f"knee: {found.reason}" if found else "",
    )  # fmt: skip


def _panels(points: Sequence[SweepPoint], *, joined: bool, ideal: bool) -> list[Panel]:
    """The panels; dollars only where the chip has a price, the ideal step only where devices are swept and the batch is not."""

    def of(value: Callable[[Plan], float]) -> tuple[float | None, ...]:
        return tuple(value(point.plan) if point.plan else None for point in points)

    fixed = ideal and len({point.case.job.global_batch_tokens for point in points}) == 1
    reference: dict[str, Any] = {"reference": _ideal(points), "dashed": "linear scaling"} if fixed else {}
    prices = [point.usd_per_token for point in points]
    dollars = tuple(None if price is None else price * BILLION for price in prices)
    capacity = {point.plan.estimate.memory_capacity_bytes for point in points if point.plan}
    limit: dict[str, Any] = {"limit": max(capacity), "dashed": "capacity"} if len(capacity) == 1 else {}
    found = [
        Panel(
            title="step", unit="s", parts={"step": of(lambda one: one.estimate.step_time_s)}, joined=joined, **reference
        ),
        Panel(title="MFU", unit="%", parts={"MFU": of(lambda one: one.estimate.mfu)}, joined=joined),
    ]
    if any(value is not None for value in dollars):
        found.append(Panel(title="dollars for a billion tokens", unit="$", parts={"dollars": dollars}, joined=joined))
    return [
        *found,
        Panel(title="where the time of a step goes", unit="%", parts=_shares(points)),
        Panel(title="memory of a device", unit="B", parts=_memory(points), **limit),
    ]


def _ideal(points: Sequence[SweepPoint]) -> tuple[float | None, ...]:
    """Seconds of a step if every device were as fast as at the first point."""
    first = next((point for point in points if point.plan), None)
    if first is None or first.plan is None:
        return ()
    seconds = first.plan.estimate.step_time_s * first.case.cluster.num_devices
    return tuple(seconds / point.case.cluster.num_devices if point.plan else None for point in points)


def _shares(points: Sequence[SweepPoint]) -> Mapping[str, tuple[float | None, ...]]:
    found = [
        (step_time_parts(point.plan.estimate), point.plan.estimate.step_time_s) if point.plan else None
        for point in points
    ]
    names = next(one[0] for one in found if one)
    return {name: tuple(one[0][name] / one[1] if one else None for one in found) for name in names}


def _memory(points: Sequence[SweepPoint]) -> Mapping[str, tuple[float | None, ...]]:
    found = [point.plan.estimate.memory if point.plan else None for point in points]
    return {name: tuple(one[name] if one else None for one in found) for name in MEMORY_TERMS}


def heat_map(swept: Swept) -> HeatMap:
    """The best MFU at every point of a grid, with the layout that reaches it.

    Source: the playbook, "Benchmarking thousands of configurations", its heat map of model sizes and nodes.
    """
    rows, columns = swept.sweeps
    at = {tuple(point.at.values()): point for point in swept.points}
    cells = [[at.get((row, column)) for column in columns.values] for row in rows.values]
    title, job = what_is_planned(swept)
    stack = predicted_for(swept)
    return HeatMap(
        title=f"{title}: best layouts by {rows.name} and {columns.name}", subtitle=job,
        row_title=rows.name, column_title=columns.name,
        rows=tuple(map(format_value, rows.values)), columns=tuple(map(format_value, columns.values)),
        values=tuple(tuple(one.plan.estimate.mfu if one and one.plan else None for one in row) for row in cells),
        notes=tuple(tuple(layout_lines(one.plan) if one and one.plan else (absent(one),) for one in row) for row in cells),
        absent="no plan; the report says why", scale=f"MFU, predicted for {stack}" if stack else "MFU at most, an upper bound",
    )  # fmt: skip
