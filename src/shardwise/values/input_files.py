"""Open and read files that Shardwise did not write, or that may have been changed since: one reader for all of them.

A file must be a regular one (no named pipe, no device: neither has an end that can be waited for) of bounded size, and text in
UTF-8. What it spells is parsed by `input_texts`. Every failure is an `InputError` (exit code 2) with what was found, and the fix
that the caller names. Nothing else under `src` opens such files: tests/unit/test_input_files.py forbids it, with few exceptions
(data of the package, messages between our own processes). NumPy and PyTorch are not imported.
"""

from __future__ import annotations

import errno
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardwise.values.errors import InputError

MAX_TEXT_BYTES = 64_000_000  # of a file that is read as a whole: a tokenizer.json has up to 35 MB
MAX_LINE_BYTES = 16_000_000  # of a line of a file that is read line by line
PIPE_WAIT_S = 5.0  # for which a pipe may be silent


class FileMessages(NamedTuple):
    """How errors speak of a file: what stands before its path (such as "model: "), after the reason, and their class."""

    prefix: str = ""
    fix: str = ""
    error: type[InputError] = InputError

    def fail(self, problem: str) -> InputError:
        """Return the error of a problem."""
        return self.error(f"{self.prefix}{problem}" + (f"; {self.fix}" if self.fix else ""))


PLAIN = FileMessages()


def _open_descriptor(path: str | Path, *, allow_pipe: bool) -> int:
    # Opening a pipe waits for a writer, and opening a device may have effects: both are refused before, and once more after,
    # since the path may have been replaced in between.
    _require_kind(os.stat(path).st_mode, path, allow_pipe)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        _require_kind(os.fstat(descriptor).st_mode, path, allow_pipe)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_kind(mode: int, path: str | Path, allow_pipe: bool) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISREG(mode) or (allow_pipe and stat.S_ISFIFO(mode)):
        return
    kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    raise OSError(errno.EINVAL, f"it is {kind}, and a regular file is required", str(path))


def require_regular(path: str | Path) -> None:
    """Raise `OSError` for anything but a regular file, before a library opens the path by itself."""
    _require_kind(os.stat(path).st_mode, path, allow_pipe=False)


@contextmanager
def open_input(path: str | Path, *, allow_pipe: bool = False) -> Iterator[BinaryIO]:
    """Open a regular file to read its bytes piece by piece; with `allow_pipe` also a pipe, as of `<(zcat train.log.gz)`.

    Raises `OSError` for anything else, and for a pipe without a writer for `PIPE_WAIT_S`.
    """
    descriptor = _open_descriptor(path, allow_pipe=allow_pipe)
    raw = _Pipe(descriptor, str(path)) if stat.S_ISFIFO(os.fstat(descriptor).st_mode) else None
    file: Any = raw or os.fdopen(descriptor, "rb")
    try:
        yield file
    finally:
        file.close()


class _Pipe:
    """Read end of a pipe that was opened without waiting: a read waits for bytes, but not for ever."""

    def __init__(self, descriptor: int, path: str) -> None:
        self.descriptor, self.path = descriptor, path

    def read(self, size: int) -> bytes:
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        # A pipe whose writer has not opened it yet reads as ended; so the first bytes are waited for with poll, which then
        # reports nothing until a writer comes.
        if not poll.poll(PIPE_WAIT_S * 1000):
            raise OSError(errno.ETIMEDOUT, f"it is a pipe that sent nothing for {PIPE_WAIT_S:g} s", self.path)
        return os.read(self.descriptor, size)

    def close(self) -> None:
        os.close(self.descriptor)


def read_bytes(path: str | Path, messages: FileMessages = PLAIN, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """Return the bytes of a regular file of at most `max_bytes`. Raises the error of `messages`.

    >>> read_bytes("/dev/zero", FileMessages("rows: "))
    Traceback (most recent call last):
    shardwise.values.errors.InputError: rows: cannot read /dev/zero: it is a device, and a regular file is required
    """
    try:
        with open_input(path) as file:
            content = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        name = str(path) if str(path).isprintable() else repr(str(path))
        reason = describe_error(error)
        problem = f"cannot read {name}: {reason}" if messages.prefix else f"{name}: cannot read: {reason}"
        raise messages.fail(problem) from None
    if len(content) > max_bytes:
        raise messages.fail(f"cannot read {path}: it has more than {max_bytes:,} bytes, and at most as many are read")
    return content


def read_text(
    path: str | Path, messages: FileMessages = PLAIN, max_bytes: int = MAX_TEXT_BYTES, encoding: str = "utf-8"
) -> str:
    """Return the text of a regular file, with line ends as they are in Python. Raises the error of `messages`, also for bytes
    that are not in the encoding (`utf-8`, or `utf-8-sig` for a file with a byte order mark)."""
    return decode_text(read_bytes(path, messages, max_bytes), f"{path}", messages, encoding)


def decode_text(content: bytes, name: str, messages: FileMessages = PLAIN, encoding: str = "utf-8") -> str:
    """Return the text of bytes; line ends become those of Python. Raises the error of `messages`."""
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        position = f"byte {error.object[error.start]:#04x} at {error.start:,}"
        raise messages.fail(f"{name} is not text: {position} is not UTF-8, which is required") from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_lines(path: str | Path, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a regular file of any size, each with its line break. Raises `OSError`, also for longer lines."""
    with open_input(path) as file:
        while line := file.readline(max_line_bytes + 1):
            if len(line) > max_line_bytes:
                raise OSError(errno.EINVAL, f"it has a line of more than {max_line_bytes:,} bytes", str(path))
            yield line


def describe_error(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its class if it has none.

    >>> describe_error(ValueError())
    'ValueError'
    """
    text = getattr(error, "strerror", None) or _text_of(error)
    return next(iter(str(text).splitlines()), "") or type(error).__name__


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # an error with arguments that a stranger's file made may fail to print
        return ""
