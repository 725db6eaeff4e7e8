"""What keeping tensors costs and spares in a layer, as a chart: every set that no other beats, and the layout's own."""

from __future__ import annotations

from dataclasses import replace

from shardwise.layout import Layout
from shardwise.model import POLICIES
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.line_chart import Line, LineChart, Point
from shardwise.price import Pricing, Problem
from shardwise.search.recompute_budget import list_layer_recompute, recompute_layers


def kept_chart(problem: Problem, layout: Layout) -> LineChart:
    """Seconds of what a layer of each kind computes again over the bytes that it keeps, in one micro-batch on one device.

    Lines are the sets of which no other has fewer bytes and fewer seconds, each kernel by itself; points are policies and the
    layout's own, with kernels fused as they run.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**19, seq_len=4096)
    >>> layout = sw.Layout.parse("fsdp=8 recompute=keep:q,k,v,attended,lse")
    >>> chart = kept_chart(Problem(sw.load_model("llama-3-8b"), sw.load_cluster("h100:8"), job), layout)
    >>> [line.label for line in chart.lines], [point.label for point in chart.points]
    (['block'], ['the layout', 'none', 'selective', 'full'])
    """
    problem = problem.with_defaults()

    def priced(policy: str) -> Pricing:
        return Pricing(problem, replace(layout, recompute=policy, recompute_layers=None))

    always = {one.layer: one.kept_bytes for one in list_layer_recompute(priced("full"))}
    lines = tuple(
        Line(label=kind, points=tuple((always[kind] + one.num_bytes, one.seconds) for one in layer.savings))
        for kind, layer in recompute_layers(priced("full")).items()
    )
    most = max(list_layer_recompute(priced("full")), key=lambda one: one.num_layers).layer
    policies = {"the layout": layout.recompute, **{name: name for name in POLICIES if name != layout.recompute}}
    points = (
        Point(label=label, x=one.kept_bytes, y=one.seconds)
        for label, policy in policies.items()
        for one in list_layer_recompute(priced(policy))
        if one.layer == most
    )
    return LineChart(
        title=f"What a layer of {problem.architecture.name} keeps and computes again",
        subtitle="Lines: the sets that no other beats, each kernel by itself; points: policies, with kernels fused as they run.",
        x=Axis(title="bytes that a layer keeps in one micro-batch", unit="B", linear=True),
        y=Axis(title="seconds that it computes again", unit="s", linear=True),
        lines=lines, points=tuple(points),
    )  # fmt: skip
