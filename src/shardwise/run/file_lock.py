"""Exclusive and shared locks of files, which the system releases when the last process that has them ends."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from shardwise.values import InputError

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # errors of file systems without locks: flock(2)
MAX_HOLDER_BYTES = 1 << 16  # of what the holder of a lock writes into its file


class FileLock:
    """A lock on a file. `describe_holder` returns the text of the error from what the holder wrote into the file.

    Methods raise `InputError` with that text while another process has the lock.
    """

    def __init__(self, path: Path, describe_holder: Callable[[bytes], str]) -> None:
        self.path, self._describe_holder = path, describe_holder
        self._file: int | None = None

    @property
    def is_taken(self) -> bool:
        """True while this process has the lock."""
        return self._file is not None

    def take(self) -> None:
        """Take the lock exclusively; the folder is created if it is missing."""
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.lock(fcntl.LOCK_EX)

    def write(self, content: bytes) -> None:
        """Write what others read who do not get the lock."""
        if self._file is not None:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, content, 0)

    def release(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def lock(self, operation: int) -> None:
        """Lock the file, `LOCK_EX` or `LOCK_SH`, without waiting."""
        if self._file is None:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
            holder = os.pread(self._file, MAX_HOLDER_BYTES, 0)
            self.release()
            if isinstance(error, BlockingIOError):
                raise InputError(self._describe_holder(holder)) from None
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
