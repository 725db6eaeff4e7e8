"""One term of an estimate, as `cost.term` explains it, with its layout."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cost.estimate import Estimate
from shardwise.cost.pricing import TERMS, Pricing
from shardwise.cost.recorded import Input
from shardwise.cost.term import Derived
from shardwise.errors import InputError
from shardwise.layout.layout import Layout
from shardwise.names import unknown
from shardwise.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of one layout. `unit` is "s" or "B"; `hidden_s` is communication of the term that compute hides. `inputs` are
    the symbols of `derived`, the counts that formulas multiply these by, and the numbers from which the term's rule computed
    `value`."""

    name: str
    layout: str
    value: float
    unit: str
    share: float
    hidden_s: float
    words: str
    formula: str
    source: str
    inputs: tuple[Input, ...]
    derived: tuple[Derived, ...]


def term(plan: Plan, layout: Layout, priced: Estimate, name: str) -> Term:
    """One term, such as memory.activations or time.tp. Raises `InputError` that lists the names of the terms."""
    if name not in TERMS:
        raise InputError(f"--term: {unknown(name, TERMS)}")
    tree, _, own = name.partition(".")
    terms, hidden = (priced.time, priced.hidden) if tree == "time" else (priced.memory, {})
    pricing = Pricing(plan.model, plan.cluster, plan.job, layout)
    explained = pricing.term(name)
    symbols = {one.symbol: one for one in (*explained.symbols, *pricing.counted)}
    return Term(
        name=name, layout=str(layout), value=terms[own], unit=explained.unit, share=terms[own] / sum(terms.values()),
        hidden_s=hidden.get(own, 0.0), words=explained.words, formula=explained.formula, source=explained.source,
        inputs=(*(symbols[key] for key in sorted(symbols)), *(one for one in explained.inputs if one.symbol not in symbols)),
        derived=explained.derived,
    )  # fmt: skip
