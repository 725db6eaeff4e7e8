"""Reports of a plan and of one priced layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from shardwise.layout import Placement, atomic_degrees, layers_by_stage, layout_degrees
from shardwise.layout.layout import AXES
from shardwise.layout.placement import degrees_across_pods
from shardwise.model import Job
from shardwise.present.rendering.numbers import count, num_bytes, seconds, share
from shardwise.present.rendering.report import Block, Line, Number, Report, Row, Section, Table, share_bar
from shardwise.present.reports.wording import (
    format_rate_interval,
    plan_summary,
    published_table,
    run_lines,
    spare_lines,
)
from shardwise.price import Estimate, mfu_format
from shardwise.search import LayoutPlan, Plan
from shardwise.values import format_seconds, get_precision

OFFLOADED = {
    "optimizer": "moments and master weights",
    "activations": "activations until their backward pass",
    "both": "moments, master weights, and activations until their backward pass",
}


def plan_report(plan: Plan) -> Report:
    """Report the summary; in detail the prediction, the run, layout, time, memory, runners-up, the books' rules, the search."""
    head, *details = _plan_sections(plan)
    return [head, Section(list(spare_lines(plan.limits, plan.run))), *details]


def layout_plan_report(priced: LayoutPlan) -> Report:
    """Report one priced layout as a plan, with the smallest change that would make it fit if it does not."""
    return _plan_sections(priced.plan, priced.smallest_change)


def _plan_sections(plan: Plan, smallest_change: str | None = None) -> list[Section]:
    estimate = plan.estimate
    details = {
        "the prediction" if plan.cluster.calibration else "the bound": _rates(plan),
        "the whole run": (f"  {line}" for line in run_lines(plan.run)) if plan.run else (),
        "the layout": _layout_lines(plan),
        "time of a step": _time(estimate),
        "memory of a device": [
            term_table({n: num_bytes(b, f"estimate.memory.{n}") for n, b in estimate.memory.items()})
        ],
        "other shapes": _alternatives(plan),
        "published runs": [published_table(plan.published, "")] if plan.published else (),
        "the books' rules": _rules(plan),
        "the search": _search(plan),
    }
    sections = (Section(list(blocks), title=title, detail=True) for title, blocks in details.items())
    return [plan_summary(plan, smallest_change), *(section for section in sections if section.blocks)]


def _rates(plan: Plan) -> Iterator[Block]:
    """Yield rates with their intervals, what the seconds rest on, and beside a prediction its bound."""
    estimate = plan.estimate
    rate = count(estimate.tokens_per_s_per_device, "estimate.tokens_per_s_per_device", "tokens/s")
    yield Line(("  ", rate, f"{_tokens_range(estimate)} tokens/s per device"))
    mfu, hfu = share(estimate.mfu, "estimate.mfu"), share(estimate.hfu, "estimate.hfu")
    yield Line(("  MFU ", mfu, f" ({_mfu_range(estimate)}causal attention{_against_peak(plan.job)}), HFU ", hfu))
    yield from _bound(plan)
    yield from (f"  {note}" for note in estimate.notes if note not in estimate.caveats)


def _bound(plan: Plan) -> Iterator[Line]:
    """Yield the same layout at the rates of micro-benchmarks, beside a prediction; a lower bound where it is below.

    Above it lies what the convention of overlap exposes and the stack was seen to hide.
    """
    if plan.bound_s is not None:
        mfu = plan.estimate.mfu * plan.estimate.step_time_s / plan.bound_s
        is_below = plan.bound_s <= plan.estimate.step_time_s
        convention = "" if is_below else f", overlap convention {plan.job.overlap_convention}"
        yield Line(
            (
                "  lower bound " if is_below else "  ", seconds(plan.bound_s, "bound_s", kind="bound"), ", MFU ", share(mfu),
                f": kernels and links at the best that micro-benchmarks reach{convention}",
            )
        )  # fmt: skip


def _tokens_range(estimate: Estimate) -> str:
    interval = format_rate_interval(estimate.tokens_per_s_per_device, estimate, lambda value: f"{value:,.0f}")
    return f" ({interval})" if interval else ""


def _mfu_range(estimate: Estimate) -> str:
    interval = format_rate_interval(estimate.mfu, estimate, lambda value: f"{value:.1%}")
    return f"{interval}, " if interval else ""


def _against_peak(job: Job) -> str:
    """Return which peak an MFU is measured against, where products run in another format."""
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
    degrees = degrees_across_pods(
        plan.cluster.topology, placement, atomic_degrees(plan.model, layout_degrees(plan.layout))
    )
    return f"   between pods {' '.join(f'{axis}={size}' for axis, size in degrees.items())}" if degrees else ""


def _runs(values: Iterable[int]) -> str:
    """Return 7 8 8 7 as "7, 2x8, 7"."""
    groups: list[list[int]] = []
    for value in values:
        if groups and groups[-1][0] == value:
            groups[-1].append(value)
        else:
            groups.append([value])
    return ", ".join(f"{len(g)}x{g[0]}" if len(g) > 1 else str(g[0]) for g in groups)


def term_table(terms: Mapping[str, Number]) -> Table:
    """Return each term with its share of the whole: of the slowest stage, or of the fullest."""
    total = sum(term.value or 0.0 for term in terms.values())
    rows: list[Row] = [
        (name, term, share(term.value / total), share_bar(term.value / total, name))
        for name, term in terms.items()
        if term.value
    ]
    return Table(rows=tuple(rows), right=(1, 2), head=False, indent=2)


def _time(estimate: Estimate) -> Iterator[Block]:
    yield term_table({name: seconds(value, f"estimate.time.{name}") for name, value in estimate.time.items()})
    hidden = ", ".join(f"{axis} {format_seconds(value)}" for axis, value in estimate.hidden.items())
    if hidden:
        yield f"  hidden behind compute: {hidden}"


def _alternatives(plan: Plan) -> Iterator[Block]:
    rows: list[Row] = []
    for index, alternative in enumerate(plan.alternatives):
        step = seconds(alternative.estimate.step_time_s, f"alternatives.{index}.estimate.step_time_s")
        rows += [(step, str(alternative.layout)), ("", alternative.reason)]
    if rows:
        yield Table(rows=tuple(rows), right=(0,), head=False, indent=2)


def _rules(plan: Plan) -> Iterator[Block]:
    rows: list[Row] = [
        (
            rule.name,
            Number(f"{rule.value:,.1f}", rule.value, rule.unit, f"rules.{index}.value"),
            rule.unit,
            rule.verdict,
        )
        for index, rule in enumerate(plan.rules)
    ]
    if rows:
        yield Table(rows=tuple(rows), right=(1,), head=False, indent=2)


def _search(plan: Plan) -> Iterator[Block]:
    if plan.search is not None:
        cpu_s = plan.search.cpu_seconds
        yield Line(
            (
                "  searched ", count(plan.search.num_layouts, "search.num_layouts"), " layouts in ",
                Number(f"{cpu_s:.2f}", cpu_s, "s", "search.cpu_seconds"), " s of CPU time; ",
                count(plan.search.num_fitting, "search.num_fitting"), " fit",
            )
        )  # fmt: skip
