"""A run's folder is one run's: locked as long as any of its ranks lives, by the system, which knows when a process ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from shardwise.records.run_folder import LOCK
from shardwise.run.faults.rank_status import Peer
from shardwise.values.errors import InputError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # of file systems that have none: flock(2)
MAX_SHOWN = 3  # ranks in a message


class RunLock:
    """The lock of a run's folder.

    The first rank takes it alone before it changes anything; then all ranks hold it together, so that no other run can take it
    before the last of them has ended, in whatever way. Raises `InputError` that says who holds it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._file: int | None = None

    def take(self) -> None:
        """Hold it alone; the folder is made where there is none."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock(fcntl.LOCK_EX)

    def share(self, peers: Sequence[Peer]) -> None:
        """Hold it with the other ranks `peers`; the first rank does so before they do."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps([asdict(peer) for peer in peers]).encode(), 0)
        self._lock(fcntl.LOCK_SH)

    def release(self) -> None:
        """Release it."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def _lock(self, operation: int) -> None:
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._file, operation | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                if operation == fcntl.LOCK_EX:
                    problem = f"the file system of {self.path.parent} has no locks"
                    print(
                        f"warning: {problem}; nothing keeps another run out of the folder", file=sys.stderr, flush=True
                    )
                return
            self.release()
            if isinstance(error, BlockingIOError):
                raise InputError(_describe_holders(self.path)) from None
            raise

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def require_free(folder: Path) -> None:
    """Raise `InputError` where a run in this folder goes on; nothing is changed."""
    lock = RunLock(folder)
    if lock.path.exists():
        with lock:
            lock.take()


def _describe_holders(path: Path) -> str:
    """Who holds a lock, by what the first of them wrote; of this host those that still live."""
    try:
        peers = [Peer(**payload) for payload in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError):
        peers = []
    alive = [peer for peer in peers if peer.host != socket.gethostname() or _is_alive(peer.pid)]
    holders = ", ".join(map(str, alive[:MAX_SHOWN])) + (
        f" and {len(alive) - MAX_SHOWN} more" if len(alive) > MAX_SHOWN else ""
    )
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
