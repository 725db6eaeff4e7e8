"""The errors that callers meet.

ShardwiseError
├── InputError            the user's input is wrong: found, required, fix (exit code 2)
│   ├── NotationError     a fault in an expression, printed with a caret under it
│   └── ShardingError     an expression that parses but breaks a rule of shardings
├── MissingValueError     a fact that the catalogue does not have a source for (exit code 2)
├── NothingFitsError      no legal layout fits in memory (exit code 3)
├── MissedLimitError      what fits takes longer than its deadline, or costs more than its budget (exit code 3)
├── OutputError           what was to be printed cannot be written: a full disk (exit code 1)
├── RunEndedError         ranks of a run have ended, and none of them could say why (train/outcome.py, exit code 1)
└── LostRankError         a wait for other ranks has failed (train/waits.py, exit code 4)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from shardwise.names import unknown

Choice = TypeVar("Choice")

SCHEMA = "shardwise.error/1"
STOPPED = 130  # what a shell gives for a program that SIGINT (2) ended: 128 + 2


class ShardwiseError(Exception):
    """Base of every error that Shardwise raises on purpose.

    `problems` has one sentence for each thing that is wrong, `exit_code` what the command line exits with.

    >>> error = ShardwiseError("chip: found 'h900'", "job: seq_len is 0")
    >>> len(error.problems), error.exit_code
    (2, 2)
    """

    exit_code = 2
    problems: tuple[str, ...]

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class InputError(ShardwiseError):
    """The input is wrong: what was found, what is required, and the fix; all violations at once. Exit code 2.

    >>> import shardwise as sw
    >>> try:
    ...     sw.Job(global_batch_tokens=4096, seq_len=0)
    ... except InputError as error:
    ...     error.problems
    ('job: seq_len is 0; a whole number of at least 1 is required',)
    """


class NotationError(InputError):
    """A fault in an expression: the expression, a caret under the fault, and the rule it breaks."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        super().__init__(f"{problem}\n  {text}\n  {' ' * position}^")
        self.text = text
        self.position = position


class ShardingError(InputError):
    """A sharding or an expression that breaks a rule (an axis used twice, a dim that does not divide)."""


class MissingValueError(ShardwiseError):
    """A value that has no source in the catalogue, and is therefore not guessed. Exit code 2.

    >>> import shardwise as sw
    >>> sw.load_chip("h100").peak("fp4")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.errors.MissingValueError: chip h100: no sourced fp4 peak; it has ...
    """


class NothingFitsError(ShardwiseError):
    """No legal layout fits in memory; the message has the smallest excess, and what would help. Exit code 3.

    >>> import shardwise as sw
    >>> sw.plan("llama-3-70b", "h100:2", global_batch_tokens="64Ki", seq_len=4096)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.errors.NothingFitsError: ...
    """

    exit_code = 3


class MissedLimitError(ShardwiseError):
    """The best plan misses its deadline or its budget; the message says by how much, and what would meet it. Exit code 3.

    The command line raises it for `--deadline` and `--budget`. From Python, `plan_clusters` returns a `Comparison` instead, whose
    `chosen` is None.

    >>> MissedLimitError("cluster: the run takes 9 days; the deadline is 7").exit_code
    3
    """

    exit_code = 3


class OutputError(ShardwiseError):
    """What was to be printed cannot be written."""

    exit_code = 1


def told(problems: Sequence[str], exit_code: int, *, as_json: bool) -> str:
    """Problems as a command line prints them on the error stream: sentences, or with `--json` one line of JSON.

    >>> print(told(["chip: found 'h900'"], 2, as_json=False))
    error: chip: found 'h900'
    >>> print(told(["chip: found 'h900'"], 2, as_json=True))
    {"schema": "shardwise.error/1", "error": {"problems": ["chip: found 'h900'"], "exit_code": 2}}
    """
    if as_json:
        return json.dumps({"schema": SCHEMA, "error": {"problems": list(problems), "exit_code": exit_code}})
    return "error: " + "\n".join(problems)


def require(violations: Sequence[str]) -> None:
    """Raise one `InputError` that carries all violations, if there are any."""
    if violations:
        raise InputError(*violations)


def chosen(table: Mapping[str, Choice], name: str, what: str) -> Choice:
    """The entry of a table of choices by name. No entry stands for a name that is not there.

    Raises `InputError` that says what was found and lists the names.

    >>> chosen({"sum": 4.0, "max": 1.0}, "max", "overlap")
    1.0
    """
    if name not in table:
        raise InputError(f"{what}: {unknown(name, table)}")
    return table[name]


def collect(*makers: Callable[[], Any]) -> list[Any]:
    """Run all makers and raise all their problems at once, each once."""
    made: list[Any] = []
    problems: list[str] = []
    for make in makers:
        try:
            made.append(make())
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*dict.fromkeys(problems))
    return made
