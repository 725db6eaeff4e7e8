"""Words of an engine's command line as options, by its table and as its parser reads them, and options as words.

vLLM and SGLang parse with argparse: any unique beginning of a flag stands for it, and the last of several values counts. vLLM
takes dashes and underscores as the same, JSON by parts (`--speculative-config.method mtp`) and `-O3` (source: vLLM 0.32.0,
vllm/utils/argparse_utils.py). TensorRT-LLM's click takes whole flags only.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.interop.text_formats.option_tables import FrameworkOption, option_problem
from shardwise.values import InputError, did_you_mean, parse_json, short_repr
from shardwise.values.errors import join_words
from shardwise.values.input_texts import parse_integer, parse_number

MAX_DOTS = 10  # sections of a part of a JSON option
# Suffixes of counts. Sources: vLLM 0.32.0, human_readable_int; SGLang 0.5.23, human_readable_int.
COUNT_SUFFIXES: Mapping[str, Mapping[str, int]] = {
    "vllm": {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40},
    "sglang": {
        "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    },
}  # fmt: skip
_COUNT = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)([kKmMgGtT]i?)")
_NEGATIVE_NUMBER = re.compile(r"-\d+(\.\d*)?|-\.\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSyntax:
    """Syntax of an engine's flags: `abbreviates` unique beginnings, `joins_dashes`: underscores are dashes, `has_parts`:
    JSON options are set by parts, `suffixes` of counts by their factor, `automatic`: what "auto" stands for, by option."""

    abbreviates: bool = True
    joins_dashes: bool = False
    has_parts: bool = False
    suffixes: Mapping[str, int] = field(default_factory=dict)
    automatic: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class ParsedWords:
    """Options by name, the words that belong to none, and what is wrong."""

    options: dict[str, Any] = field(default_factory=dict)
    positionals: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class FlagReader:
    """Reads the words of a command line by the table of an engine's options."""

    def __init__(self, title: str, table: Mapping[str, FrameworkOption], syntax: FlagSyntax) -> None:
        self.title, self.table, self.syntax = title, table, syntax
        self.flags: dict[str, str] = {}
        for option in table.values():
            if option.kind != "field":
                self.flags |= dict.fromkeys((f"--{option.name}", *option.aliases), option.name)

    def read(self, tokens: Sequence[str]) -> ParsedWords:
        """Return the options among words. A value of another type, an unknown flag and a missing value are problems."""
        parsed, tokens = ParsedWords(), list(tokens)
        if self.syntax.has_parts:
            tokens = list(_split_optimization_levels(tokens))
        index = 0
        while index < len(tokens):
            word, index = tokens[index], index + 1
            if not _is_flag(word):
                parsed.positionals.append(word)
                continue
            flag, equals, joined_value = word.partition("=")
            flag, dot, part = flag.partition(".") if self.syntax.has_parts else (flag, "", "")
            values = [joined_value] if equals else tokens[index : _end_of_values(tokens, index)]
            option = self._find_option(flag, parsed)
            if option is None:  # its values are not known to be its own, but are of no use elsewhere
                num_values = len(values)
            elif option.kind == "bool":
                num_values = 0
                self._set_switch(parsed, option, flag, joined_value if equals else None)
            else:
                num_values = len(values) if option.kind == "list" and not dot else min(len(values), 1)
                self._set_values(parsed, option, flag, part, values[:num_values])
            index += 0 if equals else num_values
        return parsed

    def _set_values(
        self, parsed: ParsedWords, option: FrameworkOption, flag: str, part: str, values: Sequence[str]
    ) -> None:
        """Set an option, or a part of a JSON option, from the words behind its flag."""
        if not values:
            parsed.problems.append(f"{flag}: found no value; one is required")
        elif part:
            self._set_part(parsed, option, part, values[0])
        else:
            self.set_value(parsed, option, values)

    def set_value(self, parsed: ParsedWords, option: FrameworkOption, values: Sequence[str]) -> None:
        """Set an option to the value that words say."""
        value = (
            [_number_or_text(text) for text in values] if option.kind == "list" else self._convert(option, values[0])
        )
        problem = option_problem(option, value)
        if problem and option.choices and isinstance(value, str):
            folded = value.lower().replace("-", "_")  # as vLLM's options of kernels are read
            value, problem = (folded, None) if folded in option.choices else (value, problem)
        if option.kind == "any" and isinstance(value, str) and value.lstrip().startswith(("{", "[")):
            problem = f"{option.name}: found {short_repr(value)}; JSON is required"
        is_none = isinstance(value, str) and value.lower() == "none"
        if problem and "$" in str(value) and option.effect != "none":
            parsed.problems.append(
                f"--{option.name}: found {short_repr(value)}, a variable that nothing sets here; --env NAME=VALUE gives it"
            )
        elif problem and not is_none and "$" not in str(value):
            parsed.problems.append(f"--{problem}")
        else:
            parsed.options[option.name] = value

    def _find_option(self, flag: str, parsed: ParsedWords) -> FrameworkOption | None:
        """Return the option of a flag; a flag that no option or several have is a problem."""
        if self.syntax.joins_dashes and flag.startswith("--"):
            flag = flag.replace("_", "-")
        if flag in self.flags:
            return self.table[self.flags[flag]]
        matches = [name for name in self.flags if name.startswith(flag)] if self.syntax.abbreviates else []
        options = dict.fromkeys(self.flags[match] for match in matches)
        if len(options) == 1 and len({match.startswith("--no-") for match in matches}) == 1:
            return self.table[next(iter(options))]
        if matches:
            listed = join_words(matches[:6], "or") + (", ..." if len(matches) > 6 else "")
            parsed.problems.append(f"{flag}: stands for {listed}; the whole flag is required")
        else:
            parsed.problems.append(f"{flag}: no option of {self.title}{did_you_mean(flag, self.flags)}")
        return None

    def _set_switch(self, parsed: ParsedWords, option: FrameworkOption, flag: str, value: str | None) -> None:
        """Set an option that is on or off, whose flag takes no value."""
        if value is not None:
            parsed.problems.append(f"{flag}: found the value {short_repr(value)}; the flag alone is required")
        parsed.options[option.name] = not flag.replace("_", "-").startswith("--no-") or option.name.startswith("no-")

    def _set_part(self, parsed: ParsedWords, option: FrameworkOption, part: str, text: str) -> None:
        """Set a part of a JSON option; a name that ends with + takes a list."""
        names = part.removesuffix("+").split(".")[:MAX_DOTS]
        value = text.split(",") if part.endswith("+") else _json_or_text(text)
        subtree = parsed.options.setdefault(option.name, {})
        for name in names[:-1]:
            subtree = subtree.setdefault(name, {}) if isinstance(subtree, dict) else {}
        if not isinstance(subtree, dict):
            parsed.problems.append(f"--{option.name}.{part}: found a value and parts of it; one of the two is required")
        else:
            subtree[names[-1]] = value

    def _convert(self, option: FrameworkOption, text: str) -> Any:
        """Return the value of a text by the option's kind; a text that is none stays as it is."""
        try:
            if option.kind == "int":
                return parse_integer(text)
            if option.kind == "count":
                return self.syntax.automatic[option.name] if text == "auto" else self._parse_count(text)
            if option.kind == "float":
                return parse_number(text)
        except (ValueError, KeyError, InputError):  # a text that is not a number, or is too long for one
            return text
        return _json_or_text(text) if option.kind == "any" else text

    def _parse_count(self, text: str) -> int:
        match = _COUNT.fullmatch(text)
        if match and match[2] in self.syntax.suffixes:
            return round(parse_number(match[1]) * self.syntax.suffixes[match[2]])
        return parse_integer(text)


def _split_optimization_levels(tokens: Sequence[str]) -> Iterator[str]:
    """Yield words with -O3 and -O=3 as --optimization-level 3."""
    for word in tokens:
        if word.startswith("-O"):
            yield from ("--optimization-level", *filter(None, [word[2:].removeprefix("=")]))
        else:
            yield word


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and " " not in word and not _NEGATIVE_NUMBER.fullmatch(word)


def _end_of_values(tokens: Sequence[str], start: int) -> int:
    """Return the index of the next flag."""
    return next((index for index in range(start, len(tokens)) if _is_flag(tokens[index])), len(tokens))


def _json_or_text(text: str) -> Any:
    try:
        return parse_json(text, "option")
    except InputError:
        return text


def _number_or_text(text: str) -> Any:
    for parse in (parse_integer, parse_number):
        try:
            return parse(text)
        except (ValueError, InputError):  # a text that is not a number, or is too long for one
            continue
    return text


def format_words(options: Mapping[str, Any], table: Mapping[str, FrameworkOption]) -> Iterator[list[str]]:
    """Yield the words of each option, quoted for a shell where need be."""
    for name, value in options.items():
        if isinstance(value, bool) and table[name].kind == "bool":
            if value:
                yield [f"--{name}"]
            elif f"--no-{name}" in table[name].aliases:
                yield [f"--no-{name}"]
        elif isinstance(value, (list, tuple)) and table[name].kind == "list":
            yield [f"--{name}", *(shlex.quote(str(part)) for part in value)]
        else:
            text = json.dumps(value) if isinstance(value, (dict, list, bool)) else str(value)
            yield [f"--{name}", shlex.quote(text)]
