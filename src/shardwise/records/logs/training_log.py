"""Read the log of a training run: detect the framework by lines or tags, and collect its steps.

`read_training_log` takes files of lines, TensorBoard events, W&B histories and tables, or the folder of a run. Files of any size
are read block by block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.records.logs.frameworks import FORMATS
from shardwise.records.logs.logged_steps import (
    LogFormat,
    LoggedStep,
    TaggedValues,
    detect_format,
    fill_clock_times,
    merge_by_step,
    row_to_values,
    to_steps,
)
from shardwise.records.logs.tensorboard_events import NAME_PART, is_event_file, read_scalars
from shardwise.records.logs.wandb_history import (
    WANDB_SUFFIX,
    is_csv_export,
    is_wandb_file,
    read_csv_export,
    read_wandb_file,
)
from shardwise.records.run_folder import RunFolder
from shardwise.values.errors import InputError

BLOCK_BYTES = 1 << 20  # bytes read at a time
LONGEST_LINE = 1 << 16  # bytes kept of a line: lines of steps are a few hundred long
# Colours and cursors of terminals, and how `cat -v`, syslog and JSON write them.
_ESCAPES = re.compile(rb"(?:\x1b|\^\[|#033|\\x1b|\\u001b)\[[0-9;?]*[A-Za-z]")


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, however they end; of a longer one its last `LONGEST_LINE` bytes."""
    with path.open("rb") as file:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            *whole, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
            yield from whole
            rest = rest[-LONGEST_LINE:]
        if rest:
            yield rest


def decode_line(line: bytes) -> str:
    """A line as text, without what colours it."""
    return _ESCAPES.sub(b"", line[-LONGEST_LINE:]).decode("utf-8", errors="replace")


def parse_json_line(text: str) -> dict[str, Any] | None:
    """The object that a line is, in front of which a launcher may have written whose it is; None for none."""
    try:
        found = json.loads(text[text.find("{") :])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


TRACKER_PATTERNS = (f"*{NAME_PART}*", f"*{WANDB_SUFFIX}")  # of TensorBoard, of W&B


def find_tracker_files(folder: Path) -> list[Path]:
    """The event files of a run, in the order of their names, which is that of their beginnings; without any those of W&B.

    Raises `InputError` for a folder without any, and for one of several runs.
    """
    each = (sorted(path for path in folder.rglob(pattern) if path.is_file()) for pattern in TRACKER_PATTERNS)
    found = next((files for files in each if files), [])
    if not found:
        raise InputError(
            f"log: {folder} is a folder without log.jsonl, event files or files of W&B; the folder of a run is required"
        )
    folders = sorted({path.parent for path in found})
    if len(folders) > 1:
        named = ", ".join(map(str, folders[:3])) + (", ..." if len(folders) > 3 else "")
        raise InputError(
            f"log: {folder} has the files of runs in {len(folders)} folders ({named}); one of them is required"
        )
    return found


MOST_STEPS = 200_000  # kept of a log, the last ones
ALL_TAGS = frozenset(tag for one in FORMATS.values() for tag in (*one.tags, *((one.untimed,) if one.untimed else ())))
# A line that is an object with a tag which tells whose it is.
_IDENTIFYING_LINE = re.compile(
    b'\\{.*"(?:'
    + b"|".join(re.escape(tag.encode()) for one in FORMATS.values() for tag in one.identifying_tags)
    + b')"'
)
LINES, EVENTS, HISTORY, TABLE = "a log", "TensorBoard events", "a W&B history", "a table"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """The steps of a run, each once, in the order in which they were last logged.

    `medium`: what the log is. `first`: the first one that was logged. `memory_bytes`: the largest peak of a device. `torn`: lines
    of steps that could not be read. `by_clock`: no step said how long it took, and each time is that since the one before it.
    """

    format: LogFormat
    medium: str
    first: LoggedStep
    steps: tuple[LoggedStep, ...]
    memory_bytes: float | None
    torn: int
    by_clock: bool


@dataclass(slots=True)
class _LogReader:
    format: LogFormat | None = None
    medium: str = LINES
    first: LoggedStep | None = None
    steps: dict[int, LoggedStep] = field(default_factory=dict)
    memory_bytes: float | None = None
    torn: int = 0
    num_taken: int = 0

    def add_file(self, path: Path) -> int:
        """Take a file; how many steps it has."""
        before = self.num_taken
        whole = path.is_file()  # rather than a pipe, which cannot be looked at twice
        if whole and is_event_file(path):
            self._add_values(read_scalars(path, ALL_TAGS), EVENTS)
        elif whole and is_wandb_file(path):
            self._add_values(read_wandb_file(path, ALL_TAGS), HISTORY)
        elif whole and is_csv_export(path):
            self._add_values(read_csv_export(path, ALL_TAGS), TABLE)
        else:
            self._add_values(self._add_lines(path), LINES)
        return self.num_taken - before

    def _add_lines(self, path: Path) -> Iterator[TaggedValues | None]:
        """Take the lines of a file; those that are objects as points, None for one that is torn."""
        for line in read_lines(path):
            if _IDENTIFYING_LINE.search(line):
                row = parse_json_line(decode_line(line))
                yield row_to_values(row, ALL_TAGS) if row else None
            else:
                self._add_line(line)

    def _add_line(self, line: bytes) -> None:
        for one in FORMATS.values() if self.format is None else (self.format,):
            if one.has_step(line):
                found = one.step(decode_line(line))
                if found is not None:
                    self.format = one
                    self._add_step(found)
                    return
                self.torn += self.format is not None
            elif one.memory_marker is not None and one.memory_marker in line:
                self._add_peak(one.memory(decode_line(line)))

    def _add_values(self, points: Iterable[TaggedValues | None], medium: str) -> None:
        """Take points, if they are those of a framework."""
        found, torn = merge_by_step(points, MOST_STEPS)
        tags = {tag for point in found.values() for tag in point.values}
        form = detect_format(tags, FORMATS.values() if self.format is None else (self.format,))
        if form is not None:
            self.format, self.medium = form, medium
            self.torn += torn
            for step in to_steps(found.values(), form):
                self._add_step(step)

    def _add_step(self, found: LoggedStep) -> None:
        self.num_taken += 1
        earlier = self.steps.pop(found.step, None)
        self.steps[found.step] = earlier.merge(found) if earlier else found
        self.first = self.first or found
        if self.first.step == found.step:
            self.first = self.steps[found.step]
        self._add_peak(found.memory_bytes)
        if len(self.steps) > MOST_STEPS:
            del self.steps[next(iter(self.steps))]

    def _add_peak(self, memory_bytes: float | None) -> None:
        if memory_bytes is not None:
            self.memory_bytes = max(memory_bytes, self.memory_bytes or 0.0)


def read_training_log(paths: Sequence[Path]) -> TrainingLog:
    """The log of a run: one file, or several that follow each other or are of several ranks; or the folder of `shardwise train`,
    of TensorBoard or of W&B.

    The framework is that of the first line that one of them makes for a step, or of which most tags are. A step that is logged
    again, by another rank or after a restart, counts once, as it was logged last. Raises `InputError` for a file without a step.
    """
    if not paths:
        raise InputError("log: none given; the log of a training run is required")
    reading = _LogReader()
    for path in paths:
        try:
            if not sum(map(reading.add_file, _find_files(path))):
                raise InputError(_no_step_message(path, reading.format))
        except OSError as error:
            where = error.filename or path
            raise InputError(
                f"log: cannot read {where}: {error.strerror}; the log of a training run is required"
            ) from None
    assert reading.format is not None, "a file with a step has a format"
    assert reading.first is not None, "a file with a step has a first one"
    by_clock = not any(step.is_timed for step in reading.steps.values())
    steps = fill_clock_times(reading.steps.values()) if by_clock else reading.steps.values()
    return TrainingLog(
        format=reading.format, medium=reading.medium, first=reading.first, steps=tuple(steps),
        memory_bytes=reading.memory_bytes, torn=reading.torn, by_clock=by_clock,
    )  # fmt: skip


def _find_files(path: Path) -> list[Path]:
    """The files of a log: of the folder of a run its own one, of another one what a tracker keeps there."""
    if not path.is_dir():
        return [path]
    own = RunFolder(path).log
    return [own] if own.exists() else find_tracker_files(path)


def _no_step_message(path: Path, known: LogFormat | None) -> str:
    titles = ", ".join(one.title for one in FORMATS.values())
    of = f"a step of {known.title}, as the file before it," if known else f"a log of {titles}"
    return f"log: found no step in {path}; {of} with lines or tags of steps is required"
