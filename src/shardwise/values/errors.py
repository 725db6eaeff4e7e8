"""The errors that callers meet, and what their sentences say about unknown names.

ShardwiseError
├── InputError            the user's input is wrong: found, required, fix (exit code 2)
│   ├── NotationError     a fault in an expression, printed with a caret under it
│   └── ShardingError     an expression that parses but breaks a rule of shardings
├── MissingValueError     a fact that the catalogue does not have a source for (exit code 2)
├── NothingFitsError      no legal layout fits in memory (exit code 3)
├── MissedLimitError      what fits takes longer than its deadline, or costs more than its budget (exit code 3)
├── OutputError           what was to be printed cannot be written: a full disk (exit code 1)
├── RunEndedError         ranks of a run have ended, and none of them could say why (run/launcher.py, exit code 1)
└── LostRankError         a wait for other ranks has failed (run/faults/rank_status.py, exit code 4)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Choice = TypeVar("Choice")

SCHEMA = "shardwise.error/1"
EXIT_INTERRUPTED = 130  # what a shell gives for a program that SIGINT (2) ended: 128 + 2


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
    shardwise.values.errors.MissingValueError: chip h100: no sourced fp4 peak; it has ...
    """


class NothingFitsError(ShardwiseError):
    """No legal layout fits in memory; the message has the smallest excess, and what would help. Exit code 3.

    >>> import shardwise as sw
    >>> sw.plan("llama-3-70b", "h100:2", global_batch_tokens="64Ki", seq_len=4096)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.values.errors.NothingFitsError: ...
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


def format_problems(problems: Sequence[str], exit_code: int, *, as_json: bool) -> str:
    """Problems as a command line prints them on the error stream: sentences, or with `--json` one line of JSON.

    >>> print(format_problems(["chip: found 'h900'"], 2, as_json=False))
    error: chip: found 'h900'
    >>> print(format_problems(["chip: found 'h900'"], 2, as_json=True))
    {"schema": "shardwise.error/1", "error": {"problems": ["chip: found 'h900'"], "exit_code": 2}}
    """
    if as_json:
        return json.dumps({"schema": SCHEMA, "error": {"problems": list(problems), "exit_code": exit_code}})
    return "error: " + "\n".join(problems)


def raise_problems(violations: Sequence[str]) -> None:
    """Raise one `InputError` that carries all violations, if there are any."""
    if violations:
        raise InputError(*violations)


def lookup(table: Mapping[str, Choice], name: str, what: str) -> Choice:
    """The entry of a table of choices by name. No entry stands for a name that is not there.

    Raises `InputError` that says what was found and lists the names.

    >>> lookup({"sum": 4.0, "max": 1.0}, "max", "overlap")
    1.0
    """
    if name not in table:
        raise InputError(f"{what}: {describe_unknown(name, table)}")
    return table[name]


def run_all(*makers: Callable[[], Any]) -> list[Any]:
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


# Of two texts that are as alike as difflib's ratio: "tpp" and "tp" have 0.8, "colour" and "source" 0.5. A choice.
MIN_SIMILARITY = 0.65
MAX_SUGGESTIONS = 3  # of names that are equally near
MIN_SUBSTRING_LENGTH = 5  # characters of a part of a name that means the name. A choice
MAX_NAME_LENGTH = 100  # characters: what is longer is no misspelt name


def describe_unknown(found: object, known: Iterable[object]) -> str:
    """The part of an error about an unknown name: what was found, the nearest known name, and all of them.

    >>> describe_unknown("hbn", ["host", "hbm", "vmem"])
    "found 'hbn' (did you mean 'hbm'?); one of host, hbm, vmem is required"
    """
    names = list(map(str, known))
    return f"found {found!r}{did_you_mean(found, names)}; one of {', '.join(names)} is required"


def did_you_mean(found: object, known: Iterable[object]) -> str:
    """The known names nearest to what was found, as an error says them; empty where none is near.

    >>> did_you_mean("--batch_tokens", ["--batch-tokens", "--seq-len"])
    " (did you mean '--batch-tokens'?)"
    >>> did_you_mean("llama-70b", ["llama-2-70b", "llama-3-8b", "llama-3-70b"])
    " (did you mean 'llama-2-70b' or 'llama-3-70b'?)"
    >>> did_you_mean("falcon", ["h100", "b200"])
    ''
    """
    names = [repr(name) for name in find_nearest_names(found, known)]
    listed = " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return f" (did you mean {listed}?)" if names else ""


def find_nearest_names(found: object, known: Iterable[object]) -> list[str]:
    """The known names most like what was found, the first few of equals; none where nothing is like it.

    Case, separators and what stands before a slash do not count: "meta-llama/Llama-3.1-8B" is "llama-3.1-8b".

    >>> find_nearest_names("meta-llama/Llama-3.1-8B-Instruct", ["llama-3-8b", "llama-3.1-8b", "llama-3.1-70b"])
    ['llama-3.1-8b']

    Where none is alike, those that contain it, if it is long enough to mean them.

    >>> find_nearest_names("bubble", ["roofline", "pipeline-bubbles", "zero-stages"])
    ['pipeline-bubbles']
    """
    if not isinstance(found, str) or len(found) > MAX_NAME_LENGTH:
        return []
    names = list(map(str, known))
    if found in names:  # which is not what is wrong
        return []
    scores = {name: _similarity(_normalize(found), _normalize(name)) for name in names}
    best = max(scores.values(), default=0.0)
    alike = [name for name, score in scores.items() if score == best >= MIN_SIMILARITY]
    return (
        alike
        or [name for name in names if len(found) >= MIN_SUBSTRING_LENGTH and _normalize(found) in _normalize(name)]
    )[:MAX_SUGGESTIONS]


def _normalize(text: str) -> str:
    return re.sub(r"[-_\s]", "", text.rstrip("/").rpartition("/")[2].casefold())


def _similarity(found: str, name: str) -> float:
    """From 0 to 1. A name that is a part of the text, or begins or ends with it, is the nearer the more of the longer it is."""
    from difflib import SequenceMatcher

    if found == name or not found or not name:
        return float(found == name)
    part = len(name) > 2 and name in found
    part = part or (len(found) > 1 and (name.startswith(found) or name.endswith(found)))
    if part:
        return 0.7 + 0.25 * min(len(name), len(found)) / max(len(name), len(found))
    return SequenceMatcher(None, found, name, autojunk=False).ratio()
