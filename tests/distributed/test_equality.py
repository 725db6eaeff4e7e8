"""Every layout trains like one process: loss, norm, every gradient and weight in float64; and issues the planned list."""

from __future__ import annotations

import pytest
import torch
from equality_cases import CASES
from equality_further import FURTHER
from training import RunResult, plain, put_together, trained

from shardwise.run.rank_threads import run_rank_threads
from shardwise.verify.training.compare_runs import collective_differences


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER)])
def test_ranks_equal_one_process(name: str) -> None:
    case = {**CASES, **FURTHER}[name]
    reference = plain(case)
    size = case.layout.num_devices
    ranks = put_together(run_rank_threads(trained, size, case))
    for result in ranks:
        compare(result, reference)
    assert {name for result in ranks for name in result.biases} == set(reference.biases)
    assert collective_differences(case.small(), [result.issued for result in ranks]) == ()


def compare(actual: RunResult, expected: RunResult) -> None:
    """The design's limits: loss and norm to 1e-12, each gradient to 1e-10."""
    assert actual.losses == pytest.approx(expected.losses, rel=1e-12)
    assert actual.auxiliary == pytest.approx(expected.auxiliary, rel=1e-12)
    for actual_losses, expected_losses in zip(actual.further, expected.further, strict=True):
        assert actual_losses == pytest.approx(expected_losses, rel=1e-12)
    assert actual.norms == pytest.approx(expected.norms, rel=1e-12)
    for step, (actual_gradients, expected_gradients) in enumerate(
        zip(actual.gradients, expected.gradients, strict=True)
    ):
        assert set(actual_gradients) == set(expected_gradients)
        for name, gradient in expected_gradients.items():
            assert error(actual_gradients[name], gradient) <= 1e-10, f"gradient of {name} in step {step}"
    assert set(actual.weights) == set(expected.weights)
    for name, weight in expected.weights.items():
        assert error(actual.weights[name], weight) <= 1e-10, f"weight {name}"
    for name, bias in actual.biases.items():  # those of the rank's stages
        torch.testing.assert_close(bias, expected.biases[name], rtol=0, atol=0)


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """‖actual - expected‖ / ‖expected‖."""
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))
