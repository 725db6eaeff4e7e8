"""Charts of plans and estimates: time and memory by term, comparisons, explanations, recompute policies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shardwise.layout import Layout
from shardwise.model import POLICIES
from shardwise.present.charts.chart import LETTERS, Axis, Chart, Curve, Points
from shardwise.present.charts.common_charts import bar_chart, curve_chart
from shardwise.price import Pricing, Problem
from shardwise.search.recompute_budget import list_layer_recompute, recompute_layers
from shardwise.values import InputError, format_bytes

if TYPE_CHECKING:
    from shardwise.price import Estimate
    from shardwise.search import LayoutMemory, MemoryComparison


Bars = Mapping[str, Mapping[str, float]]


def estimate_charts(about: str, estimates: Mapping[str, Estimate]) -> tuple[Chart, Chart]:
    """Return seconds of a step and bytes of a device by term, a bar for each estimate. Raises `InputError` for none."""
    if not estimates:
        raise InputError("picture: found no estimate; one at least is required")
    time = {label: estimate.time for label, estimate in estimates.items()}
    memory = {label: estimate.memory for label, estimate in estimates.items()}
    return time_and_memory_charts(
        about, time, memory, max(estimate.memory_capacity_bytes for estimate in estimates.values())
    )


def time_and_memory_charts(about: str, time: Bars, memory: Bars, capacity: float) -> tuple[Chart, Chart]:
    return bar_chart("Time of a step", about, time, unit="s"), memory_chart(
        "Memory of the fullest device", about, memory, capacity
    )


def memory_chart(title: str, about: str, memory: Bars, capacity: float) -> Chart:
    return bar_chart(title, about, memory, limit=capacity, limit_label=f"capacity: {format_bytes(capacity)}")


def stage_bars(memory: LayoutMemory) -> Bars:
    """Return the bytes of a device of each stage, by term."""
    stages = memory.stages
    return (
        {f"stage {stage}": terms for stage, terms in enumerate(stages)}
        if len(stages) > 1
        else {"every device": stages[0]}
    )


def kept_chart(problem: Problem, layout: Layout) -> Chart:
    """Return seconds that a layer of each kind recomputes over bytes that it keeps, in one micro-batch on one device.

    Lines are the sets of which no other has fewer bytes and fewer seconds, each kernel by itself; points are policies and the
    layout's own, with kernels fused as they run.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**19, seq_len=4096)
    >>> layout = sw.Layout.parse("fsdp=8 recompute=keep:q,k,v,attended,lse")
    >>> chart = kept_chart(Problem(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job), layout)
    >>> [mark.label for mark in chart.panels[0].marks]
    ['block', 'the layout', 'none', 'selective', 'full']
    """
    problem = problem.with_defaults()

    def priced(policy: str) -> Pricing:
        return Pricing(problem, replace(layout, recompute=policy, recompute_layers=None))

    always = {
        kind_recompute.layer: kind_recompute.kept_bytes for kind_recompute in list_layer_recompute(priced("full"))
    }
    lines = tuple(
        Curve(label=kind, points=tuple((always[kind] + saving.num_bytes, saving.seconds) for saving in layer.savings))
        for kind, layer in recompute_layers(priced("full")).items()
    )
    commonest_layer = max(
        list_layer_recompute(priced("full")), key=lambda kind_recompute: kind_recompute.num_layers
    ).layer
    policies = {"the layout": layout.recompute, **{name: name for name in POLICIES if name != layout.recompute}}
    points = (
        Points(label=label, letter=letter, points=((kind_recompute.kept_bytes, kind_recompute.seconds),))
        for letter, (label, policy) in zip(LETTERS, policies.items(), strict=False)
        for kind_recompute in list_layer_recompute(priced(policy))
        if kind_recompute.layer == commonest_layer
    )
    return curve_chart(
        title=f"What a layer of {problem.architecture.name} keeps and computes again",
        subtitle="Lines: the sets that no other beats, each kernel by itself; points: policies, with kernels fused as they run.",
        x=Axis(title="bytes that a layer keeps in one micro-batch", unit="B"),
        y=Axis(title="seconds that it computes again", unit="s"),
        marks=(*lines, *points),
    )  # fmt: skip


def memory_comparison_chart(comparison: MemoryComparison) -> Chart:
    """Return bars of the memory of several layouts, or of the stages of one, against the capacity of the chip."""
    layouts, chip = comparison.layouts, comparison.cluster.chip
    if len(layouts) == 1:
        (memory,) = layouts
        subtitle = f"Bytes of one device of each stage: {memory.layout}"
        bars = stage_bars(memory)
    else:
        subtitle = "Bytes of one device, of the fullest stage where there are several."
        bars = {
            f"[{number}] {memory.layout}": memory.stages[memory.fullest_stage]
            for number, memory in enumerate(layouts, start=1)
        }
    title, limit = f"Memory of {comparison.model.name} on {comparison.cluster.name}", chip.capacity_bytes
    return bar_chart(title, subtitle, bars, limit=limit, limit_label=f"{chip.name}: {format_bytes(limit)}")
