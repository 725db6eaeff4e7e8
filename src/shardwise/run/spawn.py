"""Starts processes of this machine that can exchange collectives, each with its share of the cores, and reads their reports."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from shardwise.run.machine_resources import set_threads
from shardwise.values.errors import InputError

TIMEOUT = timedelta(seconds=120)
# Runs in each process: its rank, their number, its device, its arguments; what the first one yields is passed on.
ProcessWork = Callable[[int, int, torch.device, Any], Iterator[Any]]


def run_in_processes(
    work: ProcessWork, arguments: Any, device: str, num_processes: int, num_results: int, verb: str = "bench"
) -> Iterator[Any]:
    """Run `work` in so many processes at once, and give the `num_results` things that the first of them yields, as they come.

    Raises `InputError` when a process fails; it names the verb.
    """
    with tempfile.TemporaryDirectory() as folder:
        queue = get_context("spawn").SimpleQueue()
        with _shared_threads(num_processes), _block_sigint():
            context: Any = spawn(  # type: ignore[no-untyped-call]
                _run_process,
                (work, arguments, num_processes, device, str(Path(folder) / "store"), queue),
                num_processes,
                join=False,
            )
        try:
            for _ in range(num_results):
                while queue.empty():
                    _require_alive(context, verb)
                    time.sleep(0.01)
                yield queue.get()
            context.join()
        finally:
            _end_processes(context.processes)


def _require_alive(context: Any, verb: str) -> None:
    try:
        if context.join(timeout=0.01):
            raise InputError(f"{verb}: the processes ended before all was done")
    except ProcessRaisedException as error:
        last_line = str(error).strip().splitlines()[-1]
        raise InputError(f"{verb}: a process failed: {last_line}") from None


@contextmanager
def _shared_threads(num_processes: int) -> Iterator[None]:
    """As many threads for each process as `train` gives it."""
    previous_threads = os.environ.get("OMP_NUM_THREADS")
    set_threads(num_processes)
    try:
        yield
    finally:
        if previous_threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Ctrl-C waits: processes that start here never receive it, and leave it to this one to end them."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _end_processes(processes: Sequence[Any]) -> None:
    """End those that still run: after Ctrl-C, or where one has failed."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _run_process(rank: int, work: ProcessWork, arguments: Any, size: int, device: str, store: str, queue: Any) -> None:
    torch_device = torch.device(f"cuda:{rank}" if device == "cuda" else "cpu")
    if device == "cuda":
        torch.cuda.set_device(torch_device)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(store, size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=TIMEOUT,
    )
    try:
        for report in work(rank, size, torch_device, arguments):
            if rank == 0:
                queue.put(report)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    # All has been said (a SimpleQueue writes at once). Threads of gloo that were not joined may abort an interpreter that ends.
    os._exit(0)
