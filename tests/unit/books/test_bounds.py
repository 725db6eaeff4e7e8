"""Bounds on the batch."""

from __future__ import annotations

import pytest

from shardwise.book_formulas.rules import is_compute_bound


@pytest.mark.parametrize(("tokens", "reaches"), [(849.0, False), (850.0, True), (851.0, True)])
def test_the_batch_at_the_bound_reaches_the_bound(tokens: float, reaches: bool) -> None:
    assert is_compute_bound(tokens, 850.0) is reaches
