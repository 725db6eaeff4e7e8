"""Serving rows and constants: the repeated fit and its folds equal those of the package and the documents."""

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.measure.serving.fitted_constants import constants_text, fit_everything
from shardwise.measure.serving.row_stack import stack_rows
from shardwise.measure.serving.serving_fit import RowTable, fitted_rows
from shardwise.measure.serving.serving_rows import published_serving_rows, read_serving_rows
from shardwise.measure.serving.serving_validation import validate_serving_rows
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.serving_accuracy import serving_accuracy_report
from shardwise.serve import estimate_serving
from shardwise.serve.serving_constants import constants_file
from shardwise.values import InputError, to_json

ROOT = Path(__file__).parents[3]
# Median, mean and 90th percentile of TPOT errors and median of TTFT errors: a tenth of a point above what is shipped.
REACHED = {
    "family": (0.097, 0.138, 0.277, 0.222),
    "chip": (0.090, 0.132, 0.263, 0.221),
    "engine": (0.088, 0.125, 0.255, 0.209),
    "source": (0.075, 0.119, 0.235, 0.208),
}
REACHED_OF_BATCHES = {
    "none": (0.074, 0.083, 0.144, 0.131),
    "family": (0.180, 0.189, 0.309, 0.124),
    "chip": (0.086, 0.094, 0.185, 0.135),
    "engine": (0.120, 0.125, 0.243, 0.105),
    "source": (0.119, 0.125, 0.242, 0.103),
}


def test_stacked_rows_equal_estimates_of_single_layouts():
    rows = fitted_rows()[::97]
    for stack in stack_rows(rows):
        state = stack.solve(stack.engine.constants)
        for position, tpot_s in zip(stack.index, state.tpot_s, strict=True):
            row = rows[position]
            fraction = stack.engine.constants.memory_fraction
            limits = dataclasses.replace(row.problem.batch_limits, memory_fraction=fraction)
            problem = dataclasses.replace(row.problem, batch_limits=limits)
            estimate = estimate_serving(problem, row.layout)
            factor = stack.engine.release_factor(row.chip, row.expert_or_weight_format).pass_factor
            # The factor of a release scales passes and inputs alike.
            assert estimate.tpot_s.value == pytest.approx(factor * tpot_s, rel=0.02)


def test_rows_have_a_source():
    rows = published_serving_rows()
    assert all(row.source and row.tpot_s > 0 and row.ttft_s > 0 for row in rows)
    assert all(row.release or row.measured for row in rows)


def test_an_unreadable_row_names_its_line(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("model,chip\nllama-3.1-8b,h100\n")
    with pytest.raises(InputError, match=r"rows.csv, line 2: .* the columns of serving_rows.csv are required"):
        read_serving_rows(str(path))


@pytest.mark.matrix
def test_constants_and_folds_equal_a_repeated_fit():
    table = RowTable.of(fitted_rows())
    fitted, predictions = fit_everything(table)
    text = tomllib.loads(constants_text(table, fitted, predictions))
    for name, constant in constants_file()["constants"].items():
        assert text["constants"][name]["value"] == pytest.approx(constant["value"], rel=0.02), name
    for engine, constants in constants_file()["engine_constants"].items():
        for name, constant in constants.items():
            assert text["engine_constants"][engine][name]["value"] == pytest.approx(constant["value"], rel=0.02), name
    validation = validate_serving_rows()
    for folds, reached in ((validation.folds, REACHED), (validation.batches, REACHED_OF_BATCHES)):
        for fold in folds:
            errors = fold.tpot.median, fold.tpot.mean, fold.tpot.percentile_90, fold.ttft.median
            assert np.all(np.array(errors) <= reached[fold.fold]), fold.fold
    # Widths are from other families' errors, so that a family unlike them is covered less often.
    kinds = [part for part in validation.coverage if part.key == "kind"]
    assert all(0.86 <= share <= 0.94 for part in kinds for share in (part.tpot, part.ttft))
    assert sum(choice.num_broken for choice in validation.choices) <= 0.1 * sum(
        c.num_groups for c in validation.choices
    )
    payload = to_json(validation)
    require_valid(payload)
    report = serving_accuracy_report(validation)
    require_payload_numbers(validation)
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for line in render_text(report).splitlines():
        if "left out " in line and "%" in line:
            name, numbers = line.split("  ", 1)
            assert f"| {name} | {' | '.join(numbers.split())} |" in page
