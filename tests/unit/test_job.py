"""Jobs and precision recipes refuse impossible values, with the fix."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.model.job import Job
from shardwise.model.optimizer_program import bytes_per_parameter
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS, get_precision


def test_a_batch_has_whole_sequences() -> None:
    assert Job(global_batch_tokens=4096 * 3, seq_len=4096).num_seqs == 3
    with pytest.raises(InputError) as caught:
        Job(global_batch_tokens=10_000, seq_len=4096)
    assert str(caught.value) == (
        "job: a batch of 10000 tokens is not a whole number of sequences of 4096; the nearest batches are 8192 and 12288 tokens"
    )


@pytest.mark.parametrize(
    ("batch", "seq_len", "meant"),
    [
        (4_000_000, 8192, "a batch of 4Mi"),
        (1_500_000, 4096, "a batch of 1.5Mi"),
        (4 * 2**20, 8000, "sequences of 8Ki"),
        (1_000_000, 16_000, "a batch of 1Mi and sequences of 16Ki"),
    ],
)
def test_indivisible_decimal_sizes_suggest_binary_ones(batch: int, seq_len: int, meant: str) -> None:
    with pytest.raises(InputError) as caught:
        Job(global_batch_tokens=batch, seq_len=seq_len)
    assert f" (did you mean {meant}?); the nearest batches" in str(caught.value)


@pytest.mark.parametrize(("batch", "seq_len"), [(1_000_000, 3000), (4096 * 3 + 1, 4096), (10_000, 4096)])
def test_indivisible_binary_sizes_are_not_suggested(batch: int, seq_len: int) -> None:
    with pytest.raises(InputError) as caught:
        Job(global_batch_tokens=batch, seq_len=seq_len)
    assert "did you mean" not in str(caught.value)


def test_a_batch_shorter_than_a_sequence_suggests_valid_batches() -> None:
    with pytest.raises(InputError, match="the smallest is 4096 tokens"):
        Job(global_batch_tokens=100, seq_len=4096)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"global_batch_tokens": 0}, "job: global_batch_tokens is 0; a whole number of at least 1 is required"),
        ({"seq_len": 1.5}, "job: seq_len is 1.5; a whole number of at least 1 is required"),
        ({"tokens": 0}, "job: tokens is 0; a positive number is required"),
        ({"tokens": float("nan")}, "job: tokens is nan; a positive number is required"),
        ({"precision": "fp7"}, "job: precision is 'fp7'; one of PRECISIONS is required"),
        (
            {"loss": "lost"},
            "job: loss is 'lost'; one of unfused, unfused_parallel, fused, streamed, in_place, chunked is required",
        ),
        ({"overlap": "none"}, "job: overlap is 'none'; one of per_axis, sum, max is required"),
    ],
)
def test_impossible_jobs_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        Job(**({"global_batch_tokens": 4096, "seq_len": 4096} | wrong))
    assert str(caught.value) == message.replace("PRECISIONS", ", ".join(PRECISIONS))


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        Job(global_batch_tokens=-1, seq_len=True, precision="x", overlap="y")  # type: ignore[arg-type]
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize(
    ("name", "state_bytes"), [("bf16", 16), ("bf16_fp32_gradients", 20), ("bf16_no_master", 12), ("fp32", 16)]
)
def test_bytes_of_state_per_parameter(name: str, state_bytes: float) -> None:
    assert bytes_per_parameter(get_precision(name)) == state_bytes
    assert len(get_precision(name).source) > 10


def test_an_unknown_precision_lists_the_names() -> None:
    with pytest.raises(InputError) as caught:
        get_precision("fp7")
    assert str(caught.value) == f"precision: found 'fp7'; one of {', '.join(PRECISIONS)} is required"
