"""A run's processes on this machine, in the environment that torchrun gives its own, and an end for all of them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from shardwise.train.outcome import LOST, STOP_S, Outcome
from shardwise.train.parent import LAUNCHER
from shardwise.train.stop import SIGNALS
from shardwise.train.waits import LOST_KEY, PREFIX

if TYPE_CHECKING:
    from shardwise.train.store import Store

MODULE = "shardwise.train.rank"
HOST = "localhost"  # where the ranks meet: unreachable from elsewhere
# How long the others may take to end when one has: a rank that ends takes its connections with it. torchrun's `shutdown_timeout`.
LEAVE_S = 30.0
TICK_S = 0.2  # between two looks at signals and deadlines, where no rank ends


def set_threads(processes: int) -> None:
    """Give each of the processes of this host its share of the cores, unless OMP_NUM_THREADS is set; before PyTorch is loaded."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores // processes, 1)))


def launch(arguments: Sequence[str], processes: int, module: str = MODULE) -> int:
    """Run `python -m MODULE ARGUMENTS` as ranks 0 to `processes` - 1 of one world on this machine, until all have ended.

    Its exit code: 0, or that of a rank that has said why it ended; 128 and the signal where this process was asked to stop. What
    ranks print goes where this process prints. Ranks end with this process too, however it ends (`train.parent`).

    Raises `RunEndedError` for ranks that ended without a word, `LostRankError` where ranks have lost each other.
    """
    return outcome_of(arguments, processes, {}, module).code()


def outcome_of(arguments: Sequence[str], processes: int, more: Mapping[str, str], module: str = MODULE) -> Outcome:
    """The same, and how it ended, whatever that is. `more` is added to the environment of the ranks."""
    ranks, server = _Ranks(), socket.create_server((HOST, 0))
    port = server.getsockname()[1]
    before = {one: signal.signal(one, ranks.stop) for one in SIGNALS}
    try:
        command = [sys.executable, "-m", module, *arguments]
        for rank in range(processes):
            ranks.start(command, {**environment(rank, processes, port), **more})
        from shardwise.train.store import TCPStore  # as the ranks load PyTorch

        store = TCPStore(HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        codes = ranks.wait()
        word = said(store, f"{PREFIX}/{LOST_KEY}") if LOST in codes.values() else ""
        return Outcome(codes, ranks.killed, ranks.asked, word)
    finally:
        ranks.kill()
        server.close()
        for one, handler in before.items():
            signal.signal(one, handler)


def environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun would tell a rank, and who started it."""
    ours = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes,
        "MASTER_ADDR": HOST, "MASTER_PORT": port, LAUNCHER: os.getpid(),
        # the store is here, and not on rank 0 (torch.distributed.rendezvous, `_torchelastic_use_agent_store`)
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }  # fmt: skip
    return {**os.environ, **{name: str(value) for name, value in ours.items()}}


def said(store: Store, key: str) -> str:
    """What ranks have said in the run's store."""
    return (
        store.get(key).decode()
        if store.check([key])
        else "ranks lost their connections to each other, and none reported a reason"
    )


class _Ranks:
    """The processes, and how those that have ended did."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended: Queue[int] = Queue()
        self.asked = 0
        self.killed: set[int] = set()

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        rank, process = len(self._processes), subprocess.Popen(command, env=environment)
        self._processes.append(process)

        def wait() -> None:
            process.wait()
            self._ended.put(rank)

        threading.Thread(target=wait, daemon=True).start()

    def stop(self, number: int, frame: Any) -> None:
        """Asked to stop: the ranks are asked in turn."""
        self.asked = self.asked or number

    def wait(self) -> dict[int, int]:
        """Until all have ended: the exit code of each. Those that hang are killed."""
        codes: dict[int, int] = {}
        deadline, sent = float("inf"), 0
        while len(codes) < len(self._processes):
            try:
                rank = self._ended.get(timeout=TICK_S)
                codes[rank] = self._processes[rank].returncode
                deadline = min(deadline, time.monotonic() + (LEAVE_S if codes[rank] else STOP_S))
            except Empty:
                pass
            if not sent and (sent := self.asked or (signal.SIGTERM if any(codes.values()) else 0)):
                deadline = min(deadline, time.monotonic() + STOP_S)
                self._send(sent)
            if time.monotonic() > deadline:
                self.kill()
        return codes

    def _send(self, number: int) -> None:
        """Send a signal to all that run, and wake those that are stopped (SIGSTOP), so that they receive it."""
        for process in self._processes:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End what still runs."""
        for rank, process in enumerate(self._processes):
            if process.poll() is None:
                self.killed.add(rank)
                process.kill()
