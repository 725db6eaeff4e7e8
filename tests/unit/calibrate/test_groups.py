"""Layouts measured under equal conditions: their groups, the statistics, and the ranking by the shipped constants."""

from __future__ import annotations

from pathlib import Path

import pytest
from json_schemas import require_valid
from number_paths import require_payload_numbers

from shardwise.measure.calibrate.layout_ranking import (
    FEWEST_LAYOUTS,
    FITTED_HALF,
    HELD_OUT_HALF,
    KEY_COLUMNS,
    LAYOUT_GROUP_COLUMNS,
    PUBLISHED_RUNS,
    LayoutGroup,
    choice_statistics,
    half_of_study,
    num_groups,
    published_groups,
    row_key,
)
from shardwise.measure.calibrate.payloads import RankedLayoutsRecord
from shardwise.measure.calibrate.published_fit import study_observations
from shardwise.measure.calibrate.published_runs.run_table import layout_rows
from shardwise.measure.calibrate.validation import RankedLayouts
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.calibration import groups_report
from shardwise.values import to_json


def layouts(measured: tuple[float, ...], predicted: tuple[float, ...]) -> LayoutGroup:
    names = [f"row {number}" for number in range(len(measured))]
    return LayoutGroup(
        key=("a",) * len(KEY_COLUMNS), measured_s=dict(zip(names, measured, strict=True)),
        predicted_s=dict(zip(names, predicted, strict=True)),
    )  # fmt: skip


def test_statistics_of_a_group_by_hand() -> None:
    group = layouts((1.0, 1.05, 1.2, 2.0), (3.0, 2.0, 4.0, 2.5))
    assert (group.pick, group.best) == ("row 1", "row 0")
    assert group.regret == pytest.approx(0.05)
    # 1.0 and 1.05 count as equal; of the other five pairs, (1.0, 2.0) and (1.2, 2.0) are ordered wrongly
    assert group.pairs == (5, 3)
    statistics = choice_statistics([group, layouts((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))])
    assert statistics is not None
    assert (statistics.num_groups, statistics.num_pairs, statistics.picked) == (2, 8, 1)
    assert (statistics.ordered, statistics.mean_regret) == pytest.approx((6 / 8, 0.025))
    assert choice_statistics([layouts((1.0, 1.01), (1.0, 2.0))]) is None


def test_the_halves_of_the_study_share_no_group() -> None:
    rows = layout_rows()
    fitted, held_out = half_of_study(rows, fitted=True), half_of_study(rows, fitted=False)
    assert len(fitted) + len(held_out) == len(rows) == 793
    assert not {row_key(row, LAYOUT_GROUP_COLUMNS) for row in fitted} & {
        row_key(row, LAYOUT_GROUP_COLUMNS) for row in held_out
    }
    assert num_groups(fitted) + num_groups(held_out) == num_groups(rows)


def test_constants_are_fitted_to_a_half_weighted_by_its_groups() -> None:
    observations, held_out_s = (
        study_observations(),
        {row.step_time_s for row in half_of_study(layout_rows(), fitted=False)},
    )
    fitted_s = {row.step_time_s for row in half_of_study(layout_rows(), fitted=True)}
    assert sum(observation.weight for observation in observations) == pytest.approx(
        num_groups(half_of_study(layout_rows(), fitted=True))
    )
    assert {observation.measured_s for observation in observations} <= fitted_s
    assert not {observation.measured_s for observation in observations} & (held_out_s - fitted_s)


def test_shipped_constants_rank_layouts() -> None:
    """Nine of ten pairs that differ by over a tenth are ordered correctly, also in the half outside of the fit."""
    groups_by_name = published_groups()
    assert all(len(group.measured_s) >= FEWEST_LAYOUTS for groups in groups_by_name.values() for group in groups)
    by_name = {name: choice_statistics(groups) for name, groups in groups_by_name.items()}
    for name, picked in ((FITTED_HALF, 28), (HELD_OUT_HALF, 25)):
        statistics = by_name[name]
        assert statistics is not None
        assert statistics.ordered >= 0.939
        assert statistics.picked >= picked
        assert statistics.mean_regret <= 0.03
    runs = by_name[PUBLISHED_RUNS]
    assert runs is not None
    assert (runs.picked >= 16, runs.mean_regret <= 0.02) == (True, True)
    ranked = RankedLayouts(groups_by_name)
    payload = to_json(RankedLayoutsRecord.of(ranked))
    require_valid(payload)
    assert require_payload_numbers(ranked) == 18
    assert payload["summary"][HELD_OUT_HALF]["num_groups"] == len(groups_by_name[HELD_OUT_HALF])
    assert {"fold", "key", "fewest_layouts"} <= payload.keys()
    text = render_text(groups_report(ranked))
    document = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert f"$ shardwise validate --groups\n\n{text}\n```" in document
