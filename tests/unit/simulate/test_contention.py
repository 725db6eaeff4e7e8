"""Published contention of kernels and traffic: chips with a figure, and errors where there is none."""

from __future__ import annotations

import pytest

from shardwise.hardware.chips import chip_names
from shardwise.price.simulation.contention import CONTENTION_BY_CHIP, parse_contention
from shardwise.values.errors import InputError


def test_figures_belong_to_chips_of_the_catalogue_with_source_and_date() -> None:
    assert set(CONTENTION_BY_CHIP) <= set(chip_names())
    for published in CONTENTION_BY_CHIP.values():
        assert 1.0 < published.factor < (published.highest or 2.0)
        assert "arXiv" in published.source
        assert any(year in published.source for year in ("2024-", "2025-"))


def test_figures_equal_the_published_ones() -> None:
    """Lee et al. state 18.9% on average and 40.0% at most; of an H800's 132 multiprocessors DeepSeek-V3 leaves 112."""
    assert parse_contention("published", "h100") == parse_contention("published", "a100-80gb") == 1.189
    assert parse_contention("published", "h800") == pytest.approx(1.1786, abs=1e-4)
    assert parse_contention("1.3", "tpu-v5p") == parse_contention(1.3, "h100") == 1.3


@pytest.mark.parametrize("chip", ["tpu-v5p", "b200", "h200", ""])
def test_an_unknown_contention_is_an_error(chip: str) -> None:
    with pytest.raises(InputError, match=f"is published for {chip or 'a chip outside'}.*a number of at least 1"):
        parse_contention("published", chip)
