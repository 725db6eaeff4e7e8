"""Constants from measurements: a fit recovers the constants of synthetic times, folds leave out groups, layouts are ranked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardwise.hardware.calibration_constants import CONSTANTS
from shardwise.hardware.published_constants import constant_values, with_calibration
from shardwise.measure.calibrate.constant_fit import FoldMember, fit_constants, fit_loss, initial_fit
from shardwise.measure.calibrate.layout_ranking import rank_layouts, time_per_token
from shardwise.measure.calibrate.observations import Observation, run_observation, step_time_function
from shardwise.measure.calibrate.prediction_errors import predict_rows
from shardwise.measure.calibrate.prediction_spread import LeftOutErrors, Spread, fit_spread
from shardwise.measure.calibrate.published_runs.prediction_from_row import read_case
from shardwise.measure.calibrate.published_runs.run_table import RowCells, published_rows
from shardwise.price import Problem
from shardwise.price.estimate import estimate

ROWS = {row.id: row for row in published_rows()}


def observation(name: str, **constants: float) -> Observation:
    """A run with the step time predicted at other constants."""
    case = read_case(RowCells(dict(ROWS[name].inputs)))
    plain = run_observation(case, 1.0)
    constants_of_run = {**constant_values(plain.chip, plain.stack), **constants}
    return run_observation(case, float(step_time_function(case)(constants_of_run)))


@pytest.mark.parametrize(
    "name", ["dgxc-h100-137", "bigscience-bloom-a100-020", "simumax-b200-001", "maxtext-tpu-v5p-015"]
)
def test_the_response_at_the_shipped_constants_equals_the_estimate(name: str) -> None:
    case = read_case(RowCells(dict(ROWS[name].inputs)))
    cluster = with_calibration(case.cluster, case.software.calibration(case.cluster.chip))
    step_time_s = step_time_function(case)(constant_values(case.cluster.chip.name, case.software.stack))
    assert step_time_s == pytest.approx(
        estimate(Problem(case.architecture, cluster, case.job), case.layout).step_time_s, rel=1e-12
    )


def test_a_fit_recovers_the_constants_of_synthetic_times() -> None:
    """Two constants were moved; runs of one stack with long and short sequences, on one node and many, separate them."""
    names = [row.id for row in ROWS.values() if row.family == "mosaicml-mpt" and "A100" in row.cell("chip")][:60:3]
    observations = [observation(name, elementwise=5.0, attention_fraction=0.4) for name in names]
    begin = initial_fit(observations)
    fitted_ = fit_constants(observations, begin, sigma=0.005)
    errors = [run.seconds(fitted_.constants_at(run, fitted_.point)) / run.measured_s - 1 for run in observations]
    before = [run.seconds(fitted_.constants_at(run, fitted_.prior)) / run.measured_s - 1 for run in observations]
    assert np.max(np.abs(errors)) < 0.01
    assert np.max(np.abs(before)) > 0.05
    stack = f"stack {observations[0].stack.name}"
    assert fitted_.value((stack, "elementwise")) == pytest.approx(5.0, rel=0.1)
    # the stack's attention kernels and the chip's rate are one product on one chip
    fitted_values = {name: fitted_.value((owner, name)) for owner, name in observations[0].names}
    assert fitted_values["attention"] / fitted_values["attention_fraction"] == pytest.approx(
        constant_values("a100-80gb", observations[0].stack)["attention"] / 0.4, rel=0.1
    )


def test_constants_without_observations_stay_at_their_priors() -> None:
    observations = [observation("mosaicml-mpt-017")]
    fitted = fit_constants(observations, initial_fit(observations))
    key = ("chip a100-80gb", "fp8_matmul_fraction")
    assert fitted.value(key) == pytest.approx(CONSTANTS["fp8_matmul_fraction"].prior)
    deviations = dict(zip(fitted.keys, fitted.deviations(np.ones(1)), strict=True))
    assert deviations[key] == pytest.approx(CONSTANTS["fp8_matmul_fraction"].width)
    assert deviations["chip a100-80gb", "matmul_fraction"] < CONSTANTS["matmul_fraction"].width


def test_an_outlier_does_not_pull_the_other_observations() -> None:
    names = [f"dgxc-h100-{number}" for number in (137, 182, 187, 192, 203, 208)]
    observations = [observation(name) for name in names]
    wrong = [
        observations[0],
        *observations[1:],
        run_observation(read_case(RowCells(dict(ROWS[names[0]].inputs))), 5 * observations[0].measured_s),
    ]
    fitted = fit_constants(wrong, initial_fit(wrong))
    errors = [run.seconds(fitted.constants_at(run, fitted.point)) / run.measured_s - 1 for run in observations]
    assert np.median(np.abs(errors)) < 0.12


def test_releases_are_grouped_by_source_and_sources_by_lab() -> None:
    run = observation("dgxc-h100-137")

    def member(family: str) -> FoldMember:
        return FoldMember(observation=run, family=family, model="m")

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


def spread_of(ratios: np.ndarray, names: list[tuple[str, ...]], groups: list[int], num_groups: int = 10**9) -> Spread:
    return fit_spread(
        LeftOutErrors(log_ratios=np.log(ratios), weights=np.ones(len(ratios)), classes=names, groups=groups), num_groups
    )


def test_an_interval_covers_nine_of_ten_ratios_and_contains_one() -> None:
    ratios = np.linspace(1.01, 2.0, 100)
    low, high = spread_of(ratios, [()] * 100, [0] * 100).interval()
    assert low == 1.0
    assert np.mean(ratios <= high) == pytest.approx(0.95, abs=0.01)


def test_few_groups_make_an_interval_wider() -> None:
    ratios = np.exp(np.random.default_rng(0).normal(scale=0.1, size=500))
    (low, high), (lower, higher) = (spread_of(ratios, [()] * 500, [0] * 500, n).interval() for n in (10**9, 6))
    assert (lower, higher) == pytest.approx((low**1.5, high**1.5))


def two_classes(num_groups: int) -> tuple[np.ndarray, Spread]:
    """Errors of 0.05 and 0.2 around 1 in two classes of 2,000 runs, each with `num_groups` groups."""
    random, scales = np.random.default_rng(1), np.repeat([0.05, 0.2], 2000)
    ratios = np.exp(random.normal(size=4000) * scales)
    names: list[tuple[str, ...]] = [("narrow",)] * 2000 + [("wide",)] * 2000
    return ratios, spread_of(ratios, names, [i % num_groups for i in range(4000)])


def test_each_class_has_the_spread_of_its_errors() -> None:
    """1.645 standard deviations cover nine of ten normal errors."""
    _, spread = two_classes(100)
    for name, deviation in (("narrow", 0.05), ("wide", 0.2)):
        low, high = np.log(spread.interval((name,)))
        assert (-low, high) == pytest.approx((1.645 * deviation,) * 2, rel=0.1)
    assert spread.interval(("narrow", "a stack without runs")) == spread.interval(("narrow",))
    assert spread.interval(("a chip without runs",)) == spread.interval()


def test_a_class_of_few_groups_is_drawn_towards_all() -> None:
    """A class of a single group takes the overall spread; one of two groups moves towards it by 0.571 / 1.571 on a logarithmic
    scale."""
    ratios, two = two_classes(2)
    _, single = two_classes(1)
    overall = np.abs(np.log(ratios)).mean()
    assert two.scales[()] == pytest.approx(overall)
    assert set(single.scales.values()) == {two.scales[()]}
    for name, part in (("narrow", ratios[:2000]), ("wide", ratios[2000:])):
        class_scale = np.abs(np.log(part)).mean()
        shrinkage = np.log(two.scales[name,] / class_scale) / np.log(overall / class_scale)
        assert shrinkage == pytest.approx(0.5708 / 1.5708, abs=1e-3)


def test_ranking_counts_differing_pairs_and_the_loss_of_a_wrong_choice() -> None:
    rows = [row for row in ROWS.values() if row.family == "bigscience-bloom-a100" and row.quality == "A"][:40]
    reference = next(row for row in rows if row.cell("n_devices") == "384")
    comparable = [
        row
        for row in rows
        if all(row.cell(c) == reference.cell(c) for c in ("software", "model", "chip", "n_devices", "dtype"))
    ]
    comparable = [row for row in comparable if row.cell("global_batch") == reference.cell("global_batch")][:3]
    assert len({row.dup_group for row in comparable}) == 3
    right = rank_layouts([time_per_token(row, s, s) for row, s in zip(comparable, (1.0, 1.05, 2.0), strict=True)])
    assert right is not None
    assert (right.num_pairs, right.ordered, right.lost) == (2, 1.0, 0.0)
    wrong = rank_layouts(
        [time_per_token(row, m, p) for row, m, p in zip(comparable, (1.0, 1.05, 2.0), (3.0, 2.0, 1.0), strict=True)]
    )
    assert wrong is not None
    assert (wrong.ordered, wrong.lost) == (0.0, 0.5)
    assert rank_layouts([time_per_token(comparable[0], 1.0, 1.0)]) is None


def test_predictions_without_the_constants_are_bounds() -> None:
    rows = [ROWS[name] for name in ("dgxc-h100-137", "mosaicml-mpt-017")]
    for predicted, bound in zip(predict_rows(rows), predict_rows(rows, bound=True), strict=True):
        assert predicted.prediction is not None
        assert bound.prediction is not None
        assert bound.prediction.estimate.step_time_s < predicted.prediction.estimate.step_time_s
        assert bound.prediction.estimate.interval90 is None


def test_a_constant_beyond_its_bounds_ends_at_the_bound_and_the_fit_converges() -> None:
    """Its derivative is zero beyond the bound: an unbounded step would alternate between the bound and the prior forever."""
    names = [row.id for row in ROWS.values() if row.family == "mosaicml-mpt" and "A100" in row.cell("chip")][:60:3]
    faster = [observation(name, elementwise=1.0) for name in names]
    faster = [replace(run, measured_s=0.75 * run.measured_s) for run in faster]
    stack = f"stack {faster[0].stack.name}"
    fitted = [fit_constants(faster, initial_fit(faster), sigma=0.005, iterations=count) for count in (11, 12, 40)]
    assert [fit.value((stack, "elementwise")) for fit in fitted] == pytest.approx(3 * [CONSTANTS["elementwise"].low])
    assert fit_loss(faster, fitted[2], sigma=0.005) <= fit_loss(faster, fitted[0], sigma=0.005)
    for fit in fitted:
        low, high = fit.bounds
        assert np.all((low <= fit.point) & (fit.point <= high))
