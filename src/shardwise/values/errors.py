"""Errors that callers meet, sentences about unknown names, and what errors call an argument: its parameter, or its flag."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

_LABELS: ContextVar[Mapping[str, str]] = ContextVar("argument_labels", default={})  # noqa: B039 - never changed in place


def argument_label(parameter: str, default: str | None = None) -> str:
    """Return what an error message calls a parameter: its flag on a command line, else `default` or its own name.

    >>> argument_label("seq_len", "job: seq_len")
    'job: seq_len'
    >>> with label_arguments({"seq_len": "--seq-len"}):
    ...     argument_label("seq_len", "job: seq_len")
    '--seq-len'
    """
    return _LABELS.get().get(parameter, default or parameter)


@contextmanager
def label_arguments(labels: Mapping[str, str]) -> Iterator[None]:
    """Let errors name parameters as these labels do, while a verb of the command line runs."""
    token = _LABELS.set(labels)
    try:
        yield
    finally:
        _LABELS.reset(token)


Choice = TypeVar("Choice")

SCHEMA = "shardwise.error/1"
EXIT_INTERRUPTED = 130  # what a shell gives for a program that SIGINT (2) ended: 128 + 2


class ShardwiseError(Exception):
    """Base class of every error that Shardwise raises on purpose.

    `problems` has one sentence per problem, `exit_code` is that of the command line.

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
    """Wrong input: what was found, what is required, and the fix, for all violations at once. Exit code 2.

    >>> import shardwise as sw
    >>> try:
    ...     sw.Job(global_batch_tokens=4096, seq_len=0)
    ... except InputError as error:
    ...     error.problems
    ('job: seq_len is 0; a whole number of at least 1 is required',)
    """


class NotationError(InputError):
    """Fault in a sharding expression: the expression, a caret under the fault, and the rule that it breaks."""

    def __init__(self, text: str, position: int, problem: str) -> None:
        super().__init__(f"{problem}\n  {text}\n  {' ' * position}^")
        self.text = text
        self.position = position


class ShardingError(InputError):
    """Sharding or expression that breaks a rule (an axis used twice, a dim that does not divide)."""


class MissingValueError(ShardwiseError):
    """Value without a source in the catalogue, which is therefore not guessed. Exit code 2.

    >>> import shardwise as sw
    >>> sw.load_chip("h100").peak("fp4")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.values.errors.MissingValueError: chip h100: no sourced fp4 peak; it has ...
    """


class NothingFitsError(ShardwiseError):
    """No legal layout fits in memory; the message gives the smallest excess and what would help. Exit code 3.

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
    """Output that cannot be written."""

    exit_code = 1


def format_problems(problems: Sequence[str], exit_code: int, *, as_json: bool) -> str:
    """Format problems for stderr: sentences, or with `as_json` one line of JSON.

    >>> print(format_problems(["chip: found 'h900'"], 2, as_json=False))
    error: chip: found 'h900'
    >>> print(format_problems(["chip: found 'h900'"], 2, as_json=True))
    {"schema": "shardwise.error/1", "error": {"problems": ["chip: found 'h900'"], "exit_code": 2}}
    """
    if as_json:
        return json.dumps({"schema": SCHEMA, "error": {"problems": list(problems), "exit_code": exit_code}})
    return "error: " + "\n".join(problems)


def raise_problems(violations: Sequence[str]) -> None:
    """Raise one `InputError` with all violations, if there are any."""
    if violations:
        raise InputError(*violations)


def lookup(table: Mapping[str, Choice], name: str, label: str) -> Choice:
    """Return an entry of a table by name; unlike `table.get`, an unknown name is an error.

    Raises `InputError` that says what was found, after `label`, and lists the names.

    >>> lookup({"sum": 4.0, "max": 1.0}, "max", "overlap")
    1.0
    """
    if name not in table:
        raise InputError(f"{label}: {describe_unknown(name, table)}")
    return table[name]


def run_all(*makers: Callable[[], Any]) -> list[Any]:
    """Call all functions and return their results, or raise all their problems at once, each once."""
    results: list[Any] = []
    problems: list[str] = []
    for make in makers:
        try:
            results.append(make())
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*dict.fromkeys(problems))
    return results


# Similarity by difflib's ratio: "tpp" and "tp" have 0.8, "colour" and "source" 0.5. A choice.
MIN_SIMILARITY = 0.65
MAX_SUGGESTIONS = 3  # of names that are equally near
MIN_SUBSTRING_LENGTH = 5  # characters of a substring that suggests the name. A choice
MAX_NAME_LENGTH = 100  # characters: a longer text is no misspelt name


def describe_unknown(unknown: object, allowed: Iterable[object]) -> str:
    """Return the part of an error about an unknown name: what was found, the nearest known names, and all of them.

    >>> describe_unknown("hbn", ["host", "hbm", "vmem"])
    "found 'hbn' (did you mean 'hbm'?); one of host, hbm, vmem is required"
    """
    names = list(map(str, allowed))
    return f"found {unknown!r}{did_you_mean(unknown, names)}; one of {', '.join(names)} is required"


def did_you_mean(unknown: object, allowed: Iterable[object]) -> str:
    """Return the nearest known names as an error suggests them, or "" if none is near.

    >>> did_you_mean("--batch_tokens", ["--batch-tokens", "--seq-len"])
    " (did you mean '--batch-tokens'?)"
    >>> did_you_mean("llama-70b", ["llama-2-70b", "llama-3-8b", "llama-3-70b"])
    " (did you mean 'llama-2-70b' or 'llama-3-70b'?)"
    >>> did_you_mean("falcon", ["h100", "b200"])
    ''
    """
    names = [repr(name) for name in find_nearest_names(unknown, allowed)]
    return f" (did you mean {join_words(names, 'or')}?)" if names else ""


def join_words(names: Sequence[str], conjunction: str) -> str:
    """Join names as in a sentence.

    >>> join_words(["A", "B", "C"], "and"), join_words(["A"], "or")
    ('A, B and C', 'A')
    """
    return f" {conjunction} ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def find_nearest_names(unknown: object, allowed: Iterable[object]) -> list[str]:
    """Return the known names most similar to an unknown one, the first few of equals, or none if nothing is similar.

    Case, separators and any prefix that ends with a slash are ignored: "meta-llama/Llama-3.1-8B" is "llama-3.1-8b".

    >>> find_nearest_names("meta-llama/Llama-3.1-8B-Instruct", ["llama-3-8b", "llama-3.1-8b", "llama-3.1-70b"])
    ['llama-3.1-8b']

    Where none is alike, those that contain it, if it is long enough to mean them.

    >>> find_nearest_names("bubble", ["roofline", "pipeline-bubbles", "zero-stages"])
    ['pipeline-bubbles']
    """
    if not isinstance(unknown, str) or len(unknown) > MAX_NAME_LENGTH:
        return []
    names = list(map(str, allowed))
    if unknown in names:  # the name is known, so something else is wrong
        return []
    scores = {name: _similarity(_normalize(unknown), _normalize(name)) for name in names}
    best_score = max(scores.values(), default=0.0)
    similar = [name for name, score in scores.items() if score == best_score >= MIN_SIMILARITY]
    return (
        similar
        or [name for name in names if len(unknown) >= MIN_SUBSTRING_LENGTH and _normalize(unknown) in _normalize(name)]
    )[:MAX_SUGGESTIONS]


def _normalize(text: str) -> str:
    return re.sub(r"[-_\s]", "", text.rstrip("/").rpartition("/")[2].casefold())


def _similarity(text: str, name: str) -> float:
    """Return 0 to 1; a name that is part of the text, or its start or end, scores higher the more of the longer it covers."""
    from difflib import SequenceMatcher  # loaded only for an error

    if text == name or not text or not name:
        return float(text == name)
    is_part = len(name) > 2 and name in text
    is_part = is_part or (len(text) > 1 and (name.startswith(text) or name.endswith(text)))
    if is_part:
        return 0.7 + 0.25 * min(len(name), len(text)) / max(len(name), len(text))
    return SequenceMatcher(None, text, name, autojunk=False).ratio()
