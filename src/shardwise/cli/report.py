"""A plan as text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from shardwise.cli.interval import rate_text, step_text
from shardwise.cli.run_report import run_lines
from shardwise.cluster.chips import LOCAL, LOCAL_IS
from shardwise.cost.estimate import Estimate, mfu_format
from shardwise.cost.rates import exposed_share
from shardwise.job import Job, precision_named
from shardwise.layout.family import atomic_degrees
from shardwise.layout.layout import AXES
from shardwise.layout.legality import degrees_of, num_micro_batches
from shardwise.layout.placement import Placement, between_pods
from shardwise.layout.stages import held_layers
from shardwise.model.counts import num_params
from shardwise.optimizer import DEFAULT
from shardwise.planning.plan import Plan
from shardwise.terms import COMMUNICATION
from shardwise.units import counted, format_bytes, format_count, format_seconds

BAR = 28
OFFLOADED = {
    "optimizer": "moments and master weights",
    "activations": "activations until their backward pass",
    "both": "moments, master weights, and activations until their backward pass",
}


def plan_report(plan: Plan, *, smallest_change: str | None = None) -> str:
    """The report: job, the whole run, layout, time, memory, runners-up, the books' rules, the search.

    `smallest_change` is what would make a layout fit that does not.
    """
    sections = [
        _headline(plan, smallest_change),
        _run(plan),
        _layout(plan),
        _time(plan.estimate),
        _memory(plan.estimate),
    ]
    sections += [_alternatives(plan), _rules(plan), _search(plan)]
    return "\n\n".join(section for section in sections if section)


def _headline(plan: Plan, smallest_change: str | None) -> str:
    job, estimate = plan.job, plan.estimate
    over = estimate.memory_bytes - estimate.memory_capacity_bytes
    fits = f"fits, {estimate.margin:.0%} free" if estimate.fits else f"DOES NOT FIT, {format_bytes(over)} too much"
    lines = [
        f"{plan.model.name} ({format_count(num_params(plan.model))} parameters) on {plan.cluster.name} "
        f"({plan.cluster.num_devices:,} devices), {job.global_batch_tokens:,} tokens per batch, sequences of {job.seq_len:,}"
        + (f", updated by {job.optimizer}" if job.optimizer != DEFAULT else ""),
        f"  {_seconds(plan)}   {_tokens(estimate)} tokens/s per device   "
        f"MFU {estimate.mfu:.1%} ({_mfu_range(estimate)}causal attention{_against_peak(job)})   HFU {estimate.hfu:.1%}",
        *_bound(plan),
        f"  bound by {estimate.bound}, {overlap_text(job.convention, exposed_share(plan.cluster), estimate)}",
        f"  memory {format_bytes(estimate.memory_bytes)} of {format_bytes(estimate.memory_capacity_bytes)} ({fits})",
    ]
    if smallest_change:
        lines.append(f"  smallest change that fits: {smallest_change}")
    return "\n".join([*lines, *(f"  note: {note}" for note in (*_local(plan), *estimate.notes))])


def _seconds(plan: Plan) -> str:
    """The headline's seconds: of the step as predicted, or a bound on it, named as what they are."""
    calibration, estimate = plan.cluster.calibration, plan.estimate
    if calibration is None:
        return f"lower bound of the step {format_seconds(estimate.step_time_s)}"
    return f"step {step_text(estimate.step_time_s, estimate.interval90)} predicted for {calibration.stack}"


def _bound(plan: Plan) -> Iterable[str]:
    """The same layout at the rates of micro-benchmarks, beside a prediction; a lower bound where it is below.

    Above it lies what the convention of overlap exposes and the stack was seen to hide.
    """
    if plan.bound_s is not None:
        mfu = plan.estimate.mfu * plan.estimate.step_time_s / plan.bound_s
        bound, low = f"{format_seconds(plan.bound_s)}, MFU {mfu:.1%}", plan.bound_s <= plan.estimate.step_time_s
        yield (
            f"  {'lower bound ' if low else ''}{bound}: kernels and links at the best that micro-benchmarks reach"
            + ("" if low else f", overlap convention {plan.job.convention}")
        )


def overlap_text(convention: str, exposed: float | None, estimate: Estimate | None = None) -> str:
    """How much of the communication shows: what a convention says, or the share that was measured, and where compute is too
    short to hide the rest, the share that does."""
    if exposed is None:
        return f"overlap convention {convention}"
    shows = exposed
    if estimate is not None:
        shown = sum(estimate.time[axis] for axis in COMMUNICATION)
        hidden = sum(seconds for axis, seconds in estimate.hidden.items() if axis in COMMUNICATION)
        shows = shown / (shown + hidden) if shown + hidden > 0 else exposed
    return f"{shows:.0%} of communication exposed"


def _tokens(estimate: Estimate) -> str:
    rate = estimate.tokens_per_s_per_device
    around = rate_text(rate, estimate, lambda value: f"{value:,.0f}")
    return f"{rate:,.0f}" + (f" ({around})" if around else "")


def _mfu_range(estimate: Estimate) -> str:
    around = rate_text(estimate.mfu, estimate, lambda value: f"{value:.1%}")
    return f"{around}, " if around else ""


def _local(plan: Plan) -> Iterable[str]:
    """What the machine of `local:N` is: not the one that this runs on."""
    if plan.cluster.chip.name == LOCAL:
        yield f"{LOCAL_IS} (show chips cpu), not this machine: for that give your own .toml file"


def _against_peak(job: Job) -> str:
    """Which peak an MFU is measured against, where products run in another format."""
    fmt = mfu_format(job)
    return f", of the {fmt} peak" if precision_named(job.precision).product_format != fmt else ""


def _run(plan: Plan) -> str:
    return "\n  ".join(["the whole run", *run_lines(plan.run)]) if plan.run else ""


def _layout(plan: Plan) -> str:
    layout = plan.layout
    degrees = " ".join(f"{axis}={getattr(layout, axis)}" for axis in AXES)
    micro_batches = num_micro_batches(plan.job, degrees_of(layout))
    lines = [
        "layout",
        f"  {degrees}",
        f"  ZeRO stage {layout.zero_stage}, sequence parallelism {'on' if layout.sequence_parallel else 'off'}, "
        f"recompute {layout.recompute}, {_micro_batches(micro_batches, layout.micro_batch_seqs)}",
    ]
    if layout.expert_tp != layout.tp:
        lines[1] += f" etp={layout.expert_tp}"
        lines.append(f"  experts are whole: tp = {layout.tp} is a part of ep = {layout.ep}")
    if layout.recompute_layers is not None:
        lines.append(f"  recompute of the first {layout.recompute_layers} layers of each stage")
    if layout.offload != "none":
        lines.append(f"  on the host: {OFFLOADED[layout.offload]}")
    if layout.cp > 1:
        lines.append(f"  context parallelism by {layout.cp_variant}")
    if layout.async_tp:
        lines.append("  tensor parallelism in pieces beside the products")
    if layout.pp > 1:
        layers = held_layers(plan.model, layout)
        lines.append(
            f"  schedule {layout.schedule}, {layout.num_virtual_stages} virtual stages, blocks per stage {_runs(layers)}"
        )
    if layout.placement:
        lines.append(f"  placement {layout.placement}{_between_pods(plan, layout.placement)}")
    return "\n".join([*lines, *_waste(plan.estimate)])


def _micro_batches(number: int, seqs: int) -> str:
    return f"{number} micro-batch{'es' if number != 1 else ''} of {counted(seqs, 'sequence')}"


def _between_pods(plan: Plan, placement: Placement) -> str:
    found = between_pods(plan.cluster.topology, placement, atomic_degrees(plan.model, degrees_of(plan.layout)))
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


def _waste(estimate: Estimate) -> list[str]:
    waste = estimate.waste
    if "sequences" not in waste:
        return []
    nearest = waste["nearest_full_batch_tokens"]
    return [
        f"  {waste['sequences']:.1%} of the replicas' time is idle: the nearest full batch is {nearest:,.0f} tokens"
    ]


def _bars(title: str, terms: Mapping[str, float], form: Callable[[float], str]) -> str:
    total = sum(terms.values())
    lines = [title]
    for name, value in terms.items():
        if value > 0:
            bar = "#" * max(1, round(BAR * value / total))
            lines.append(f"  {name:<12}{form(value):>10}  {value / total:6.1%}  {bar}")
    return "\n".join(lines)


def _time(estimate: Estimate) -> str:
    shown = _bars("time of a step (slowest stage)", estimate.time, format_seconds)
    hidden = ", ".join(f"{axis} {format_seconds(seconds)}" for axis, seconds in estimate.hidden.items())
    return shown + (f"\n  hidden behind compute: {hidden}" if hidden else "")


def _memory(estimate: Estimate) -> str:
    return _bars("memory of a device (fullest stage)", estimate.memory, format_bytes)


def _alternatives(plan: Plan) -> str:
    if not plan.alternatives:
        return ""
    lines = ["other shapes"]
    for other in plan.alternatives:
        lines.append(f"  {format_seconds(other.estimate.step_time_s):>8}  {other.layout}\n            {other.reason}")
    return "\n".join(lines)


def _rules(plan: Plan) -> str:
    lines = ["the books' rules"]
    for rule in plan.rules:
        lines.append(f"  {rule.name:<36}{rule.value:>12,.1f} {rule.unit:<16} {rule.verdict}")
    return "\n".join(lines) if plan.rules else ""


def _search(plan: Plan) -> str:
    if plan.search is None:
        return ""
    searched = (
        f"searched {plan.search.num_layouts:,} layouts in {plan.search.cpu_seconds:.2f} s of CPU time; "
        f"{plan.search.num_fitting:,} fit"
    )
    return "\n".join(filter(None, (searched, plan.search.elsewhere)))
