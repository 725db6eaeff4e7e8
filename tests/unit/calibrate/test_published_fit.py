"""The fit to the published runs and its folds: errors of predictions, and that package and documents state them.

Thresholds lie a tenth of a point above what is shipped. It is a single test, so that the fit is made once however tests are
distributed over processes.
"""

from __future__ import annotations

import json
import re
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.published_constants import load_published_fit
from shardwise.measure.calibrate.constant_fit import FOLDS, fold_groups
from shardwise.measure.calibrate.payloads import FoldsRecord
from shardwise.measure.calibrate.prediction_errors import STRATA as ERROR_STRATA
from shardwise.measure.calibrate.prediction_errors import memory_error_tables, predict_rows
from shardwise.measure.calibrate.published_fit import (
    STRATA,
    PublishedFit,
    fit_published,
    fold_ranking,
    fold_statistics,
    format_constants,
)
from shardwise.measure.calibrate.published_runs.run_table import published_rows
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.calibration import fold_report
from shardwise.values import to_json

NUMBER = r"[-+]?\d+\.\d+"
# Of each kind of fold and stratum: mean, median and 90th percentile of the step-time error.
REACHED = {
    ("fitted", "all"): (0.048, 0.031, 0.103),
    ("model", "all"): (0.064, 0.041, 0.148),
    ("model", "dense A100"): (0.046, 0.036, 0.091),
    ("model", "dense H100, 16 bits"): (0.039, 0.026, 0.082),
    ("model", "dense H100, fp8"): (0.061, 0.044, 0.132),
    ("model", "dense Blackwell"): (0.087, 0.068, 0.175),
    ("model", "TPU"): (0.053, 0.040, 0.111),
    ("model", "MoE"): (0.162, 0.121, 0.371),
    ("source", "all"): (0.098, 0.077, 0.202),
    ("lab", "all"): (0.102, 0.083, 0.202),
    ("three", "all"): (0.089, 0.061, 0.189),
}  # fmt: skip


def errors_by_fold(published: PublishedFit, fold: str, stratum: str) -> None:
    statistics = fold_statistics(published, fold, STRATA[stratum])
    assert statistics is not None
    for value, limit in zip((statistics.mean, statistics.median, statistics.p90), REACHED[fold, stratum], strict=True):
        assert value <= limit


def errors_are_not_implausibly_small(published: PublishedFit) -> None:
    """Two runs of the same configuration differ by 2 to 4%: a smaller error would mean that constants memorise the runs."""
    statistics = fold_statistics(published, "fitted", STRATA["all"])
    assert statistics is not None
    assert statistics.mean > 0.035


def errors_of_korthikantis_runs_are_near_calculons(published: PublishedFit) -> None:
    """Calculon (Isaev et al. 2023) was fitted only to these runs: 3.65% on average, 8.87% at most."""
    errors = [
        abs(published.in_sample[0][i] / published.measured[i] - 1)
        for i, evaluated in enumerate(published.judged)
        if evaluated.row.family == "korthikanti-2022"
    ]
    assert len(errors) == 8
    assert np.mean(errors) < 0.0385
    assert np.max(errors) < 0.0887


def intervals_cover_nine_of_ten(published: PublishedFit, fold: str) -> None:
    assert 0.86 <= (published.intervals.coverage(fold) or 0.0) <= 0.94


def uncompiled_runs_lie_inside_their_intervals(published: PublishedFit) -> None:
    """Folds leave out their model; their stack counts as known."""
    low, high = published.intervals.spread("model")["dense"].interval()
    eager = [i for i, run in enumerate(published.judged) if run.row.cell("compile") == "no"]
    assert len(eager) == 2
    ratios = published.measured[eager] / published.folds["model"][:, eager]
    assert ((ratios > low) & (ratios < high)).all()


def intervals_of_known_stacks_are_narrow(published: PublishedFit) -> None:
    """At most as wide as the former interval of all chips: 0.89 to 1.13 for dense models, 0.76 to 1.87 for mixtures of
    experts."""
    spreads = published.intervals.spread("model")
    (low, high), (moe_low, moe_high) = spreads["dense"].interval(), spreads["moe"].interval()
    assert (high - low) / 2 <= 0.12
    assert (moe_high - moe_low) / 2 <= 0.555


def intervals_of_each_class_cover_nine_of_ten(published: PublishedFit) -> None:
    """Classes are chip, source, number format and stack, each with at least 80 runs; folds leave out the model.

    GB200 lacks 2%: three of its runs, DeepSeek-V3 under NeMo 25, took 1.8 times the prediction. H100 in 16 bits has 1% too
    many."""
    classes: dict[str, list[int]] = {}
    for i, run in enumerate(published.judged):
        names = [name for name, stratum in STRATA.items() if stratum(run)]
        names += [stratum(run) for key, stratum in ERROR_STRATA.items() if key in ("chip", "dtype", "source")]
        names.append(published.members[i].observation.stack.name)
        for name in names:
            classes.setdefault(name, []).append(i)
    coverage = {}
    for name, indices in classes.items():
        chosen = np.isin(np.arange(len(published.judged)), indices)
        coverage[name] = published.intervals.coverage("model", chosen)
    large = {name: coverage[name] or 0.0 for name, indices in classes.items() if len(indices) >= 80}
    assert len(large) >= 20
    assert large.pop("GB200") > 0.83
    assert large.pop("dense H100, 16 bits") < 0.955
    assert {name: share for name, share in large.items() if not 0.86 <= share <= 0.942} == {}


def layouts_are_ordered_as_measured(published: PublishedFit) -> None:
    folds = (published.in_sample, published.folds["model"], published.folds["source"])
    fitted, new_model, new_source = (fold_ranking(published, seconds) for seconds in folds)
    assert fitted is not None
    assert new_model is not None
    assert new_source is not None
    assert fitted.num_pairs == 535
    assert fitted.ordered > 0.905
    assert new_model.ordered > 0.895
    assert new_source.ordered > 0.805
    assert max(fitted.lost, new_model.lost) < 0.011


def the_package_has_the_fitted_constants(published: PublishedFit) -> None:
    """`benchmarks/published.py --write` has to run after a change of the prices."""
    now = tomllib.loads(format_constants(published))
    shipped = load_published_fit()
    assert now["source"] == shipped["source"]
    for group in ("chips", "stacks"):
        assert now[group].keys() == shipped[group].keys()
        for name, values in now[group].items():
            assert {k: v for k, v in values.items() if k in CONSTANTS} == pytest.approx(
                {k: v for k, v in shipped[group][name].items() if k in CONSTANTS}, rel=0.02
            )


def report_and_payload_agree(published: PublishedFit) -> None:
    text, payload = render_text(fold_report(published)), to_json(FoldsRecord.of(published))
    require_valid(json.loads(json.dumps(payload)))
    assert require_payload_numbers(published) > 200
    mean = payload["summary"]["model"]["all"]["mean"]
    assert f"{mean:>8.1%}" in text
    assert set(payload["summary"]) == {"fitted", *FOLDS}
    assert len(payload["rows"]) == len(published.members)
    unpredicted = [row for row in payload["rows"] if row["three_step_time_s"] is None]
    assert 0 < len(unpredicted) < len(payload["rows"])
    assert "ordered correctly" in text
    assert "inside" in text


def a_model_is_left_out_with_all_its_runs(published: PublishedFit) -> None:
    for draw in range(2):
        folds = fold_groups(published.members, "model", draw)
        tenths = [{published.members[i].pair for i in fold} for fold in folds]
        assert sum(map(len, tenths)) == len(set().union(*tenths))
        assert sorted(i for fold in folds for i in fold) == list(range(len(published.members)))


def the_readme_states_the_errors(published: PublishedFit) -> None:
    """Each number of its table equals the current one."""
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| .*%", line)]
    printed = [set(re.findall(r"\d+\.\d%", row)) for row in rows]
    expected = [
        ("model", ("all",)), ("model", ("dense A100",)), ("model", ("dense H100, 16 bits", "dense H100, fp8")),
        ("model", ("dense Blackwell",)), ("model", ("TPU",)), ("model", ("MoE",)), ("source", ("all",)), ("lab", ("all",)),
        ("three", ("all",)),
    ]  # fmt: skip
    assert len(rows) == len(expected) + 1
    for numbers, (fold, strata) in zip(printed, expected, strict=False):
        statistics = [fold_statistics(published, fold, STRATA[name]) for name in strata]
        assert numbers == {
            f"{share:.1%}" for stratum in statistics if stratum for share in (stratum.mean, stratum.median, stratum.p90)
        }
    memory = memory_error_tables(predict_rows(published_rows()))["overall"]["all"]
    assert printed[-1] == {f"{share:.1%}" for share in (memory.mean, memory.median, memory.p90)}


def the_documents_print_the_errors(published: PublishedFit) -> None:
    """The output of `shardwise validate --folds`; processors round sums differently, so that the last digit may differ."""
    text = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    session = re.search(r"```\n\$ shardwise validate --folds\n\n(.*?)\n```", text, re.DOTALL)
    assert session
    (printed_text, numbers), (expected_text, expected_numbers) = (
        _split_numbers(text) for text in (session.group(1), render_text(fold_report(published)))
    )
    assert printed_text == expected_text
    assert numbers == pytest.approx(expected_numbers, abs=0.11)


def _split_numbers(text: str) -> tuple[list[str], list[float]]:
    """The text without its numbers, and the numbers."""
    return re.sub(NUMBER, "#", text).split(), [float(number) for number in re.findall(NUMBER, text)]


CHECKS = {
    **{
        f"errors of {stratum} by {fold}": partial(errors_by_fold, fold=fold, stratum=stratum)
        for fold, stratum in REACHED
    },
    **{f"intervals by {fold}": partial(intervals_cover_nine_of_ten, fold=fold) for fold in FOLDS},
    **{
        check.__name__: check
        for check in (
            errors_are_not_implausibly_small,
            errors_of_korthikantis_runs_are_near_calculons,
            uncompiled_runs_lie_inside_their_intervals,
            intervals_of_known_stacks_are_narrow,
            intervals_of_each_class_cover_nine_of_ten,
            layouts_are_ordered_as_measured,
            the_package_has_the_fitted_constants,
            report_and_payload_agree,
            a_model_is_left_out_with_all_its_runs,
            the_readme_states_the_errors,
            the_documents_print_the_errors,
        )
    },
}


@pytest.mark.matrix  # it takes minutes: CI runs it by itself, `make accuracy`
def test_the_fit_to_published_runs(subtests: pytest.Subtests) -> None:
    published = fit_published()
    for name, check in CHECKS.items():
        with subtests.test(name):
            check(published)
