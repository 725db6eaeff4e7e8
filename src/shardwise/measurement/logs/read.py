"""A training log, read: whose it is, by its lines or tags, and its steps."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import InputError
from shardwise.measurement.folder import RunFolder
from shardwise.measurement.logs.datastore import datastore_points, is_datastore
from shardwise.measurement.logs.events import event_points, is_events
from shardwise.measurement.logs.exported import is_table, table_points
from shardwise.measurement.logs.formats import FORMATS
from shardwise.measurement.logs.lines import json_line, lines_of, text_of
from shardwise.measurement.logs.logged import LogFormat, LoggedStep
from shardwise.measurement.logs.points import Point, by_the_clock, format_of, gathered, point_of, steps_of
from shardwise.measurement.logs.tracked import tracked_files

MOST_STEPS = 200_000  # kept of a log, the last ones
TAGS = frozenset(tag for one in FORMATS.values() for tag in (*one.tags, *((one.untimed,) if one.untimed else ())))
# A line that is an object with a tag which tells whose it is.
_TOLD = re.compile(
    b'\\{.*"(?:' + b"|".join(re.escape(tag.encode()) for one in FORMATS.values() for tag in one.told_by) + b')"'
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
class _Reading:
    format: LogFormat | None = None
    medium: str = LINES
    first: LoggedStep | None = None
    steps: dict[int, LoggedStep] = field(default_factory=dict)
    memory_bytes: float | None = None
    torn: int = 0
    num_taken: int = 0

    def file(self, path: Path) -> int:
        """Take a file; how many steps it has."""
        before = self.num_taken
        whole = path.is_file()  # rather than a pipe, which cannot be looked at twice
        if whole and is_events(path):
            self._points(event_points(path, TAGS), EVENTS)
        elif whole and is_datastore(path):
            self._points(datastore_points(path, TAGS), HISTORY)
        elif whole and is_table(path):
            self._points(table_points(path, TAGS), TABLE)
        else:
            self._points(self._lines(path), LINES)
        return self.num_taken - before

    def _lines(self, path: Path) -> Iterator[Point | None]:
        """Take the lines of a file; those that are objects as points, None for one that is torn."""
        for line in lines_of(path):
            if _TOLD.search(line):
                row = json_line(text_of(line))
                yield point_of(row, TAGS) if row else None
            else:
                self._line(line)

    def _line(self, line: bytes) -> None:
        for one in FORMATS.values() if self.format is None else (self.format,):
            if one.has_step(line):
                found = one.step(text_of(line))
                if found is not None:
                    self.format = one
                    self._add(found)
                    return
                self.torn += self.format is not None
            elif one.memory_marker is not None and one.memory_marker in line:
                self._peak(one.memory(text_of(line)))

    def _points(self, points: Iterable[Point | None], medium: str) -> None:
        """Take points, if they are those of a framework."""
        found, torn = gathered(points, MOST_STEPS)
        tags = {tag for point in found.values() for tag in point.values}
        form = format_of(tags, FORMATS.values() if self.format is None else (self.format,))
        if form is not None:
            self.format, self.medium = form, medium
            self.torn += torn
            for step in steps_of(found.values(), form):
                self._add(step)

    def _add(self, found: LoggedStep) -> None:
        self.num_taken += 1
        earlier = self.steps.pop(found.step, None)
        self.steps[found.step] = earlier.merged(found) if earlier else found
        self.first = self.first or found
        if self.first.step == found.step:
            self.first = self.steps[found.step]
        self._peak(found.memory_bytes)
        if len(self.steps) > MOST_STEPS:
            del self.steps[next(iter(self.steps))]

    def _peak(self, memory_bytes: float | None) -> None:
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
    reading = _Reading()
    for path in paths:
        try:
            if not sum(map(reading.file, _files(path))):
                raise InputError(_nothing(path, reading.format))
        except OSError as error:
            where = error.filename or path
            raise InputError(
                f"log: cannot read {where}: {error.strerror}; the log of a training run is required"
            ) from None
    assert reading.format is not None, "a file with a step has a format"
    assert reading.first is not None, "a file with a step has a first one"
    by_clock = not any(step.is_timed for step in reading.steps.values())
    steps = by_the_clock(reading.steps.values()) if by_clock else reading.steps.values()
    return TrainingLog(
        format=reading.format, medium=reading.medium, first=reading.first, steps=tuple(steps),
        memory_bytes=reading.memory_bytes, torn=reading.torn, by_clock=by_clock,
    )  # fmt: skip


def _files(path: Path) -> list[Path]:
    """The files of a log: of the folder of a run its own one, of another one what a tracker keeps there."""
    if not path.is_dir():
        return [path]
    own = RunFolder(path).log
    return [own] if own.exists() else tracked_files(path)


def _nothing(path: Path, known: LogFormat | None) -> str:
    titles = ", ".join(one.title for one in FORMATS.values())
    of = f"a step of {known.title}, as the file before it," if known else f"a log of {titles}"
    return f"log: found no step in {path}; {of} with lines or tags of steps is required"
