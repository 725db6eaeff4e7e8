"""The trade-off of steps and tokens: the figures of its sources, and the law that both forms come from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.books.rules import BatchTradeoff, critical_batch_of_loss, tokens_per_param_optimal

SIZES = st.floats(1.0, 1e12)


@given(SIZES, SIZES, SIZES)
def test_steps_and_tokens_lie_on_the_hyperbola_of_the_paper(steps: float, noise: float, batch: float) -> None:
    """(S / S_min - 1) · (E / E_min - 1) = 1: McCandlish et al. 2018, equation 2.11."""
    found = BatchTradeoff(min_steps=steps, noise_tokens=noise)
    more_steps = (found.steps(batch) - steps) / steps
    more_tokens = (found.tokens(batch) - found.min_tokens) / found.min_tokens
    if min(more_steps, more_tokens) > 1e-6:  # what a difference of floats still tells
        assert more_steps * more_tokens == pytest.approx(1.0, rel=1e-6)
    assert found.tokens(batch) == pytest.approx(batch * found.steps(batch))


def test_the_critical_batch_takes_twice_the_least_of_both() -> None:
    found = BatchTradeoff(min_steps=3e4, noise_tokens=2e6)
    at = found.critical_batch_tokens
    assert (found.steps(at), found.tokens(at)) == (6e4, 2 * found.min_tokens)


def test_critical_batches_of_a_loss_are_those_of_the_paper() -> None:
    """Kaplan et al. 2020, section 5.1: it doubles for every 13% that the loss falls, and is 1 to 2 million tokens where the
    largest models converge."""
    assert critical_batch_of_loss(2.0 * 0.87) / critical_batch_of_loss(2.0) == pytest.approx(2.0, rel=0.05)
    assert 1e6 <= critical_batch_of_loss(3.0) <= 2e6


def test_tokens_of_an_optimal_run_are_chinchillas() -> None:
    """Hoffmann et al. 2022: 70B parameters on 1.4 trillion tokens."""
    assert tokens_per_param_optimal() * 70e9 == 1.4e12
