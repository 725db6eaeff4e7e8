"""The figures that `verify` reports: which norm an error is relative to, what is compared, and the limits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from shardwise.verify.training.compare_runs import (
    ERROR_LIMITS,
    SMALLEST,
    SMALLEST_NUMBER,
    ZERO,
    CaseResult,
    RelativeErrors,
    relative_errors,
)

NAMES = ("large", "small", "idle")


def case_result(*gradients: Mapping[str, float]) -> CaseResult:
    """A run whose parameters are of four equal elements; `gradients` are the norms by step, 2, 1e-9 and 0 where none is given."""
    norms = [{"large": 2.0, "small": 1e-9, "idle": 0.0, **step_norms} for step_norms in gradients]
    return CaseResult(
        losses=[4.0] * len(norms), norms=[2.0] * len(norms),
        gradients=[{name: np.full(4, norm / 2) for name, norm in step_norms.items()} for step_norms in norms],
        weights={name: np.full(4, 0.5) for name in NAMES},
    )  # fmt: skip


def test_errors_are_relative_and_the_largest_of_all_steps_counts() -> None:
    reference, actual = case_result({}, {}, {}), case_result({}, {"large": 2.0 + 4e-8}, {"large": 2.0 - 2e-8})
    actual.losses, actual.norms = [4.0, 4.0 - 4e-6, 4.0 + 2e-6], [2.0 + 2e-6, 2.0, 2.0]
    actual.weights["large"] = actual.weights["large"] + 1e-3
    judged = relative_errors(actual, reference)
    assert judged.largest == pytest.approx({"loss": 1e-6, "norm": 1e-6, "gradients": 2e-8, "weights": 2e-3}, rel=1e-6)
    assert (judged.gradient, judged.weight, judged.without_gradient) == ("large", "large", ("idle",))


def test_errors_of_small_gradients_are_shares_of_all_gradients_norm() -> None:
    """A thousandth of 1e-9 is small beside `SMALLEST` of 2; weights are measured by themselves."""
    judged = relative_errors(case_result({"small": 1.001e-9}), case_result({}))
    assert judged.largest["gradients"] == pytest.approx(1e-12 / (1e-6 * 2.0), rel=1e-6)
    assert judged.gradient == "small"
    between = relative_errors(case_result({"small": 3e-6 + 3e-9}), case_result({"small": 3e-6}))
    assert between.largest["gradients"] == pytest.approx(1e-3, rel=1e-6)
    assert SMALLEST == 1e-6


def test_values_that_are_zero_in_both_runs_have_no_error() -> None:
    reference = case_result({})
    reference.weights["small"] = np.zeros(4)
    actual = replace(reference, weights={**reference.weights})
    assert relative_errors(actual, reference).largest["weights"] == 0.0
    actual.weights["small"] = np.full(4, 1e-150)
    assert relative_errors(actual, reference).largest["weights"] == pytest.approx(2e-150 / SMALLEST_NUMBER)


@pytest.mark.parametrize(("norm", "idle"), [(1.9 * ZERO, True), (2.1 * ZERO, False)])
def test_a_gradient_that_is_rounding_in_every_step_leaves_its_weight_out(norm: float, idle: bool) -> None:
    reference = case_result({"idle": norm}, {})
    actual = replace(reference, weights={**reference.weights, "idle": np.full(4, 7.0)})
    judged = relative_errors(actual, reference)
    assert (judged.without_gradient, judged.ok) == (("idle",) if idle else (), idle)
    assert ZERO == 1e-14


def test_missing_misshapen_and_nan_values_have_infinite_error() -> None:
    reference = case_result({})
    for values in (np.full(5, 0.5), np.full(4, np.nan)):
        actual = replace(reference, weights={**reference.weights, "small": values})
        judged = relative_errors(actual, reference)
        assert (judged.largest["weights"], judged.weight) == (math.inf, "small")
    lacking = replace(
        reference, gradients=[{name: gradient for name, gradient in reference.gradients[0].items() if name != "large"}]
    )
    assert (relative_errors(lacking, reference).largest["gradients"], relative_errors(lacking, reference).gradient) == (
        math.inf,
        "large",
    )


@pytest.mark.parametrize("name", ERROR_LIMITS)
def test_limits_are_inclusive(name: str) -> None:
    limits = {"loss": 1e-12, "norm": 1e-12, "gradients": 1e-10, "weights": 1e-10}
    assert RelativeErrors(largest=limits, gradient="", weight="", without_gradient=()).ok
    assert not RelativeErrors(
        largest={**limits, name: limits[name] * 1.01}, gradient="", weight="", without_gradient=()
    ).ok
