"""The training command of a shell script: the words of its commands, with the variables that the script itself sets.

Assignments, arrays, whole-number arithmetic and conditions on texts are understood; nothing is run. A value that comes from
elsewhere (`$1`, `$(command)`, an unset variable) stays as it is written. A condition on such a value (or on files) is unknown, so
what depends on it is left out, as are loops and cases.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from shardwise.values.errors import InputError

MAX_EXPANDED_CHARACTERS = 1_000_000  # of a text with its variables filled in
MAX_WORDS = 20_000
MAX_VARIABLE_DEPTH = 20  # of variables that name variables
_DEFAULT = r"(?::?-((?:[^{}$]|\$\w+)*))?"
_VARIABLE = re.compile(r"\$\{(\w+)\[[@*]\]\}|\$\{(\w+)" + _DEFAULT + r"\}|\$([A-Za-z_]\w*)")
_WHOLE_ARRAY = re.compile(r'"\$\{(\w+)\[[@*]\]\}"')  # each of its words is one
_ARITHMETIC = re.compile(r"\$\(\(([^;]*?)\)\)")
_COMMENT = re.compile(r"(^|(?<=\s))#[^\n]*")
_UNSET = re.compile(r"\$\{?\w+[^}\s\"]*\}?")  # unset variables: an empty text, in a condition
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_TEXT_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_NUMBER_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def split_statements(text: str) -> Iterator[str]:
    """The statements of a script, without comments; quotes and brackets may span lines."""
    text = _COMMENT.sub("", text.replace("\\\n", " "))
    found, quote = _scan_statements(text)
    yield from (one for line in text.splitlines() for one in _scan_statements(line)[0]) if quote else found


def _scan_statements(text: str) -> tuple[list[str], str]:
    """Statements, and the quote that stays open."""
    found, start, depth, quote = [], 0, 0, ""
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[at - 1] != "\\" else quote
        elif character in "'\"":
            quote = character if text[at - 1] != "\\" or not at else ""
        elif character in "()":
            depth = max(depth + (1 if character == "(" else -1), 0)
        elif character in "\n;" and not depth:
            found.append(text[start:at].strip())
            start = at + 1
    return [one for one in (*found, text[start:].strip()) if one], quote


def split_words(text: str, what: str) -> list[str]:
    """Words of a text. Raises `InputError` for too many of them."""
    try:
        words = shlex.split(text, comments=False)
    except ValueError:
        words = text.replace('"', " ").replace("'", " ").split()  # a quote that nothing closes
    if len(words) > MAX_WORDS:
        raise InputError(f"{what}: {len(words):,} words on a line; at most {MAX_WORDS:,} are required")
    return words


class ShellVariables:
    """What a script has set so far: texts, and arrays of words."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.texts: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}

    def assign(self, name: str, value: str, *, more: bool) -> None:
        """Set a variable to what stands behind its =; `more`: behind +=."""
        if value.startswith("("):
            words = split_words(self.expand(value.removeprefix("(").removesuffix(")")), self.what)
            self.arrays[name] = (self.arrays.get(name, []) if more else []) + words
            self.texts.pop(name, None)
            return
        words = split_words(value, self.what)
        self.texts[name] = (self.texts.get(name, "") if more else "") + self.expand(" ".join(words))

    def expand(self, text: str) -> str:
        """A text with its variables replaced, as often as they name one another."""
        text = _WHOLE_ARRAY.sub(lambda match: shlex.join(self.arrays.get(match[1], [])), text)
        for _ in range(MAX_VARIABLE_DEPTH):
            filled = _ARITHMETIC.sub(self._arithmetic_value, _VARIABLE.sub(self._variable_value, text))
            if len(filled) > MAX_EXPANDED_CHARACTERS:
                raise InputError(f"{self.what}: variables that grow beyond {MAX_EXPANDED_CHARACTERS:,} characters")
            if filled == text:
                break
            text = filled
        return text

    def _variable_value(self, match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        known = " ".join(self.arrays[name]) if name in self.arrays else self.texts.get(name)
        return known if known is not None else match[3] if match[3] is not None else match[0]

    def _arithmetic_value(self, match: re.Match[str]) -> str:
        """The value of $((...)), or the text where it has none."""
        names = re.sub(r"[A-Za-z_]\w*", lambda name: self.texts.get(name[0], name[0]), match[1])
        try:
            return str(_evaluate_arithmetic(ast.parse(names.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return match[0]

    def condition_holds(self, condition: str) -> bool:
        """Whether a condition is known to hold: of texts and whole numbers; of files nothing is known."""
        words = split_words(_UNSET.sub("", self.expand(condition)), self.what)
        if not words or words[0] not in ("[", "[[", "test"):
            return False
        alternatives = _split_at([word for word in words[1:] if word not in ("]", "]]")], "||", "-o")
        return any(all(_is_condition_true(one) for one in _split_at(words, "&&", "-a")) for words in alternatives)


def _split_at(words: list[str], *ends: str) -> Iterator[list[str]]:
    found: list[str] = []
    for word in words:
        if word in ends or word in ("[", "[["):
            if word in ends:
                yield found
                found = []
            continue
        found.append(word)
    yield found


def _is_condition_true(words: list[str]) -> bool:
    match words:
        case ["!", *others]:
            return others[:1] in (["-n"], ["-z"]) and not _is_condition_true(others)
        case ["-z"] | ["-z", ""]:
            return True
        case ["-n", text]:
            return bool(text)
        case [one, compared, other] if compared in _TEXT_COMPARISONS:
            return _TEXT_COMPARISONS[compared](one, other)
        case [one, compared, other] if compared in _NUMBER_COMPARISONS:
            return one.isdigit() and other.isdigit() and _NUMBER_COMPARISONS[compared](int(one), int(other))
    return False


def _evaluate_arithmetic(node: ast.expr) -> int:
    """The value of sums and products of whole numbers. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**53:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate_arithmetic(node.left), _evaluate_arithmetic(node.right))
        if abs(value) < 2**53:
            return value
    raise ValueError("no arithmetic of whole numbers")


MAX_SCRIPT_CHARACTERS = 1_000_000
MAX_COMMAND_DEPTH = 5  # of commands that are words of a command (bash -c "...")
_ASSIGNMENT = re.compile(r"^(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=")
COMMAND_SEPARATORS = {"&&", "||", "|", "&"}
LOOP_OPENERS, LOOP_CLOSERS = (
    ("for", "while", "until", "case", "select"),
    ("done", "esac"),
)  # what may run any number of times
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")  # modules that start a program


class TrainingCommand(NamedTuple):
    """What a script starts: `launcher` are the words before the program (torchrun's), `arguments` those behind it."""

    launcher: tuple[str, ...]
    arguments: tuple[str, ...]


def training_command(text: str, what: str) -> TrainingCommand:
    """The command of a script that starts a program of Python with most options, the script's own variables filled in.

    Raises `InputError` for a text that is no script, or in which no command has an option.
    """
    if len(text) > MAX_SCRIPT_CHARACTERS:
        raise InputError(
            f"{what}: {len(text):,} characters; a launch script of at most {MAX_SCRIPT_CHARACTERS:,} is required"
        )
    variables = ShellVariables(what)
    found = max(_list_commands(text, variables), key=_num_options, default=[])
    if not _num_options(found):
        raise InputError(
            f"{what}: no command has an option; a script that starts a training (... --name value ...) is required"
        )
    at = next((i for i, word in enumerate(found) if _is_program(found, i, word)), -1)
    return TrainingCommand(tuple(found[: at + 1]), tuple(found[at + 1 :]))


def _is_program(words: list[str], at: int, word: str) -> bool:
    return word.endswith(".py") or (at > 0 and words[at - 1] == "-m" and word not in LAUNCHER_MODULES)


def _num_options(words: list[str]) -> int:
    return sum(word.startswith("--") for word in words)


def _list_commands(text: str, variables: ShellVariables, depth: int = 0) -> Iterator[list[str]]:
    """Words of each command of a text; its assignments are taken on the way."""
    for statement in _reached_statements(text, variables):
        match = _ASSIGNMENT.match(statement)
        if match and _is_assignment(statement[match.end() :], variables.what):
            variables.assign(match[1], statement[match.end() :], more=bool(match[2]))
            continue
        for words in _split_commands(split_words(variables.expand(statement), variables.what)):
            yield words
            for nested in (word for word in words if " --" in word and ".py " in word):
                if depth < MAX_COMMAND_DEPTH:
                    yield from _list_commands(nested, variables, depth + 1)


def _is_assignment(value: str, what: str) -> bool:
    """Whether nothing but a value follows; else it is a command with a variable before it."""
    return value.startswith("(") or not _num_options(split_words(value, what)[1:])


def _split_commands(words: list[str]) -> Iterator[list[str]]:
    start = 0
    for at, word in enumerate([*words, "|"]):
        if word in COMMAND_SEPARATORS:
            if at > start:
                yield words[start:at]
            start = at + 1


def _reached_statements(text: str, variables: ShellVariables) -> Iterator[str]:
    """Statements of a text that are reached: of conditions the first branch that is known to hold, of loops and cases none."""
    branches: list[bool | None] = []  # of each open condition: whether this branch runs; None behind the one that did
    loops = 0
    for statement in split_statements(text):
        word, _, rest = statement.partition(" ")
        if word in LOOP_OPENERS or word in LOOP_CLOSERS:
            loops = max(loops + (1 if word in LOOP_OPENERS else -1), 0)
        elif loops:
            continue
        elif word == "if":
            branches.append(all(branches) and variables.condition_holds(rest))
        elif word in ("elif", "else") and branches:
            branches[-1] = (
                None
                if branches[-1] is not False
                else all(branches[:-1]) and (word == "else" or variables.condition_holds(rest))
            )
        elif word == "fi" and branches:
            branches.pop()
        elif all(branches):
            body = rest if word in ("then", "do", "else", "{") else statement
            if body and body not in ("fi", "}"):
                yield body
