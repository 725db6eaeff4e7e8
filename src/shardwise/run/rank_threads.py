"""Runs the ranks of a world as threads of this process.

>>> from shardwise.run.transport.current import current_transport
>>> def average(value):
...     values = torch.tensor([float(value + current_transport().rank)])
...     current_transport().world.all_reduce(values).wait()
...     return values.item() / current_transport().size
>>> run_rank_threads(average, 4, 10)
[11.5, 11.5, 11.5, 11.5]

What threads cannot show: a rank that is killed, runs out of memory or hangs in a loop; signals; launchers; the transport of
processes itself.
"""

from __future__ import annotations

import pickle
import random
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.run.faults.rank_status import track_thread_activity
from shardwise.run.transport.current import set_thread_transport
from shardwise.run.transport.thread_groups import SharedGroup, ThreadTransport
from shardwise.run.transport.thread_scheduler import RankFailedError, ThreadScheduler, ThreadState


class SharedStateError(RuntimeError):
    """A rank has changed state that all threads of the process share: random generators, or the default dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankThreadOptions:
    """Options of ranks that run as threads.

    Attributes:
        is_cooperative: Run one rank at a time.
        is_strict: Fill outputs with NaN until the wait, and refuse writes to inputs before it.
        seed: Order in which ranks run; None: by their number.
        timeout_s: Longest time without any operation of any rank.
        copies_arguments: Give each rank a copy of the arguments of its own, as a process has.
    """

    is_cooperative: bool = True
    is_strict: bool = True
    seed: int | None = None
    timeout_s: float = 120.0
    copies_arguments: bool = True


DEFAULT_OPTIONS = RankThreadOptions()


def run_rank_threads(
    function: Callable[..., Any], world_size: int, *arguments: Any, options: RankThreadOptions = DEFAULT_OPTIONS
) -> list[Any]:
    """Call `function(*arguments)` on each rank of a world, and return what each rank returns, in the order of ranks.

    Raises the error of the first rank that failed, with a note that names the rank; `DeadlockError` where no rank can go on;
    `SharedStateError` where ranks changed what threads share.
    """
    scheduler = ThreadScheduler(world_size, is_cooperative=options.is_cooperative, seed=options.seed)
    groups: dict[str, SharedGroup] = {}
    results: list[Any] = [None] * world_size
    before = _shared_state()
    packed = pickle.dumps(arguments) if options.copies_arguments else b""

    def run(rank: int) -> None:
        error: BaseException | None = None
        scheduler.enter(rank)
        try:
            scheduler.check()
            transport = ThreadTransport(rank, scheduler, groups, is_strict=options.is_strict)
            set_thread_transport(transport)
            track_thread_activity()
            results[rank] = function(*(pickle.loads(packed) if options.copies_arguments else arguments))
            if transport.unfinished:
                work = next(iter(transport.unfinished.values()))
                raise RuntimeError(
                    f"{len(transport.unfinished)} operations were never waited for; one {work.describe()}"
                )
        except RankFailedError:
            pass
        except BaseException as raised:
            raised.add_note(f"on rank {rank} of {world_size}")
            error = raised if scheduler.failure is None else None
        finally:
            set_thread_transport(None)
            scheduler.leave(error)

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world_size)
    ]
    for thread in threads:
        thread.start()
    scheduler.start()
    try:
        _join(scheduler, threads, options.timeout_s)
    except BaseException as error:  # a timeout, or Ctrl-C: ranks end where they wait next
        scheduler.fail(error)
        raise
    if scheduler.failure is not None:
        raise scheduler.failure
    changed = [name for name, value in _shared_state().items() if value != before[name]]
    if changed:
        raise SharedStateError(f"ranks changed state that all threads share: {', '.join(changed)}")
    return results


def _join(scheduler: ThreadScheduler, threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Wait until all ranks have ended. Raises `TimeoutError` with the stacks of those that run when nothing happens."""
    progress = -1
    while not scheduler.finished.wait(timeout_s):
        if scheduler.progress == progress:
            frames = sys._current_frames()
            stacks = [
                f"{thread.name}:\n{''.join(traceback.format_stack(frames[thread.ident]))}"
                for thread, state in zip(threads, scheduler.ranks, strict=True)
                if state.state is ThreadState.RUNNING and thread.ident in frames
            ]
            raise TimeoutError(f"no operation for {timeout_s} s\n{scheduler.table()}\n" + "\n".join(stacks))
        progress = scheduler.progress
    for thread in threads:
        thread.join()


def _shared_state() -> dict[str, Any]:
    """State of the process that ranks must not change."""
    return {
        "torch random generator": hash(torch.get_rng_state().numpy().tobytes()),
        "Python random generator": hash(random.getstate()),
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
