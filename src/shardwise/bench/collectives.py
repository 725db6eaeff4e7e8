"""Collectives between processes of this machine: NCCL on GPUs, gloo on a CPU."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from shardwise.bench.clock import REPEATS, WARM_UPS, Timing, timing
from shardwise.errors import InputError

TIMEOUT = timedelta(seconds=120)
Lines = Sequence[Mapping[str, Any]]


def measure_all(lines: Lines, device: str, num_processes: int) -> Iterator[tuple[Mapping[str, Any], Timing]]:
    """Time some collectives in one start of the processes. Raises `InputError` when a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        queue = get_context("spawn").SimpleQueue()
        with _one_thread():
            joined: Any = spawn(  # type: ignore[no-untyped-call]
                _worker,
                (num_processes, device, str(Path(folder) / "store"), list(lines), queue),
                num_processes,
                join=False,
            )
        for line in lines:
            while queue.empty():
                _alive(joined)
                time.sleep(0.01)
            yield line, Timing(*queue.get())
        joined.join()


def _alive(joined: Any) -> None:
    try:
        if joined.join(timeout=0.01):
            raise InputError("bench: the processes ended before all collectives were measured")
    except ProcessRaisedException as error:
        last = str(error).strip().splitlines()[-1]
        raise InputError(f"bench: a process failed: {last}") from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """Each process with one thread of its own, unless the environment says otherwise."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("OMP_NUM_THREADS", None)


def _worker(rank: int, size: int, device: str, store: str, lines: Lines, queue: Any) -> None:
    place = torch.device(f"cuda:{rank}" if device == "cuda" else "cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    try:
        for line in lines:
            found = _timed(_collective(line, rank, size, place), device)
            if rank == 0:
                queue.put((found.seconds, found.low, found.high, found.repeats))
    finally:
        dist.barrier()
        dist.destroy_process_group()


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
    kind = line["kind"]
    if kind == "all_gather":
        return lambda: dist.all_gather_single(whole, part)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole)
    received = torch.empty_like(whole)
    if kind == "all_to_all":
        own = max(len(part) // size, 1) * size
        return lambda: dist.all_to_all_single(received[:own], whole[:own])
    return lambda: _ring(whole, received, rank, size)


def _ring(sent: torch.Tensor, received: torch.Tensor, rank: int, size: int) -> None:
    """Each sends to the next and receives from the one before."""
    moves = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
