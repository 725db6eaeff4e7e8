"""The lock of a run's folder: held while any rank of the run lives, and released by the system when the last process
ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from shardwise.records.run_folder import LOCK
from shardwise.run.faults.rank_status import Peer, join_first
from shardwise.run.file_lock import FileLock
from shardwise.values import InputError, read_json


class RunLock(FileLock):
    """The lock of a run's folder.

    The first rank takes it exclusively before it changes anything; then all ranks share it, so that no other run can
    take it before the last rank has ended, in whatever way. Methods raise `InputError` that names the holders.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / LOCK, lambda holder: _describe_holders(folder / LOCK))

    def share(self, peers: Sequence[Peer]) -> None:
        """Share the lock among the ranks `peers`; the first rank calls this before the others."""
        self.write(json.dumps([asdict(peer) for peer in peers]).encode())
        self.lock(fcntl.LOCK_SH)


def require_free(folder: Path) -> None:
    """Raise `InputError` if a run in this folder is still alive; nothing is changed."""
    lock = RunLock(folder)
    if lock.path.exists():
        with lock:
            lock.take()


def _describe_holders(path: Path) -> str:
    """Return an error text that names the holders of a lock, without processes of this host that have ended."""
    try:
        peers = [Peer(**payload) for payload in read_json(path)]
    except (InputError, TypeError):
        peers = []
    alive = [peer for peer in peers if peer.host != socket.gethostname() or _is_alive(peer.pid)]
    holders = join_first(list(map(str, alive)))
    return (
        f"{path.parent} is locked: a run goes on in it{': ' if holders else ''}{holders}; wait for its end or stop it, or choose "
        "another --out"
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
