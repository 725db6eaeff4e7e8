"""Read the log of a training run: detect the framework by lines or tags, collect its steps, and measure its steady state.

`read_training_log` takes files of lines, TensorBoard events, W&B histories and tables, or the folder of a run. Files of any
size are read block by block. `measure_steady_state` gives the median step, and says which lines do not count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shardwise import values
from shardwise.records.logs.frameworks import FORMATS
from shardwise.records.logs.logged_steps import (
    LogFormat,
    LoggedStep,
    RunHeader,
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
from shardwise.values import InputError, open_input

BLOCK_BYTES = 1 << 20  # bytes read at a time
LONGEST_LINE = 1 << 16  # bytes kept of a line: lines of steps are a few hundred long
# Colours and cursors of terminals, and how `cat -v`, syslog and JSON write them.
_ESCAPES = re.compile(rb"(?:\x1b|\^\[|#033|\\x1b|\\u001b)\[[0-9;?]*[A-Za-z]")


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, with any line ending; of a longer one its last `LONGEST_LINE` bytes."""
    with open_input(path, allow_pipe=True) as file:
        rest = b""
        while block := file.read(BLOCK_BYTES):
            *lines, rest = (rest + block).replace(b"\r", b"\n").split(b"\n")
            yield from lines
            rest = rest[-LONGEST_LINE:]
        if rest:
            yield rest


def decode_line(line: bytes) -> str:
    """Return a line as text, without terminal escapes."""
    return _ESCAPES.sub(b"", line[-LONGEST_LINE:]).decode("utf-8", errors="replace")


def parse_json_line(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a line, after any prefix of a launcher, or None."""
    try:
        payload = values.parse_json_line(text[text.find("{") :])
    except ValueError:
        return None
    return payload if isinstance(payload, dict) else None


TRACKER_PATTERNS = (f"*{NAME_PART}*", f"*{WANDB_SUFFIX}")  # of TensorBoard, of W&B


def find_tracker_files(folder: Path) -> list[Path]:
    """Return the event files of a run in order of their names, which is that of their start times; without any, those of W&B.

    Raises `InputError` for a folder with neither, and for one of several runs.
    """
    files_by_pattern = (
        sorted(path for path in folder.rglob(pattern) if path.is_file()) for pattern in TRACKER_PATTERNS
    )
    tracker_files = next((files for files in files_by_pattern if files), [])
    if not tracker_files:
        raise InputError(
            f"log: {folder} is a folder without log.jsonl, event files or files of W&B; the folder of a run is required"
        )
    folders = sorted({path.parent for path in tracker_files})
    if len(folders) > 1:
        named = ", ".join(map(str, folders[:3])) + (", ..." if len(folders) > 3 else "")
        raise InputError(
            f"log: {folder} has the files of runs in {len(folders)} folders ({named}); one of them is required"
        )
    return tracker_files


NO_HEADER = RunHeader()
HEADER_LINES = 10_000  # lines before which the header of a run is looked for
MOST_STEPS = 200_000  # steps kept of a log, the last ones
ALL_TAGS = frozenset(
    tag
    for log_format in FORMATS.values()
    for tag in (*log_format.tags, *((log_format.untimed,) if log_format.untimed else ()))
)
# A JSON object with a tag that identifies its framework.
_IDENTIFYING_LINE = re.compile(
    b'\\{.*"(?:'
    + b"|".join(re.escape(tag.encode()) for log_format in FORMATS.values() for tag in log_format.identifying_tags)
    + b')"'
)
LINES, EVENTS, HISTORY, TABLE = "a log", "TensorBoard events", "a W&B history", "a table"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLog:
    """Steps of a run, each once, in the order in which they were last logged.

    `medium`: kind of log. `first`: the first step that was logged. `memory_bytes`: the largest peak of a device. `torn`:
    lines of steps that could not be read. `by_clock`: no step had a time or a rate, and each time is the one since the
    previous step. `header`: what was logged of the run before its steps.
    """

    format: LogFormat
    medium: str
    first: LoggedStep
    steps: tuple[LoggedStep, ...]
    memory_bytes: float | None
    torn: int
    by_clock: bool
    header: RunHeader = NO_HEADER


@dataclass(slots=True)
class _LogReader:
    format: LogFormat | None = None
    medium: str = LINES
    first: LoggedStep | None = None
    steps: dict[int, LoggedStep] = field(default_factory=dict)
    memory_bytes: float | None = None
    torn: int = 0
    num_taken: int = 0
    header: RunHeader = NO_HEADER

    def add_file(self, path: Path) -> int:
        """Read a file and return the number of its steps."""
        taken_before = self.num_taken
        is_file = path.is_file()  # a pipe cannot be read twice
        if is_file and is_event_file(path):
            self._add_values(read_scalars(path, ALL_TAGS), EVENTS)
        elif is_file and is_wandb_file(path):
            self._add_values(read_wandb_file(path, ALL_TAGS), HISTORY)
        elif is_file and is_csv_export(path):
            self._add_values(read_csv_export(path, ALL_TAGS), TABLE)
        else:
            self._add_values(self._add_lines(path), LINES)
        return self.num_taken - taken_before

    def _add_lines(self, path: Path) -> Iterator[TaggedValues | None]:
        """Read the lines of a file; yield JSON objects as points, None for a torn one."""
        for line in read_lines(path):
            if _IDENTIFYING_LINE.search(line):
                row = parse_json_line(decode_line(line))
                yield row_to_values(row, ALL_TAGS) if row else None
            else:
                self._add_line(line)

    def _add_line(self, line: bytes) -> None:
        for log_format in FORMATS.values() if self.format is None else (self.format,):
            if log_format.has_step(line):
                step = log_format.step(decode_line(line))
                if step is not None:
                    self.format = log_format
                    self._add_step(step)
                    return
                self.torn += self.format is not None
            elif log_format.memory_marker is not None and log_format.memory_marker in line:
                self._add_peak(log_format.memory(decode_line(line)))
            elif log_format.header_marker is not None and log_format.header_marker in line:
                self.header = log_format.header(decode_line(line)) or self.header

    def _add_values(self, points: Iterable[TaggedValues | None], medium: str) -> None:
        """Add points, if they are those of a framework."""
        by_step, torn = merge_by_step(points, MOST_STEPS)
        tags = {tag for point in by_step.values() for tag in point.values}
        log_format = detect_format(tags, FORMATS.values() if self.format is None else (self.format,))
        if log_format is not None:
            self.format, self.medium = log_format, medium
            self.torn += torn
            for step in to_steps(by_step.values(), log_format):
                self._add_step(step)

    def _add_step(self, step: LoggedStep) -> None:
        self.num_taken += 1
        earlier = self.steps.pop(step.step, None)  # a repeated step moves to the end
        self.steps[step.step] = earlier.merge(step) if earlier else step
        self.first = self.first or step
        if self.first.step == step.step:
            self.first = self.steps[step.step]
        self._add_peak(step.memory_bytes)
        if len(self.steps) > MOST_STEPS:
            del self.steps[next(iter(self.steps))]

    def _add_peak(self, memory_bytes: float | None) -> None:
        if memory_bytes is not None:
            self.memory_bytes = max(memory_bytes, self.memory_bytes or 0.0)


def read_training_log(paths: Sequence[Path]) -> TrainingLog:
    """Read the log of a run: one file, several that follow each other or are of several ranks, or the folder of `shardwise
    train`, of TensorBoard or of W&B.

    The first line that parses as a step, or the tags, determine the framework. A step that is logged again, by another rank
    or after a restart, counts once, as it was logged last. Raises `InputError` for a file without a step.
    """
    if not paths:
        raise InputError("log: none given; the log of a training run is required")
    reader = _LogReader()
    for path in paths:
        try:
            if not sum(map(reader.add_file, _find_files(path))):
                raise InputError(_no_step_message(path, reader.format))
        except OSError as error:
            where = error.filename or path
            raise InputError(
                f"log: cannot read {where}: {error.strerror}; the log of a training run is required"
            ) from None
    assert reader.format is not None, "a file with a step has a format"
    assert reader.first is not None, "a file with a step has a first one"
    by_clock = not any(step.is_timed for step in reader.steps.values())
    steps = fill_clock_times(reader.steps.values()) if by_clock else reader.steps.values()
    return TrainingLog(
        format=reader.format, medium=reader.medium, first=reader.first, steps=tuple(steps),
        memory_bytes=reader.memory_bytes, torn=reader.torn, by_clock=by_clock, header=reader.header,
    )  # fmt: skip


def read_run_header(paths: Sequence[Path]) -> RunHeader:
    """Return the batch and sequence that log files give before their steps; nothing from folders, pipes and unreadable files."""
    reader = _LogReader()
    for path in filter(Path.is_file, paths):
        with suppress(OSError):
            for number, line in enumerate(read_lines(path)):
                if reader.header.seq_len or number > HEADER_LINES:
                    break
                reader._add_line(line)
    return reader.header


def _find_files(path: Path) -> list[Path]:
    """Return the files of a log: in the folder of a run its own one, in another folder a tracker's."""
    if not path.is_dir():
        return [path]
    run_log = RunFolder(path).log
    return [run_log] if run_log.exists() else find_tracker_files(path)


def _no_step_message(path: Path, log_format: LogFormat | None) -> str:
    titles = ", ".join(known_format.title for known_format in FORMATS.values())
    required = f"a step of {log_format.title}, as the file before it," if log_format else f"a log of {titles}"
    return f"log: found no step in {path}; {required} with lines or tags of steps is required"


# The first tenth of a run's lines, at least 3 and at most 50, is its warm-up: compilation, autotuning, allocators, caches.
# Benchmark recipes leave out as much (NVIDIA's DGX Cloud ones take steps 25 to 50 of 50, MaxText's the last ones).
WARM_UP, LEAST_WARM_UP, MOST_WARM_UP = 0.1, 3, 50
# Outliers of the rest have a modified z-score above 3.5 (Iglewicz and Hoaglin 1993, How to Detect and Handle Outliers:
# 0.6745 (x - median) / MAD), and more than a twentieth, by which steps of one job differ (docs/accuracy.md). They are steps
# with a checkpoint, an evaluation or a stall. Where more than a quarter would be, the run has several speeds, and all count.
Z_SCORE, NORMAL_MAD, CLOSE_PART, MOST_OUTLIERS = 3.5, 0.6745, 0.05, 0.25
RULE = (
    "the median of the lines behind the first tenth (at least 3, at most 50), without those of another batch and those that are "
    "over 5% and a modified z-score of 3.5 off (at most a quarter)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSteadyState:
    """Steady state of a run: the time of a token without disturbances.

    `device_s_per_token`: seconds of a device for a token: the inverse of tokens/s of one device. `low` and `high`: its 10th and
    90th percentiles. `overhead`: by how much longer the lines behind the warm-up take on average with those that are far off.
    `num_lines` were read, of which `num_warm_up`, `num_other_batch` and `num_outliers` do not count. `mfu`, `tflops`: the
    framework's own, in the median; `batch_tokens` where the log says them.
    """

    device_s_per_token: float
    low: float
    high: float
    overhead: float
    num_lines: int
    num_warm_up: int
    num_other_batch: int
    num_outliers: int
    batch_tokens: int | None
    mfu: float | None
    tflops: float | None

    @property
    def num_steady(self) -> int:
        return self.num_lines - self.num_warm_up - self.num_other_batch - self.num_outliers


def measure_steady_state(
    log: TrainingLog, num_devices: int, seq_len: int, batch_tokens: int | None = None
) -> RunSteadyState:
    """Return the steady state of a run. `batch_tokens`: tokens of the global batch, for a log without them.

    Raises `InputError` if no line has a time or a rate, and for a batch that contradicts the log's.
    """
    timed = [(step, _batch_tokens(step, seq_len)) for step in log.steps if step.is_timed]
    if not timed:
        raise InputError(f"log: no step of {log.format.title} in it has a time or a rate; a log with one is required")
    if log.header.seq_len and log.header.seq_len != seq_len:
        raise InputError(
            f"--seq-len: found {seq_len:,}, and the log says {log.header.seq_len:,}; the sequence of the run is required"
        )
    step_batch = timed[-1][1]
    logged_batch = step_batch or log.header.tokens
    if logged_batch and batch_tokens and logged_batch != batch_tokens:
        raise InputError(
            f"--batch-tokens: found {batch_tokens:,}, and the log says {logged_batch:,} (sequences of {seq_len:,}); the batch "
            "of the run is required, or none: the log has it"
        )
    batch = logged_batch or batch_tokens
    same_batch = [step for step, step_tokens in timed if step_tokens == step_batch]
    warm_up = num_warm_up(len(same_batch))
    counted = same_batch[warm_up:]
    _require_consistent_batch(counted, num_devices, batch)
    paces = [_pace(step, num_devices, batch) for step in counted]
    typical = drop_outliers(paces)
    typical_pace = median(typical)
    return RunSteadyState(
        device_s_per_token=typical_pace, low=interpolated_percentile(typical, 0.1), high=interpolated_percentile(typical, 0.9),
        overhead=sum(paces) / len(paces) / (sum(typical) / len(typical)) - 1.0, num_lines=len(log.steps),
        num_warm_up=warm_up, num_other_batch=len(log.steps) - len(same_batch), num_outliers=len(paces) - len(typical),
        batch_tokens=logged_batch, mfu=_median_of_stated([step.mfu for step in counted]),
        tflops=_median_of_stated([step.tflops for step in counted]),
    )  # fmt: skip


def num_warm_up(num_lines: int) -> int:
    """Return how many of the first lines are the warm-up; at least half of them, and one, stay.

    >>> [num_warm_up(n) for n in (1, 2, 5, 8, 100, 10_000)]
    [0, 1, 2, 3, 10, 50]
    """
    return min(max(math.ceil(WARM_UP * num_lines), LEAST_WARM_UP), MOST_WARM_UP, num_lines // 2)


def drop_outliers(paces: Sequence[float]) -> list[float]:
    """Return the values without outliers (`RULE`), or all of them if over a quarter would go.

    >>> drop_outliers([1.0, 1.01, 0.99, 1.02, 7.0])
    [1.0, 1.01, 0.99, 1.02]
    """
    middle = median(paces)
    spread = median(abs(pace - middle) for pace in paces)
    max_deviation = max(Z_SCORE / NORMAL_MAD * spread, CLOSE_PART * middle)
    typical = [pace for pace in paces if abs(pace - middle) <= max_deviation]
    return typical if len(paces) - len(typical) <= MOST_OUTLIERS * len(paces) else list(paces)


def interpolated_percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, interpolated linearly between values."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    return ordered[low] + (position - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def _batch_tokens(step: LoggedStep, seq_len: int) -> int | None:
    return step.batch_tokens or (step.batch_seqs * seq_len if step.batch_seqs else None)


def _both_paces(step: LoggedStep, num_devices: int, batch_tokens: int | None) -> tuple[float | None, float | None]:
    """Return device-seconds per token by the step's time and by its rate."""
    by_time = step.step_time_s * num_devices / batch_tokens if step.step_time_s and batch_tokens else None
    return by_time, 1.0 / step.tokens_per_s if step.tokens_per_s else None


def _require_consistent_batch(steps: Sequence[LoggedStep], num_devices: int, batch_tokens: int | None) -> None:
    """Raise `InputError` if times and rates contradict this batch on this number of devices."""
    paces_and_steps = [(pace, step) for step in steps if all(pace := _both_paces(step, num_devices, batch_tokens))]
    ratios = [by_time / by_rate for (by_time, by_rate), _ in paces_and_steps if by_time and by_rate]
    if not ratios or 1 - CLOSE_PART < median(ratios) < 1 + CLOSE_PART:
        return
    step = paces_and_steps[len(paces_and_steps) // 2][1]
    raise InputError(
        f"log: step {step.step} took {step.step_time_s:g} s at {step.tokens_per_s:,.0f} tokens/s on each device, which on "
        f"{num_devices:,} devices is a batch of {median(ratios) * (batch_tokens or 0):,.0f} tokens and not of "
        f"{batch_tokens:,}; the batch and the devices of the run are required"
    )


def _pace(step: LoggedStep, num_devices: int, batch_tokens: int | None) -> float:
    """Return device-seconds per token by the step's time, which has more digits, or by its rate.

    By the rate if they differ: torchtitan's time is that of `log_freq` steps, also if fewer ran since the last line.
    """
    by_time, by_rate = _both_paces(step, num_devices, batch_tokens)
    if by_time and by_rate and not 1 - CLOSE_PART < by_time / by_rate < 1 + CLOSE_PART:
        return by_rate
    pace = by_time or by_rate
    if pace is None:
        raise InputError(
            "--batch-tokens: missing, and the log has times of steps alone; the tokens of a batch are required"
        )
    return pace


def _median_of_stated(values: Sequence[float | None]) -> float | None:
    stated = [value for value in values if value is not None]
    return median(stated) if stated else None
