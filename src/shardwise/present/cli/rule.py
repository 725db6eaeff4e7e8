"""`shardwise rule`: one of the books' rules, with the user's own numbers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.rendering.report import Report
from shardwise.values import Parser, raise_problems

DESCRIPTION = """Work out one of the books' rules: its value and unit, its formula and its source. The name alone says what the
rule takes; `show rules` lists all."""
EXAMPLES = (
    "shardwise rule critical_intensity flops_per_s=459TFLOP/s bytes_per_s=180GB/s",
    "shardwise rule training_seconds num_params=70e9 tokens=15T num_chips=8960 flops_per_s=459TFLOP/s mfu=0.4",
    "shardwise rule params_by_part architecture=llama-3-70b --json",
    "shardwise rule tp_max_degree",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    rule = parser.group("rule")
    rule.add_argument("name", metavar="NAME", completes="rules", help="a rule, as `shardwise show rules` names it")
    rule.add_argument(
        "values", nargs="*", default=[], metavar="KEY=VALUE", completes=_keys,
        help="what the rule takes, such as tokens=4Ki, bytes_per_s=3.2TB/s or memory_bytes=80GB; without one: say what it takes",
    )  # fmt: skip
    add_output_arguments(parser)


def _keys(before: Sequence[str]) -> list[str]:
    """What the rule that was named takes beside the values that it has, each with its sign of equality."""
    from shardwise.book_formulas import rules_by_name

    rule, given = rules_by_name().get(before[0]), {word.partition("=")[0] for word in before[1:]}
    return [f"{one.name}=" for one in rule.parameters if one.name not in given] if rule else []


def run(arguments: argparse.Namespace) -> str | Report:
    """What the rule is, or with values what it gives; as text or as JSON."""
    from shardwise.book_formulas import get_rule
    from shardwise.book_formulas.named_rules import evaluate_rule, rule_payload
    from shardwise.present.reports.books import rule_report, value_report

    rule, values = get_rule(arguments.name.strip()), parse_values(arguments.values)
    found = evaluate_rule(rule, values) if values or not rule.parameters else None
    if arguments.json:
        return json.dumps(rule_payload(rule, found), indent=2)
    return value_report(found) if found else rule_report(rule)


def parse_values(words: list[str]) -> dict[str, str]:
    """The values by their keys. Raises `InputError` with every word that is no KEY=VALUE, and every key given twice.

    >>> parse_values(["alpha=2550", "num_axes=3"])
    {'alpha': '2550', 'num_axes': '3'}
    """
    pairs = [word.partition("=") for word in words]
    keys = [key.strip() for key, _, _ in pairs]
    wrong = [word for word in words if not all(word.partition("="))]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    raise_problems([
        *(f"KEY=VALUE: found {word!r}; such as tokens=4Ki is required" for word in wrong),
        *(f"KEY=VALUE: found {key} {keys.count(key)} times; once is required" for key in twice),
    ])  # fmt: skip
    return {key: value.strip() for key, (_, _, value) in zip(keys, pairs, strict=True)}
