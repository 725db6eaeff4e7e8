"""The bounds of a program's time: full overlap of compute and communication, and none."""

from __future__ import annotations

import pytest

from shardwise.price.product import ProgramCost


@pytest.mark.parametrize(
    ("math_s", "comms_s", "lower_s", "upper_s"),
    [
        (2.0, 3.0, 3.0, 5.0),
        (4.0, 1.0, 4.0, 5.0),
        (None, 3.0, None, None),
        (2.0, None, None, None),
        (None, None, None, None),
    ],
)
def test_a_programs_time_lies_between_full_overlap_and_none(
    math_s: float | None, comms_s: float | None, lower_s: float | None, upper_s: float | None
) -> None:
    """Without a chip, or without its links, neither is known."""
    cost = ProgramCost(
        program=(), bytes_per_device=0.0, flops_per_device=0.0, math_s=math_s, comms_s=comms_s, result="C[I]"
    )  # fmt: skip
    assert (cost.lower_s, cost.upper_s) == (lower_s, upper_s)
