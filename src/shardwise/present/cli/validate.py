"""`shardwise validate`: predicted against measured step time and memory of published runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.cli.html import add_report_argument, write_report
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.present.rendering.report import Report, sections_of_text
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.measure.calibrate.published_runs.run_table import RunRow
    from shardwise.values import Progress

DESCRIPTION = """Predict the step time and the peak memory of published training runs, and compare. What was measured is
never read by a prediction. Runs of quality A and A- count, each 1 over the number of runs of the same configuration."""
EXAMPLES = (
    "shardwise validate --chip h100 --source dgxc --plot h100.svg",
    "shardwise validate --rows mine.csv --json",
    "shardwise validate --groups",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    runs, judgement, output = parser.groups("runs", "judgement", "output")
    runs.add_argument(
        "--chip", metavar="TEXT", completes="chips", help="only runs on chips whose name contains this, such as h100"
    )
    runs.add_argument(
        "--source", metavar="TEXT", help="only runs whose source or software contains this, such as megatron"
    )
    runs.add_argument(
        "--rows", metavar="FILE", help="a CSV file with the columns of the published rows, in their place"
    )
    judgement.add_argument(
        "--bound",
        action="store_true",
        help="price at what micro-benchmarks reach, without the constants fitted to these runs",
    )
    judgement.add_argument(
        "--folds",
        action="store_true",
        help="fit without some of the runs and predict these: a new model, a new lab, a lab with three runs given (a minute)",
    )
    judgement.add_argument(
        "--groups",
        action="store_true",
        help="layouts of one model measured beside each other: how often the predicted order and the pick are right",
    )
    output.add_argument(
        "--plot",
        type=picture_name,
        metavar="FILE",
        help="draw predicted against measured step times, and the residuals",
    )
    add_report_argument(parser)
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    from shardwise.measure.calibrate.payloads import validate_payload
    from shardwise.measure.calibrate.prediction_errors import predict_rows
    from shardwise.measure.calibrate.published_runs.run_table import published_rows, read_rows
    from shardwise.present.reports.calibration import validate_report

    if arguments.groups:
        return _groups(arguments)
    rows = read_rows(arguments.rows) if arguments.rows is not None else published_rows()
    chosen = _chosen(rows, arguments.chip, arguments.source)
    if arguments.folds:
        whole = (arguments.rows, arguments.chip, arguments.source) == (None, None, None)
        return _folds(None if whole else chosen, arguments.progress, as_json=arguments.json)
    judged = predict_rows(chosen, bound=arguments.bound, progress=arguments.progress)
    if arguments.plot:
        from shardwise.present.charts.measurement_charts import draw_accuracy

        write_picture("--plot", arguments.plot, draw_accuracy(judged))
    write_report(arguments.report, "validate", "Predictions of published runs", lambda: validate_payload(judged))
    return json.dumps(validate_payload(judged), indent=2) if arguments.json else validate_report(judged)


def _folds(rows: Sequence[RunRow] | None, progress: Progress, *, as_json: bool) -> str | Report:
    """Errors of runs that were left out of the fit; of the package's (None) with what it is fitted to beside them.

    Raises `InputError` when too few runs can be fitted.
    """
    from shardwise.measure.calibrate.payloads import fold_payload
    from shardwise.measure.calibrate.published_fit import fit_published, fold_report

    found = fit_published(rows, progress)
    return json.dumps(fold_payload(found), indent=2) if as_json else sections_of_text(fold_report(found))


def _groups(arguments: argparse.Namespace) -> str | Report:
    """How well layouts are ranked. Raises `InputError` beside options that choose rows: the groups are those of the package."""
    from shardwise.measure.calibrate.layout_ranking import groups_report, published_groups
    from shardwise.measure.calibrate.payloads import groups_payload
    from shardwise.values import InputError

    others = ("chip", "source", "rows", "plot", "bound", "folds")
    given = [f"--{name}" for name in others if getattr(arguments, name) not in (None, False)]
    if given:
        raise InputError(f"--groups: found {', '.join(given)} with it; leave out one or the other")
    found = published_groups(arguments.progress)
    return json.dumps(groups_payload(found), indent=2) if arguments.json else sections_of_text(groups_report(found))


def _chosen(rows: Sequence[RunRow], chip: str | None, source: str | None) -> list[RunRow]:
    """The rows of a chip and of a source. Raises `InputError` when none is left."""
    from shardwise.values import InputError

    def has(row: RunRow) -> bool:
        where = " ".join((row.family, row.source, row.cell("software"))).lower()
        return (chip or "").lower() in row.cell("chip").lower() and (source or "").lower() in where

    found = [row for row in rows if has(row)]
    if not found:
        chips, sources = (sorted(set(names)) for names in ((r.cell("chip") for r in rows), (r.family for r in rows)))
        raise InputError(
            f"validate: found none of {len(rows)} rows with chip {chip or 'any'!r} and source {source or 'any'!r}; "
            f"the chips are {', '.join(chips)}; the sources {', '.join(sources)}"
        )
    return found
