"""Every layout trains as one process does: loss, norm, every gradient and every weight, in float64; and issues the list."""

from __future__ import annotations

import pytest
import torch
from equality_cases import CASES
from equality_further import FURTHER
from training import Found, plain, put_together, trained

from shardwise.run.rank_threads import run_rank_threads
from shardwise.verify.training.compare_runs import collective_differences


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.matrix) for name in FURTHER)])
def test_equals_one_process(name: str) -> None:
    case = {**CASES, **FURTHER}[name]
    wanted = plain(case)
    size = case.layout.num_devices
    ranks = put_together(run_rank_threads(trained, size, case))
    for found in ranks:
        compare(found, wanted)
    assert {name for found in ranks for name in found.biases} == set(wanted.biases)
    assert collective_differences(case.small(), [found.issued for found in ranks]) == ()


def compare(found: Found, wanted: Found) -> None:
    """The design's limits: loss and norm to 1e-12, each gradient to 1e-10."""
    assert found.losses == pytest.approx(wanted.losses, rel=1e-12)
    assert found.auxiliary == pytest.approx(wanted.auxiliary, rel=1e-12)
    for own_losses, other_losses in zip(found.further, wanted.further, strict=True):
        assert own_losses == pytest.approx(other_losses, rel=1e-12)
    assert found.norms == pytest.approx(wanted.norms, rel=1e-12)
    for step, (own, others) in enumerate(zip(found.gradients, wanted.gradients, strict=True)):
        assert set(own) == set(others)
        for name, gradient in others.items():
            assert error(own[name], gradient) <= 1e-10, f"gradient of {name} in step {step}"
    assert set(found.weights) == set(wanted.weights)
    for name, weight in wanted.weights.items():
        assert error(found.weights[name], weight) <= 1e-10, f"weight {name}"
    for name, bias in found.biases.items():  # those of the rank's stages
        torch.testing.assert_close(bias, wanted.biases[name], rtol=0, atol=0)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖."""
    return float((found - wanted).norm() / wanted.norm().clamp(min=1e-300))
