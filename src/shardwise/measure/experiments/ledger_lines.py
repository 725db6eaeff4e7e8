"""Lines of a ledger: a configuration, its state, its prediction and its measurement, as JSON has them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args

State = Literal[
    "predicted", "pending", "running", "done", "out of memory", "timeout", "hung", "failed", "skipped"
]  # fmt: skip
STATES: tuple[State, ...] = get_args(State)
# Of attempts that have ended: nothing more happens to them.
ENDED: tuple[State, ...] = ("done", "out of memory", "timeout", "hung", "failed")
ACTIVE: tuple[State, ...] = ("pending", "running")
SCHEMA = "shardwise.ledger/1"
FINGERPRINT_DIGITS = 16  # hexadecimal: two of a million configurations collide with a probability of 3e-8

Setting = str | int | float | bool
Interval = tuple[float, float]
Part = TypeVar("Part")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """Configuration of a run, in `settings` by name, and the machines that it takes.

    Configurations of one `group` compete: the best of them is looked for. `label` is what reports call it.

    >>> first = Configuration(settings={"tp": 2, "seq_len": 1024}, group="gpt-2 on 8", label="tp=2")
    >>> same = Configuration(settings={"seq_len": 1024, "tp": 2}, group="gpt-2 on 8", label="two")
    >>> first.fingerprint == same.fingerprint, len(first.fingerprint)
    (True, 16)
    """

    settings: Mapping[str, Setting]
    group: str = ""
    label: str = ""
    num_nodes: int = 1
    num_devices: int = 1

    @cached_property
    def fingerprint(self) -> str:
        """Hash of what decides the run: its settings and machines, whatever they are called."""
        content = json.dumps([dict(self.settings), self.num_nodes, self.num_devices], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:FINGERPRINT_DIGITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """Prediction of a run: the step with its 90% interval, and the memory of the fullest device.

    `fits` is the verdict on the memory ("fits", "tight", "does not fit"), `usd_per_hour` the price of all devices where the chip
    has one.
    """

    step_time_s: float
    interval90: Interval | None = None
    memory_bytes: float | None = None
    capacity_bytes: float | None = None
    fits: str = "fits"
    mfu: float | None = None
    tokens_per_s_per_device: float | None = None
    usd_per_hour: float | None = None

    @property
    def ends(self) -> Interval:
        """The ends of the interval; the step itself where it is a bound."""
        return self.interval90 or (self.step_time_s, self.step_time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurement:
    """Measurement of a run; None where its log does not say. `values` are further numbers that a pattern names."""

    step_time_s: float
    num_steps: int | None = None
    mfu: float | None = None
    tokens_per_s_per_device: float | None = None
    memory_bytes: float | None = None
    loss: float | None = None
    values: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLine:
    """A change of state of a configuration, or of one of its attempts.

    `written_at` is in UTC. `attempt` counts from 1; 0 is before any. `job` is the name that the scheduler gave it, `logs` the
    folder of the attempt beside the ledger. `reason` says why, `cause` the same in two or three words that reports count by.
    `bound_s` is the step that a skipped configuration would have had to beat. `seconds` is how long an attempt took.
    """

    fingerprint: str
    state: State
    written_at: str = ""
    attempt: int = 0
    configuration: Configuration | None = None
    prediction: RunPrediction | None = None
    measurement: RunMeasurement | None = None
    reason: str = ""
    cause: str = ""
    bound_s: float | None = None
    seconds: float | None = None
    job: str = ""
    logs: str = ""
    versions: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLine:
    """The start of a driver on a ledger: what it was asked to do, and with which versions."""

    written_at: str
    experiment: Mapping[str, Any]
    versions: Mapping[str, str]


def utc_now() -> str:
    """Return the time in UTC, in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_between(start: str, end: str) -> float:
    """Return the seconds between two times of `utc_now`.

    >>> seconds_between("2026-11-28T20:00:00.000Z", "2026-11-28T20:01:30.500Z")
    90.5
    """
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()


def dump_line(line: LedgerLine | SessionLine) -> str:
    """Return a line as JSON, without fields that say nothing.

    >>> dump_line(LedgerLine(fingerprint="ab", state="running", attempt=1))
    '{"fingerprint": "ab", "state": "running", "attempt": 1}'
    """
    if isinstance(line, SessionLine):
        return json.dumps({"schema": SCHEMA, **_non_empty(line)})
    return json.dumps(_non_empty(line))


def _non_empty(value: Any) -> dict[str, Any]:
    members = {field.name: getattr(value, field.name) for field in fields(value)}
    return {
        name: _non_empty(member) if isinstance(member, (Configuration, RunPrediction, RunMeasurement)) else member
        for name, member in members.items()
        if member not in (None, "", 0)
    }


def load_line(content: Any) -> LedgerLine | SessionLine:
    """Return the line of a JSON object. Raises `ValueError` that says what is wrong."""
    if not isinstance(content, dict):
        raise ValueError("not an object")
    if "schema" in content:
        if content["schema"] != SCHEMA:
            raise ValueError(f"the schema is {content['schema']!r}; {SCHEMA} is required")
        return _build(SessionLine, {key: value for key, value in content.items() if key != "schema"})
    if content.get("state") not in STATES or not isinstance(content.get("fingerprint"), str):
        raise ValueError(f"state: found {content.get('state')!r}; one of {', '.join(STATES)} is required")
    for name, kind in NESTED.items():
        if name in content:
            content[name] = kind(content[name])
    return _build(LedgerLine, content)


def load_configuration(content: Any) -> Configuration:
    """Return a configuration of JSON. Raises `ValueError`."""
    configuration = _build(Configuration, content)
    if not isinstance(configuration.settings, dict):
        raise ValueError("configuration: settings are missing")
    return configuration


def _load_prediction(content: Any) -> RunPrediction:
    if isinstance(content, dict) and isinstance(content.get("interval90"), list):
        content["interval90"] = tuple(content["interval90"])
    return _build(RunPrediction, content)


def _build(kind: type[Part], content: Any) -> Part:
    try:
        return kind(**content)
    except TypeError as error:
        raise ValueError(f"{kind.__name__}: {error}") from None


NESTED: Mapping[str, Callable[[Any], Any]] = {
    "configuration": load_configuration,
    "prediction": _load_prediction,
    "measurement": lambda content: _build(RunMeasurement, content),
}
