"""The part of `show` about the books' rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwise.present.cli.section import Report, Section, Table
from shardwise.values.sourced_value import SourcedValue


def rule_names() -> tuple[str, ...]:
    from shardwise.book_formulas.named_rules import named_rules

    return tuple(named_rules())


def values_of(name: str) -> list[SourcedValue]:
    from shardwise.book_formulas.named_rules import rule_named, rule_values

    return rule_values(rule_named(name))


def rules_table(names: Sequence[str]) -> Report:
    """The rules by topic, a line for each."""
    from shardwise.book_formulas.named_rules import rule_named

    groups = groupby(map(rule_named, names), key=lambda one: one.topic)
    sections = [
        Section([Table(rows=tuple((one.name, one.summary) for one in group), head=False, indent=2)], title=topic)
        for topic, group in groups
    ]
    return [*sections, Section(["shardwise rule NAME says what a rule takes, its formula and its source"])]


def rule_entry(name: str) -> Report:
    from shardwise.book_formulas.named_rules import rule_named
    from shardwise.present.cli.rule_report import rule_report

    return rule_report(rule_named(name))
