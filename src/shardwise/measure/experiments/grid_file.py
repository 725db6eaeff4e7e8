"""The file that describes an experiment: what is run, over which values, and what it may cost.

```toml
target = "train"                      # train, command, or a framework that `export` writes
steps = 20
[problem]                             # as `shardwise plan` takes it
model = "llama-3-8b"
cluster = "h100:64"
batch_tokens = "1Mi"
[sweep]                               # a group of competing configurations for each combination
gpus = "8:64:x2"
[layouts]                             # the configurations of a group: the best layouts of a search
top = 20
pins = { tp = [1, 2, 4, 8] }          # of a list, those of each combination
[budget]
runs = 50
```
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.hardware.toml_tables import TableReader, TomlTable
from shardwise.measure.experiments.ledger_lines import Setting
from shardwise.search.sweep_values import Sweep, parse_sweep
from shardwise.values import InputError, parse_toml, raise_problems, read_text
from shardwise.values.units import parse_duration, parse_quantity

COMMAND, TRAIN = "command", "train"  # targets that are no framework's
DEFAULT_TIME_LIMIT_S = 3600.0  # of a run without a prediction: a choice
DEFAULT_TOP, DEFAULT_STEPS = 30, 20
KEYS = (
    "target", "steps", "data", "start", "time_limit", "hang_after", "retries", "borderline", "environment", "problem", "sweep",
    "layouts", "command", "budget",
)  # fmt: skip
TABLES: Mapping[str, tuple[str, ...]] = {
    "problem": ("model", "cluster", "batch_tokens", "seq_len", "precision", "stack", "set"),
    "layouts": ("top", "pins"),
    "command": ("line", "pattern", "values", "num_nodes", "num_devices"),
    "budget": ("runs", "device_hours", "usd"),
}
_MINUTES = re.compile(r"[\d.]+m")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentBudget:
    """The most that an experiment may take: attempts, hours of devices, dollars; None where there is no limit."""

    runs: int | None = None
    device_hours: float | None = None
    usd: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTemplate:
    """A program with placeholders in braces, the pattern that reads its output, and the values of the placeholders.

    `num_nodes` and `num_devices` are those of a run without a cluster.
    """

    line: str
    pattern: str
    values: Mapping[str, tuple[Setting, ...]] = field(default_factory=dict)
    num_nodes: int = 1
    num_devices: int = 1

    def combinations(self) -> Iterator[dict[str, Setting]]:
        """Yield every combination of the values, the first the slowest."""
        for values in itertools.product(*self.values.values()):
            yield dict(zip(self.values, values, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExperimentGrid:
    """Definition of an experiment, as its file says.

    `problem` are fields of `price.resolve_problem` with the model and the cluster, None for a command without a prediction.
    `pins` are those of the layouts, values in tuples. Times in seconds; `time_limit_s` is the most that a run may take.
    """

    path: str
    target: str
    steps: int
    data: tuple[str, ...]
    environment: Mapping[str, str]
    problem: Mapping[str, Any] | None
    sweeps: tuple[Sweep, ...]
    top: int
    pins: Mapping[str, tuple[Any, ...]]
    command: CommandTemplate | None
    budget: ExperimentBudget
    start_s: float | None
    time_limit_s: float | None
    hang_after_s: float | None
    retries: int
    borderline: int

    def pin_combinations(self) -> Iterator[dict[str, Any]]:
        """Yield every combination of the pins' values."""
        for values in itertools.product(*self.pins.values()):
            yield dict(zip(self.pins, values, strict=True))


def read_grid(path: str | os.PathLike[str]) -> ExperimentGrid:
    """Read an experiment from a TOML file. Paths in it are relative to its folder. Raises `InputError` with all that is wrong."""
    tables = parse_toml(read_text(os.fspath(path)), os.fspath(path))
    name = os.fspath(path)
    reader = TableReader(name, tables, KEYS)
    problems = reader.problems
    target = reader.text("target", TRAIN if "command" not in tables else COMMAND)
    nested = {key: _table(tables, key, name, problems) for key in ("problem", "sweep", "layouts", "command", "budget")}
    for key, keys in TABLES.items():
        TableReader(f"{name}: [{key}]", nested[key], keys, problems)
    folder = Path(path).parent
    grid = ExperimentGrid(
        path=name, target=target, steps=_count(reader, "steps", DEFAULT_STEPS, 1),
        data=tuple(_relative_source(folder, text) for text in _texts(reader, "data")),
        environment=reader.text_table("environment"), problem=_read_problem(nested["problem"], folder),
        sweeps=tuple(_read_sweeps(nested["sweep"], name, problems)),
        top=_count(TableReader("", nested["layouts"], TABLES["layouts"], problems), "top", _default_top(nested["layouts"]), 1),
        pins={key: _values(value) for key, value in _table(nested["layouts"], "pins", name, problems).items()},
        command=_read_command(nested["command"], name, problems), budget=_read_budget(nested["budget"], name, problems),
        start_s=_duration(reader, "start"), time_limit_s=_duration(reader, "time_limit"),
        hang_after_s=_duration(reader, "hang_after"), retries=_count(reader, "retries", 1, 0),
        borderline=_count(reader, "borderline", 2, 0),
    )  # fmt: skip
    problems += _contradictions(grid)
    raise_problems(list(dict.fromkeys(problems)))
    return grid


def _default_top(layouts: TomlTable) -> int:
    return 1 if any(isinstance(value, list) for value in dict(layouts.get("pins") or {}).values()) else DEFAULT_TOP


def _contradictions(grid: ExperimentGrid) -> Iterator[str]:
    if grid.target == COMMAND and grid.command is None:
        yield f"{grid.path}: [command]: missing; its line and its pattern are required"
    if grid.target != COMMAND and grid.command is not None:
        yield f"{grid.path}: [command]: found beside the target {grid.target}; leave out one of the two"
    if grid.target != COMMAND and grid.problem is None:
        yield f"{grid.path}: [problem]: missing; a model and a cluster are required"
    if grid.target == TRAIN and not grid.data:
        yield f"{grid.path}: data: missing; folders that `shardwise tokenize` wrote are required"
    if grid.problem is None and (grid.sweeps or grid.pins):
        yield f"{grid.path}: [sweep] and [layouts]: found without [problem]; a model and a cluster are required"


def _table(tables: TomlTable, key: str, name: str, problems: list[str]) -> TomlTable:
    table = tables.get(key, {})
    if not isinstance(table, Mapping):
        problems.append(f"{name}: {key}: found {table!r}; a table is required")
        return {}
    return table


def _read_problem(table: TomlTable, folder: Path) -> Mapping[str, Any] | None:
    """Return the arguments of `resolve_problem`; texts that name files beside the grid become their paths."""
    if not table:
        return None
    names = {"batch_tokens": "global_batch_tokens", "set": "overrides"}
    values = {names.get(key, key): value for key, value in table.items()}
    for key in ("model", "cluster"):
        file = folder / str(values.get(key, ""))
        if key in values and file.is_file():
            values[key] = os.fspath(file)
    return values


def _read_sweeps(table: TomlTable, name: str, problems: list[str]) -> Iterator[Sweep]:
    for key, value in table.items():
        text = ",".join(map(_text, value)) if isinstance(value, list) else _text(value)
        try:
            yield parse_sweep(f"{key}={text}", f"{name}: [sweep]")
        except InputError as error:
            problems += error.problems


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _read_command(table: TomlTable, name: str, problems: list[str]) -> CommandTemplate | None:
    if not table:
        return None
    reader = TableReader(f"{name}: [command]", table, TABLES["command"], problems)
    line, pattern = reader.text("line"), reader.text("pattern")
    try:
        names = set(re.compile(pattern).groupindex)
    except re.error as error:
        problems.append(f"{name}: [command] pattern: found {pattern!r}: {error}; a regular expression is required")
        names = set(STEP_GROUPS)
    if pattern and not names & set(STEP_GROUPS):
        groups = " or ".join(f"(?P<{group}>...)" for group in STEP_GROUPS)
        problems.append(f"{name}: [command] pattern: found {pattern!r}; a group of a step's time is required: {groups}")
    values = {key: _values(value) for key, value in _table(table, "values", name, problems).items()}
    return CommandTemplate(
        line=line, pattern=pattern, values=values, num_nodes=_count(reader, "num_nodes", 1, 1),
        num_devices=_count(reader, "num_devices", 1, 1),
    )  # fmt: skip


STEP_GROUPS: Mapping[str, float] = {"step_time_s": 1.0, "step_time_ms": 1e-3}  # groups of a pattern, in seconds


def _values(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _read_budget(table: TomlTable, name: str, problems: list[str]) -> ExperimentBudget:
    reader = TableReader(f"{name}: [budget]", table, TABLES["budget"], problems)
    amounts = {
        key: reader.quantity(key, "", any_size=True) if key in table else None for key in ("device_hours", "usd")
    }
    return ExperimentBudget(runs=_count(reader, "runs", 1, 1) if "runs" in table else None, **amounts)


def _count(reader: TableReader, key: str, default: int, minimum: int) -> int:
    value = reader.table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= 10**9:
        reader.add_problem(key, f"a whole number of at least {minimum}")
        return default
    return value


def _texts(reader: TableReader, key: str) -> Sequence[str]:
    value = reader.table.get(key, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        reader.add_problem(key, "a text, or a list of texts,")
        return []
    return texts


def _relative_source(folder: Path, text: str) -> str:
    """Return a source of data, DIR or DIR=WEIGHT, with the folder's path."""
    path, equals, weight = text.partition("=")
    return f"{(folder / path).resolve()}{equals}{weight}"


def read_duration(value: object, label: str) -> float:
    """Return seconds from a number, or from a text such as "20m", "90s" or "2h". Raises `InputError`.

    >>> read_duration("20m", "time"), read_duration(30, "time")
    (1200.0, 30.0)
    """
    if isinstance(value, str):
        text = f"{value.strip()}in" if _MINUTES.fullmatch(value.strip()) else value
        return parse_duration(text, label=label)
    return parse_quantity(f"{value}", label=label, unit="")


def _duration(reader: TableReader, key: str) -> float | None:
    if key not in reader.table:
        return None
    try:
        return read_duration(reader.table[key], f"{reader.where}: {key}")
    except InputError as error:
        reader.problems.extend(error.problems)
        return None
