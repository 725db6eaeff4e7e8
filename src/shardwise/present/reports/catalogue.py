"""Reports of the catalogue: values with their sources, stacks, export targets, rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from shardwise.present.rendering.report import Block, Report, Row, Section, Table
from shardwise.values import SourcedValue

UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "bytes": "B",
    "usd_per_hour": "USD/h",
}  # by a part of a value's name
WIDEST_SOURCE = 100  # of a table


def shown(key: str, value: Any) -> str:
    """A value in the unit that its name says."""
    from shardwise.values import format_count, format_quantity, format_seconds

    if value is None or value == () or value == []:
        return "none"
    if isinstance(value, (list, tuple)):
        return ("x" if isinstance(value[0], int) and not isinstance(value[0], bool) else ", ").join(
            shown("", part) for part in value
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if key.endswith("num_params") and isinstance(value, float):
        return format_count(value)
    if key.endswith("_w"):
        return f"{value:g} W"
    for part, unit in UNITS.items():
        if part in key:
            return format_quantity(float(value), unit, digits=4)
    if key.endswith("latency_s"):
        return format_seconds(float(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def first_words(source: str) -> str:
    """A source without what it says, where that makes a table too wide."""
    if len(source) <= WIDEST_SOURCE:
        return source
    clause = source.partition(";")[0]
    return clause if len(clause) <= WIDEST_SOURCE else clause.partition(":")[0]


def stack_names() -> tuple[str, ...]:
    from shardwise.hardware import stack_names as names

    return names()


def stack_entry(name: str, chip: str | None = None) -> Report:
    """A line for each constant and for each ability, each source once."""
    from shardwise.hardware import get_stack
    from shardwise.present.catalogue_values import stack_constants

    stack, found = get_stack(name), list(stack_constants(name, chip))
    facts = ", attention writes its scores to memory" * stack.unfused_attention
    facts += ", overlaps tensor parallelism with products" * stack.overlaps_tp
    facts += ", casts operands of narrow products in these alone" * (stack.casts == "in_products")
    constants: list[Row] = [("constant", "value", "one deviation", "meaning")]
    constants += [
        (f"{one.owner}.{one.name}", f"{one.value:.4g}", f"{one.low:.3g} to {one.high:.3g}", one.meaning)
        for one in found
    ]
    sources = dict.fromkeys((one.owner, one.source) for one in found)
    abilities: tuple[Row, ...] = tuple((key, _values(values)) for key, values in stack.abilities.items())
    usual = [f"  source (precision): {stack.precision_source}"] if stack.precision_source else []
    blocks: list[Block] = [
        Table(rows=tuple(constants), right=(1,), indent=2),
        *(f"  source ({owner}): {source}" for owner, source in sources),
        "  what it runs",
        Table(rows=abilities, head=False, indent=2),
        f"  source (what it runs): {stack.abilities.source}",
        f"  precision where none is named: {stack.precision}",
        *usual,
        *([] if chip else ["  --chip NAME shows the constants of a chip beside them"]),
    ]
    return [Section(blocks, title=f"{name}{f' on {chip}' if chip else ''}: a stack of the kind {stack.kind}{facts}")]


def _values(values: bool | Sequence[object]) -> str:
    if isinstance(values, bool):
        return "yes" if values else "no"
    return ", ".join(map(str, values)) or "none"


def stacks_table(names: Sequence[str]) -> Report:
    """Stacks and kinds with their four constants."""
    from shardwise.hardware import get_stack
    from shardwise.hardware.published_constants import is_measured, load_published_fit
    from shardwise.present.catalogue_values import stack_constants

    every = {name: list(stack_constants(name, None)) for name in names}
    known = next(iter(every.values()))
    rows: list[Row] = [("stack", "kind", *(one.name for one in known), "from")]
    for name, found in every.items():
        stack = get_stack(name)
        origin = "runs" if is_measured(stack) else "expected of its kind"
        rows.append((name, stack.kind, *(f"{one.value:.3g}" for one in found), origin))
    meanings = [f"{one.name}: {one.meaning}" for one in known]
    table = Table(rows=tuple(rows), right=range(2, 2 + len(known)))
    return [Section([table]), Section([*meanings, f"runs: {load_published_fit()['source']}"])]


def target_names() -> tuple[str, ...]:
    from shardwise.interop import TARGETS

    return tuple(TARGETS)


def targets_table(names: Sequence[str]) -> Report:
    """Targets with their releases and stacks."""
    from shardwise.interop import get_target

    rows: list[Row] = [("target", "framework", "release", "stack", "says the model", "options")]
    for name in names:
        target = get_target(name)
        says = "yes" if target.includes_model else "no: --model"
        rows.append((name, target.title, target.version, target.stack, says, f"{len(target.options):,}"))
    return [Section([Table(rows=tuple(rows), right=(5,))])]


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
    from shardwise.present.reports.books import rule_report

    return rule_report(get_rule(name))
