"""Log of a run, `log.jsonl`: the record of a step, its rates and MFU, the writer and the reader; steps to a loss.

The log has a JSON line for each step, with torchtitan's names where it has one. A line with a "schema" is a header, written
at each start of the run; one with "validation_metrics/loss" is a validation; one with an "event" reports something beside the
steps, such as a "rewind"; any other is a step, and one with "inspected" was recorded by the inspector, and slower for it.
Every line is flushed as it is written; an incomplete last line, as a killed run leaves it, is not read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.values import (
    TIME_TERMS,
    InputError,
    format_quantity,
    name_path_in_errors,
    parse_json_line,
    raise_problems,
    read_lines,
    short_repr,
    write_text_atomic,
)

# Terms of an estimate, and two that no estimate has: the wait for data, and the rest.
MEASURED_TERMS = (*TIME_TERMS, "data", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step, counted from 1: `step` is the number of steps done with it.

    `loss` is the mean over the `num_targets` of the global batch, in nats; `grad_norm` that of all gradients together, before
    it is clipped. `num_tokens` are those of the global batch. `seconds` by name of `MEASURED_TERMS`, of `step_time_s`
    wall-clock seconds.

    For models with experts: `auxiliary_loss`, `expert_imbalance` (rows of the fullest expert over the mean, on the first
    process's stages), and with a capacity `dropped_share` (share of that process's rows that no expert took).
    `prediction_loss`, for multi-token prediction: the mean over its modules, without its weight. `loss` includes no other
    loss. In fp16: the `loss_scale` of the next step, and the steps skipped so far (`num_skipped`), whose gradients were not
    finite.

    A step that measured the noise scale has its inputs: the mean squared norm of the gradients of parts of the batch, of
    `small_tokens` each, and that of the whole batch of `big_tokens`, both of the loss per token and before they are clipped.
    Raises `InputError` for an unknown term and for an impossible time.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_targets: int
    step_time_s: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    auxiliary_loss: float | None = None
    expert_imbalance: float | None = None
    dropped_share: float | None = None
    prediction_loss: float | None = None
    loss_scale: float | None = None
    num_skipped: int | None = None
    small_norm_squared: float | None = None
    big_norm_squared: float | None = None
    small_tokens: float | None = None
    big_tokens: float | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.seconds if name not in MEASURED_TERMS]
        problems = [f"seconds of {name!r}; one of {', '.join(MEASURED_TERMS)}" for name in unknown]
        if self.step < 1:
            problems.append(f"step {self.step}; at least 1")
        if not 0 < self.step_time_s < math.inf:
            problems.append(f"step_time_s {self.step_time_s}; a time above 0")
        raise_problems([f"step record: found {problem} is required" for problem in problems])


@dataclass(frozen=True, slots=True, kw_only=True)
class MfuFormula:
    """Formula that turns a step into rates.

    `flops_per_token` are the model's, forward and backward, with causal attention counted once and no recomputation;
    `hardware_ratio` is what the devices run over that. `peak_flops_per_s` is one device's in `peak_format`; None if the chip
    has no sourced one, and then there is neither MFU nor HFU. Source of MFU: Chowdhery et al. 2022 (PaLM), appendix B.
    """

    num_devices: int
    chip: str
    flops_per_token: float
    hardware_ratio: float
    peak_format: str
    peak_flops_per_s: float | None

    def tokens_per_s(self, record: StepRecord) -> float:
        """Return the tokens of the global batch per second, over all devices."""
        return record.num_tokens / record.step_time_s

    def flops_per_s(self, record: StepRecord) -> float:
        """Return the model's FLOP/s on one device."""
        return self.flops_per_token * self.tokens_per_s(record) / self.num_devices

    def mfu(self, record: StepRecord) -> float | None:
        """Return the model FLOPs utilisation, 0 to 1; None without a peak."""
        return None if self.peak_flops_per_s is None else self.flops_per_s(record) / self.peak_flops_per_s

    def hfu(self, record: StepRecord) -> float | None:
        """Return the hardware FLOPs utilisation, which counts recomputation; None without a peak."""
        mfu = self.mfu(record)
        return None if mfu is None else mfu * self.hardware_ratio

    def formula(self) -> str:
        """Return how MFU and HFU are computed, with the numbers that go in."""
        if self.peak_flops_per_s is None:
            return f"MFU n/a: {self.chip} has no sourced {self.peak_format} peak"
        return (
            f"MFU = {format_quantity(self.flops_per_token, 'FLOP', digits=4)}/token x tokens/s / ({self.num_devices} x "
            f"{format_quantity(self.peak_flops_per_s, 'FLOP/s', digits=4)}), the dense {self.peak_format} peak of {self.chip}; "
            f"HFU = {self.hardware_ratio:.3f} x MFU"
        )


SCHEMA = "shardwise.log/1"
# Source of the names with a unit in brackets, a slash or a capital: torchtitan, torchtitan/components/metrics.py
# (MetricsProcessor.log, log_validation; n_tokens_seen: torchtitan/trainer.py), where tps is that of one device.
LOSS, VALIDATION_LOSS, SECONDS = "loss_metrics/global_avg_loss", "validation_metrics/loss", "time_metrics/end_to_end(s)"
DATA_SECONDS, DATA_PART = "time_metrics/data_loading(s)", "time_metrics/data_loading(%)"
INSPECTED, EVENT = "inspected", "event"
CHECKPOINT_EVENT = "checkpoint"  # an event: a checkpoint of the step is complete
TARGET_EVENT = "target"  # an event: the smoothed loss has reached the target, and the run ends
BATCH_EVENT = "batch"  # an event: another batch from the next step on, by noise scale
SLOW_EVENT = "slow"  # an event: the set of ranks slower than others with the same work has changed
TERM_PREFIX = "seconds/"  # ours, before the name of a term
EPOCHS_PREFIX = "epochs/"  # ours, before the name of a source of a mixture: epochs of it so far
REQUIRED_FIELDS = ("learning_rate", "num_tokens", "num_targets")
OPTIONAL_FIELDS = (
    "auxiliary_loss", "expert_imbalance", "dropped_share", "prediction_loss", "loss_scale", "num_skipped",
    "small_norm_squared", "big_norm_squared", "small_tokens", "big_tokens",
)  # fmt: skip


def format_step_line(record: StepRecord, throughput: MfuFormula, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the log line of a step. `more` has what neither the record nor its rates have, such as the memory of the device."""
    tokens_per_s, data_s = throughput.tokens_per_s(record), record.seconds.get("data", 0.0)
    line = {
        "step": record.step, LOSS: record.loss, "grad_norm": record.grad_norm,
        "throughput(tps)": tokens_per_s / throughput.num_devices, "tflops": throughput.flops_per_s(record) / 1e12,
        "mfu(%)": _percent(throughput.mfu(record)), "hfu(%)": _percent(throughput.hfu(record)),
        SECONDS: record.step_time_s, DATA_SECONDS: data_s, DATA_PART: 100.0 * data_s / record.step_time_s,
        **{name: getattr(record, name) for name in REQUIRED_FIELDS}, "tokens_per_s": tokens_per_s,
        **{TERM_PREFIX + name: seconds for name, seconds in record.seconds.items()},
    }  # fmt: skip
    optional = {name: getattr(record, name) for name in OPTIONAL_FIELDS}
    line |= {name: value for name, value in optional.items() if value is not None}
    return {name: _json_number(value) for name, value in (line | dict(more)).items() if value is not None}


def _percent(fraction: float | None) -> float | None:
    return None if fraction is None else 100.0 * fraction


def _json_number(value: Any) -> Any:
    """Return a number for JSON; infinities and NaN become texts, which `float` reads back."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


NON_FINITE = ("nan", "inf", "-inf")  # as `_json_number` writes them
MAX_STEP = 10**12


def parse_step(line: Mapping[str, Any]) -> StepRecord:
    """Return the record of a step's line. Raises `ValueError` for a value that is missing or no number."""
    required: dict[str, Any] = {name: _read_number(line, name) for name in REQUIRED_FIELDS}
    optional: dict[str, Any] = {name: _read_number(line, name, required=False) for name in OPTIONAL_FIELDS}
    return StepRecord(
        step=_read_step(line), loss=float(_read_number(line, LOSS)), grad_norm=float(_read_number(line, "grad_norm")),
        step_time_s=_read_number(line, SECONDS),
        seconds={name: _read_number(line, TERM_PREFIX + name) for name in MEASURED_TERMS if TERM_PREFIX + name in line},
        **required, **optional,
    )  # fmt: skip


def _read_step(line: Mapping[str, Any]) -> int:
    step: Any = line.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MAX_STEP:
        raise ValueError(f"step is {short_repr(step)}; a whole number is required")
    return step


def _read_number(line: Mapping[str, Any], name: str, *, required: bool = True) -> Any:
    """Return the number under a name, or None if it may be missing and is. Raises `ValueError` for anything else."""
    value = line.get(name)
    if value is None and not required:
        return None
    if isinstance(value, str) and value in NON_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} is {short_repr(value)}; a number is required")
    return value


class LogWriter:
    """Writer that appends lines to a log."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        """Append a line and flush it."""
        with name_path_in_errors(self._path):
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with name_path_in_errors(self._path):
            self._file.close()


@dataclass(frozen=True, slots=True)
class StepLog:
    """Contents of a log: the header of each start, the steps, the validation losses (nats) by step, the numbers of the
    inspected steps, and the events."""

    headers: tuple[Mapping[str, Any], ...]
    steps: tuple[StepRecord, ...]
    validation: Mapping[int, float]
    inspected: frozenset[int] = frozenset()
    events: tuple[Mapping[str, Any], ...] = ()

    @property
    def timed_steps(self) -> tuple[StepRecord, ...]:
        """Steps whose seconds count: those that were not inspected, if there are any."""
        return tuple(record for record in self.steps if record.step not in self.inspected) or self.steps


def read_log(path: Path) -> StepLog:
    """Read a log. Raises `InputError` for one that is missing or damaged elsewhere than in its last line."""
    headers: list[Mapping[str, Any]] = []
    steps: list[StepRecord] = []
    validation: dict[int, float] = {}
    inspected: set[int] = set()
    events: list[Mapping[str, Any]] = []
    for number, line in enumerate(_read_lines(path), start=1):
        try:
            if "schema" in line:
                headers.append(line)
                continue
            step = _read_step(line)
            if EVENT in line:
                events.append(line)
            elif VALIDATION_LOSS in line:
                validation[step] = float(_read_number(line, VALIDATION_LOSS))
            else:
                steps.append(parse_step(line))
                inspected |= {step} if line.get(INSPECTED) else set()
        except (InputError, ValueError) as error:
            raise InputError(f"{path}, line {number}: {error}; a log that a run wrote is required") from None
    return StepLog(tuple(headers), tuple(steps), validation, frozenset(inspected), tuple(events))


def truncate_log(path: Path, step: int) -> None:
    """Remove the steps after `step`, which will be run again, and a torn last line."""
    lines = [line for line in _read_lines(path) if "step" not in line or _read_step(line) <= step]
    write_text_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        for number, text in enumerate(read_lines(path), start=1):
            if text.endswith(b"\n"):  # a last line without a line break is torn
                yield _parse_line(text, f"{path}, line {number}")
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror}; the log of a run is required") from None


def _parse_line(text: bytes, location: str) -> dict[str, Any]:
    try:
        line = parse_json_line(text.decode("utf-8", errors="replace"))
        if not isinstance(line, dict) or not ("schema" in line or "step" in line):
            raise ValueError("no line of a log")
    except ValueError as error:
        raise InputError(f"{location}: {error}; a log that a run wrote is required") from None
    return line


SMOOTHED_PART = 3  # a smoothed loss uses the last third of the steps
FEWEST_STEPS = 8  # steps that a line is fitted to


class StepsToLoss:
    """Tracker of the number of steps after which the smoothed training loss of a run is at most `target` nats.

    The smoothed loss after s steps is the value at s of the straight line in log steps (least squares) through the losses of
    the last third of them: their mean would lag behind. Steps are interpolated between the last smoothed loss above the
    target and the first one that is not. It is the training loss, of new samples as long as the run does not repeat its data;
    the loss of a step is that before its update. Losses that are not finite are left out.

    >>> target = StepsToLoss(3.0)
    >>> for step in range(1, 200):
    ...     if target.add_loss(6.0 - 0.75 * math.log(step)):
    ...         break
    >>> step, abs(target.steps / math.exp(4) - 1) < 1e-3
    (55, True)
    """

    def __init__(self, target: float) -> None:
        self.target = target
        self.steps: float | None = None
        self._smoothed = math.inf
        self._sums = [(0, 0.0, 0.0, 0.0, 0.0)]  # up to each step: 1, x, x², y and x·y of its log step x and loss y

    @property
    def smoothed(self) -> float | None:
        """Smoothed loss after the steps so far; None if they are too few."""
        return self._smoothed if self._smoothed < math.inf else None

    def add_loss(self, loss: float) -> bool:
        """Add the loss of the next step; return True once the target is reached."""
        x = math.log(len(self._sums))
        terms = (1, x, x * x, loss, x * loss) if math.isfinite(loss) else (0, 0.0, 0.0, 0.0, 0.0)
        self._sums.append(tuple(a + b for a, b in zip(self._sums[-1], terms, strict=True)))  # type: ignore[arg-type]
        previous, self._smoothed = self._smoothed, self._line(x)
        if self.steps is None and self._smoothed <= self.target:
            num_steps = len(self._sums) - 1
            fraction = (previous - self.target) / (previous - self._smoothed) if previous < math.inf else 1.0
            self.steps = num_steps - 1 + fraction
        return self.steps is not None

    def _line(self, log_step: float) -> float:
        """Return the smoothed loss at a log step; infinite if the steps are too few for a line."""
        num_steps = len(self._sums) - 1
        first = self._sums[num_steps - max(num_steps // SMOOTHED_PART, min(FEWEST_STEPS, num_steps))]
        # Differences of prefix sums are the sums over the window. A line in log steps, as a mean would lag behind.
        count, x, xx, y, xy = (b - a for a, b in zip(first, self._sums[-1], strict=True))
        if count < FEWEST_STEPS:
            return math.inf
        slope = (count * xy - x * y) / (count * xx - x * x)
        return (y + slope * (count * log_step - x)) / count


def steps_to_loss(losses: Iterable[float], target: float) -> float | None:
    """Return the steps of a run with these losses to a smoothed loss of `target` nats, or None if it is not reached.

    >>> steps_to_loss([6.0 - 0.5 * math.log(step) for step in range(1, 10)], 3.0) is None
    True
    """
    tracker = StepsToLoss(target)
    return tracker.steps if any(tracker.add_loss(loss) for loss in losses) else None
