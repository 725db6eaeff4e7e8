"""Predictions of published runs, or of a user's rows: which rows are compared, and the results as values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.measure.calibrate.layout_ranking import LayoutGroup, published_groups
from shardwise.measure.calibrate.prediction_errors import EvaluatedRun, predict_rows
from shardwise.measure.calibrate.published_fit import PublishedFit, fit_published
from shardwise.measure.calibrate.published_runs.run_table import RunRow, published_rows, read_rows
from shardwise.values import InputError, Progress, argument_label, ignore_progress

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSelection:
    """Rows to compare: of a CSV file (None: the published ones), on chips and from sources whose names contain these texts."""

    rows: PathLike | None = None
    chip: str | None = None
    source: str | None = None

    @property
    def is_everything(self) -> bool:
        """True for all published rows."""
        return (self.rows, self.chip, self.source) == (None, None, None)

    def read(self) -> list[RunRow]:
        """Read the rows. Raises `InputError` when none is left."""
        rows = published_rows() if self.rows is None else read_rows(os.fspath(self.rows), argument_label("rows"))
        selected = [row for row in rows if self._has(row)]
        if not selected:
            chips = sorted({row.cell("chip") for row in rows})
            sources = sorted({row.family for row in rows})
            raise InputError(
                f"validate: found none of {len(rows)} rows with chip {self.chip or 'any'!r} and source "
                f"{self.source or 'any'!r}; the chips are {', '.join(chips)}; the sources {', '.join(sources)}"
            )
        return selected

    def _has(self, row: RunRow) -> bool:
        source = " ".join((row.family, row.source, row.cell("software"))).lower()
        return (self.chip or "").lower() in row.cell("chip").lower() and (self.source or "").lower() in source


@dataclass(frozen=True, slots=True)
class EvaluatedRuns:
    """Runs with their predictions, in the order of the rows.

    >>> import shardwise as sw
    >>> evaluated = sw.validate(source="simumax")
    >>> evaluated.runs[0].row.family, evaluated.runs[0].prediction is not None
    ('simumax-b200', True)
    """

    runs: Sequence[EvaluatedRun]


@dataclass(frozen=True, slots=True)
class RankedLayouts:
    """Groups of layouts that were measured beside each other, by the set of rows that they are from."""

    groups_by_set: dict[str, list[LayoutGroup]]


def evaluate_runs(
    selection: RowSelection, *, bound: bool = False, progress: Progress = ignore_progress
) -> EvaluatedRuns:
    """Predict the selected rows; `bound` prices at the rates of micro-benchmarks. Raises `InputError` for a wrong selection."""
    return EvaluatedRuns(predict_rows(selection.read(), bound=bound, progress=progress))


def evaluate_folds(selection: RowSelection, progress: Progress = ignore_progress) -> PublishedFit:
    """Fit the constants without some of the selected runs, and predict these. Raises `InputError` for too few runs.

    All published runs come with what the package's constants are fitted to beside them.
    """
    rows = selection.read()
    return fit_published(None if selection.is_everything else rows, progress)


def rank_published_layouts(progress: Progress = ignore_progress) -> RankedLayouts:
    """Compare the predicted order of layouts with the measured one, in the package's own groups."""
    return RankedLayouts(published_groups(progress))
