"""A short course in collectives: what every rank holds before and after each, and an all-reduce built from sends.

python examples/collectives_course.py

It starts three processes on this machine (gloo, no GPU needed), then five for the ring.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

Line = tuple[str, str]  # what a line is about ("Before broadcast"), and what this rank holds then
Lesson = Callable[[int, int], Iterator[Line]]

NAP_S = 1.0  # before the barrier, rank r sleeps r naps


def broadcast(rank: int, size: int) -> Iterator[Line]:
    """One rank's array goes to all: 1 .. 5 from rank 0."""
    x = torch.arange(1.0, 6.0) if rank == 0 else torch.zeros(5)
    yield "Before broadcast", str(x)
    dist.broadcast(x, src=0)
    yield "After broadcast", str(x)


def reduce(rank: int, size: int) -> Iterator[Line]:
    """The sum of all arrays arrives at rank 0; the others keep what they had."""
    x = torch.full((5,), rank + 1.0)
    yield "Before reduce", str(x)
    # What gloo leaves on ranks other than the destination is not defined, so they hand in a copy.
    total = x.clone()
    dist.reduce(total, dst=0)
    yield "After reduce", str(total if rank == 0 else x)


def all_reduce(rank: int, size: int) -> Iterator[Line]:
    """The sum of all arrays arrives everywhere."""
    x = torch.full((5,), rank + 1.0)
    yield "Before all_reduce", str(x)
    dist.all_reduce(x)
    yield "After all_reduce", str(x)


def gather(rank: int, size: int) -> Iterator[Line]:
    """Rank 0 collects every rank's array."""
    x = torch.full((5,), rank + 1.0)
    yield "Before gather", str(x)
    collected = [torch.zeros(5) for _ in range(size)] if rank == 0 else None
    dist.gather(x, collected, dst=0)
    if collected is not None:
        yield "After gather", str(collected)


def all_gather(rank: int, size: int) -> Iterator[Line]:
    """Every rank collects every rank's array."""
    x = torch.full((5,), rank + 1.0)
    yield "Before all_gather", str(x)
    collected = [torch.zeros(5) for _ in range(size)]
    dist.all_gather(collected, x)
    yield "After all_gather", str(collected)


def scatter(rank: int, size: int) -> Iterator[Line]:
    """Rank 0 hands one array to each rank: a gather backwards."""
    parts = [torch.full((5,), i + 1.0) for i in range(size)] if rank == 0 else None
    if parts is not None:
        yield "To scatter", str(parts)
    x = torch.zeros(5)
    yield "Before scatter", str(x)
    dist.scatter(x, parts, src=0)
    yield "After scatter", str(x)


def reduce_scatter(rank: int, size: int) -> Iterator[Line]:
    """Rank j gets the sum of every rank's j-th array; here the j-th is [r + 1, 2(r + 1)] to the power j + 1."""
    parts = [torch.tensor([1.0, 2.0]).mul(rank + 1).pow(j + 1) for j in range(size)]
    yield "Before reduce_scatter", str(parts)
    x = torch.zeros(2)
    dist.reduce_scatter(x, parts)
    yield "After reduce_scatter", str(x)


def all_to_all(rank: int, size: int) -> Iterator[Line]:
    """Rank i's j-th element goes to rank j, which keeps it as its i-th: the ranks' arrays as rows, transposed."""
    x = 10.0 * rank + torch.arange(float(size))
    yield "Before all_to_all", str(x)
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    yield "After all_to_all", str(received)


def barrier(rank: int, size: int) -> Iterator[Line]:
    """No rank goes on before the slowest has come: all of them spend its time. The processes of a host share a clock."""
    dist.barrier()  # start together
    yield "Sleep before barrier", f"{rank * NAP_S:g} s"
    time.sleep(rank * NAP_S)
    yield "Clock before barrier", f"{time.monotonic():.4f} s"
    dist.barrier()
    yield "Clock past barrier", f"{time.monotonic():.4f} s"


def ring(rank: int, size: int) -> Iterator[Line]:
    """An all-reduce by sends to the right-hand neighbour only, in 2(N - 1) steps."""
    x = (rank + 1) * torch.arange(1.0, 6.0)
    yield "Before ring all-reduce", str(x)
    steps, sent = ring_all_reduce(x, rank, size)
    yield "After ring all-reduce", str(x)
    yield "Sent in the ring", f"{sent} elements in {steps} steps, {sent / x.numel():g} of the array"


def ring_all_reduce(x: torch.Tensor, rank: int, size: int) -> tuple[int, int]:
    """Sum `x` over all ranks in place; returns the number of steps, and of elements that this rank sent.

    `x` is cut into N chunks. In the reduce-scatter each chunk travels once round, and every rank that it comes by
    adds its own: after N - 1 steps rank r has all of chunk r + 1. In the all-gather the finished chunks travel on for
    N - 1 steps more. Each step sends 1/N of the array, so a rank sends 2(N - 1)/N of it however many ranks there are.
    """
    chunks = x.tensor_split(size)  # views: what is written to them is written to x
    sent = 0
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        incoming += _pass_right(outgoing, torch.empty_like(incoming), rank, size)
        sent += outgoing.numel()
    for step in range(size - 1):
        outgoing, incoming = chunks[(rank + 1 - step) % size], chunks[(rank - step) % size]
        _pass_right(outgoing, incoming, rank, size)
        sent += outgoing.numel()
    return 2 * (size - 1), sent


def _pass_right(outgoing: torch.Tensor, incoming: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Send to the right-hand neighbour while receiving from the left-hand one."""
    sending = dist.isend(outgoing, (rank + 1) % size)
    dist.recv(incoming, (rank - 1) % size)
    if sending is not None:
        sending.wait()
    return incoming


LESSONS: tuple[Lesson, ...] = (
    broadcast, reduce, all_reduce, gather, all_gather, scatter, reduce_scatter, all_to_all, barrier,
)  # fmt: skip


def take_part(rank: int, lessons: tuple[Lesson, ...], size: int, store: str) -> list[list[Line]]:
    """One process: join the group, go through the lessons, and return the lines of each."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    lines = [list(lesson(rank, size)) for lesson in lessons]
    dist.destroy_process_group()
    return lines


def teach(lessons: tuple[Lesson, ...], size: int) -> None:
    """Run the lessons on `size` processes and print, for each moment of each lesson, what every rank holds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, context) as pool:
        part = functools.partial(take_part, lessons=lessons, size=size, store=str(Path(folder) / "store"))
        ranks = list(pool.map(part, range(size)))
    for number, lesson in enumerate(lessons):
        print(f"# {lesson.__name__}: {lesson.__doc__}\n")
        printed = [(rank, about, text) for rank, lines in enumerate(ranks) for about, text in lines[number]]
        for moment in dict.fromkeys(about for _, about, _ in printed):
            print(*(f"{about} on rank {rank}: {text}" for rank, about, text in printed if about == moment), sep="\n")
        print(flush=True)


def main() -> int:
    """The course: nine lessons on three ranks, then the ring on five."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    teach(LESSONS, 3)
    teach((ring,), 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
