"""No rank that a test has started outlives it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from train.launching import Launched


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    while Launched.started:
        Launched.started.pop().kill()
