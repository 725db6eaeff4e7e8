"""`shardwise batch fit`: the fewest steps and tokens to a loss, and the critical batch, from the runs of a sweep."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.present.cli.pictures import write_picture
from shardwise.present.rendering.report import Block, Report, Row, Section, Table

if TYPE_CHECKING:
    from shardwise.batch_size.batch_sweep_fit import TradeoffFit

SOURCE = "the folder of a sweep, or a CSV file"
PICTURE = "steps against tokens, and the knee"


def run(arguments: argparse.Namespace) -> str | Report:
    """The fit, as a report or as JSON, and its picture."""
    from shardwise.batch_size.batch_sweep_fit import fit_tradeoff, read_batch_runs
    from shardwise.batch_size.payloads import fit_payload
    from shardwise.present.charts.batch_size_charts import pareto_chart
    from shardwise.present.charts.draw_chart import draw_chart

    found = fit_tradeoff(read_batch_runs(arguments.source))
    if arguments.plot:
        write_picture("--plot", arguments.plot, draw_chart(pareto_chart(found)))
    return json.dumps(fit_payload(found), indent=2) if arguments.json else fit_report(found, arguments.source)


def fit_report(found: TradeoffFit, source: str) -> Report:
    """The critical batch with its interval, the law, and each batch's steps beside those of the law."""
    return [
        Section(list(_head(found)), title=f"{source}: {_counts(found)}"),
        Section([_table(found)]),
        Section(list(_not_reached(found))),
    ]


def _counts(found: TradeoffFit) -> str:
    from shardwise.values import pluralize

    loss = "" if found.target_loss is None else f" of {found.target_loss:g}"
    return f"{pluralize(len(found.runs), 'run')} to the loss{loss}, {len(found.batches)} batches"


def _head(found: TradeoffFit) -> Iterator[Block]:
    from shardwise.values import format_count

    law = found.tradeoff
    rows = (
        ("critical batch", law.critical_batch_tokens, found.critical_batch_interval90, "tokens"),
        ("fewest steps", law.min_steps, found.min_steps_interval90, "steps"),
        ("fewest tokens", law.min_tokens, found.min_tokens_interval90, "tokens"),
    )
    said = [
        (name, f"{format_count(value)} {unit}", f"90% interval {format_count(low)} to {format_count(high)}")
        for name, value, (low, high), unit in rows
    ]
    yield Table(rows=tuple(said), head=False, indent=2)
    yield f"  S(B) = S_min · (1 + B_crit / B): root mean square of the residuals {found.rms_residual:.1%}"
    if not found.within:
        side = "above" if law.critical_batch_tokens > found.batches[-1] else "below"
        yield f"  note: the critical batch lies {side} all batches that were run, and is extrapolated: run some {side} it"


def _table(found: TradeoffFit) -> Table:
    rows: list[Row] = [("batch, tokens", "runs", "steps", "of the law", "off", "tokens")]
    for batch in found.batches:
        runs = [one for one in found.runs if one.run.batch_tokens == batch]
        steps = [one.run.steps for one in runs if one.run.steps is not None]
        mean, off = sum(steps) / len(steps), sum(one.residual for one in runs) / len(runs)
        rows.append(
            (
                f"{batch:,.0f}", f"{len(runs)}", f"{mean:,.0f}", f"{runs[0].fitted_steps:,.0f}", f"{off:+.1%}",
                f"{mean * batch:,.0f}",
            )
        )  # fmt: skip
    return Table(rows=tuple(rows), right=range(len(rows[0])))


def _not_reached(found: TradeoffFit) -> Iterator[str]:
    for run in found.not_reached:
        yield f"not fitted: batch {run.batch_tokens:,.0f}, seed {run.seed}: {run.failed}"
