"""The lock of a run's folder: held while any rank of the run lives, and released by the system when the last process
ends."""

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
from shardwise.run.faults.rank_status import Peer, join_first
from shardwise.values import InputError, read_json

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems without locks: flock(2)


class RunLock:
    """The lock of a run's folder.

    The first rank takes it exclusively before it changes anything; then all ranks share it, so that no other run can
    take it before the last rank has ended, in whatever way. Methods raise `InputError` that names the holders.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
        self._file: int | None = None

    def take(self) -> None:
        """Take the lock exclusively; the folder is created if it is missing."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock(fcntl.LOCK_EX)

    def share(self, peers: Sequence[Peer]) -> None:
        """Share the lock among the ranks `peers`; the first rank calls this before the others."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps([asdict(peer) for peer in peers]).encode(), 0)
        self._lock(fcntl.LOCK_SH)

    def release(self) -> None:
        """Release the lock."""
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
