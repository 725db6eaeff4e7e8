"""The harness of the distributed tests: results by rank, and one failure ends all ranks."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from harness import run_processes


def sum_ranks(start: float) -> float:
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    return value.item()


def preloaded() -> bool:
    return "preload" in sys.modules


def failing_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank fails")
    dist.barrier()


def test_results_by_rank() -> None:
    assert run_processes(sum_ranks, 3, 1.0) == [6.0, 6.0, 6.0]


def test_ranks_find_what_the_server_has_loaded() -> None:
    assert run_processes(preloaded, 1) == [True]


def test_a_failure_ends_all_ranks_and_is_shown() -> None:
    with pytest.raises(AssertionError, match="the second rank fails"):
        run_processes(failing_on_one, 2)
