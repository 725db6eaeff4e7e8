"""Start short-lived processes of this machine that exchange collectives, each with its share of the cores, and read
their reports."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessRaisedException, spawn

from shardwise.run.machine_resources import set_threads
from shardwise.values import InputError

TIMEOUT = timedelta(seconds=120)
# Runs in each process, with rank, number of processes, device and arguments; reports of the first process are passed on.
ProcessWork = Callable[[int, int, torch.device, Any], Iterator[Any]]


@dataclass(frozen=True, slots=True)
class _SpawnedWork:
    """Work of a process, its devices ("cpu" or "cuda"), and the file of the store through which the processes meet."""

    work: ProcessWork
    arguments: Any
    num_processes: int
    device: str
    store: str
    queue: Any


def run_in_processes(
    work: ProcessWork, arguments: Any, device: str, num_processes: int, num_results: int, verb: str = "bench"
) -> Iterator[Any]:
    """Run `work` in `num_processes` processes, and yield the `num_results` reports of the first of them as they come.
    Raises `InputError`, which names the verb, when a process fails."""
    with tempfile.TemporaryDirectory() as folder:
        queue = get_context("spawn").SimpleQueue()
        with _shared_threads(num_processes), _block_sigint():
            spawned = _SpawnedWork(work, arguments, num_processes, device, str(Path(folder) / "store"), queue)
            context: Any = spawn(_run_process, (spawned,), num_processes, join=False)  # type: ignore[no-untyped-call]
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
    """Give each process as many threads as `train` does."""
    previous_threads = os.environ.get("OMP_NUM_THREADS")
    set_threads(num_processes)
    try:
        yield
    finally:
        if previous_threads is None:
            os.environ.pop("OMP_NUM_THREADS", None)


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Block SIGINT while processes start: they inherit the mask and never receive Ctrl-C, so that this process ends
    them."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def _end_processes(processes: Sequence[Any]) -> None:
    """Kill the processes that still run, after Ctrl-C or a failure."""
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()


def _run_process(rank: int, spawned: _SpawnedWork) -> None:
    on_gpu, size = spawned.device == "cuda", spawned.num_processes
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    store = dist.FileStore(spawned.store, size)  # type: ignore[attr-defined]
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        for report in spawned.work(rank, size, device, spawned.arguments):
            if rank == 0:
                spawned.queue.put(report)
    finally:
        dist.barrier()
        dist.destroy_process_group()
    # All reports are sent (a SimpleQueue writes at once). Unjoined threads of gloo may abort an interpreter that ends.
    os._exit(0)
