"""The books' rules by name: what a rule takes, its unit, formula and source, its value for given numbers; and as plain data.

These are read off the signature and the docstring of the rule's function. A docstring begins with what the rule gives. Behind
labels follow `Formula:`, `Unit:` (where its name does not say it), `Assumes:`, `Differs:` (where another book counts otherwise)
and `Source:`.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typing_extensions import TypedDict

from shardwise.book_formulas import rules
from shardwise.book_formulas.rule_parameters import (
    VALUE_PARSERS,
    RuleParameter,
    parse_value,
    quantity_text,
    unit_of_name,
)
from shardwise.book_formulas.rules.job_rules import BOOK, NOTE, PLAYBOOK
from shardwise.model.architecture import Architecture
from shardwise.values.errors import InputError, did_you_mean, raise_problems, run_all
from shardwise.values.sourced_value import SourcedValue

Number = float | int | bool
LETTERS = re.compile(r"^Letters[^:]*: (.+?)(?:\n\n|\Z)", re.DOTALL | re.MULTILINE)
LABEL = re.compile(r"(?<!\S)(Formula|Unit|Assumes|Differs|Source): ")
WORKS = {"the book": BOOK, "the note": NOTE, "the playbook": PLAYBOOK}  # as sources of docstrings name them
PROSE = re.compile(
    r"1F1B|\d+e\d+|\b(?!(?:alpha|eta|lambda|Sigma)(?:\b|_))[A-Za-z]*[a-z]{2}\w*|\b(?:FLOP|MFU|HFU|TP|DP|FSDP)s?\b|`[^`]*`"
)  # words of a formula
SYMBOL = re.compile(r"alpha|lambda|Sigma|eta(?:_\w+)?|[A-Za-z](?:_\w+|[xy](?![a-z]))?")
PURE = re.compile(r"share|fraction|ratio|_over_")  # names of numbers without a unit


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePart:
    """One number of what a rule gives. A number without a unit has ""."""

    name: str
    value: Number
    unit: str

    @property
    def text(self) -> str:
        """The number with its unit."""
        return quantity_text(self.value, self.unit)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedRule:
    """A rule of the books by its name: its parameters with their defaults, the unit of its result, its formula and source.

    >>> import shardwise as sw
    >>> rule = sw.rules()[0]
    >>> rule.signature.startswith(rule.name), bool(rule.formula), bool(rule.source)
    (True, True, True)
    """

    name: str
    topic: str
    summary: str
    remarks: str
    parameters: tuple[RuleParameter, ...]
    unit: str
    formula: str
    letters: str
    assumes: str
    differs: str
    source: str
    function: Callable[..., Any]

    @property
    def signature(self) -> str:
        """The rule as it is called on a command line: NAME KEY=..., with the defaults of what may be left out."""
        return " ".join([self.name, *(f"{one.name}={one.default_text or '...'}" for one in self.parameters)])

    def __repr__(self) -> str:
        return f"NamedRule: {self.signature}: {self.formula}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleValue:
    """A rule worked out for given numbers. `value` is what its function returns: a number, or a dataclass of several (`parts`).

    >>> import shardwise as sw
    >>> found = sw.rule("fsdp_min_tokens_per_chip", alpha=2550, num_axes=3)
    >>> found.value, found.parts[0].unit
    (850.0, 'tokens/chip')
    """

    rule: NamedRule
    arguments: Mapping[str, Any]
    value: Any

    @property
    def parts(self) -> tuple[RulePart, ...]:
        """The numbers by name, with their units."""
        if not is_dataclass(self.value):
            return (
                RulePart(name=self.rule.name, value=self.value, unit=_unit(self.rule.name, self.value, self.rule.unit)),
            )
        names = [one.name for one in fields(self.value)]
        names += [name for name, one in vars(type(self.value)).items() if isinstance(one, property)]
        values = [(name, getattr(self.value, name)) for name in names]
        return tuple(RulePart(name=name, value=one, unit=_unit(name, one, self.rule.unit)) for name, one in values)

    def __repr__(self) -> str:
        return f"RuleValue: {', '.join(f'{one.name} = {one.text}' for one in self.parts)}; {self.rule.formula}"


def _unit(name: str, value: Number, otherwise: str) -> str:
    if isinstance(value, bool) or PURE.search(name):
        return ""
    return unit_of_name(name) or otherwise


@cache
def rules_by_name() -> Mapping[str, NamedRule]:
    """The rules by name, those of a topic together: all whose arguments and results are numbers, choices or a model."""
    found = (_build_rule(name, getattr(rules, name)) for name in rules.__all__)
    ordered = sorted((one for one in found if one), key=lambda one: (one.topic, one.function.__code__.co_firstlineno))
    return {one.name: one for one in ordered}


def get_rule(name: str) -> NamedRule:
    """The rule of that name. Raises `InputError` that names the nearest ones."""
    if name not in rules_by_name():
        hint = did_you_mean(name, rules_by_name())
        raise InputError(f"rule: found {name!r}{hint}; one of those that `shardwise show rules` lists is required")
    return rules_by_name()[name]


def evaluate_rule(rule: NamedRule, given: Mapping[str, Any]) -> RuleValue:
    """The rule with values for its parameters, each a number or a text with its unit.

    Raises `InputError` with every key that is missing or not the rule's, and every value that is not of its kind.

    >>> evaluate_rule(get_rule("fsdp_min_tokens_per_chip"), {"alpha": 2550.0, "num_axes": "3"})
    RuleValue: fsdp_min_tokens_per_chip = 850 tokens/chip; alpha / M
    """
    known = {one.name: one for one in rule.parameters}
    readers = {key: partial(parse_value, known[key], one) for key, one in given.items() if key in known}
    _, *found = run_all(lambda: raise_problems(_wrong_keys(rule, given)), *readers.values())
    values = dict(zip(readers, found, strict=True))
    try:
        value = rule.function(**values)
    except (ArithmeticError, ValueError) as error:
        shown = ", ".join(f"{key} = {value}" for key, value in values.items())
        raise InputError(f"{rule.name}: found {shown}, for which {rule.formula} has no value ({error})") from None
    everything = {key: one.default for key, one in known.items()} | values
    return RuleValue(rule=rule, arguments=everything, value=value)


def _wrong_keys(rule: NamedRule, given: Collection[str]) -> list[str]:
    """What is wrong with the keys: those that are not the rule's, and those that are missing."""
    known = [one.name for one in rule.parameters]
    takes = f"it takes {', '.join(known) or 'nothing'}"
    wrong = [f"{rule.name}: no {key!r}{did_you_mean(key, known)}; {takes}" for key in given if key not in known]
    return wrong + [
        f"{rule.name}: {one.name} missing; a value is required, such as {one.name}={one.example}"
        for one in rule.parameters
        if one.required and one.name not in given
    ]


def _build_rule(name: str, function: Any) -> NamedRule | None:
    """The rule that a function is; None for a class, and for what does not take or give numbers alone."""
    if not inspect.isfunction(function):
        return None
    hints = get_type_hints(function)
    gives = hints.pop("return")
    if not (all(_is_kind(hint) for hint in hints.values()) and (gives in (float, int, bool) or is_dataclass(gives))):
        return None
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in inspect.signature(function).parameters.values()):
        return None
    text, *labelled = LABEL.split((inspect.getdoc(function) or "").partition("\n>>> ")[0])
    said = {label: _line(one).rstrip(".") for label, one in zip(labelled[::2], labelled[1::2], strict=True)}
    summary, _, remarks = text.partition("\n\n")
    return NamedRule(
        name=name, function=function, topic=_topic(function), summary=_line(summary),
        letters=_letters(function, said["Formula"], hints),
        remarks=_line(remarks), unit=said.get("Unit", ""), formula=said["Formula"], assumes=said.get("Assumes", ""),
        differs=said.get("Differs", ""), source=_spell_source(said["Source"]),
        parameters=tuple(
            RuleParameter(name=one.name, hint=hints[one.name], default=one.default)
            for one in inspect.signature(function).parameters.values()
        ),
    )  # fmt: skip


def _topic(function: Any) -> str:
    """What the rules of a file are about: the first line of it."""
    return _line((inspect.getdoc(sys.modules[function.__module__]) or "").partition("\n\n")[0]).rstrip(".")


def _letters(function: Any, formula: str, parameters: Collection[str]) -> str:
    """What the letters of a formula mean, and which parameters they are: as the rule's file says, or else that of all of them."""
    told = (inspect.getdoc(sys.modules[function.__module__]) or "", inspect.getdoc(rules) or "")
    meanings: dict[str, str] = {}
    for found in filter(None, map(LETTERS.search, told)):
        for item in _line(found[1]).rstrip(".").split("; "):
            letter, _, meaning = item.partition(" ")
            meanings.setdefault(letter, _named_here(meaning, parameters))
    used = set(SYMBOL.findall(PROSE.sub(" ", formula)))
    return "; ".join(f"{letter} {meaning}" for letter, meaning in meanings.items() if letter in used)


def _named_here(meaning: str, parameters: Collection[str]) -> str:
    """A letter's meaning with those of its parameters that a rule takes."""
    if not meaning.endswith(")"):
        return meaning
    text, _, names = meaning.removesuffix(")").rpartition(" (")
    own = [name for name in names.split(", ") if name in parameters]
    return f"{text} ({', '.join(own)})" if own else text


def _line(text: str) -> str:
    return " ".join(text.split())


def _is_kind(hint: Any) -> bool:
    return get_origin(hint) is Literal or any(kind in (hint, *get_args(hint)) for kind in VALUE_PARSERS)


def _spell_source(source: str) -> str:
    """A source with its work's authors and title."""
    return re.sub("|".join(WORKS), lambda found: WORKS[found[0]], source)


SCHEMA = "shardwise.rule/1"
KIND_NAMES = {float: "number", int: "integer", bool: "boolean", str: "name", Literal: "name", Architecture: "model"}


class ParameterPayload(TypedDict):
    """What a rule takes; a default of null is none, or infinite."""

    name: str
    kind: str
    unit: str
    required: bool
    default: float | bool | str | None
    choices: list[str]


class RulePartPayload(TypedDict):
    """A number that a rule gives; null where it is infinite."""

    name: str
    value: float | bool | None
    unit: str


class RulePayload(TypedDict):
    """One of the books' rules; `given` and `values` are null where it was asked for without numbers."""

    schema: Literal["shardwise.rule/1"]
    name: str
    topic: str
    summary: str
    remarks: str
    parameters: list[ParameterPayload]
    unit: str
    formula: str
    letters: str
    assumes: str
    differs: str
    source: str
    given: dict[str, float | bool | str | None] | None
    values: list[RulePartPayload] | None


def rule_payload(rule: NamedRule, found: RuleValue | None = None) -> dict[str, Any]:
    """The rule as `--json` prints it, with its numbers where it has them."""
    given = {key: _json_value(value) for key, value in found.arguments.items()} if found else None
    values = (
        [{"name": one.name, "value": _json_value(one.value), "unit": one.unit} for one in found.parts]
        if found
        else None
    )
    return {
        "schema": SCHEMA, "name": rule.name, "topic": rule.topic, "summary": rule.summary, "remarks": rule.remarks,
        "parameters": [_parameter_payload(one) for one in rule.parameters], "unit": rule.unit, "formula": rule.formula,
        "letters": rule.letters, "assumes": rule.assumes, "differs": rule.differs, "source": rule.source,
        "given": given, "values": values,
    }  # fmt: skip


def rule_values(rule: NamedRule) -> list[SourcedValue]:
    """A rule as a catalogue lists it: a value for each line of it, with its source."""
    told = {"topic": rule.topic, "summary": rule.summary, "signature": rule.signature, "formula": rule.formula}
    return [(key, text, rule.source) for key, text in told.items()]


def _parameter_payload(one: RuleParameter) -> dict[str, Any]:
    return {
        "name": one.name, "kind": KIND_NAMES[one.kind], "unit": one.unit, "required": one.required,
        "default": None if one.required else _json_value(one.default), "choices": list(one.choices),
    }  # fmt: skip


def _json_value(value: Any) -> Any:
    """A value as JSON has it: a model by its name."""
    if isinstance(value, Architecture):
        return value.name
    return None if isinstance(value, float) and math.isinf(value) else value
