"""The chart of predictions against measurements."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.calibrate.accuracy import Judged, summary
from shardwise.draw.lines import Axis, Cloud, Line, LineChart
from shardwise.errors import InputError


def accuracy_chart(judged: Sequence[Judged]) -> LineChart:
    """Predicted against measured step time, a mark a row, coloured by chip; on the diagonal they are equal.

    Raises `InputError` where no row that counts has both.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for one in judged:
        if one.scored and one.prediction and one.row.step_time_s:
            pairs.setdefault(one.row.cell("chip"), []).append(
                (one.row.step_time_s, one.prediction.estimate.step_time_s)
            )
    if not pairs:
        raise InputError("--plot: no row of quality A or A- has both a prediction and a measured step time")
    points = [point for found in pairs.values() for point in found]
    ends = min(map(min, points)), max(map(max, points))
    overall = summary(judged)["overall"]["all"]
    return LineChart(
        title="Predicted and measured step times of published runs",
        subtitle=f"{overall.num_rows} runs of quality A and A-: mean error {overall.mean:.1%}, median {overall.median:.1%}, "
        f"bias {overall.bias:+.1%}, weighted by duplicates",
        x=Axis(title="measured step time", unit="s"),
        y=Axis(title="predicted step time", unit="s"),
        lines=(Line(label="equal", points=((ends[0], ends[0]), (ends[1], ends[1])), reference=True),),
        clouds=tuple(Cloud(label=f"{chip} ({len(found)})", points=tuple(found)) for chip, found in sorted(pairs.items())),
    )  # fmt: skip
