"""A rule, and a rule with numbers, as sections."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.present.cli.section import Report, Row, Section, Table, lines_table

if TYPE_CHECKING:
    from shardwise.book_formulas.named_rules import NamedRule, RuleValue
    from shardwise.book_formulas.rule_parameters import RuleParameter


def rule_report(rule: NamedRule) -> Report:
    """What a rule takes and gives, its formula, what it assumes and its source."""
    rows: list[Row] = [("takes", "unit", "default"), *map(_takes, rule.parameters)]
    takes = [Section([Table(rows=tuple(rows), indent=2)])] if rule.parameters else []
    gives = [("gives", rule.unit)] if rule.unit else []
    facts = [*gives, *_facts(rule), ("letters", rule.letters), ("remarks", rule.remarks)]
    return [Section([f"  {rule.summary}"], title=rule.name), *takes, Section([_told(facts)])]


def value_report(found: RuleValue) -> Report:
    """What a rule gives with its numbers, from which values, how and after whom."""
    rule, parts = found.rule, found.parts
    told = [one for one in rule.parameters if found.arguments[one.name] is not None]
    given = ", ".join(f"{one.name} = {_given(one, found)}" for one in told)
    facts = _told([("given", given), *_facts(rule)])
    if len(parts) == 1:
        return [Section([f"  {rule.summary}", facts], title=f"{rule.name} = {parts[0].text}")]
    table = Table(rows=tuple((one.name, one.text) for one in parts), right=(1,), head=False, indent=2)
    return [Section([f"  {rule.summary}"], title=rule.name), Section([table]), Section([facts])]


def _takes(one: RuleParameter) -> Row:
    default = "required" if one.required else one.default_text or "none"
    choices = f" (one of {', '.join(one.choices)})" if one.choices else ""
    return (one.name, one.unit or "-", default + choices)


def _facts(rule: NamedRule) -> list[tuple[str, str]]:
    return [("formula", rule.formula), ("assumes", rule.assumes), ("differs", rule.differs), ("source", rule.source)]


def _told(facts: list[tuple[str, str]]) -> Table:
    return lines_table([(name, text) for name, text in facts if text])


def _given(one: RuleParameter, found: RuleValue) -> str:
    """A value as a report says it: a model by its name."""
    from shardwise.book_formulas.rule_parameters import quantity_text

    value = found.arguments[one.name]
    return quantity_text(value, one.unit) if isinstance(value, (int, float)) else str(getattr(value, "name", value))
