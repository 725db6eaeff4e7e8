"""A training log, read: whose it is, by its lines, and its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwise.errors import InputError
from shardwise.measurement.folder import RunFolder
from shardwise.measurement.logs.formats import FORMATS
from shardwise.measurement.logs.lines import lines_of, text_of
from shardwise.measurement.logs.logged import LogFormat, LoggedStep

MOST_STEPS = 200_000  # kept of a log, the last ones


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """The steps of a run, each once, in the order in which they were last printed.

    `first`: the first one that was printed. `memory_bytes`: the largest peak of a device. `torn`: lines of steps that could not
    be read.
    """

    format: LogFormat
    first: LoggedStep
    steps: tuple[LoggedStep, ...]
    memory_bytes: float | None
    torn: int


@dataclass(slots=True)
class _Reading:
    format: LogFormat | None = None
    first: LoggedStep | None = None
    steps: dict[int, LoggedStep] = field(default_factory=dict)
    memory_bytes: float | None = None
    torn: int = 0

    def line(self, line: bytes) -> bool:
        """Take a line; whether it is one of a step."""
        for one in FORMATS.values() if self.format is None else (self.format,):
            if one.has_step(line):
                found = one.step(text_of(line))
                if found is not None:
                    self.format = one
                    self._add(found)
                    return True
                self.torn += self.format is not None
            elif one.memory_marker is not None and one.memory_marker in line:
                self._peak(one.memory(text_of(line)))
        return False

    def _add(self, found: LoggedStep) -> None:
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
    """The log of a run: one file, or several that follow each other or are of several ranks; or the folder of `shardwise train`.

    The framework is that of the first line that one of them makes for a step. A step that is printed again, by another rank or
    after a restart, counts once, as it was printed last. Raises `InputError` for a file without a step.
    """
    if not paths:
        raise InputError("log: none given; the log of a training run is required")
    reading = _Reading()
    for path in _files(paths):
        if not sum(map(reading.line, lines_of(path))):
            raise InputError(_nothing(path, reading.format))
    assert reading.format is not None, "a file with a step has a format"
    assert reading.first is not None, "a file with a step has a first one"
    return TrainingLog(
        format=reading.format, first=reading.first, steps=tuple(reading.steps.values()),
        memory_bytes=reading.memory_bytes, torn=reading.torn,
    )  # fmt: skip


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            folder = RunFolder(path)
            if not folder.log.exists():
                raise InputError(
                    f"log: {path} is a folder without log.jsonl; a log, or the folder of a run, is required"
                )
            yield folder.log
        else:
            yield path


def _nothing(path: Path, known: LogFormat | None) -> str:
    titles = ", ".join(one.title for one in FORMATS.values())
    of = f"a step of {known.title}, as the file before it," if known else f"a log of {titles}"
    return f"log: found no step in {path}; {of} with lines of steps is required"
