"""Layouts of well-known runs against the plan for the same stack: docs/advice.md.

    python benchmarks/well_known.py            # print it
    python benchmarks/well_known.py --write    # rewrite docs/advice.md

Of each run (`well_known.toml`) both layouts are predicted under the run's own stack: the one that was used, as
`calibrate/published_runs` reads it, and the one that `plan` takes among those that the stack runs. The words for a gap are
the plan's own comparison of the two.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.hardware.published_constants import with_calibration
from shardwise.layout.layout import Layout
from shardwise.measure.calibrate.published_runs.prediction_from_row import RowPrediction, predict_cached
from shardwise.measure.calibrate.published_runs.run_table import RunRow, published_rows
from shardwise.price import Problem
from shardwise.search.plan import Plan
from shardwise.search.planner import make_plan
from shardwise.search.verdicts import MEMORY_RESERVE, RESOLUTION, changed_fields, explain_slowdown
from shardwise.values.errors import NothingFitsError
from shardwise.values.units import format_bytes, format_seconds

RUNS = Path(__file__).with_name("well_known.toml")
TARGET = Path(__file__).parents[1] / "docs" / "advice.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A run, its layout as predicted, and the plan for the same stack; None where no layout fits by the memory model."""

    title: str
    reason: str
    row: RunRow
    used: RowPrediction
    best: Plan | None

    @property
    def gap(self) -> float | None:
        """By how much the used layout is predicted to take longer than the plan's."""
        return self.used.estimate.step_time_s / self.best.estimate.step_time_s - 1 if self.best else None


def compared(text: str = "") -> Iterable[Compared]:
    """The runs of `well_known.toml` whose title or id has `wanted`."""
    rows = {row.id: row for row in published_rows()}
    described: Mapping[str, Mapping[str, str]] = tomllib.loads(RUNS.read_text(encoding="utf-8"))
    for name, entry in described.items():
        if text.lower() in f"{name} {entry['title']}".lower():
            used = predict_cached(rows[name].inputs)
            assert isinstance(used, RowPrediction), f"{name}: {used}"
            yield Compared(
                title=entry["title"], reason=entry.get("reason", ""), row=rows[name], used=used, best=_planned(used)
            )


def _planned(used: RowPrediction) -> Plan | None:
    case = used.case
    cluster = with_calibration(case.cluster, case.software.calibration(case.cluster.chip))
    try:
        return make_plan(Problem(case.architecture, cluster, case.job))
    except NothingFitsError:
        return None


def document(runs: Iterable[Compared]) -> str:
    """The whole document."""
    every = list(runs)
    lines = [
        *_INTRODUCTION,
        "| run | devices | stack | used, predicted | measured | plan | gap |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_table_row(run) for run in every]
    for run in every:
        lines += ["", f"## {run.title}", "", *_paragraph(run)]
    return "\n".join(lines) + "\n"


_INTRODUCTION = (
    "# Plans compared with well-known runs",
    "",
    "The layout of each well-known run, and the one that `plan` chooses for the same model, machine, batch and stack among",
    "the layouts that the stack runs. Both step times are predicted with the stack's constants; the measured step time is given",
    f"where there is one. A gap below {RESOLUTION:.0%} means nothing: of two layouts predicted that close, either may be faster.",
    "Made by `python benchmarks/well_known.py --write`; the sources of the runs are in `calibrate/published_runs/runs.csv`.",
    "",
)


def _table_row(run: Compared) -> str:
    case, estimate = run.used.case, run.used.estimate
    measured = run.row.step_time_s
    cells = (
        run.title, f"{case.cluster.num_devices:,} {case.cluster.chip.name}", case.software.stack.name,
        format_seconds(estimate.step_time_s), format_seconds(measured) if measured else "",
        format_seconds(run.best.estimate.step_time_s) if run.best else "none fits",
        f"{run.gap:+.1%}" if run.gap is not None else "",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _paragraph(run: Compared) -> Iterable[str]:
    case, estimate = run.used.case, run.used.estimate
    yield f"Source: {run.row.source} (`{run.row.id}`)."
    yield ""
    full = "" if estimate.fits else ", which does not fit by the memory model"
    yield f"- used: `{_plain(case.layout)}`, {format_bytes(estimate.memory_bytes)}{full}"
    if run.best is None:
        yield "- plan: none; nothing that the stack runs fits by the memory model"
    else:
        yield f"- plan: `{_plain(run.best.layout)}`, {format_bytes(run.best.estimate.memory_bytes)}"
        yield f"- {explanation(run.used, run.best)}"
        if run.best.search and run.best.search.elsewhere:
            yield f"- {run.best.search.elsewhere}"
    if run.reason:
        yield f"- {run.reason}"


def explanation(used: RowPrediction, best: Plan) -> str:
    """Why there is a gap, in the words with which plans compare their runners-up."""
    gap = used.estimate.step_time_s / best.estimate.step_time_s - 1
    words = explain_slowdown(used.estimate, best.estimate)
    if abs(gap) <= RESOLUTION:
        return f"no clear gap: the used layout is {words}"
    changes = changed_fields(_plain(best.layout), _plain(used.case.layout)).items()
    changed = ", ".join(f"{name} {planned} for {used_value}" for name, (planned, used_value) in changes)
    if gap < 0:
        why = "; ".join(_out_of_reach(used)) or "the plan is simpler"
        return f"the used layout is {-gap:.1%} faster: {why}. The plan has {changed}"
    return f"the used layout is {words}. The plan has {changed}"


def _out_of_reach(used: RowPrediction) -> Iterable[str]:
    """Why a plan does not take the layout that was used."""
    estimate, layout = used.estimate, used.case.layout
    if not estimate.fits:
        yield "it does not fit by the memory model"
    elif estimate.margin < MEMORY_RESERVE:
        yield f"it leaves {estimate.margin:.0%} of the memory free, where plans leave {MEMORY_RESERVE:.0%} where possible"
    if layout.offload != "none":
        yield "offload is searched only on request"
    if layout.recompute_layers is not None:
        yield "recomputation of some of the layers is searched only on request"


def _plain(layout: Layout) -> Layout:
    """The layout without its placement, and without layers of each stage that are the same on all."""
    layers = layout.layers_per_stage
    return replace(layout, placement=None, layers_per_stage=layers if layers and len(set(layers)) > 1 else None)


def main() -> int:
    """Print the document, or write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run", default="", help="only runs whose title or id has this")
    parser.add_argument("--write", action="store_true", help="rewrite docs/advice.md")
    arguments = parser.parse_args()
    text = document(compared(arguments.run))
    if arguments.write:
        TARGET.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
