"""`shardwise batch noise`: the gradient noise scale that a run measured."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.present.cli.pictures import write_picture
from shardwise.present.rendering.report import Report, Row, Section, Table

if TYPE_CHECKING:
    from shardwise.batch_size.run_noise import RunNoise

SOURCE = "the folder of a run of `shardwise train --noise-scale-every N`"
PICTURE = "the noise scale over the tokens seen"


def run(arguments: argparse.Namespace) -> str | Report:
    """The noise scale, as a report or as JSON, and its picture."""
    from shardwise.batch_size.payloads import run_noise_payload
    from shardwise.batch_size.run_noise import run_noise
    from shardwise.present.charts.batch_size_charts import run_noise_chart
    from shardwise.present.charts.draw_chart import draw_chart

    found = run_noise(arguments.source)
    if arguments.plot:
        write_picture("--plot", arguments.plot, draw_chart(run_noise_chart(found)))
    return json.dumps(run_noise_payload(found), indent=2) if arguments.json else noise_report(found)


def noise_report(found: RunNoise) -> Report:
    """The noise scale with its interval, what the batch is beside it, and the run in parts."""
    from shardwise.values import pluralize

    title = f"{found.path}: {pluralize(found.num_measured, 'step')} measured the noise scale"
    return [Section(list(_head(found)), title=title), Section([_table(found)])]


def _head(found: RunNoise) -> Iterator[str]:
    from shardwise.present.charts.batch_size_charts import said
    from shardwise.values import format_percent

    yield f"  noise scale: {said(found.late)}, over the last half of these steps"
    yield (
        f"  a batch of {found.batch_tokens:,.0f} tokens makes {format_percent(found.progress)} of the progress of the true "
        "gradient's step: 1 / (1 + B_noise / B)"
    )
    yield f"  B_simple = tr(Sigma) / |G|², from gradients of {found.small_tokens:,.0f} tokens and of the batch"


def _table(found: RunNoise) -> Table:
    from shardwise.values import format_count

    rows: list[Row] = [("steps", "tokens seen", "loss", "noise scale", "90% interval", "|G|²", "tr(Sigma)")]
    for one in found.parts:
        noise = one.measured
        rows.append(
            (
                f"{one.first_step}-{one.last_step}", format_count(one.seen_tokens), f"{one.loss:.3f}", _count(noise.tokens),
                f"{_count(noise.low)} to {_count(noise.high)}", f"{noise.noise.squared_gradient:.3g}",
                f"{noise.noise.covariance_trace:.3g}",
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=range(1, len(rows[0])))


def _count(tokens: float) -> str:
    from math import inf

    from shardwise.values import format_count

    return "∞" if tokens == inf else format_count(tokens)
