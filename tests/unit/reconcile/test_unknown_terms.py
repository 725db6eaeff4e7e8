"""Terms without a prediction: reports state that, and print neither "0 B" nor a miss of a tolerance."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from shardwise.measure.reconcile.step_terms import MemoryTerm, StepMemory
from shardwise.present.reports.run import _memory_line, _rehearsal_verdict

UNPREDICTED = MemoryTerm(name="scratch", predicted=None, measured=1e9)


def test_memory_without_a_prediction_is_not_printed_as_zero() -> None:
    memory = StepMemory(
        terms=(), total=UNPREDICTED, runtime=0.0, resident_bytes=None, allocated_bytes=None, reserved_bytes=None
    )
    assert _memory_line(memory).text.startswith("  memory - predicted, 1 GB measured")


def test_a_term_without_a_prediction_is_not_reported_as_a_miss() -> None:
    rehearsal: Any = SimpleNamespace(
        ok=False, failed_terms=(UNPREDICTED,), collectives=SimpleNamespace(equal=True),
        memory=SimpleNamespace(undeclared_bytes=0),
    )  # fmt: skip
    assert _rehearsal_verdict(rehearsal) == "NOT ok: scratch is not predicted, so that nothing can be said of it"
