"""Reports of a plan, of one priced layout, and of plans on several clusters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from shardwise.layout import Placement, atomic_degrees, layers_by_stage, layout_degrees
from shardwise.layout.layout import AXES
from shardwise.layout.placement import degrees_across_pods
from shardwise.model import Job
from shardwise.present.rendering.report import Block, Report, Row, Section, Table, share_bar
from shardwise.present.reports.wording import format_rate_interval, plan_summary, run_lines
from shardwise.price import Estimate, mfu_format
from shardwise.search import Plan
from shardwise.values import (
    format_bytes,
    format_seconds,
    get_precision,
)

if TYPE_CHECKING:
    pass


OFFLOADED = {
    "optimizer": "moments and master weights",
    "activations": "activations until their backward pass",
    "both": "moments, master weights, and activations until their backward pass",
}


def plan_report(plan: Plan, *, smallest_change: str | None = None) -> Report:
    """The summary; in detail the prediction, the whole run, layout, time, memory, runners-up, the books' rules, the search.

    `smallest_change` is what would make a layout fit that does not.
    """
    details = {
        "the prediction" if plan.cluster.calibration else "the bound": _rates(plan),
        "the whole run": (f"  {line}" for line in run_lines(plan.run)) if plan.run else (),
        "the layout": _layout_lines(plan),
        "time of a step": _time(plan.estimate),
        "memory of a device": _shares(plan.estimate.memory, format_bytes),
        "other shapes": _alternatives(plan),
        "the books' rules": _rules(plan),
        "the search": _search(plan),
    }
    sections = (Section(list(blocks), title=title, detail=True) for title, blocks in details.items())
    return [plan_summary(plan, smallest_change), *(one for one in sections if one.blocks)]


def _rates(plan: Plan) -> Iterator[str]:
    """Rates with their intervals, what the seconds rest on, and beside a prediction its bound."""
    estimate = plan.estimate
    yield f"  {estimate.tokens_per_s_per_device:,.0f}{_tokens_range(estimate)} tokens/s per device"
    yield f"  MFU {estimate.mfu:.1%} ({_mfu_range(estimate)}causal attention{_against_peak(plan.job)}), HFU {estimate.hfu:.1%}"
    yield from _bound(plan)
    yield from (f"  {note}" for note in estimate.notes if note not in estimate.caveats)


def _bound(plan: Plan) -> Iterator[str]:
    """The same layout at the rates of micro-benchmarks, beside a prediction; a lower bound where it is below.

    Above it lies what the convention of overlap exposes and the stack was seen to hide.
    """
    if plan.bound_s is not None:
        mfu = plan.estimate.mfu * plan.estimate.step_time_s / plan.bound_s
        bound, low = f"{format_seconds(plan.bound_s)}, MFU {mfu:.1%}", plan.bound_s <= plan.estimate.step_time_s
        yield (
            f"  {'lower bound ' if low else ''}{bound}: kernels and links at the best that micro-benchmarks reach"
            + ("" if low else f", overlap convention {plan.job.overlap_convention}")
        )


def _tokens_range(estimate: Estimate) -> str:
    around = format_rate_interval(estimate.tokens_per_s_per_device, estimate, lambda value: f"{value:,.0f}")
    return f" ({around})" if around else ""


def _mfu_range(estimate: Estimate) -> str:
    around = format_rate_interval(estimate.mfu, estimate, lambda value: f"{value:.1%}")
    return f"{around}, " if around else ""


def _against_peak(job: Job) -> str:
    """Which peak an MFU is measured against, where products run in another format."""
    fmt = mfu_format(job)
    return f", of the {fmt} peak" if get_precision(job.precision).matmul_format != fmt else ""


def _layout_lines(plan: Plan) -> Iterator[str]:
    layout = plan.layout
    degrees = " ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES)
    yield f"  {degrees}" + (f" etp={layout.expert_tp}" if layout.expert_tp != layout.tp else "")
    yield (
        f"  ZeRO stage {layout.zero_stage}, sequence parallelism {'on' if layout.sequence_parallel else 'off'}, "
        f"recompute {layout.recompute}"
    )
    if layout.expert_tp != layout.tp:
        yield f"  experts are whole: tp = {layout.tp} is a part of ep = {layout.ep}"
    if layout.recompute_layers is not None:
        yield f"  recompute of the first {layout.recompute_layers} layers of each stage"
    if layout.offload != "none":
        yield f"  on the host: {OFFLOADED[layout.offload]}"
    if layout.cp > 1:
        yield f"  context parallelism by {layout.cp_variant}"
    if layout.async_tp:
        yield "  tensor parallelism in pieces, overlapped with matmuls"
    if layout.pp > 1:
        layers = _runs(layers_by_stage(plan.model, layout))
        yield f"  schedule {layout.schedule}, {layout.num_virtual_stages} virtual stages, blocks per stage {layers}"
    if layout.placement:
        yield f"  placement {layout.placement}{_between_pods(plan, layout.placement)}"


def _between_pods(plan: Plan, placement: Placement) -> str:
    found = degrees_across_pods(
        plan.cluster.topology, placement, atomic_degrees(plan.model, layout_degrees(plan.layout))
    )
    return f"   between pods {' '.join(f'{axis}={size}' for axis, size in found.items())}" if found else ""


def _runs(values: Iterable[int]) -> str:
    """7 8 8 7 as "7, 2x8, 7"."""
    groups: list[list[int]] = []
    for value in values:
        if groups and groups[-1][0] == value:
            groups[-1].append(value)
        else:
            groups.append([value])
    return ", ".join(f"{len(g)}x{g[0]}" if len(g) > 1 else str(g[0]) for g in groups)


def _shares(terms: Mapping[str, float], form: Callable[[float], str]) -> Iterator[Block]:
    """Each term with its share of the whole: of the slowest stage, or of the fullest."""
    total = sum(terms.values())
    rows: list[Row] = [
        (name, form(value), f"{value / total:.1%}", share_bar(value / total, name))
        for name, value in terms.items()
        if value
    ]
    yield Table(rows=tuple(rows), right=(1, 2), head=False, indent=2)


def _time(estimate: Estimate) -> Iterator[Block]:
    yield from _shares(estimate.time, format_seconds)
    hidden = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in estimate.hidden.items())
    if hidden:
        yield f"  hidden behind compute: {hidden}"


def _alternatives(plan: Plan) -> Iterator[Block]:
    rows: list[Row] = []
    for other in plan.alternatives:
        rows += [(format_seconds(other.estimate.step_time_s), str(other.layout)), ("", other.reason)]
    if rows:
        yield Table(rows=tuple(rows), right=(0,), head=False, indent=2)


def _rules(plan: Plan) -> Iterator[Block]:
    rows: list[Row] = [(rule.name, f"{rule.value:,.1f}", rule.unit, rule.verdict) for rule in plan.rules]
    if rows:
        yield Table(rows=tuple(rows), right=(1,), head=False, indent=2)


def _search(plan: Plan) -> Iterator[str]:
    if plan.search is not None:
        yield (
            f"  searched {plan.search.num_layouts:,} layouts in {plan.search.cpu_seconds:.2f} s of CPU time; "
            f"{plan.search.num_fitting:,} fit"
        )
