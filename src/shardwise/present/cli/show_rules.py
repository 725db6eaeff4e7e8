"""The part of `show` about the books' rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from shardwise.present.cli.section import Report, Section, Table
from shardwise.values import SourcedValue


def rule_names() -> tuple[str, ...]:
    from shardwise.book_formulas import rules_by_name

    return tuple(rules_by_name())


def values_of(name: str) -> list[SourcedValue]:
    from shardwise.book_formulas import get_rule
    from shardwise.book_formulas.named_rules import rule_values

    return rule_values(get_rule(name))


def rules_table(names: Sequence[str]) -> Report:
    """The rules by topic, a line for each."""
    from shardwise.book_formulas import get_rule

    groups = groupby(map(get_rule, names), key=lambda one: one.topic)
    sections = [
        Section([Table(rows=tuple((one.name, one.summary) for one in group), head=False, indent=2)], title=topic)
        for topic, group in groups
    ]
    return [*sections, Section(["shardwise rule NAME says what a rule takes, its formula and its source"])]


def rule_entry(name: str) -> Report:
    from shardwise.book_formulas import get_rule
    from shardwise.present.cli.rule_report import rule_report

    return rule_report(get_rule(name))
