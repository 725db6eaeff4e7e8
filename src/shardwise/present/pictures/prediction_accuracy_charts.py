"""The chart of predictions against measurements, and what is left between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.measure.calibrate.prediction_errors import EvaluatedRun, error_tables
from shardwise.present.draw.axis import Axis
from shardwise.present.draw.drawing import Drawing, below
from shardwise.present.draw.line_chart import Band, Cloud, Line, LineChart
from shardwise.present.draw.lines import draw_lines
from shardwise.values import InputError

WITHIN = 0.1  # of what was measured: the band that is drawn
RESIDUAL_HEIGHT = 220.0
Pairs = Mapping[str, Sequence[tuple[float, float]]]
MEASURED = Axis(title="measured step time", unit="s")


def draw_accuracy(judged: Sequence[EvaluatedRun]) -> Drawing:
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
    return below([draw_lines(accuracy_chart(pairs, said)), draw_lines(residual_chart(pairs), RESIDUAL_HEIGHT)])


def _pairs(judged: Sequence[EvaluatedRun]) -> Pairs:
    """Measured and predicted seconds of the rows that count, by chip."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for one in judged:
        if one.scored and one.prediction and one.row.step_time_s:
            pairs.setdefault(one.row.cell("chip"), []).append(
                (one.row.step_time_s, one.prediction.estimate.step_time_s)
            )
    return dict(sorted(pairs.items()))


def accuracy_chart(pairs: Pairs, subtitle: str) -> LineChart:
    """Predicted against measured; on the diagonal they are equal."""
    points = [point for found in pairs.values() for point in found]
    ends = min(map(min, points)), max(map(max, points))
    return LineChart(
        title="Predicted and measured step times of published runs", subtitle=subtitle,
        x=MEASURED, y=Axis(title="predicted step time", unit="s"),
        lines=(Line(label="equal", points=tuple((end, end) for end in ends), reference=True),),
        bands=(Band(label=f"within {WITHIN:.0%}", edges=tuple((end, *_around(end)) for end in ends)),),
        clouds=tuple(Cloud(label=f"{chip} ({len(found)})", points=tuple(found)) for chip, found in pairs.items()),
    )  # fmt: skip


def residual_chart(pairs: Pairs) -> LineChart:
    """Predicted over measured, against measured."""
    clouds = {chip: tuple((x, y / x) for x, y in found) for chip, found in pairs.items()}
    quotients = [y for found in clouds.values() for _, y in found]
    measured = [x for found in clouds.values() for x, _ in found]
    ends = min(measured), max(measured)
    within = sum(abs(quotient - 1.0) <= WITHIN for quotient in quotients)
    return LineChart(
        title="Residuals: predicted over measured",
        subtitle=f"{within} of {len(quotients)} runs within {WITHIN:.0%} of what was measured, duplicates counted",
        x=MEASURED, y=Axis(title="predicted / measured", unit="x"),
        lines=(Line(label="equal", points=tuple((end, 1.0) for end in ends), reference=True),),
        bands=(Band(label=f"within {WITHIN:.0%}", edges=tuple((end, *_around(1.0)) for end in ends)),),
        clouds=tuple(Cloud(label=chip, points=found) for chip, found in clouds.items()),
    )  # fmt: skip


def _around(value: float) -> tuple[float, float]:
    return value * (1.0 - WITHIN), value * (1.0 + WITHIN)
