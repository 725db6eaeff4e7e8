"""The training command of a shell script, with the variables that the script itself sets filled in.

Assignments, arrays, whole-number arithmetic, conditions on texts and cases are understood; nothing is run. A value that comes
from elsewhere (`$(command)`, an unset variable, `$1` without `set --`) stays as it is written, and is empty in a condition. A
condition on files is unknown, so what depends on it is left out, as are loops.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from shardwise.interop.text_formats.config_trees import require_length
from shardwise.values import InputError

MAX_EXPANDED_CHARACTERS = 1_000_000  # of a text with its variables replaced
MAX_WORDS = 20_000
MAX_VARIABLE_DEPTH = 20  # variables whose values name variables
_DEFAULT = r"(?::?-((?:[^{}$]|\$\w+)*))?"
_VARIABLE = re.compile(r"\$\{(\w+)\[[@*]\]\}|\$\{(\w+)" + _DEFAULT + r"\}|\$([A-Za-z_]\w*|\d)")
_WHOLE_ARRAY = re.compile(r'"\$\{(\w+)\[[@*]\]\}"')  # expands to the array's words, each quoted
_ARITHMETIC = re.compile(r"\$\(\(([^;]*?)\)\)|\$\(expr\s+([^;()]*?)\)")  # $((a + b)) and $(expr a + b)
_COMMENT = re.compile(r"(^|(?<=\s))#[^\n]*")
_UNSET = re.compile(r"\$\{?\w+[^}\s\"]*\}?")  # a variable that is not set counts as an empty text in a condition
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_TEXT_COMPARISONS: Mapping[str, Callable[[str, str], bool]] = {"=": operator.eq, "==": operator.eq, "!=": operator.ne}
_NUMBER_COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq, "-ne": operator.ne, "-lt": operator.lt, "-le": operator.le, "-gt": operator.gt, "-ge": operator.ge,
}  # fmt: skip


def split_statements(text: str) -> Iterator[str]:
    """Yield the statements of a script, without comments; quotes and brackets may span lines."""
    text = _COMMENT.sub("", text.replace("\\\n", " "))
    statements, quote = _scan_statements(text)
    if quote:  # it is never closed, so that lines are all there is to split at
        statements = [statement for line in text.splitlines() for statement in _scan_statements(line)[0]]
    yield from statements


def _scan_statements(text: str) -> tuple[list[str], str]:
    """Return the statements, and the quote that stays open."""
    statements, start, depth, quote = [], 0, 0, ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[index - 1] != "\\" else quote
        elif character in "'\"":
            quote = character if text[index - 1] != "\\" or not index else ""
        elif character in "()":
            depth = max(depth + (1 if character == "(" else -1), 0)
        elif character in "\n;" and not depth:
            statements.append(text[start:index].strip())
            start = index + 1
    return [statement for statement in (*statements, text[start:].strip()) if statement], quote


def split_words(text: str, source: str) -> list[str]:
    """Return the words of a text. Raises `InputError` if there are more than `MAX_WORDS`."""
    try:
        tokens = shlex.split(text, comments=False)
    except ValueError:
        tokens = text.replace('"', " ").replace("'", " ").split()  # a quote is not closed
    if len(tokens) > MAX_WORDS:
        raise InputError(f"{source}: {len(tokens):,} words on a line; at most {MAX_WORDS:,} are required")
    return tokens


class ShellVariables:
    """The variables that a script has set so far: texts, and arrays of words."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.texts: dict[str, str] = {}
        self.arrays: dict[str, list[str]] = {}

    def assign(self, name: str, value: str, *, append: bool) -> None:
        """Set a variable from the text behind its `=`, or add to it (`append`, for `+=`)."""
        if value.startswith("("):
            tokens = split_words(self.expand(value.removeprefix("(").removesuffix(")")), self.source)
            self.arrays[name] = (self.arrays.get(name, []) if append else []) + tokens
            self.texts.pop(name, None)
            return
        tokens = split_words(value, self.source)
        self.texts[name] = (self.texts.get(name, "") if append else "") + self.expand(" ".join(tokens))

    def set_arguments(self, values: list[str]) -> None:
        """Set the script's arguments, `$1` and further, as `set --` does."""
        self.texts |= {str(number): value for number, value in enumerate(values, start=1)}

    def expand(self, text: str) -> str:
        """Return a text with its variables replaced, repeatedly, as a value may name other variables."""
        text = _WHOLE_ARRAY.sub(lambda match: shlex.join(self.arrays.get(match[1], [])), text)
        for _ in range(MAX_VARIABLE_DEPTH):
            expanded = _ARITHMETIC.sub(self._arithmetic_value, _VARIABLE.sub(self._variable_value, text))
            if len(expanded) > MAX_EXPANDED_CHARACTERS:
                raise InputError(f"{self.source}: variables that grow beyond {MAX_EXPANDED_CHARACTERS:,} characters")
            if expanded == text:
                break
            text = expanded
        return text

    def _variable_value(self, match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[4]
        replacement = " ".join(self.arrays[name]) if name in self.arrays else self.texts.get(name)
        return replacement if replacement is not None else match[3] if match[3] is not None else match[0]

    def _arithmetic_value(self, match: re.Match[str]) -> str:
        """Return the value of $((...)) or $(expr ...), or its text if it has none."""
        expression = re.sub(
            r"[A-Za-z_]\w*", lambda name: self.texts.get(name[0], name[0]), match[1] or match[2].replace("\\*", "*")
        )
        try:
            return str(_evaluate_arithmetic(ast.parse(expression.strip(), mode="eval").body))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
            return match[0]

    def condition_text(self, word: str) -> str:
        """Return a word as a condition sees it: a variable that is not set is empty."""
        return " ".join(split_words(_UNSET.sub("", self.expand(word)), self.source))

    def condition_holds(self, condition: str) -> bool:
        """Return whether a condition on texts or whole numbers is known to hold. Conditions on files never are."""
        tokens = split_words(_UNSET.sub("", self.expand(condition)), self.source)
        if not tokens or tokens[0] not in ("[", "[[", "test"):
            return False
        alternatives = _split_at([token for token in tokens[1:] if token not in ("]", "]]")], "||", "-o")
        clauses = (_split_at(alternative, "&&", "-a") for alternative in alternatives)
        return any(all(map(_is_condition_true, alternative)) for alternative in clauses)


def _split_at(tokens: list[str], *separators: str) -> Iterator[list[str]]:
    clause: list[str] = []
    for token in tokens:
        if token in separators or token in ("[", "[["):
            if token in separators:
                yield clause
                clause = []
            continue
        clause.append(token)
    yield clause


def _is_condition_true(tokens: list[str]) -> bool:
    match tokens:
        case ["!", *operands]:
            return operands[:1] in (["-n"], ["-z"]) and not _is_condition_true(operands)
        case ["-z"] | ["-z", ""]:
            return True
        case ["-n", text]:
            return bool(text)
        case [left, comparison, right] if comparison in _TEXT_COMPARISONS:
            return _TEXT_COMPARISONS[comparison](left, right)
        case [left, comparison, right] if comparison in _NUMBER_COMPARISONS:
            return left.isdigit() and right.isdigit() and _NUMBER_COMPARISONS[comparison](int(left), int(right))
    return False


def _evaluate_arithmetic(node: ast.expr) -> int:
    """Return the value of arithmetic on whole numbers. Raises `ValueError` for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 2**53:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluate_arithmetic(node.left), _evaluate_arithmetic(node.right))
        if abs(value) < 2**53:
            return value
    raise ValueError("no arithmetic of whole numbers")


MAX_COMMAND_DEPTH = 5  # commands inside a word of a command (bash -c "...")
_ASSIGNMENT = re.compile(r"^(?:(?:export|declare|local|readonly)\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)(\+?)=")
COMMAND_SEPARATORS = {"&&", "||", "|", "&"}
LOOP_OPENERS, LOOP_CLOSERS = ("for", "while", "until", "select"), ("done",)
_CASE_BRANCH = re.compile(r"^\(?([^()]+)\)\s*(.*)$", re.DOTALL)
LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch")


class TrainingCommand(NamedTuple):
    """Command of a script: `launcher` are the words up to and with the program (torchrun's), `arguments` those behind it."""

    launcher: tuple[str, ...]
    arguments: tuple[str, ...]


def training_command(text: str, source: str) -> TrainingCommand:
    """Return the command of a script with most options, the script's own variables filled in.

    Raises `InputError` for a text that is no script, or in which no command has an option.
    """
    require_length(text, source, "a launch script")
    variables = ShellVariables(source)
    command = max(list_commands(text, variables, is_python_script), key=_num_options, default=[])
    if not _num_options(command):
        raise InputError(
            f"{source}: no command has an option; a script that starts a training (... --name value ...) is required"
        )
    program_index = next((i for i, token in enumerate(command) if _is_program(command, i, token)), -1)
    return TrainingCommand(tuple(command[: program_index + 1]), tuple(command[program_index + 1 :]))


def _is_program(tokens: list[str], index: int, token: str) -> bool:
    return token.endswith(".py") or (index > 0 and tokens[index - 1] == "-m" and token not in LAUNCHER_MODULES)


def _num_options(tokens: list[str]) -> int:
    return sum(token.startswith("--") for token in tokens)


def is_python_script(token: str) -> bool:
    """Return whether a word of a command is itself a script that starts a Python program with options."""
    return " --" in token and ".py " in token


def list_commands(
    text: str, variables: ShellVariables, is_script: Callable[[str], bool], depth: int = 0
) -> Iterator[list[str]]:
    """Yield the words of each command of a text; assignments on the way set `variables`.

    Words that are scripts themselves (`is_script`), as that of `bash -c`, are read as well.
    """
    for statement in _reached_statements(text, variables):
        match = _ASSIGNMENT.match(statement)
        if match and _is_assignment(statement[match.end() :], variables.source):
            variables.assign(match[1], statement[match.end() :], append=bool(match[2]))
            continue
        if statement.startswith("set -- "):
            variables.set_arguments(split_words(variables.expand(statement), variables.source)[2:])
            continue
        for tokens in _split_commands(split_words(variables.expand(statement), variables.source)):
            yield tokens
            for nested_script in filter(is_script, tokens):
                if depth < MAX_COMMAND_DEPTH:
                    yield from list_commands(nested_script, variables, is_script, depth + 1)


def _is_assignment(value: str, source: str) -> bool:
    """Return whether a statement is only an assignment, not a command with a variable in front."""
    return value.startswith("(") or not _num_options(split_words(value, source)[1:])


def _split_commands(tokens: list[str]) -> Iterator[list[str]]:
    start = 0
    for index, token in enumerate([*tokens, "|"]):
        if token in COMMAND_SEPARATORS:
            if index > start:
                yield tokens[start:index]
            start = index + 1


class _Case(NamedTuple):
    """A case that is open: its text, and the place of its branch among the open ones."""

    text: str
    place: int


def _reached_statements(text: str, variables: ShellVariables) -> Iterator[str]:
    """Yield the statements that run: the first branch of a condition that is known to hold, or of a case; nothing of loops."""
    # One state per open condition or case: True while its branch runs, False while none ran yet, None after one ran. An unknown
    # condition counts as false, so its body is dropped and its `else` runs.
    branches: list[bool | None] = []
    cases: list[_Case] = []
    loops = 0
    for statement in split_statements(text):
        keyword, _, rest = statement.partition(" ")
        if keyword in LOOP_OPENERS or keyword in LOOP_CLOSERS:
            loops = max(loops + (1 if keyword in LOOP_OPENERS else -1), 0)
        elif loops:
            continue
        elif keyword == "case":
            word, _, rest = rest.partition(" in")
            cases.append(_Case(variables.condition_text(word), len(branches)))
            branches.append(False)
            statement = rest.strip()  # a branch on the same line
        elif keyword == "esac" and cases:
            del branches[cases.pop().place :]
            continue
        elif keyword == "if":
            branches.append(all(branches) and variables.condition_holds(rest))
            continue
        elif keyword in ("elif", "else") and branches:
            if branches[-1] is not False:
                branches[-1] = None
            else:
                branches[-1] = all(branches[:-1]) and (keyword == "else" or variables.condition_holds(rest))
            continue
        elif keyword == "fi" and branches:
            branches.pop()
            continue
        if loops or keyword in LOOP_CLOSERS:
            continue
        if cases and len(branches) == cases[-1].place + 1 and (match := _CASE_BRANCH.match(statement)):
            branches[-1] = _enters_branch(branches, cases[-1].text, match[1])
            statement = match[2]
        keyword, _, rest = statement.partition(" ")
        if all(branches):
            body = rest if keyword in ("then", "do", "else", "{") else statement
            if body and body not in ("fi", "}"):
                yield body


def _enters_branch(branches: list[bool | None], text: str, patterns: str) -> bool | None:
    """Return the state of a case at its next branch: of the first that matches only its own statements run."""
    if branches[-1] is not False:
        return None
    names = (pattern.strip().strip("'\"") for pattern in patterns.split("|"))
    return all(branches[:-1]) and any(fnmatchcase(text, name) for name in names)
