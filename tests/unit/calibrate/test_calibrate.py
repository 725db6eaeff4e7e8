"""Constants from measurements: a fit finds what made them, and predicts the published runs where it was not fitted.

Thresholds only ever get tighter.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from shardwise.calibrate.accuracy import Judged, judge, memory_summary
from shardwise.calibrate.fit import fit, start
from shardwise.calibrate.folds import FOLDS, Member, fold_groups
from shardwise.calibrate.published import (
    STRATA,
    Published,
    between,
    fit_published,
    fold_payload,
    fold_ranking,
    fold_report,
    fold_statistics,
)
from shardwise.calibrate.published_runs.case import case_of
from shardwise.calibrate.published_runs.facts import Facts
from shardwise.calibrate.published_runs.rows import published_rows
from shardwise.calibrate.ranking import ranking, timed
from shardwise.calibrate.record import constants_toml
from shardwise.calibrate.response import Observation, run_observation, step_seconds
from shardwise.cluster.calibration import CONSTANTS
from shardwise.cluster.stacks import calibrated, constants_of, fitted
from shardwise.cost.estimate import estimate

ROWS = {row.id: row for row in published_rows()}


@pytest.fixture(scope="module")
def published() -> Published:
    return fit_published()


def observation(name: str, **constants: float) -> Observation:
    """A run that took as long as it would at other constants."""
    case = case_of(Facts(dict(ROWS[name].inputs)))
    plain = run_observation(case, 1.0)
    at = {**constants_of(plain.chip, plain.stack), **constants}
    return run_observation(case, float(step_seconds(case)(at)))


@pytest.mark.parametrize(
    "name", ["dgxc-h100-137", "bigscience-bloom-a100-020", "simumax-b200-001", "maxtext-tpu-v5p-015"]
)
def test_a_response_at_the_shipped_constants_is_the_estimate(name: str) -> None:
    case = case_of(Facts(dict(ROWS[name].inputs)))
    cluster = calibrated(case.cluster, case.software.calibration(case.cluster.chip))
    found = step_seconds(case)(constants_of(case.cluster.chip.name, case.software.stack))
    assert found == pytest.approx(estimate(case.architecture, cluster, case.job, case.layout).step_time_s, rel=1e-12)


def test_a_fit_finds_the_constants_that_made_the_times() -> None:
    """Two constants were moved; runs of one stack with long and short sequences, on one node and many, tell them apart."""
    names = [row.id for row in ROWS.values() if row.family == "mosaicml-mpt" and "A100" in row.cell("chip")][:60:3]
    made = [observation(name, elementwise=5.0, attention_fraction=0.4) for name in names]
    begin = start(made)
    fitted_ = fit(made, begin, sigma=0.005)
    errors = [one.seconds(fitted_.constants_at(one, fitted_.found)) / one.measured_s - 1 for one in made]
    before = [one.seconds(fitted_.constants_at(one, fitted_.expected)) / one.measured_s - 1 for one in made]
    assert np.max(np.abs(errors)) < 0.01
    assert np.max(np.abs(before)) > 0.05
    stack = f"stack {made[0].stack.name}"
    assert fitted_.value((stack, "elementwise")) == pytest.approx(5.0, rel=0.1)
    # the stack's attention kernels and the chip's rate are one product on one chip
    at = {name: fitted_.value((owner, name)) for owner, name in made[0].names}
    assert at["attention"] / at["attention_fraction"] == pytest.approx(
        constants_of("a100-80gb", made[0].stack)["attention"] / 0.4, rel=0.1
    )


def test_what_no_observation_says_stays_where_it_was_expected() -> None:
    made = [observation("mosaicml-mpt-017")]
    found = fit(made, start(made))
    key = ("chip a100-80gb", "fp8_matmul_fraction")
    assert found.value(key) == pytest.approx(CONSTANTS["fp8_matmul_fraction"].prior)
    deviations = dict(zip(found.keys, found.deviations(np.ones(1)), strict=True))
    assert deviations[key] == pytest.approx(CONSTANTS["fp8_matmul_fraction"].width)
    assert deviations["chip a100-80gb", "matmul_fraction"] < CONSTANTS["matmul_fraction"].width


def test_one_observation_that_is_far_off_does_not_pull_the_others() -> None:
    names = [f"dgxc-h100-{number}" for number in (137, 182, 187, 192, 203, 208)]
    made = [observation(name) for name in names]
    wrong = [made[0], *made[1:], run_observation(case_of(Facts(dict(ROWS[names[0]].inputs))), 5 * made[0].measured_s)]
    found = fit(wrong, start(wrong))
    errors = [one.seconds(found.constants_at(one, found.found)) / one.measured_s - 1 for one in made]
    assert np.median(np.abs(errors)) < 0.12


# Of each kind of fold and stratum: mean, median and 90th percentile of the step-time error.
REACHED = {
    ("fitted", "all"): (0.057, 0.039, 0.113),
    ("model", "all"): (0.076, 0.049, 0.184),
    ("model", "dense A100"): (0.054, 0.043, 0.109),
    ("model", "dense H100, 16 bits"): (0.042, 0.028, 0.079),
    ("model", "dense H100, fp8"): (0.079, 0.058, 0.170),
    ("model", "dense Blackwell"): (0.080, 0.054, 0.159),
    ("model", "TPU"): (0.063, 0.054, 0.135),
    ("model", "MoE"): (0.214, 0.204, 0.426),
    ("source", "all"): (0.120, 0.099, 0.242),
    ("lab", "all"): (0.133, 0.115, 0.265),
    ("three", "all"): (0.103, 0.073, 0.220),
}  # fmt: skip


@pytest.mark.parametrize(("fold", "stratum"), REACHED)
def test_errors_by_fold(published: Published, fold: str, stratum: str) -> None:
    seconds = published.in_sample if fold == "fitted" else published.folds[fold]
    found = fold_statistics(published, seconds, STRATA[stratum])
    assert found is not None
    for value, most in zip((found.mean, found.median, found.p90), REACHED[fold, stratum], strict=True):
        assert value <= most


def test_a_fit_that_is_too_good_is_an_alarm(published: Published) -> None:
    """Two runs of one configuration differ by 2 to 4%: a smaller error would be one of memory, not of physics."""
    found = fold_statistics(published, published.in_sample, STRATA["all"])
    assert found is not None
    assert found.mean > 0.035


def test_korthikantis_eight_runs_are_nearer_than_calculon_was(published: Published) -> None:
    """Calculon (Isaev et al. 2023) was fitted to them: 3.65% on average, 8.87% at most."""
    errors = [
        abs(published.in_sample[0][i] / published.measured[i] - 1)
        for i, one in enumerate(published.judged)
        if one.row.family == "korthikanti-2022"
    ]
    assert len(errors) == 8
    assert np.mean(errors) < 0.020
    assert np.max(errors) < 0.030


@pytest.mark.parametrize("fold", FOLDS)
def test_intervals_cover_nine_of_ten(published: Published, fold: str) -> None:
    assert 0.87 <= published.coverage(fold) <= 0.93


def test_intervals_of_known_stacks_are_narrow(published: Published) -> None:
    """The median run is dense."""
    low, high = published.spread("model")["dense"]
    assert (high - low) / 2 < 0.15


def test_layouts_are_ordered_as_measured(published: Published) -> None:
    known, crossed = (fold_ranking(published, s) for s in (published.in_sample, published.folds["model"]))
    assert known is not None
    assert crossed is not None
    assert known.num_pairs == 535
    assert known.ordered > 0.875
    assert crossed.ordered > 0.85
    assert max(known.lost, crossed.lost) < 0.011


def test_the_package_comes_with_what_is_fitted(published: Published) -> None:
    """benchmarks/published.py --write has been run since the physics changed."""
    import tomllib

    now = tomllib.loads(constants_toml(published))
    shipped = fitted()
    assert now["source"] == shipped["source"]
    for group in ("chips", "stacks"):
        assert now[group].keys() == shipped[group].keys()
        for name, values in now[group].items():
            assert {k: v for k, v in values.items() if k in CONSTANTS} == pytest.approx(
                {k: v for k, v in shipped[group][name].items() if k in CONSTANTS}, rel=0.02
            )


def test_report_and_payload_say_the_same(published: Published) -> None:
    text, payload = fold_report(published), fold_payload(published)
    mean = payload["summary"]["model"]["all"]["mean"]
    assert f"{mean:>8.1%}" in text
    assert set(payload["summary"]) == {"fitted", *FOLDS}
    assert len(payload["rows"]) == len(published.members)
    given = [row for row in payload["rows"] if row["three_step_time_s"] is None]
    assert 0 < len(given) < len(payload["rows"])
    assert "ordered rightly" in text
    assert "coverage" in text


def test_sources_hold_their_releases_together_and_labs_their_sources() -> None:
    one = observation("dgxc-h100-137")

    def member(family: str) -> Member:
        return Member(observation=one, family=family, model="m")

    assert member("nvidia-mbridge-26.02").source == member("mbridge-skills").source
    assert member("dgxc-h100").source == member("dgxc-gb200").source != member("nemo-perf-2024").source
    nvidia = (
        "dgxc-h100",
        "nemo-perf-2024",
        "nvidia-mbridge-25.09",
        "korthikanti-2022",
        "jax-toolbox-pax",
        "megatron-lm-llama-readme",
    )
    assert {member(family).lab for family in nvidia} == {"NVIDIA"}
    assert {member(family).lab for family in ("maxtext-tpu-v5e", "tpu-v6e-recipes")} == {"Google"}
    assert member("torchtitan").lab == "torchtitan"


def test_a_model_is_left_out_with_all_its_runs_by_a_stack(published: Published) -> None:
    for draw in range(2):
        folds = fold_groups(published.members, "model", draw)
        tenths = [{published.members[i].pair for i in fold} for fold in folds]
        assert sum(map(len, tenths)) == len(set().union(*tenths))
        assert sorted(i for fold in folds for i in fold) == list(range(len(published.members)))


def test_between_holds_nine_of_ten_and_one() -> None:
    ratios = np.linspace(1.01, 2.0, 100)
    low, high = between(ratios, np.ones(100))
    assert low == 1.0
    assert np.mean(ratios <= high) == pytest.approx(0.95, abs=0.01)


def test_ranking_counts_pairs_that_differ_and_what_a_wrong_best_loses() -> None:
    rows = [row for row in ROWS.values() if row.family == "bigscience-bloom-a100" and row.quality == "A"][:40]
    one = next(row for row in rows if row.cell("n_devices") == "384")
    alike = [
        row
        for row in rows
        if all(row.cell(c) == one.cell(c) for c in ("software", "model", "chip", "n_devices", "dtype"))
    ]
    alike = [row for row in alike if row.cell("global_batch") == one.cell("global_batch")][:3]
    assert len({row.dup_group for row in alike}) == 3
    right = ranking([timed(row, s, s) for row, s in zip(alike, (1.0, 1.05, 2.0), strict=True)])
    assert right is not None
    assert (right.num_pairs, right.ordered, right.lost) == (2, 1.0, 0.0)
    wrong = ranking([timed(row, m, p) for row, m, p in zip(alike, (1.0, 1.05, 2.0), (3.0, 2.0, 1.0), strict=True)])
    assert wrong is not None
    assert (wrong.ordered, wrong.lost) == (0.0, 0.5)
    assert ranking([timed(alike[0], 1.0, 1.0)]) is None


def test_predictions_without_the_constants_are_bounds() -> None:
    rows = [ROWS[name] for name in ("dgxc-h100-137", "mosaicml-mpt-017")]
    for one, bound in zip(judge(rows), judge(rows, bound=True), strict=True):
        assert one.prediction is not None
        assert bound.prediction is not None
        assert bound.prediction.estimate.step_time_s < one.prediction.estimate.step_time_s
        assert bound.prediction.estimate.interval90 is None


def test_the_readme_says_what_is_reached(published: Published) -> None:
    """Each number of its table is one of today's."""
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if re.match(r"\| .*%", line)]
    said = [set(re.findall(r"\d+\.\d%", row)) for row in rows]
    folds = published.folds
    expected = [
        ("model", ("all",)), ("model", ("dense A100",)), ("model", ("dense H100, 16 bits", "dense H100, fp8")),
        ("model", ("dense Blackwell",)), ("model", ("TPU",)), ("model", ("MoE",)), ("source", ("all",)), ("lab", ("all",)),
        ("three", ("all",)),
    ]  # fmt: skip
    assert len(rows) == len(expected) + 1
    for numbers, (fold, strata) in zip(said, expected, strict=False):
        found = [fold_statistics(published, folds[fold], STRATA[name]) for name in strata]
        assert numbers == {f"{share:.1%}" for one in found if one for share in (one.mean, one.median, one.p90)}
    memory = memory_summary(published_judged())["overall"]["all"]
    assert said[-1] == {f"{share:.1%}" for share in (memory.mean, memory.median, memory.p90)}


def test_the_documents_print_what_is_reached(published: Published) -> None:
    """As `shardwise validate --folds` prints it."""
    text = (Path(__file__).parents[3] / "docs" / "accuracy.md").read_text(encoding="utf-8")
    session = re.search(r"```\n\$ shardwise validate --folds\n\n(.*?)\n```", text, re.DOTALL)
    assert session
    assert session.group(1) == fold_report(published)


def published_judged() -> tuple[Judged, ...]:
    return judge(published_rows())
