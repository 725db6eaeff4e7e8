"""A term of an estimate: a value, its formula in words and in symbols, the numbers that it was computed from, and a source.

A rule computes its term from a record: a stage's step (`cost.step.Step`) or a device's memory (`cost.stage_memory.Memory`), of
one layout or, with arrays for numbers, of many. Words and inputs are made only where a term is explained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from shardwise.cost.expressions import Expression, Expressions
from shardwise.cost.rates import Rates
from shardwise.cost.recorded import Input, Recorder
from shardwise.job import Overlap, Precision
from shardwise.loss import Loss
from shardwise.symbolic import Value


class Setting(NamedTuple):
    """Facts that the wording of a term depends on, apart from numbers."""

    rates: Rates
    precision: Precision
    loss: Loss
    schedule: str
    overlap: Overlap


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """An expression from the derivation: elements (or FLOPs) of one unit on one device, counted once."""

    what: str
    expression: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of one layout, in `unit` "s" or "B". Its rule makes the same value of the same `inputs` again; `derived` are the
    expressions that the costs of units among these rest on, and `symbols` what those stand for."""

    name: str
    value: float
    unit: str
    words: str
    formula: str
    source: str
    inputs: tuple[Input, ...]
    derived: tuple[Derived, ...]
    symbols: tuple[Input, ...]


Record = TypeVar("Record")
Text = str | Callable[[Setting], str]
Read = Callable[[Expressions], Iterable[Expression]]


class Rule(NamedTuple, Generic[Record]):
    """What a term is in words and in symbols, where that comes from, and how it is worked out of a record.

    `given`: cached properties of the record that the formula has, and whose own inputs are not the term's; `derived` reads what
    the costs of units behind it rest on.
    """

    words: str
    formula: Text
    source: Text
    value: Callable[[Record], Value]
    derived: Read = lambda _: ()
    given: tuple[str, ...] = ()


class Rules(Generic[Record]):
    """The rules of one tree of terms, `time` or `memory`, in the order in which terms are shown and added up."""

    def __init__(self, tree: str, unit: str, by_name: Mapping[str, Rule[Record]]) -> None:
        self.tree, self.unit, self.by_name = tree, unit, by_name

    def values(self, record: Record) -> dict[str, Value]:
        """Every term of a record."""
        return {name: rule.value(record) for name, rule in self.by_name.items()}

    def formula(self, name: str, setting: Setting) -> str:
        """The formula of a term in symbols."""
        return _text(self.by_name[name].formula, setting)

    def explained(self, name: str, record: Record, setting: Setting, expressions: Expressions) -> Term:
        """One term of one layout."""
        rule, recorder = self.by_name[name], Recorder()
        value = float(rule.value(recorder.copy(record, given=rule.given)))
        found = [read for read in rule.derived(expressions) if read.polynomial]
        return Term(
            name=f"{self.tree}.{name}", value=value, unit=self.unit, words=rule.words,
            formula=_text(rule.formula, setting), source=_text(rule.source, setting), inputs=tuple(recorder.inputs.values()),
            derived=tuple(
                Derived(what=r.what, expression=str(r.polynomial), value=expressions.value(r.polynomial)) for r in found
            ),
            symbols=expressions.symbols(read.polynomial for read in found),
        )  # fmt: skip


def _text(text: Text, setting: Setting) -> str:
    return text if isinstance(text, str) else text(setting)
