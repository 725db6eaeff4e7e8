"""Bounds on the batch."""

from __future__ import annotations

import pytest

from shardwise.book_formulas.rules import is_compute_bound


@pytest.mark.parametrize(("tokens", "reaches"), [(849.0, False), (850.0, True), (851.0, True)])
def test_a_batch_at_its_bound_reaches_it(tokens: float, reaches: bool) -> None:
    assert is_compute_bound(tokens, 850.0) is reaches
