"""Runs a function on several gloo processes of this machine, started from a server that has PyTorch loaded already."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

TIMEOUT_S = 120.0
PRELOADED = ["preload"]


def run_processes(function: Callable[..., Any], world_size: int, *arguments: Any, grace_s: float = 0.0) -> list[Any]:
    """What `function(*arguments)` returns on each rank of a gloo world; it must be importable, and its results picklable.

    When one rank fails the others are ended, those that do not end by themselves within `grace_s`, and `AssertionError` has
    its traceback.
    """
    context = server()
    with tempfile.TemporaryDirectory() as folder:
        ranks: list[Any] = [
            context.Process(target=_rank, args=(function, rank, world_size, folder, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        _join(ranks, grace_s)
        results = [_result(Path(folder), rank) for rank in range(world_size)]
        codes = [rank.exitcode for rank in ranks]
    problems = [text for ok, text in results if not ok]
    assert not problems, "\n".join(problems)
    assert codes == [0] * world_size, f"exit codes {codes}"
    return [value for _, value in results]


def server() -> Any:
    """The context of processes that begin as copies of the server; it is started, if it does not run yet.

    Python 3.11's knows nothing of this process's `sys.path`, and says nothing of a module that it cannot preload: it is told
    by the environment where they are.
    """
    forkserver.set_forkserver_preload(PRELOADED)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    return multiprocessing.get_context("forkserver")


def _join(ranks: list[Any], grace_s: float) -> None:
    """Until all have ended; one that fails, or takes too long, ends them all, `grace_s` later."""
    running = {rank.sentinel: rank for rank in ranks}
    while running:
        ended = wait(list(running), timeout=TIMEOUT_S)
        failed = not ended or any(running[sentinel].exitcode for sentinel in ended)
        for sentinel in ended:
            running.pop(sentinel).join()
        if failed:
            for rank in running.values():
                rank.join(grace_s)
            for rank in running.values():
                rank.kill()


def _result(folder: Path, rank: int) -> tuple[bool, Any]:
    path = folder / f"result-{rank}"
    if not path.exists():
        return True, None  # ended by another one's failure, which its exit code says
    return pickle.loads(path.read_bytes())


def _rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, arguments: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", world_size), rank=rank, world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_S),
    )  # fmt: skip
    try:
        result = (True, function(*arguments))
    except BaseException:
        result = (False, f"rank {rank} of {world_size}:\n{traceback.format_exc()}")
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    if result[0]:
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0 if result[0] else 1)  # at once, whatever threads are left
