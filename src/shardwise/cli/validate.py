"""`shardwise validate`: predicted against measured step time and memory of published runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.cli.arguments import add_output_arguments
from shardwise.cli.html import add_report_argument, write_report
from shardwise.cli.pictures import picture_name, write_picture
from shardwise.parser import Parser

if TYPE_CHECKING:
    from shardwise.calibrate.accuracy import ErrorStatistics, Judged
    from shardwise.calibrate.published_runs.rows import Row
    from shardwise.progress import Progress

WORST = 10
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
    runs.add_argument("--chip", metavar="TEXT", help="only runs on chips whose name contains this, such as h100")
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


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON."""
    from shardwise.calibrate.accuracy import judge
    from shardwise.calibrate.payload import validate_payload
    from shardwise.calibrate.published_runs.rows import published_rows, read_rows

    if arguments.groups:
        return _groups(arguments)
    rows = read_rows(arguments.rows) if arguments.rows is not None else published_rows()
    chosen = _chosen(rows, arguments.chip, arguments.source)
    if arguments.folds:
        whole = (arguments.rows, arguments.chip, arguments.source) == (None, None, None)
        return _folds(None if whole else chosen, arguments.progress, as_json=arguments.json)
    judged = judge(chosen, bound=arguments.bound, progress=arguments.progress)
    if arguments.plot:
        from shardwise.calibrate.figures import draw_accuracy

        write_picture("--plot", arguments.plot, draw_accuracy(judged))
    write_report(arguments.report, "validate", "Predictions of published runs", lambda: validate_payload(judged))
    return json.dumps(validate_payload(judged), indent=2) if arguments.json else validate_text(judged)


def _folds(rows: Sequence[Row] | None, progress: Progress, *, as_json: bool) -> str:
    """Errors of runs that were left out of the fit; of the package's (None) with what it is fitted to beside them.

    Raises `InputError` when too few runs can be fitted.
    """
    from shardwise.calibrate.folds_payload import fold_payload
    from shardwise.calibrate.published import fit_published, fold_report

    found = fit_published(rows, progress)
    return json.dumps(fold_payload(found), indent=2) if as_json else fold_report(found)


def _groups(arguments: argparse.Namespace) -> str:
    """How well layouts are told apart. Raises `InputError` beside what chooses rows: the groups are those of the package."""
    from shardwise.calibrate.groups import groups_payload, groups_report, published_groups
    from shardwise.errors import InputError

    others = ("chip", "source", "rows", "plot", "bound", "folds")
    given = [f"--{name}" for name in others if getattr(arguments, name) not in (None, False)]
    if given:
        raise InputError(f"--groups: found {', '.join(given)} with it; leave out one or the other")
    found = published_groups(arguments.progress)
    return json.dumps(groups_payload(found), indent=2) if arguments.json else groups_report(found)


def _chosen(rows: Sequence[Row], chip: str | None, source: str | None) -> list[Row]:
    """The rows of a chip and of a source. Raises `InputError` when none is left."""
    from shardwise.errors import InputError

    def has(row: Row) -> bool:
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


def validate_text(judged: Sequence[Judged]) -> str:
    """The report for people."""
    from shardwise.calibrate.accuracy import memory_summary, refuted_fits, summary, worst

    times, memory = summary(judged), memory_summary(judged)
    predicted = sum(one.prediction is not None for one in judged)
    parts = [
        f"{len(judged)} runs, {predicted} with a prediction; those of quality A and A- count, weighted 1/duplicates; "
        "inside: in the 90% interval"
    ]
    if times["overall"]:
        parts.append("\n".join(_table("step time, |predicted / measured - 1|", times)))
        parts.append("\n".join(["largest errors", *(line for one in worst(judged, WORST) for line in _worst(one))]))
    else:
        parts.append("no run that counts has both a prediction and a measured step time")
    if memory["overall"]:
        parts.append(
            "\n".join(_table("peak memory", {name: memory[name] for name in ("overall", "measured", "source")}))
        )
    stated, over, far = refuted_fits(judged)
    if stated:
        parts.append(
            f"{over} of {stated} runs that say what they recompute would not fit by the memory model, though they ran, "
            f"{far} by more than a tenth"
        )
    parts.append("\n".join(_unreadable(judged)))
    parts.append("\n".join(_skipped(judged)))
    return "\n\n".join(filter(None, parts))


def _table(title: str, tables: Mapping[str, Mapping[str, ErrorStatistics]]) -> Iterator[str]:
    columns = ("rows", "weight", "mean", "median", "p90", "worst", "bias", "inside")
    yield f"{title:<42}" + "".join(f"{column:>8}" for column in columns)
    for name, table in tables.items():
        for value, one in table.items():
            shares = "".join(f"{share:>8.1%}" for share in (one.mean, one.median, one.p90, one.worst))
            inside = "" if one.coverage is None else f"{one.coverage:>8.1%}"
            yield f"  {name:<10}{value:<30}{one.num_rows:>8}{one.weight:>8.0f}{shares}{one.bias:>+8.1%}{inside}"


def _worst(one: Judged) -> Iterator[str]:
    from shardwise.calibrate.guess import guess
    from shardwise.units import format_seconds

    assert one.prediction is not None
    case, seconds = one.prediction.case, one.row.step_time_s or 0.0
    yield (
        f"  {one.row.id:<28} {one.error or 0.0:>+7.1%}  {format_seconds(one.prediction.estimate.step_time_s)} for "
        f"{format_seconds(seconds)}; {case.architecture.name} on {case.cluster.name}"
    )
    yield f"      {case.layout}"
    yield f"      {guess(one)}"


def _unreadable(judged: Sequence[Judged]) -> Iterator[str]:
    from shardwise.calibrate.published_runs.rows import unreadable

    found = unreadable(one.row for one in judged)
    if found:
        row, column, text = found[0]
        yield f"{len(found)} measured cells are not numbers above 0 and are ignored: {row}, {column}: found {text[:40]!r}"


def _skipped(judged: Sequence[Judged]) -> Iterator[str]:
    from shardwise.calibrate.accuracy import skipped_kinds

    kinds = skipped_kinds(judged)
    if kinds:
        yield "without a prediction (of those, how many would count)"
    for kind, (rows, scored) in kinds.items():
        yield f"  {kind:<44}{rows:>5} ({scored})"
