"""Explanation of a number of a plan: formula, inputs, source, and whether it is a bound, a prediction or measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.present.explorer.number_provenance import MEMORY, NUMBERS, kind_of
from shardwise.present.explorer.request import ViewRequest
from shardwise.price.layout_pricer import TERM_NAMES
from shardwise.search.explain.explanation import explain_term
from shardwise.values import MEMORY_TERMS, TIME_TERMS, InputError, describe_unknown


def why(request: ViewRequest) -> dict[str, Any]:
    """Return the provenance of the number in the detail `term`: a term of the estimate, or a key of `NUMBERS`."""
    request.require_legal()
    return {"why": provenance_payload(request, request.state.detail("term") or "step_time_s")}


def list_number_names(time: Mapping[str, float], memory: Mapping[str, float]) -> Sequence[str]:
    """Return the names that `why` explains: numbers of a plan, and the terms of its estimate that are there."""
    time_names = (f"time.{name}" for name in TIME_TERMS if time[name])
    return *NUMBERS, *time_names, *(f"memory.{name}" for name in MEMORY_TERMS if memory[name])


def provenance_payload(request: ViewRequest, name: str) -> dict[str, Any]:
    """Return a number's provenance; for a term what `shardwise explain --term` prints.

    Raises `InputError` for an unknown name.
    """
    priced = request.plan.estimate
    if name in TERM_NAMES:
        kind = kind_of(request, memory=name.startswith("memory"))
        return {
            **asdict(explain_term(request.plan, request.plan.layout, priced, name)),
            "kind": kind,
            "interval90": None,
        }
    if name not in NUMBERS:
        raise InputError(f"term: {describe_unknown(name, (*NUMBERS, *TERM_NAMES))}")
    number = NUMBERS[name]
    inputs = [
        {"symbol": key, "meaning": "", "value": float(value), "unit": _unit(key)}
        for key, value in number.inputs(request).items()
    ]
    return {
        "name": name, "layout": str(request.layout), "value": number.value_of(request), "unit": number.unit,
        "words": number.words, "formula": number.formula, "source": number.source,
        "kind": kind_of(request, memory=name in MEMORY), "inputs": inputs, "derived": [],
        "interval90": priced.interval90 if name == "step_time_s" else None,
    }  # fmt: skip


def _unit(symbol: str) -> str:
    """Return the unit of an input: that of a term's tree, else the end of its name."""
    return {"time": "s", "memory": "B"}.get(
        symbol.partition(".")[0], symbol.rpartition(", ")[2] if ", " in symbol else ""
    )
