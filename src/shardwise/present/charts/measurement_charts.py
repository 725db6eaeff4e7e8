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


def reconciliation_charts(reconciliation: Reconciliation, about: str = "") -> tuple[Chart, Chart]:
    """Return bars of time and of memory, predicted above measured; `about` replaces the machine in the subtitles."""
    time, memory = reconciliation.time.terms, reconciliation.memory.terms
    predicted_s = {term.name: term.predicted_s or 0.0 for term in time}
    predicted_bytes = {term.name: term.predicted or 0.0 for term in memory}
    measured_s = {term.name: term.measured_s for term in time}
    measured_bytes = {term.name: max(term.measured, 0.0) for term in memory}
    subtitle = about or f"on {reconciliation.machine}"
    return (
        _chart("Time of a step", subtitle, predicted_s, measured_s, MEASURED_TERMS, "s"),
        _chart("Memory of a device", subtitle, predicted_bytes, measured_bytes, MEMORY_TERMS, "B"),
    )  # fmt: skip


def _chart(
    title: str,
    about: str,
    predicted: Mapping[str, float],
    measured: Mapping[str, float],
    order: Iterable[str],
    unit: str,
) -> Chart:
    terms_by_label = {"predicted": predicted, "measured": measured}
    names = [name for name in order if any(parts.get(name, 0.0) > 0 for parts in terms_by_label.values())]
    bars = {label: {name: parts.get(name, 0.0) for name in names} for label, parts in terms_by_label.items()}
    return bar_chart(f"{title}: predicted and measured", about, bars, unit=unit)


WITHIN = 0.1  # of what was measured: the band that is drawn
RESIDUAL_HEIGHT = 220.0
Pairs = Mapping[str, Sequence[tuple[float, float]]]
MEASURED = Axis(title="measured step time", unit="s", log=True)


def accuracy_charts(runs: Sequence[EvaluatedRun]) -> tuple[Chart, Chart]:
    """Return predicted against measured step times, and their quotients, a mark a row; with a band of 10% either way.

    Raises `InputError` where no row that counts has both.
    """
    pairs = _pairs(runs)
    if not pairs:
        raise InputError("--plot: no row of quality A or A- has both a prediction and a measured step time")
    overall = error_tables(runs)["overall"]["all"]
    subtitle = (
        f"{overall.num_rows} runs of quality A and A-: mean error {overall.mean:.1%}, median {overall.median:.1%}, "
        f"bias {overall.bias:+.1%}, weighted by duplicates"
    )
    return accuracy_chart(pairs, subtitle), residual_chart(pairs)


def _pairs(runs: Sequence[EvaluatedRun]) -> Pairs:
    """Return measured and predicted seconds of the rows that count, by chip."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        if run.scored and run.prediction and run.row.step_time_s:
            pairs.setdefault(run.row.cell("chip"), []).append(
                (run.row.step_time_s, run.prediction.estimate.step_time_s)
            )
    return dict(sorted(pairs.items()))


def accuracy_chart(pairs: Pairs, subtitle: str) -> Chart:
    """Return predicted against measured step times; on the diagonal they are equal."""
    points = [point for chip_pairs in pairs.values() for point in chip_pairs]
    ends = min(map(min, points)), max(map(max, points))
    return curve_chart(
        title="Predicted and measured step times of published runs", subtitle=subtitle,
        x=MEASURED, y=Axis(title="predicted step time", unit="s", log=True),
        marks=(
            Curve(label="equal", points=tuple((end, end) for end in ends), reference=True),
            Band(label=f"within {WITHIN:.0%}", edges=tuple((end, *_tolerance_band(end)) for end in ends)),
            *(Points(label=f"{chip} ({len(chip_pairs)})", points=tuple(chip_pairs)) for chip, chip_pairs in pairs.items()),
        ),
    )  # fmt: skip


def residual_chart(pairs: Pairs) -> Chart:
    """Return quotients of predicted and measured step times, against measured ones."""
    clouds = {chip: tuple((x, y / x) for x, y in points) for chip, points in pairs.items()}
    quotients = [y for points in clouds.values() for _, y in points]
    measured = [x for points in clouds.values() for x, _ in points]
    ends = min(measured), max(measured)
    within = sum(abs(quotient - 1.0) <= WITHIN for quotient in quotients)
    return curve_chart(
        title="Residuals: predicted over measured",
        subtitle=f"{within} of {len(quotients)} runs within {WITHIN:.0%} of what was measured, duplicates counted",
        x=MEASURED, y=Axis(title="predicted / measured", unit="x", log=True),
        marks=(
            Curve(label="equal", points=tuple((end, 1.0) for end in ends), reference=True),
            Band(label=f"within {WITHIN:.0%}", edges=tuple((end, *_tolerance_band(1.0)) for end in ends)),
            *(Points(label=chip, points=points) for chip, points in clouds.items()),
        ),
        height=RESIDUAL_HEIGHT,
    )  # fmt: skip


def _tolerance_band(value: float) -> tuple[float, float]:
    return value * (1.0 - WITHIN), value * (1.0 + WITHIN)
