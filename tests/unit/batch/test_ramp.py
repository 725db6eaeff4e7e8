"""Ramps of the batch: which steps and batches are refused."""

from __future__ import annotations

import pytest

from shardwise.batch_size.batch_schedule import BatchRamp
from shardwise.values.errors import InputError


@pytest.mark.parametrize("values", [(), ((5, 64),), ((0, 64), (10, 96), (10, 128)), ((0, 64), (10, 96), (5, 128))])
def test_steps_start_at_0_and_grow(values: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(InputError, match="steps that start at 0 and grow are required"):
        BatchRamp(values)


@pytest.mark.parametrize("sequences", [0, -1])
def test_a_batch_has_a_sequence(sequences: int) -> None:
    with pytest.raises(InputError, match="at least one sequence in each batch is required"):
        BatchRamp(((0, 64), (10, sequences)))
