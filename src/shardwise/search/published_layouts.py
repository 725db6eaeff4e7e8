"""Layouts of published runs on a plan's cluster, priced for its job beside the plan.

A layout keeps the degrees that split the model and fills the cluster with replicas. Entry point: `compare_published_runs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise.layout import Layout, layout_as_run, require_legal, stack_of, unsupported_choices
from shardwise.price import Estimate
from shardwise.search.explain.neighbour_layouts import place_fastest
from shardwise.search.plan import NearestRuns, Plan, PublishedComparison, PublishedLayout, PublishedRun
from shardwise.search.verdicts import MEMORY_RESERVE, RESOLUTION, describe_memory_change, describe_time_changes
from shardwise.values import ShardwiseError, describe_error, format_bytes, pluralize

NUM_PRICED = 3  # different layouts that are priced beside a plan
COMPARED_CHOICES = {"tp": "TP", "cp": "CP", "pp": "PP", "ep": "EP", "zero_stage": "ZeRO stage"}


def compare_published_runs(plan: Plan, nearest: NearestRuns) -> PublishedComparison | None:
    """Price the layouts of the nearest published runs for the plan's job on its cluster; None without such runs.

    Layouts that are the same on the plan's cluster count once, and the first `NUM_PRICED` are priced. What a layout changes is
    explained by the terms of the estimate that differ most.
    """
    if not nearest.runs:
        return None
    groups: dict[Layout, list[PublishedRun]] = {}
    for run in nearest.runs:
        groups.setdefault(_layout_on_cluster(plan, run), []).append(run)
    return PublishedComparison(
        num_runs=len(nearest.runs), same_model=nearest.same_model, same_chip=nearest.same_chip,
        unlike=tuple(_unlike_choices(plan.layout, nearest.runs)),
        layouts=tuple(_price_layout(plan, layout, runs) for layout, runs in list(groups.items())[:NUM_PRICED]),
    )  # fmt: skip


def _layout_on_cluster(plan: Plan, run: PublishedRun) -> Layout:
    """Return a run's layout with replicas over the plan's devices, and micro-batches of as many tokens."""
    layout = Layout.parse(run.layout_text)
    replicas = max(plan.cluster.num_devices // (layout.tp * layout.cp * layout.pp), 1)
    fsdp = 1
    if layout.zero_stage:
        is_hybrid = layout.dp > 1 and replicas % layout.fsdp == 0
        fsdp = layout.fsdp if is_hybrid else replicas
    zero_stage = layout.zero_stage if fsdp * layout.cp > 1 else 0
    micro_batch_seqs = max(layout.micro_batch_seqs * run.seq_len // plan.job.seq_len, 1)
    stages = layout.layers_per_stage
    return layout_as_run(
        stack_of(plan.cluster),
        replace(
            layout, dp=replicas // fsdp, fsdp=fsdp, zero_stage=zero_stage, placement=None, recompute_layers=None,
            micro_batch_seqs=min(micro_batch_seqs, max(plan.job.num_seqs // replicas, 1)), recompute=run.recomputes[0],
            layers_per_stage=stages if stages and sum(stages) == plan.model.num_layers else None,
        ),
    )  # fmt: skip


def _price_layout(plan: Plan, layout: Layout, runs: Sequence[PublishedRun]) -> PublishedLayout:
    """Price a layout with the least recomputation of the runs that fits."""
    best_rate = max(run.tokens_per_s_per_device for run in runs)
    try:
        require_legal(plan.model, plan.job, plan.cluster.num_devices, layout)
        for recompute in runs[0].recomputes:
            placed, priced = place_fastest(plan, replace(layout, recompute=recompute))
            if priced.fits:
                break
    except ShardwiseError as error:  # a rule refuses the layout, or the chip lacks a rate
        return PublishedLayout(
            run=runs[0], num_runs=len(runs), best_tokens_per_s_per_device=best_rate, layout_text=str(layout),
            problem=describe_error(error),
        )  # fmt: skip
    stack = stack_of(plan.cluster)
    lacks = unsupported_choices(stack, plan.model, plan.job, placed) if stack and stack.is_known else []
    return PublishedLayout(
        run=runs[0], num_runs=len(runs), best_tokens_per_s_per_device=best_rate,
        layout_text=str(replace(placed, placement=None)), lacks="; ".join(lacks),
        step_time_s=priced.step_time_s, memory_bytes=priced.memory_bytes, fits=priced.fits,
        lead=priced.step_time_s / plan.estimate.step_time_s - 1, difference=describe_difference(priced, plan.estimate),
        time=_changes(plan.estimate.time, priced.time), memory=_changes(plan.estimate.memory, priced.memory),
    )  # fmt: skip


def _changes(plan_terms: Mapping[str, float], other_terms: Mapping[str, float]) -> dict[str, float]:
    """Return other terms less the plan's; terms that are zero in both are left out."""
    # the plan may come from a file, of a version that lacked a term
    differences = {name: value - plan_terms.get(name, 0.0) for name, value in other_terms.items()}
    return {name: change for name, change in differences.items() if change or other_terms[name]}


def describe_lead(lead: float) -> str:
    """Return how much longer or shorter a step takes than the plan's, as text."""
    if abs(lead) <= RESOLUTION:
        return f"{abs(lead):.1%} {'slower' if lead > 0 else 'faster'}, within the resolution of predictions, {RESOLUTION:.0%}"
    if lead > 1:
        return f"{lead + 1:.1f} times as long"
    return f"{abs(lead):.1%} {'slower' if lead > 0 else 'faster'}"


def describe_difference(priced: Estimate, best: Estimate) -> str:
    """Describe how a layout's step and memory differ from a plan's, and the terms that differ most, in both directions."""
    ratio = priced.step_time_s / best.step_time_s - 1
    memory_text = describe_memory_change(priced, best)
    if not priced.fits:
        memory_text += f", {format_bytes(priced.memory_bytes - priced.memory_capacity_bytes)} too much"
    elif priced.margin < MEMORY_RESERVE:
        memory_text += f"; {priced.margin:.0%} is free, and plans leave {MEMORY_RESERVE:.0%} where they can"
    if abs(ratio) < 5e-4:
        return f"as fast within 0.05%; {memory_text}"
    return f"{describe_lead(ratio)}: {describe_time_changes(priced, best)}; {memory_text}"


def _unlike_choices(layout: Layout, runs: Sequence[PublishedRun]) -> Iterator[str]:
    """Yield the choices of a layout that no run made, each with those of the runs."""
    layouts = [Layout.parse(run.layout_text) for run in runs]
    for axis, label in COMPARED_CHOICES.items():
        published = sorted({getattr(run_layout, axis) for run_layout in layouts})
        if getattr(layout, axis) not in published:
            yield f"{label} {getattr(layout, axis)} (theirs: {', '.join(map(str, published))})"
    policies = {policy for run in runs for policy in run.recomputes}
    if layout.recompute not in policies:
        yield f"recompute {layout.recompute} (theirs: {', '.join(sorted(policies))})"


def describe_runs(comparison: PublishedComparison, model: str, chip: str) -> str:
    """Return which runs a plan is compared with, in words."""
    runs = pluralize(comparison.num_runs, "published run")
    if comparison.same_model:
        chips = chip if comparison.same_chip else ", ".join(sorted({layout.run.chip for layout in comparison.layouts}))
        return f"{runs} of {model} on {chips}"
    names = ", ".join(dict.fromkeys(f"{layout.run.model_name} on {layout.run.chip}" for layout in comparison.layouts))
    return f"none of {model}; the nearest by size: {names}"
