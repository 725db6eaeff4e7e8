"""Charts of predictions beside measurements: a reconciled run, published runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.measure.calibrate.prediction_errors import EvaluatedRun, error_tables
from shardwise.present.charts.chart import Axis, Band, Chart, Curve, Points
from shardwise.present.charts.common_charts import bar_chart, curve_chart
from shardwise.records.step_log import MEASURED_TERMS
from shardwise.values import MEMORY_TERMS, InputError

if TYPE_CHECKING:
    from shardwise.measure import Reconciliation


def reconciliation_charts(found: Reconciliation, about: str = "") -> tuple[Chart, Chart]:
    """Predicted above measured, of time and of memory; `about` says whose they are."""
    time, memory = found.time.terms, found.memory.terms
    predicted_s = {one.name: one.predicted_s or 0.0 for one in time}
    predicted_bytes = {one.name: one.predicted or 0.0 for one in memory}
    measured_s = {one.name: one.measured_s for one in time}
    measured_bytes = {one.name: max(one.measured, 0.0) for one in memory}
    said = about or f"on {found.machine}"
    return (
        _chart("Time of a step", said, predicted_s, measured_s, MEASURED_TERMS, "s"),
        _chart("Memory of a device", said, predicted_bytes, measured_bytes, MEMORY_TERMS, "B"),
    )  # fmt: skip


def _chart(
    title: str,
    about: str,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    order: Iterable[str],
    unit: str,
) -> Chart:
    both = {"predicted": predicted, "measured": measured}
    names = [name for name in order if any(parts.get(name, 0.0) > 0 for parts in both.values())]
    bars = {label: {name: parts.get(name, 0.0) for name in names} for label, parts in both.items()}
    return bar_chart(f"{title}: predicted and measured", about, bars, unit=unit)


WITHIN = 0.1  # of what was measured: the band that is drawn
RESIDUAL_HEIGHT = 220.0
Pairs = Mapping[str, Sequence[tuple[float, float]]]
MEASURED = Axis(title="measured step time", unit="s", log=True)


def accuracy_charts(judged: Sequence[EvaluatedRun]) -> tuple[Chart, Chart]:
    """Predicted against measured step time, and under it their quotient, a mark a row; a band of 10% either way.

    Raises `InputError` where no row that counts has both.
    """
    pairs = _pairs(judged)
    if not pairs:
        raise InputError("--plot: no row of quality A or A- has both a prediction and a measured step time")
    overall = error_tables(judged)["overall"]["all"]
    said = (
        f"{overall.num_rows} runs of quality A and A-: mean error {overall.mean:.1%}, median {overall.median:.1%}, "
        f"bias {overall.bias:+.1%}, weighted by duplicates"
    )
    return accuracy_chart(pairs, said), residual_chart(pairs)


def _pairs(judged: Sequence[EvaluatedRun]) -> Pairs:
    """Measured and predicted seconds of the rows that count, by chip."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for one in judged:
        if one.scored and one.prediction and one.row.step_time_s:
            pairs.setdefault(one.row.cell("chip"), []).append(
                (one.row.step_time_s, one.prediction.estimate.step_time_s)
            )
    return dict(sorted(pairs.items()))


def accuracy_chart(pairs: Pairs, subtitle: str) -> Chart:
    """Predicted against measured; on the diagonal they are equal."""
    points = [point for found in pairs.values() for point in found]
    ends = min(map(min, points)), max(map(max, points))
    return curve_chart(
        title="Predicted and measured step times of published runs", subtitle=subtitle,
        x=MEASURED, y=Axis(title="predicted step time", unit="s", log=True),
        marks=(
            Curve(label="equal", points=tuple((end, end) for end in ends), reference=True),
            Band(label=f"within {WITHIN:.0%}", edges=tuple((end, *_around(end)) for end in ends)),
            *(Points(label=f"{chip} ({len(found)})", points=tuple(found)) for chip, found in pairs.items()),
        ),
    )  # fmt: skip


def residual_chart(pairs: Pairs) -> Chart:
    """Predicted over measured, against measured."""
    clouds = {chip: tuple((x, y / x) for x, y in found) for chip, found in pairs.items()}
    quotients = [y for found in clouds.values() for _, y in found]
    measured = [x for found in clouds.values() for x, _ in found]
    ends = min(measured), max(measured)
    within = sum(abs(quotient - 1.0) <= WITHIN for quotient in quotients)
    return curve_chart(
        title="Residuals: predicted over measured",
        subtitle=f"{within} of {len(quotients)} runs within {WITHIN:.0%} of what was measured, duplicates counted",
        x=MEASURED, y=Axis(title="predicted / measured", unit="x", log=True),
        marks=(
            Curve(label="equal", points=tuple((end, 1.0) for end in ends), reference=True),
            Band(label=f"within {WITHIN:.0%}", edges=tuple((end, *_around(1.0)) for end in ends)),
            *(Points(label=chip, points=found) for chip, found in clouds.items()),
        ),
        height=RESIDUAL_HEIGHT,
    )  # fmt: skip


def _around(value: float) -> tuple[float, float]:
    return value * (1.0 - WITHIN), value * (1.0 + WITHIN)
