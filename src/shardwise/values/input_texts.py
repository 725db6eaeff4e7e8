"""Parse texts from outside, JSON, TOML, YAML and CSV, and check their numbers.

Depth, the digits of an integer and the number of values are bounded, so that a short text cannot take minutes or gigabytes.
Every failure is the error of a `FileMessages`, by default an `InputError` (exit code 2).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

from shardwise.values.errors import InputError
from shardwise.values.input_files import MAX_TEXT_BYTES, PLAIN, FileMessages, decode_text, describe_error, read_text

MAX_DEPTH = 64  # arrays and objects within one another: a config.json has 4, a plan 6
MAX_DIGITS = 40  # of an integer: 128 bits have 39
MAX_NUMBER_CHARACTERS = 400  # of a decimal number: the longest double has 309 digits before its point
MAX_VALUES = 4_000_000  # of a text: as empty lists they take 0.3 GB. A tokenizer.json has up to 1,500,000

_LONG_INTEGER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_LARGE_EXPONENT = re.compile(r"[eE]\+?\d{3}")


def parse_json(
    text: str | bytes, name: str, messages: FileMessages = PLAIN, *, finite: bool = False, unique_keys: bool = False,
    max_values: int = MAX_VALUES,
) -> Any:  # fmt: skip
    """Return the value of a JSON text, which `name` names in errors.

    `finite` refuses NaN and infinities, which JSON lacks but Python's reader takes, and `unique_keys` repeated keys.
    Raises the error of `messages` for other texts, and beyond `MAX_DEPTH`, `MAX_DIGITS` and `max_values`.

    >>> parse_json('{"layers": 2}', "config.json")
    {'layers': 2}
    >>> parse_json("[" * 1000, "config.json")
    Traceback (most recent call last):
    shardwise.values.errors.InputError: config.json is not JSON: more than 64 arrays or objects within one another
    """
    if isinstance(text, bytes):
        text = decode_text(text, name, messages)
    hooks: dict[str, Any] = {}
    if _LONG_INTEGER.search(text):
        hooks["parse_int"] = _parse_short_integer
    if finite:
        hooks["parse_constant"] = _refuse_constant
        if _LARGE_EXPONENT.search(text):
            hooks["parse_float"] = _parse_finite
    if unique_keys:
        hooks["object_pairs_hook"] = _unique_pairs
    try:
        _require_few_values(text, max_values)
        value = json.loads(text, **hooks)
        _require_shallow(value, text.count("[") + text.count("{"))
    except RecursionError:
        raise messages.fail(f"{name} is not JSON: more than {MAX_DEPTH} arrays or objects within one another") from None
    except ValueError as error:
        raise messages.fail(f"{name} is not JSON: {describe_error(error)}") from None
    return value


def _require_few_values(text: str, max_values: int) -> None:
    """Raise `ValueError` if a JSON text may have too many values: each but the first follows a comma or a bracket."""
    count = text.count(",") + text.count("[") + text.count("{")
    if count > max_values:
        raise ValueError(f"{count:,} values; at most {max_values:,} are read")


def _require_shallow(value: Any, num_brackets: int) -> None:
    """Raise `ValueError` for a value deeper than `MAX_DEPTH`; level by level, so that no depth overflows the stack."""
    if num_brackets <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node if isinstance(node, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return
    raise ValueError(f"more than {MAX_DEPTH} arrays or objects within one another")


def _parse_short_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits):,} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _parse_finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"found {literal[:40]}; a finite number is required")
    return number


def _refuse_constant(literal: str) -> Any:
    raise ValueError(f"found {literal}; a finite number is required")


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(value := dict(pairs)) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{repeated[:80]!r} is given twice; each key once is required")
    return value


def read_json(
    path: str | Path, messages: FileMessages = PLAIN, *, finite: bool = False, max_bytes: int = MAX_TEXT_BYTES,
    max_values: int = MAX_VALUES,
) -> Any:  # fmt: skip
    """Return the value of a JSON file. Raises the error of `messages` as `read_text` and `parse_json` do."""
    return parse_json(read_text(path, messages, max_bytes), str(path), messages, finite=finite, max_values=max_values)


def read_json_object(path: str | Path, messages: FileMessages = PLAIN, *, finite: bool = False) -> dict[str, Any]:
    """Return the object of a JSON file. Raises the error of `messages`, also for a value of another type."""
    content = read_json(path, messages, finite=finite)
    if not isinstance(content, dict):
        raise messages.fail(f"{path} holds a {type(content).__name__}; an object is required")
    return content


def parse_json_line(text: str | bytes) -> Any:
    """Return the value of one line of JSON. Raises `ValueError`, which names no place: that is the caller's.

    >>> parse_json_line('{"step": 3}')
    {'step': 3}
    """
    try:
        return parse_json(text, "the line")
    except InputError as error:
        raise ValueError(error.problems[0]) from None


def parse_toml(text: str, name: str, messages: FileMessages = PLAIN) -> dict[str, Any]:
    """Return the tables of a TOML text. Raises the error of `messages`.

    >>> parse_toml("layers = 2", "cluster.toml")
    {'layers': 2}
    """
    import tomllib  # late: `--help` needs no TOML

    try:
        _require_few_values(text.replace("=", ","), MAX_VALUES // 10)  # its parser is written in Python
        tables = tomllib.loads(text)
        _require_shallow(tables, len(text))
        _require_short_integers(tables)
    except RecursionError:
        raise messages.fail(f"{name} is not TOML: more than {MAX_DEPTH} tables within one another") from None
    except ValueError as error:
        raise messages.fail(f"{name} is not TOML: {describe_error(error)}") from None
    return tables


def _require_short_integers(tree: Any) -> None:
    """Raise `ValueError` if a tree holds an integer of more than `MAX_DIGITS` digits."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, int) and abs(node) >= 10**MAX_DIGITS:
            raise ValueError(f"an integer of more than {MAX_DIGITS} digits")
        pending.extend(node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ())


MAX_YAML_CHARACTERS = 200_000  # PyYAML takes seconds for as many
MAX_YAML_BRACKETS = 2_000  # a text full of brackets takes it minutes
MAX_YAML_VALUES = 100_000  # far above any configuration


def parse_yaml(text: str, name: str, messages: FileMessages = PLAIN, *, unique_keys: bool = True) -> Any:
    """Return the value of a YAML text, read by PyYAML's safe loader, which builds plain data alone.

    Raises the error of `messages` for other or too large texts, and with `unique_keys` for repeated keys.
    """
    yaml: Any = import_module("yaml")
    if len(text) > MAX_YAML_CHARACTERS:
        raise messages.fail(
            f"{name}: {len(text):,} characters; a YAML file of at most {MAX_YAML_CHARACTERS:,} is required"
        )
    if text.count("[") + text.count("{") > MAX_YAML_BRACKETS:
        raise messages.fail(f"{name}: more than {MAX_YAML_BRACKETS:,} brackets; a configuration is required")
    try:
        tree = yaml.load(text, Loader=_unique_key_loader(yaml) if unique_keys else yaml.SafeLoader)
        _require_few_nodes(tree)
        _require_shallow(tree, len(text))
        _require_short_integers(tree)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        position = f"line {mark.line + 1}: " if mark else ""
        reason = getattr(error, "problem", None) or "cannot be read"
        raise messages.fail(f"{name} is not YAML: {position}{reason}") from None
    except (RecursionError, ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError) as error:
        reason = describe_error(error) if isinstance(error, ValueError) else type(error).__name__
        raise messages.fail(f"{name} is not YAML: {reason}") from None
    return tree


def _require_few_nodes(tree: Any) -> None:
    """Raise `ValueError` if a tree has more than `MAX_YAML_VALUES` values, nested ones included."""
    # An alias is loaded as the same object, so a short text with aliases of aliases can stand for billions of values (and an
    # alias of itself for endlessly many). Each is counted as often as it occurs, since whoever walks the tree visits it as often.
    pending, count = [tree], 0
    while pending:
        node = pending.pop()
        children = list(node.values()) if isinstance(node, Mapping) else node
        children = children if isinstance(children, (list, tuple, set)) else []
        count += len(children)
        if count > MAX_YAML_VALUES:
            raise ValueError(f"more than {MAX_YAML_VALUES:,} values")
        pending.extend(children)


def _unique_key_loader(yaml: Any) -> Any:
    """Return PyYAML's safe loader, changed to refuse a repeated key instead of taking the last one."""
    loader: Any = type("Loader", (yaml.SafeLoader,), {})

    def mapping(constructor: Any, node: Any) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        for key, count in counts.items():
            if count > 1:
                problem = f"{key} is given twice; each key once is required"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        constructor.flatten_mapping(node)
        return dict(constructor.construct_mapping(node, deep=True))

    loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return loader


CsvRow = tuple[int, list[str]]  # number of the row's last line, and its cells


def parse_csv(lines: Iterable[str], name: str, messages: FileMessages = PLAIN) -> Iterator[CsvRow]:
    """Yield the rows of a table. Raises the error of `messages` for lines that are no CSV, such as a cell of 200,000 characters.

    >>> list(parse_csv(["steps,loss", "3,0.5"], "runs.csv"))
    [(1, ['steps', 'loss']), (2, ['3', '0.5'])]
    """
    import csv  # late: `--help` needs no CSV

    reader = csv.reader(lines)
    try:
        for cells in reader:
            yield reader.line_num, cells
    except csv.Error as error:
        raise messages.fail(f"{name}, line {reader.line_num}: not CSV: {error}") from None


def parse_csv_records(
    text: str, name: str, messages: FileMessages = PLAIN
) -> tuple[list[str], Iterator[tuple[int, dict[str, str]]]]:
    r"""Return the columns of a table with a header, and its rows by column, each with its line; empty lines are no rows.

    Cells beyond the header are dropped, and missing ones are left out.

    >>> columns, rows = parse_csv_records("steps,loss\n3,0.5,x\n", "runs.csv")
    >>> columns, list(rows)
    (['steps', 'loss'], [(2, {'steps': '3', 'loss': '0.5'})])
    """
    rows = parse_csv(StringIO(text, newline=""), name, messages)
    _, columns = next(rows, (0, []))
    return columns, ((line, dict(zip(columns, cells, strict=False))) for line, cells in rows if cells)


def parse_digits(text: str, max_digits: int = MAX_DIGITS) -> int | None:
    """Return the whole number that a text spells with ASCII digits alone; None for any other text, and for more digits.

    >>> parse_digits("0042"), parse_digits("-1"), parse_digits("٣"), parse_digits("9" * 400)
    (42, None, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= max_digits else None


def parse_integer(text: str) -> int:
    """Return the integer that a text spells, as `int` does. Raises `InputError` for more than `MAX_DIGITS` digits, and
    `ValueError` for what is not an integer.

    >>> parse_integer(" 1_024 ")
    1024
    """
    return int(_require_short(text))


def parse_number(text: str) -> float:
    """Return the number that a text spells, as `float` does. Raises `InputError` for more than `MAX_NUMBER_CHARACTERS`, and
    `ValueError` for what is not a number.

    >>> parse_number("2.5e3")
    2500.0
    """
    return float(_require_short(text, MAX_NUMBER_CHARACTERS))


def _require_short(text: str, max_characters: int = MAX_DIGITS + 1) -> str:
    if len(text.strip()) > max_characters:
        raise InputError(f"found a number of {len(text):,} characters; one of at most {max_characters} is required")
    return text


def require_number(
    value: object, name: str, messages: FileMessages = PLAIN, *, is_integer: bool = False, above: float = 0.0
) -> float:
    """Return a value that must be a finite number above a bound, with `is_integer` an integer. Raises the error of `messages`.

    >>> require_number(float("nan"), "rms_norm_eps", FileMessages("model: "))
    Traceback (most recent call last):
    shardwise.values.errors.InputError: model: rms_norm_eps is nan; a finite number above 0 is required
    """
    is_number = isinstance(value, int if is_integer else (int, float)) and not isinstance(value, bool)
    if not (is_number and above < value < 10**MAX_DIGITS):  # type: ignore[operator]
        required = "a whole" if is_integer else "a finite"
        raise messages.fail(f"{name} is {short_repr(value)}; {required} number above {above:g} is required")
    return value  # type: ignore[return-value]


def short_repr(value: object, max_chars: int = 60) -> str:
    """Return the `repr` of a value in at most `max_chars` characters, for errors.

    >>> short_repr(10**5000), short_repr("x" * 100)
    ('a number of very many digits', "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...")
    """
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of very many digits"
    return text if len(text) <= max_chars else f"{text[: max_chars - 3]}..."
