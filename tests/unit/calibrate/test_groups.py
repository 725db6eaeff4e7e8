"""Layouts measured beside each other: what a group is, what is counted, and how well the shipped constants tell them apart."""

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


def test_a_group_by_hand() -> None:
    group = layouts((1.0, 1.05, 1.2, 2.0), (3.0, 2.0, 4.0, 2.5))
    assert (group.pick, group.best) == ("row 1", "row 0")
    assert group.regret == pytest.approx(0.05)
    # 1.0 and 1.05 are alike; of the other five 1.0 and 2.0, 1.2 and 2.0 are the wrong way around
    assert group.pairs == (5, 3)
    found = choice_statistics([group, layouts((1.0, 2.0, 3.0), (1.0, 2.0, 3.0))])
    assert found is not None
    assert (found.num_groups, found.num_pairs, found.picked) == (2, 8, 1)
    assert (found.ordered, found.mean_regret) == pytest.approx((6 / 8, 0.025))
    assert choice_statistics([layouts((1.0, 1.01), (1.0, 2.0))]) is None


def test_the_halves_of_the_study_share_no_group() -> None:
    rows = layout_rows()
    fitted, kept = half_of_study(rows, fitted=True), half_of_study(rows, fitted=False)
    assert len(fitted) + len(kept) == len(rows) == 793
    assert not {row_key(row, LAYOUT_GROUP_COLUMNS) for row in fitted} & {
        row_key(row, LAYOUT_GROUP_COLUMNS) for row in kept
    }
    assert num_groups(fitted) + num_groups(kept) == num_groups(rows)


def test_constants_are_fitted_to_one_half_that_weighs_as_its_groups() -> None:
    seen, kept = study_observations(), {row.step_time_s for row in half_of_study(layout_rows(), fitted=False)}
    own = {row.step_time_s for row in half_of_study(layout_rows(), fitted=True)}
    assert sum(one.weight for one in seen) == pytest.approx(num_groups(half_of_study(layout_rows(), fitted=True)))
    assert {one.measured_s for one in seen} <= own
    assert not {one.measured_s for one in seen} & (kept - own)


def test_the_choice_between_layouts() -> None:
    """Pairs over a tenth apart are ordered rightly in nine of ten cases, in the half that no constant was fitted to too."""
    found = published_groups()
    assert all(len(group.measured_s) >= FEWEST_LAYOUTS for groups in found.values() for group in groups)
    by_name = {name: choice_statistics(groups) for name, groups in found.items()}
    for name, picked in ((FITTED_HALF, 28), (HELD_OUT_HALF, 25)):
        one = by_name[name]
        assert one is not None
        assert one.ordered >= 0.939
        assert one.picked >= picked
        assert one.mean_regret <= 0.03
    runs = by_name[PUBLISHED_RUNS]
    assert runs is not None
    assert (runs.picked >= 16, runs.mean_regret <= 0.02) == (True, True)
    ranked = RankedLayouts(found)
    payload = to_json(RankedLayoutsRecord.of(ranked))
    require_valid(payload)
    assert require_payload_numbers(ranked) == 18
    assert payload["summary"][HELD_OUT_HALF]["num_groups"] == len(found[HELD_OUT_HALF])
    assert {"fold", "key", "fewest_layouts"} <= payload.keys()
    text = render_text(groups_report(ranked))
    document = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    assert f"$ shardwise validate --groups\n\n{text}\n```" in document
