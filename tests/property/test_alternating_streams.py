"""Kernels of streams that layers predict (Gemma 3n): the gates that are kept, and rows without a magnitude."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.run.numpy.kernels import get_map


def test_a_twentieth_of_many_gates_is_kept() -> None:
    """Of gates from a normal distribution, with any mean and variance."""
    gates = 3.0 + 2.0 * np.random.default_rng(0).normal(size=100_000)
    kept = get_map("gaussian_top_k")(gates, gates.sum(), np.sum(gates**2), width=gates.size)
    assert np.mean(kept > 0) == pytest.approx(0.05, abs=2e-3)


@pytest.mark.parametrize("name", ["match_magnitude", "match_magnitude_dsquares", "match_magnitude_dgoal"])
def test_a_row_of_zeros_has_no_magnitude_and_no_gradient(name: str) -> None:
    zeros = [np.zeros((1, 1, 2, 3))] * (2 if "_d" in name else 1)
    assert not get_map(name)(*zeros, np.zeros((1, 1, 2, 1)), np.zeros((1, 1, 1, 1)), width=3).any()
