"""The ledger of an experiment: a file of JSON lines, one for each change of state, which only one driver may write.

A line is written with one call and flushed to the disk, so a driver that is killed leaves whole lines, or at its end half a line,
which readers leave out and the next driver cuts off. `read_ledger` gives the present state of every configuration.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from shardwise.measure.experiments.ledger_lines import (
    ACTIVE,
    ENDED,
    Configuration,
    LedgerLine,
    RunMeasurement,
    RunPrediction,
    SessionLine,
    State,
    dump_line,
    load_line,
    utc_now,
)
from shardwise.run.file_lock import FileLock
from shardwise.values import InputError, describe_error, parse_json_line
from shardwise.values.errors import OutputError
from shardwise.values.input_files import read_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerRow:
    """The present state of a configuration, from all of its lines.

    `line` is the last of them. `attempts` are the last lines of its attempts by number, `prediction` the newest prediction,
    `predicted_before` that of the last attempt when it was submitted, `measurement` that of the attempt that was done.
    """

    configuration: Configuration
    line: LedgerLine
    attempts: Mapping[int, LedgerLine]
    prediction: RunPrediction | None = None
    predicted_before: RunPrediction | None = None
    measurement: RunMeasurement | None = None

    @property
    def state(self) -> State:
        """The state of the last line."""
        return self.line.state

    @property
    def is_open(self) -> bool:
        """True for a configuration that may still be run: predicted, or skipped by what is known so far."""
        return self.state in ("predicted", "skipped")

    @property
    def active_attempt(self) -> LedgerLine | None:
        """The last line of the attempt that has not ended; None if there is none."""
        return self.line if self.state in ACTIVE and self.line.attempt else None

    def followed_by(self, line: LedgerLine) -> LedgerRow:
        """Return the row with one more line."""
        attempts, before = self.attempts, self.predicted_before
        if line.attempt:
            attempts = {**attempts, line.attempt: line}
            if line.state == "pending":
                before = line.prediction or self.prediction
        return replace(
            self, line=line, attempts=attempts, predicted_before=before, prediction=line.prediction or self.prediction,
            measurement=line.measurement or self.measurement,
        )  # fmt: skip


@dataclass(slots=True)
class LedgerContent:
    """Contents of a ledger: a row for each configuration, the starts of drivers, and how many lines it has.

    `torn_bytes` is the size of a last line that was not written to its end.
    """

    rows: dict[str, LedgerRow]
    sessions: list[SessionLine]
    num_lines: int = 0
    num_bytes: int = 0
    torn_bytes: int = 0

    def add(self, line: LedgerLine | SessionLine) -> None:
        """Add a line. Raises `ValueError` for one of a configuration that no line before it describes."""
        self.num_lines += 1
        if isinstance(line, SessionLine):
            self.sessions.append(line)
            return
        row = self.rows.get(line.fingerprint)
        if row is None:
            if line.configuration is None:
                raise ValueError(f"{line.fingerprint}: no line before it describes this configuration")
            row = LedgerRow(configuration=line.configuration, line=line, attempts={})
        self.rows[line.fingerprint] = row.followed_by(line)


def read_ledger(path: str | os.PathLike[str]) -> LedgerContent:
    """Return what a ledger holds; without a line break at its end, the last line is left out.

    Raises `InputError` for a file that cannot be read, and for a line that is damaged.
    """
    content = LedgerContent({}, [])
    for number, raw in enumerate(_read_raw_lines(path), start=1):
        if not raw.endswith(b"\n"):
            content.torn_bytes = len(raw)
            continue
        try:
            content.add(load_line(parse_json_line(raw)))
        except ValueError as error:
            fix = (
                "a ledger that `shardwise experiments run` wrote is required"
                if number == 1
                else "a line as a driver wrote it is required: restore it, or take it out"
            )
            raise InputError(f"{os.fspath(path)}: line {number}: {describe_error(error)}; {fix}") from None
        content.num_bytes += len(raw)
    return content


def _read_raw_lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    try:
        yield from read_lines(Path(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{os.fspath(path)}: cannot read: {describe_error(error)}") from None


class Ledger:
    """A ledger that this process writes, while it is entered. Another driver on the same file is refused.

    `argument` is the flag that errors name.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "ledger.jsonl")
    >>> configuration = Configuration(settings={"tp": 2})
    >>> with Ledger(path) as ledger:
    ...     ledger.append(LedgerLine(fingerprint=configuration.fingerprint, state="predicted", configuration=configuration))
    >>> [row.state for row in read_ledger(path).rows.values()]
    ['predicted']
    """

    def __init__(self, path: str | os.PathLike[str], argument: str = "--ledger") -> None:
        self.path, self._argument = Path(path), argument
        self._lock = FileLock(self.path.with_name(f"{self.path.name}.lock"), self._describe_driver)
        self._file = -1
        self._content = LedgerContent({}, [])

    @property
    def rows(self) -> Mapping[str, LedgerRow]:
        """The present state of every configuration, by fingerprint."""
        return self._content.rows

    @property
    def sessions(self) -> tuple[SessionLine, ...]:
        """The starts of drivers."""
        return tuple(self._content.sessions)

    @property
    def attempts_folder(self) -> Path:
        """The folder beside the ledger in which every attempt has a folder."""
        return self.path.with_name(f"{self.path.stem}.runs")

    def __enter__(self) -> Ledger:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.take()
            self._lock.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._content = read_ledger(self.path)
            if self._content.torn_bytes:
                os.ftruncate(self._file, self._content.num_bytes)
        except OSError as error:
            self._close()
            raise InputError(
                f"{self._argument}: cannot write {self.path}: {describe_error(error)}; a file such as runs/ledger.jsonl, in a "
                "folder that can be written, is required"
            ) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._lock.release()

    def append(self, *lines: LedgerLine | SessionLine) -> None:
        """Write lines with one call, and wait until they are on the disk.

        Raises `OutputError` where that fails, such as on a full disk; then none of them is in the file.
        """
        timed = [line if line.written_at else replace(line, written_at=utc_now()) for line in lines]
        block = "".join(dump_line(line) + "\n" for line in timed).encode()
        try:
            self._write(block)
        except OSError as error:
            os.ftruncate(self._file, self._content.num_bytes)
            raise OutputError(
                f"cannot write {self.path}: {describe_error(error)}; the same command goes on from this ledger once it can be "
                "written"
            ) from None
        self._content.num_bytes += len(block)
        for line in timed:
            self._content.add(line)

    def _write(self, block: bytes) -> None:
        written = 0
        while written < len(block):  # a call may write a part, as on a full disk
            written += os.write(self._file, block[written:])
        os.fsync(self._file)

    def _describe_driver(self, holder: bytes) -> str:
        try:
            driver = parse_json_line(holder)
            who = f"process {driver['pid']} on {driver['host']}"
        except (ValueError, KeyError, TypeError):
            who = "another process"
        return f"{self._argument}: {self.path} is written by {who}; wait for its end or stop it, or choose another"


def rows_in_state(rows: Iterable[LedgerRow], *states: State) -> list[LedgerRow]:
    """Return the rows in some states, in their order."""
    return [row for row in rows if row.state in states]


def ended_attempts(row: LedgerRow) -> list[LedgerLine]:
    """Return the last lines of the attempts of a row that have ended."""
    return [line for line in row.attempts.values() if line.state in ENDED]
