"""How blocks are shared out over pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.layout.stages import layers_per_stage


def test_llama_3_405b_on_16_stages() -> None:
    """S0: 126 blocks with the embedding and the head counted as one each: 7, 14 times 8, 7."""
    assert layers_per_stage(126, 16, 1) == (7, *[8] * 14, 7)


@pytest.mark.parametrize(
    ("num_layers", "pp", "virtual", "expected"),
    [
        (32, 1, 1, (32,)),
        (32, 2, 1, (16, 16)),
        (80, 4, 1, (19, 21, 21, 19)),
        (8, 8, 1, (1,) * 8),
        (6, 4, 1, (1, 2, 2, 1)),
        (14, 2, 4, (7, 7)),
    ],
)
def test_known_stages(num_layers: int, pp: int, virtual: int, expected: tuple[int, ...]) -> None:
    assert layers_per_stage(num_layers, pp, virtual) == expected


@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 8))
def test_every_block_is_held_once(num_layers: int, pp: int, virtual: int) -> None:
    assume(pp * virtual <= num_layers)
    held = layers_per_stage(num_layers, pp, virtual)
    assert len(held) == pp
    assert sum(held) == num_layers
    assert min(held) >= 1


@given(st.integers(2, 200), st.integers(2, 32))
def test_stages_differ_by_at_most_one_with_the_ends_counted(num_layers: int, pp: int) -> None:
    assume(num_layers + 2 >= 2 * pp)
    first, *inner, last = layers_per_stage(num_layers, pp, 1)
    loads = [first + 1, *inner, last + 1]
    assert max(loads) - min(loads) <= 1


@given(st.integers(2, 200), st.integers(3, 32), st.integers(1, 8))
def test_no_interior_stage_holds_more_than_the_second(num_layers: int, pp: int, virtual: int) -> None:
    """The search prices the first, the second and the last stage only."""
    assume(pp * virtual <= num_layers)
    held = layers_per_stage(num_layers, pp, virtual)
    assert max(held[1:-1]) == held[1]
