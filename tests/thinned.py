"""Of many cases that are alike the suite runs a part; `make matrix` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], step: int) -> list[Any]:
    """Each `step`-th case as it is; the others are marked to be run by `make matrix`."""
    return [
        case if number % step == 0 else pytest.param(*_values(case), marks=pytest.mark.matrix)
        for number, case in enumerate(cases)
    ]


def _values(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
