"""`experiments`: many runs that predict first and lose nothing. Its kinds are functions: run, status and report."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from shardwise import measure
from shardwise.measure.experiments.places import PLACES
from shardwise.present.charts.experiment_charts import experiment_charts
from shardwise.present.exports import text_file
from shardwise.present.rendering.static_html import static_page
from shardwise.present.reports.experiments import experiment_report
from shardwise.present.verb import Argument, Mode, read_arguments, verb
from shardwise.values import InputError, Progress, argument_label, ignore_progress, raise_problems

if TYPE_CHECKING:
    from shardwise.measure import ExperimentReport, ExperimentStatus

    ExperimentResult = ExperimentStatus | ExperimentReport

ExperimentVerb = Literal["run", "status", "report"]
KINDS: tuple[ExperimentVerb, ...] = ("run", "status", "report")
SOURCES = {"run": "a grid", "status": "a ledger", "report": "a ledger, or a CSV file of published runs"}
RUN = "of run"  # group of flags
Source = Annotated[
    "str | os.PathLike[str]",
    Argument(
        group="experiment", metavar="FILE", help="; ".join(f"of {kind}: {source}" for kind, source in SOURCES.items()),
    ),
]  # fmt: skip


def print_progress(text: str) -> None:
    """Print a line of progress on the error stream."""
    print(text, file=sys.stderr, flush=True)


def experiments_run(
    source: Source,
    ledger: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--ledger", group=RUN, metavar="FILE", help="what has happened to each configuration; a run goes on from it",
        ),
    ] = None,
    place: Annotated[
        str, Argument(flag="--on", group=RUN, metavar="PLACE", choices=tuple(PLACES), help="where runs run (default: processes)")
    ] = "processes",
    settings: Annotated[
        Sequence[str],
        Argument(
            flag="--set", group=RUN, repeat=True, metavar="KEY=VALUE",
            help="a setting of the place, such as devices=8 or gpus=8; may be repeated",
        ),
    ] = (),
    report: Callable[[str], None] = print_progress,
    progress: Progress = ignore_progress,
) -> ExperimentStatus:  # fmt: skip
    """Run an experiment, or go on with it, until nothing is left that is worth running or its budget is spent.

    `source` is a TOML file (docs/experiments.md), `ledger` the file in which all is recorded, and `settings` are texts KEY=VALUE.
    Raises `InputError` with everything that is wrong, and `SystemExit` if it is stopped by a signal; the same call then goes on.
    """
    if ledger is None:
        raise InputError(f"{argument_label('ledger')}: found none; a file such as runs/ledger.jsonl is required")
    request = measure.ExperimentRequest(grid=source, ledger=ledger, place=place, settings=read_settings(settings))
    return measure.run_experiment(request, report, progress)


def read_settings(texts: Sequence[str]) -> dict[str, str]:
    """Return settings by name from texts KEY=VALUE. Raises `InputError`."""
    pairs = [text.partition("=") for text in texts]
    raise_problems(
        [
            f"{argument_label('settings')}: found {name[:60]!r}; KEY=VALUE is required"
            for name, equals, value in pairs
            if not (name and equals and value)
        ]
    )
    return {name.strip(): value.strip() for name, _, value in pairs}


def experiments_status(source: Source) -> ExperimentStatus:
    """Return how far an experiment is: states, best configurations, what is left and what it will cost.

    `source` is its ledger, which another process may write at the same time. Raises `InputError` for another file.
    """
    return measure.summarise_ledger(source)


def experiments_report(source: Source) -> ExperimentReport:
    """Return the report of a ledger: the best by model and nodes, scaling, predictions beside measurements, skips and failures.

    `source` may be a CSV file with the columns of the published runs, whose runs are then reported. Raises `InputError`.
    """
    return measure.report_experiment(source)


def _report_html(result: ExperimentReport) -> str:
    return static_page(f"Experiment of {result.source}", experiment_charts(result), experiment_report(result))


FUNCTIONS: Mapping[ExperimentVerb, Callable[..., ExperimentResult]] = {
    "run": experiments_run,
    "status": experiments_status,
    "report": experiments_report,
}


def _mode(kind: ExperimentVerb) -> Mode:
    """Return the mode of a kind, which refuses flags of the others."""

    def check(arguments: Mapping[str, Any]) -> None:
        problems: dict[str, list[str]] = {}
        for name in arguments:
            kinds = [key for key, function in FUNCTIONS.items() if name in read_arguments(function)]
            if kinds and kind not in kinds:
                verbs = " or ".join(f"`shardwise experiments {key}`" for key in kinds)
                problems.setdefault(verbs, []).append(argument_label(name))
        raise_problems(
            [
                f"{', '.join(flags)}: not of `experiments {kind}`; leave out, or {verbs} is required"
                for verbs, flags in problems.items()
            ]
        )
        if "out" in arguments and kind != "report":
            raise InputError(f"--out: `experiments {kind}` writes no report; leave it out")

    return Mode(function=FUNCTIONS[kind], applies=lambda arguments: arguments["kind"] == kind, check=check)


@verb(
    description="""Many runs that predict first, start what may matter, and record everything. `run` runs the configurations of a
grid, a TOML file, and goes on where it was stopped. `status` says how far the experiment of a ledger is. `report` shows the
best configurations by model and nodes, scaling, predictions beside measurements, and what was skipped or failed.""",
    examples=(
        "shardwise experiments run grid.toml --ledger runs/ledger.jsonl",
        "shardwise experiments status runs/ledger.jsonl",
        "shardwise experiments report runs/ledger.jsonl --out report.html",
    ),
    exports=(text_file("--out", "of report: write figures and tables as one HTML file", _report_html, ".html"),),
    modes=tuple(map(_mode, KINDS)),
    group_order=("experiment", RUN, "output"),
    has_details=True,
)
def experiments(
    kind: Annotated[
        ExperimentVerb, Argument(group="experiment", metavar="WHAT", choices=KINDS, help=" or ".join(KINDS))
    ],
    source: Source,
    **arguments: Any,
) -> ExperimentResult:
    """Run a verb of experiments: `experiments("status", "ledger.jsonl")` is `experiments_status("ledger.jsonl")`.

    Raises `InputError` as that does.

    >>> experiments("status", "none.jsonl")
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: none.jsonl: cannot read: No such file or directory
    """
    return FUNCTIONS[kind](source, **arguments)
