"""A rule, and a rule with numbers, as plain data: what `shardwise rule --json` prints."""

from __future__ import annotations

import math
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.books.named_rules import NamedRule, RuleValue
from shardwise.books.rule_parameters import Parameter
from shardwise.model.architecture import Architecture
from shardwise.sourced import SourcedValue

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


class PartPayload(TypedDict):
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
    values: list[PartPayload] | None


def rule_payload(rule: NamedRule, found: RuleValue | None = None) -> dict[str, Any]:
    """The rule as `--json` prints it, with its numbers where it has them."""
    given = {key: _plain(value) for key, value in found.given.items()} if found else None
    values = (
        [{"name": one.name, "value": _plain(one.value), "unit": one.unit} for one in found.parts] if found else None
    )
    return {
        "schema": SCHEMA, "name": rule.name, "topic": rule.topic, "summary": rule.summary, "remarks": rule.remarks,
        "parameters": [_parameter(one) for one in rule.parameters], "unit": rule.unit, "formula": rule.formula,
        "letters": rule.letters, "assumes": rule.assumes, "differs": rule.differs, "source": rule.source,
        "given": given, "values": values,
    }  # fmt: skip


def rule_values(rule: NamedRule) -> list[SourcedValue]:
    """A rule as a catalogue lists it: a value for each line of it, with its source."""
    told = {"topic": rule.topic, "summary": rule.summary, "signature": rule.signature, "formula": rule.formula}
    return [(key, text, rule.source) for key, text in told.items()]


def _parameter(one: Parameter) -> dict[str, Any]:
    return {
        "name": one.name, "kind": KIND_NAMES[one.kind], "unit": one.unit, "required": one.required,
        "default": None if one.required else _plain(one.default), "choices": list(one.choices),
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """A value as JSON has it: a model by its name."""
    if isinstance(value, Architecture):
        return value.name
    return None if isinstance(value, float) and math.isinf(value) else value
