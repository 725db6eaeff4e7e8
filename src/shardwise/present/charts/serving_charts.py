"""Charts of serving plans: what users get against what a device gives."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.present.charts.chart import Axis, Chart, Curve, Points, RuleLine
from shardwise.present.charts.common_charts import curve_chart
from shardwise.search import ServingPlan, ServingPoint


def serving_chart(plan: ServingPlan) -> Chart:
    """Return tokens/s of a user against tokens/s of a device: the Pareto front of all layouts, and the chosen one's curve.

    To the right users get their tokens faster, upwards a device serves more of them; the limit on the time of a token is a line.
    """
    question, limit = plan.question, plan.question.latency_limits.tpot_s
    chosen = plan.layout.with_replicas(1)
    marks = (
        Curve(label="best of all layouts", points=_points(plan.front), reference=True),
        Curve(label=f"{chosen}", points=_points(plan.curve)),
        Points(label="knee", letter="A", points=_points([plan.knee])),
    )
    if limit is not None:
        marks = (*marks, RuleLine(label=f"limit of {limit * 1e3:g} ms a token", at=1.0 / limit))  # type: ignore[assignment]
    return curve_chart(
        title=f"{question.architecture.name} on {question.cluster.name} with {question.engine}",
        subtitle=f"{question.isl:,} tokens in, {question.osl:,} out, weights {question.formats}",
        x=Axis(title="output tokens/s of a user", log=True), y=Axis(title="output tokens/s of a device", log=True),
        marks=marks,
    )  # fmt: skip


def _points(points: Iterable[ServingPoint]) -> tuple[tuple[float, float], ...]:
    return tuple((point.tokens_per_s_per_user, point.tokens_per_s_per_device) for point in points)
