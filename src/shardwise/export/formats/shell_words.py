"""Words of a shell: statements of a script, variables filled in, arithmetic on whole numbers, conditions on texts."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping

from shardwise.errors import InputError

MOST_CHARACTERS = 1_000_000  # of a text with its variables filled in
MOST_WORDS = 20_000
DEEPEST = 20  # of variables that name variables
_DEFAULT = r"(?::?-((?:[^{}$]|\$\w+)*))?"
_VARIABLE = re.compile(r"\$\{(\w+)\[[@*]\]\}|\$\{(\w+)" + _DEFAULT + r"\}|\$([A-Za-z_]\w*)")
_WHOLE_ARRAY = re.compile(r'"\$\{(\w+)\[[@*]\]\}"')  # each of its words is one
_ARITHMETIC = re.compile(r"\$\(\(([^;]*?)\)\)")
_COMMENT = re.compile(r"(^|(?<=\s))#[^\n]*")
_UNSET = re.compile(r"\$\{?\w+[^}\s\"]*\}?")  # unset variables: an empty text, in a condition
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: Mapping[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_COUNTED: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def statements(text: str) -> Iterator[str]:
    """The statements of a script, without comments; quotes and brackets may span lines."""
    text = _COMMENT.sub("", text.replace("\\\n", " "))
    found, quote = _statements(text)
    yield from (one for line in text.splitlines() for one in _statements(line)[0]) if quote else found


def _statements(text: str) -> tuple[list[str], str]:
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
    if len(words) > MOST_WORDS:
        raise InputError(f"{what}: {len(words):,} words on a line; at most {MOST_WORDS:,} are required")
    return words


class Variables:
    """What a script has set so far: texts, and arrays of words."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.texts: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}

    def take(self, name: str, value: str, *, more: bool) -> None:
        """Set a variable to what stands behind its =; `more`: behind +=."""
        if value.startswith("("):
            words = split_words(self.filled(value.removeprefix("(").removesuffix(")")), self.what)
            self.arrays[name] = (self.arrays.get(name, []) if more else []) + words
            self.texts.pop(name, None)
            return
        words = split_words(value, self.what)
        self.texts[name] = (self.texts.get(name, "") if more else "") + self.filled(" ".join(words))

    def filled(self, text: str) -> str:
        """A text with its variables replaced, as often as they name one another."""
        text = _WHOLE_ARRAY.sub(lambda match: shlex.join(self.arrays.get(match[1], [])), text)
        for _ in range(DEEPEST):
            filled = _ARITHMETIC.sub(self._counted, _VARIABLE.sub(self._value, text))
            if len(filled) > MOST_CHARACTERS:
                raise InputError(f"{self.what}: variables that grow beyond {MOST_CHARACTERS:,} characters")
            if filled == text:
                break
            text = filled
        return text

    def _value(self, match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        known = " ".join(self.arrays[name]) if name in self.arrays else self.texts.get(name)
        return known if known is not None else match[3] if match[3] is not None else match[0]

    def _counted(self, match: re.Match[str]) -> str:
        """The value of $((...)), or the text where it has none."""
        names = re.sub(r"[A-Za-z_]\w*", lambda name: self.texts.get(name[0], name[0]), match[1])
        try:
            return str(_whole_number(ast.parse(names.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return match[0]

    def holds(self, condition: str) -> bool:
        """Whether a condition is known to hold: of texts and whole numbers; of files nothing is known."""
        words = split_words(_UNSET.sub("", self.filled(condition)), self.what)
        if not words or words[0] not in ("[", "[[", "test"):
            return False
        alternatives = _divided([word for word in words[1:] if word not in ("]", "]]")], "||", "-o")
        return any(all(_is_true(one) for one in _divided(words, "&&", "-a")) for words in alternatives)


def _divided(words: list[str], *ends: str) -> Iterator[list[str]]:
    found: list[str] = []
    for word in words:
        if word in ends or word in ("[", "[["):
            if word in ends:
                yield found
                found = []
            continue
        found.append(word)
    yield found


def _is_true(words: list[str]) -> bool:
    match words:
        case ["!", *others]:
            return others[:1] in (["-n"], ["-z"]) and not _is_true(others)
        case ["-z"] | ["-z", ""]:
            return True
        case ["-n", text]:
            return bool(text)
        case [one, compared, other] if compared in _COMPARED:
            return _COMPARED[compared](one, other)
        case [one, compared, other] if compared in _COUNTED:
            return one.isdigit() and other.isdigit() and _COUNTED[compared](int(one), int(other))
    return False


def _whole_number(node: ast.expr) -> int:
    """The value of sums and products of whole numbers. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**53:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_whole_number(node.left), _whole_number(node.right))
        if abs(value) < 2**53:
            return value
    raise ValueError("no arithmetic of whole numbers")
