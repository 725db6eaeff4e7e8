"""Report of predictions beside published serving configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import seconds, share
from shardwise.present.rendering.report import Number, Report, Row, Section, Table

if TYPE_CHECKING:
    from shardwise.measure.serving.serving_validation import ServingErrors, ServingValidation

LEFT_OUT = {"none": "nothing left out", "family": "model family left out", "chip": "chip left out", "engine": "engine left out",
            "source": "source left out"}  # fmt: skip


def serving_accuracy_report(validation: ServingValidation) -> Report:
    """Report errors of TPOT and TTFT by fold, coverage of the intervals by class, and picks under limits."""
    folds = [("fitted", validation.fitted), *((f"folds.{i}", fold) for i, fold in enumerate(validation.folds))]
    errors: list[Row] = [("", "TPOT", "mean", "90%", "TTFT", "mean", "90%")]
    errors += [
        (LEFT_OUT[fold.fold], *_errors(fold.tpot, f"{path}.tpot"), *_errors(fold.ttft, f"{path}.ttft"))
        for path, fold in folds
    ]
    coverage: list[Row] = [("", "rows", "TPOT", "TTFT")]
    coverage += [
        (
            f"{part.key} {part.value}", Number(f"{part.num_rows}", part.num_rows, "", f"coverage.{i}.num_rows"),
            share(part.tpot, f"coverage.{i}.tpot"), share(part.ttft, f"coverage.{i}.ttft"),
        )
        for i, part in enumerate(validation.coverage)
    ]  # fmt: skip
    choices: list[Row] = [("limit", "groups", "broken", "no pick", "regret")]
    choices += [
        (
            seconds(choice.limit_s, f"choices.{i}.limit_s"),
            *(
                Number(f"{getattr(choice, name)}", getattr(choice, name), "", f"choices.{i}.{name}")
                for name in ("num_groups", "num_broken", "num_without_pick")
            ),
            share(choice.mean_regret, f"choices.{i}.mean_regret"),
        )
        for i, choice in enumerate(validation.choices)
    ]  # fmt: skip
    head = f"{validation.num_rows:,} published serving configurations: relative errors, at the median where not said otherwise"
    return [
        Section([head, Table(rows=tuple(errors), right=range(1, 7))]),
        Section(
            [Table(rows=tuple(coverage), right=range(1, 4))], title="share inside 90% intervals, model family left out"
        ),
        Section(
            [
                Table(rows=tuple(choices), right=range(5)),
                "broken: the pick of most tokens/s per device misses the limit by over 5%; regret: loss of the others",
            ],
            title="picks under a limit on TPOT, model family left out",
        ),
    ]


def _errors(errors: ServingErrors, path: str) -> tuple[Number, Number, Number]:
    return (
        share(errors.median, f"{path}.median"),
        share(errors.mean, f"{path}.mean"),
        share(errors.percentile_90, f"{path}.percentile_90"),
    )
