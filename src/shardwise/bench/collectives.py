"""Collectives between processes of this machine: NCCL on GPUs, gloo on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.bench.clock import REPEATS, WARM_UPS, Timing, timing
from shardwise.errors import chosen
from shardwise.train.processes import together

Lines = Sequence[Mapping[str, Any]]


def measure_all(lines: Lines, device: str, num_processes: int) -> Iterator[tuple[Mapping[str, Any], Timing]]:
    """Time some collectives in one start of the processes. Raises `InputError` when a process fails."""
    yield from zip(lines, together(_measure, list(lines), device, num_processes, len(lines)), strict=True)


def _measure(rank: int, size: int, place: torch.device, lines: Lines) -> Iterator[Timing]:
    for line in lines:
        yield _timed(_collective(line, rank, size, place), place.type)


def _timed(run: Callable[[], object], device: str) -> Timing:
    """All processes start together, and the slowest counts: each repetition is as long as it takes on the last of them."""
    found = []
    for repeat in range(WARM_UPS + REPEATS):
        dist.barrier()
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor([time.perf_counter() - started], device="cuda" if device == "cuda" else "cpu")
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if repeat >= WARM_UPS:
            found.append(float(took))
    return timing(found)


def _collective(line: Mapping[str, Any], rank: int, size: int, place: torch.device) -> Callable[[], object]:
    """The collective of a line; `bytes` is the whole array, and of an AllToAll all processes' shards together."""
    count = max(line["bytes"] // 2 // size, 1) * size
    whole = torch.ones(count, dtype=torch.bfloat16, device=place)
    part = torch.ones(count // size, dtype=torch.bfloat16, device=place)
    received = torch.empty_like(whole)
    own = max(len(part) // size, 1) * size
    run: Mapping[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_to_all": lambda: dist.all_to_all_single(received[:own], whole[:own]),
        "send_recv": lambda: _ring(whole, received, rank, size),
    }
    return chosen(run, line["kind"], "collective")


def _ring(sent: torch.Tensor, received: torch.Tensor, rank: int, size: int) -> None:
    """Each sends to the next and receives from the one before."""
    moves = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
