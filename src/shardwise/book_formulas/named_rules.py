"""The books' rules by name: parameters, unit, formula and source of a rule, its value for given numbers, and its JSON.

These are read off the signature and the docstring of the rule's function. A docstring begins with what the rule gives. Labels
follow: `Formula:`, `Unit:` (if its name does not say it), `Assumes:`, `Differs:` (if another book counts otherwise) and
`Source:`."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin, get_type_hints

from shardwise.book_formulas import rules
from shardwise.book_formulas.rule_parameters import (
    VALUE_PARSERS,
    RuleParameter,
    parse_value,
    quantity_text,
    unit_of_name,
)
from shardwise.book_formulas.rules.job_rules import BOOK, NOTE, PLAYBOOK
from shardwise.model import Architecture
from shardwise.values import InputError, Payload, SourcedValue, did_you_mean, raise_problems, run_all

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
    """One number of a rule's result; `unit` is "" for a number without one."""

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
        """The rule as it is called on a command line: NAME KEY=..., with the defaults of optional parameters."""
        return " ".join(
            [self.name, *(f"{parameter.name}={parameter.default_text or '...'}" for parameter in self.parameters)]
        )

    def __repr__(self) -> str:
        return f"NamedRule: {self.signature}: {self.formula}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleValue:
    """A rule evaluated for given numbers. `value` is what its function returns: a number, or a dataclass of several (`parts`).

    >>> import shardwise as sw
    >>> result = sw.rule("fsdp_min_tokens_per_chip", alpha=2550, num_axes=3)
    >>> result.value, result.parts[0].unit
    (850.0, 'tokens/chip')
    """

    rule: NamedRule
    arguments: Mapping[str, Any]
    value: Any

    @property
    def parts(self) -> tuple[RulePart, ...]:
        """Numbers of the result by name, with their units: fields and properties of a dataclass."""
        if not is_dataclass(self.value):
            return (
                RulePart(name=self.rule.name, value=self.value, unit=_unit(self.rule.name, self.value, self.rule.unit)),
            )
        names = [field.name for field in fields(self.value)]
        names += [name for name, attribute in vars(type(self.value)).items() if isinstance(attribute, property)]
        numbers = [(name, getattr(self.value, name)) for name in names]
        return tuple(
            RulePart(name=name, value=number, unit=_unit(name, number, self.rule.unit)) for name, number in numbers
        )

    def __repr__(self) -> str:
        return f"RuleValue: {', '.join(f'{part.name} = {part.text}' for part in self.parts)}; {self.rule.formula}"


def _unit(name: str, value: Number, otherwise: str) -> str:
    if isinstance(value, bool) or PURE.search(name):
        return ""
    return unit_of_name(name) or otherwise


@cache
def rules_by_name() -> Mapping[str, NamedRule]:
    """Return the rules by name, by topic: functions whose arguments and results are numbers, choices or a model."""
    built = (_build_rule(name, getattr(rules, name)) for name in dir(rules))
    ordered = sorted(
        (rule for rule in built if rule), key=lambda rule: (rule.topic, rule.function.__code__.co_firstlineno)
    )
    return {rule.name: rule for rule in ordered}


def get_rule(name: str) -> NamedRule:
    """Return the rule of that name. Raises `InputError` that names the nearest ones."""
    if name not in rules_by_name():
        hint = did_you_mean(name, rules_by_name())
        raise InputError(f"rule: found {name!r}{hint}; one of those that `shardwise show rules` lists is required")
    return rules_by_name()[name]


def evaluate_rule(rule: NamedRule, arguments: Mapping[str, Any]) -> RuleValue:
    """Evaluate a rule for arguments that are each a number or a text with its unit.

    Raises `InputError` with every key that is missing or not the rule's, and every value that is not of its kind.

    >>> evaluate_rule(get_rule("fsdp_min_tokens_per_chip"), {"alpha": 2550.0, "num_axes": "3"})
    RuleValue: fsdp_min_tokens_per_chip = 850 tokens/chip; alpha / M
    """
    parameters = {parameter.name: parameter for parameter in rule.parameters}
    readers = {
        key: partial(parse_value, parameters[key], argument) for key, argument in arguments.items() if key in parameters
    }
    _, *parsed = run_all(lambda: raise_problems(_wrong_keys(rule, arguments)), *readers.values())
    parsed_arguments = dict(zip(readers, parsed, strict=True))
    try:
        value = rule.function(**parsed_arguments)
    except (ArithmeticError, ValueError) as error:
        text = ", ".join(f"{key} = {value}" for key, value in parsed_arguments.items())
        raise InputError(f"{rule.name}: found {text}, for which {rule.formula} has no value ({error})") from None
    all_arguments = {key: parameter.default for key, parameter in parameters.items()} | parsed_arguments
    return RuleValue(rule=rule, arguments=all_arguments, value=value)


def _wrong_keys(rule: NamedRule, keys: Collection[str]) -> list[str]:
    """List keys that are not the rule's, and those that are missing."""
    names = [parameter.name for parameter in rule.parameters]
    usage = f"it takes {', '.join(names) or 'nothing'}"
    unknown = [f"{rule.name}: no {key!r}{did_you_mean(key, names)}; {usage}" for key in keys if key not in names]
    return unknown + [
        f"{rule.name}: {parameter.name} missing; a value is required, such as {parameter.name}={parameter.example}"
        for parameter in rule.parameters
        if parameter.required and parameter.name not in keys
    ]


def _build_rule(name: str, function: Any) -> NamedRule | None:
    """Build the rule of a function; None for a class, and if arguments or results are not numbers alone."""
    if not inspect.isfunction(function):
        return None
    hints = get_type_hints(function)
    returns = hints.pop("return")
    if not all(_is_kind(hint) for hint in hints.values()) or not (
        returns in (float, int, bool) or is_dataclass(returns)
    ):
        return None
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return None
    text, *labelled = LABEL.split((inspect.getdoc(function) or "").partition("\n>>> ")[0])
    sections = {label: _line(section).rstrip(".") for label, section in zip(labelled[::2], labelled[1::2], strict=True)}
    summary, _, remarks = text.partition("\n\n")
    return NamedRule(
        name=name, function=function, topic=_topic(function), summary=_line(summary),
        letters=_letters(function, sections["Formula"], hints),
        remarks=_line(remarks), unit=sections.get("Unit", ""), formula=sections["Formula"], assumes=sections.get("Assumes", ""),
        differs=sections.get("Differs", ""), source=_spell_source(sections["Source"]),
        parameters=tuple(
            RuleParameter(name=parameter.name, hint=hints[parameter.name], default=parameter.default)
            for parameter in parameters
        ),
    )  # fmt: skip


def _topic(function: Any) -> str:
    """Topic of the rules of a file: the first line of its docstring."""
    return _line((inspect.getdoc(sys.modules[function.__module__]) or "").partition("\n\n")[0]).rstrip(".")


def _letters(function: Any, formula: str, parameters: Collection[str]) -> str:
    """Describe the letters of a formula and their parameters, from the rule's file, else from the docstring of `rules`."""
    docstrings = (inspect.getdoc(sys.modules[function.__module__]) or "", inspect.getdoc(rules) or "")
    meanings: dict[str, str] = {}
    for match in filter(None, map(LETTERS.search, docstrings)):
        for definition in _line(match[1]).rstrip(".").split("; "):
            letter, _, meaning = definition.partition(" ")
            meanings.setdefault(letter, _named_here(meaning, parameters))
    used = set(SYMBOL.findall(PROSE.sub(" ", formula)))
    return "; ".join(f"{letter} {meaning}" for letter, meaning in meanings.items() if letter in used)


def _named_here(meaning: str, parameters: Collection[str]) -> str:
    """Keep only the parameters that a rule takes in a letter's meaning."""
    if not meaning.endswith(")"):
        return meaning
    text, _, names = meaning.removesuffix(")").rpartition(" (")
    matching = [name for name in names.split(", ") if name in parameters]
    return f"{text} ({', '.join(matching)})" if matching else text


def _line(text: str) -> str:
    return " ".join(text.split())


def _is_kind(hint: Any) -> bool:
    return get_origin(hint) is Literal or any(kind in (hint, *get_args(hint)) for kind in VALUE_PARSERS)


def _spell_source(source: str) -> str:
    """Spell out authors and title of a source's work."""
    return re.sub("|".join(WORKS), lambda match: WORKS[match[0]], source)


KIND_NAMES = {float: "number", int: "integer", bool: "boolean", str: "name", Literal: "name", Architecture: "model"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleParameterRecord(Payload):
    """Parameter of a rule; a default of null is none, or infinite."""

    name: str
    kind: str
    unit: str
    required: bool
    default: float | bool | str | None
    choices: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class RulePartRecord(Payload):
    """Number of a rule's result; null where it is infinite."""

    name: str
    value: float | bool | None
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRecord(Payload):
    """Rule of the books; `given` and `values` are null where no parameters were given."""

    SCHEMA = "shardwise.rule/1"
    name: str
    topic: str
    summary: str
    remarks: str
    parameters: Sequence[RuleParameterRecord]
    unit: str
    formula: str
    letters: str
    assumes: str
    differs: str
    source: str
    given: Mapping[str, float | bool | str | None] | None
    values: Sequence[RulePartRecord] | None

    @classmethod
    def of(cls, rule: NamedRule, evaluated: RuleValue | None = None) -> RuleRecord:
        """Return the record of a rule, with its numbers if it was evaluated."""
        parameters = [
            RuleParameterRecord.from_attributes(
                parameter, kind=KIND_NAMES[parameter.kind],
                default=None if parameter.required else _json_value(parameter.default),
            )
            for parameter in rule.parameters
        ]  # fmt: skip
        values = [
            RulePartRecord.from_attributes(part, value=_json_value(part.value))
            for part in (evaluated.parts if evaluated else ())
        ]
        arguments = {key: _json_value(argument) for key, argument in evaluated.arguments.items()} if evaluated else None
        return cls.from_attributes(rule, parameters=parameters, given=arguments, values=values if evaluated else None)

    @classmethod
    def of_value(cls, evaluated: RuleValue) -> RuleRecord:
        """Return the record of an evaluated rule."""
        return cls.of(evaluated.rule, evaluated)


def rule_values(rule: NamedRule) -> list[SourcedValue]:
    """Return a rule as a catalogue lists it: (key, text, source) for each of its lines."""
    texts = {"topic": rule.topic, "summary": rule.summary, "signature": rule.signature, "formula": rule.formula}
    return [(key, text, rule.source) for key, text in texts.items()]


def _json_value(value: Any) -> Any:
    """Return a value for JSON: of a model its name, of an infinite number None."""
    if isinstance(value, Architecture):
        return value.name
    return None if isinstance(value, float) and math.isinf(value) else value
