"""Report of predictions beside published serving configurations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import seconds, share, significant
from shardwise.present.rendering.report import Line, Number, Report, Row, Section, Table
from shardwise.values import pluralize

if TYPE_CHECKING:
    from shardwise.measure import CalibratedServing
    from shardwise.measure.serving.pool_validation import PoolValidation
    from shardwise.measure.serving.power_fit import PowerValidation
    from shardwise.measure.serving.serving_errors import ServingErrors
    from shardwise.measure.serving.serving_validation import ServingFold, ServingValidation

LEFT_OUT = {"none": "nothing left out", "family": "model family left out", "chip": "chip left out", "engine": "engine left out",
            "source": "source left out"}  # fmt: skip


def serving_calibration_report(calibrated: CalibratedServing) -> Report:
    """Report each result beside its predictions before and after the calibration, and the factors."""
    problem, factors = calibrated.problem, calibrated.calibration
    head: Row = ("in", "out", "load", "TPOT", "predicted", "calibrated", "TTFT", "predicted", "calibrated")
    rows = [head]
    for index, compared in enumerate(calibrated.results):
        result, path = compared.result, f"results.{index}"
        load = f"{result.concurrency:g} at once" if result.concurrency is not None else f"{result.rate_per_s:g}/s"
        rows.append(
            (
                f"{result.isl:,.0f}", f"{result.osl:,.0f}", load,
                seconds(result.tpot_s, f"{path}.result.tpot_s", kind="measured"),
                seconds(compared.predicted_tpot_s, f"{path}.predicted_tpot_s"),
                seconds(compared.calibrated_tpot_s, f"{path}.calibrated_tpot_s"),
                seconds(result.ttft_s, f"{path}.result.ttft_s", kind="measured"),
                seconds(compared.predicted_ttft_s, f"{path}.predicted_ttft_s"),
                seconds(compared.calibrated_ttft_s, f"{path}.calibrated_ttft_s"),
            )
        )  # fmt: skip
    title = (
        f"{problem.architecture.name} with {problem.engine} on {problem.cluster.name}, {calibrated.layout}, weights "
        f"{problem.formats}"
    )
    passes = Line(
        (
            "  passes take ", significant(factors.pass_factor, "calibration.pass_factor", digits=3),
            " times the prediction, first tokens ",
            significant(factors.first_token_factor, "calibration.first_token_factor", digits=3),
            f" times beside ({pluralize(factors.num_results, 'result')}, drawn towards 1)",
        )
    )  # fmt: skip
    return [Section([Table(rows=tuple(rows), right=range(9), indent=2), passes], title=title)]


def serving_accuracy_report(validation: ServingValidation) -> Report:
    """Report errors of TPOT and TTFT by fold, coverage of the intervals by class, and picks under limits."""
    folds = [("fitted", validation.fitted), *((f"folds.{i}", fold) for i, fold in enumerate(validation.folds))]
    batches = [(f"batches.{i}", fold) for i, fold in enumerate(validation.batches)]
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
    pool_errors: list[Row] = [
        ("", "TPOT", "mean", "90%", "TTFT", "mean", "90%"),
        *_pool_rows(validation.pools, "pools", "that state their workers"),
        *_pool_rows(validation.launched_pools, "launched_pools", "whose launch does, in no fit"),
    ]
    table = validation.throughput
    throughput: list[Row] = [("", "median", "mean", "90%", "too high")]
    throughput += [
        (
            f"{table.errors.num_rows} rows of TensorRT-LLM's table", *_errors(table.errors, "throughput.errors"),
            share(table.too_high, "throughput.too_high"),
        )
    ]  # fmt: skip
    return [
        Section([head, _fold_table(folds)]),
        Section(
            [_fold_table(batches)],
            title=f"{validation.num_batches} single batches (Splitwise): a token, and all inputs until their first tokens",
        ),
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
        Section([Table(rows=tuple(pool_errors), right=range(1, 7))], title="prefill and decode in pools of their own"),
        Section(
            [Table(rows=tuple(throughput), right=range(1, 5))],
            title="output tokens/s per device at saturation, in no fit",
        ),
    ]


def _fold_table(folds: Sequence[tuple[str, ServingFold]]) -> Table:
    """Return the errors of folds, each with its path in the payload."""
    rows: list[Row] = [("", "TPOT", "mean", "90%", "TTFT", "mean", "90%")]
    rows += [
        (LEFT_OUT[fold.fold], *_errors(fold.tpot, f"{path}.tpot"), *_errors(fold.ttft, f"{path}.ttft"))
        for path, fold in folds
    ]
    return Table(rows=tuple(rows), right=range(1, 7))


def _pool_rows(pools: PoolValidation, path: str, kind: str) -> tuple[Row, Row]:
    """Return the errors of rows of pools, and how many of them are in their intervals."""
    return (
        (f"{pools.num_rows} rows {kind}", *_errors(pools.tpot, f"{path}.tpot"), *_errors(pools.ttft, f"{path}.ttft")),
        (
            "  inside 90% intervals", share(pools.tpot_coverage, f"{path}.tpot_coverage"), "", "",
            share(pools.ttft_coverage, f"{path}.ttft_coverage"), "", "",
        ),
    )  # fmt: skip


def _power_line(power: PowerValidation) -> Line:
    """Return the shares of the rated power, and the error of readings that were left out."""
    return Line(
        (
            "power of A100: ", share(power.idle, "power.idle"), " of the rated one, ", share(power.memory, "power.memory"),
            " by use of the memory, ", share(power.compute, "power.compute"), " by use of the peak; ",
            Number(f"{power.num_rows}", power.num_rows, "", "power.num_rows"), " readings, a model and degree left out: ",
            share(power.mean_error, "power.mean_error"), " mean error",
        )
    )  # fmt: skip


def _errors(errors: ServingErrors, path: str) -> tuple[Number, Number, Number]:
    return (
        share(errors.median, f"{path}.median"),
        share(errors.mean, f"{path}.mean"),
        share(errors.percentile_90, f"{path}.percentile_90"),
    )
