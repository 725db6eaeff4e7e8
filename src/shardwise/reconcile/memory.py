"""The bytes of the fullest device by term, predicted against what tensors held in the watched step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.measurement.inspection import Measured, Memory
from shardwise.terms import MEMORY_TERMS

CLOSE = 0.05  # of a term, and of the peak
# What a plan has at its peak alone: the logits only where that is at the loss.
AT_PEAK = ("workspace", "logits", "buffers")
NO_TENSOR = ("runtime",)
SAVED, PASSING = "activations", "gathered"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerm:
    """One term in bytes, measured at the peak; `predicted` is None for what no plan has.

    `largest` is the most that was measured of it at any moment; None for what a plan has at its peak alone.
    """

    name: str
    predicted: float | None
    measured: float
    largest: float | None = None

    @property
    def judged(self) -> float:
        """What of it is held against the prediction."""
        return self.measured if self.largest is None or self.name == PASSING else self.largest

    @property
    def difference(self) -> float:
        return self.judged - (self.predicted or 0.0)

    @property
    def within(self) -> bool | None:
        """Whether the prediction holds; None where there is none."""
        return self.holds(CLOSE)

    def holds(self, close: float) -> bool | None:
        """Whether the prediction is as close as that part of itself."""
        return None if self.predicted is None else abs(self.difference) <= close * self.predicted


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """The terms, which add up to the peak; what the process had, and the device's allocator (None: it has none of its own)."""

    terms: tuple[MemoryTerm, ...]
    total: MemoryTerm
    runtime: float
    resident_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None


def step_memory(predicted: Mapping[str, float], seen: Measured) -> StepMemory:
    """Compare by term. `seen` has the memory of a watched step.

    All terms are measured at the peak and add up to it. Those that rest are judged by the most that each ever had. What is
    gathered is not at its most when the rest is, neither here nor in a plan, and is judged as it is at the peak. Activations
    are what was saved for the backward pass; what of it has gone by the peak is taken off the workspace, here as in a plan.
    Where the plan's peak is at the loss (`cost.stage_memory`), logits are held against logits; where it is in a block, logits are
    workspace, as the peak was at the loss after all.
    """
    assert seen.memory is not None
    process = seen.process
    terms = tuple(_terms(predicted, seen.memory))
    return StepMemory(
        terms=terms, runtime=sum(predicted.get(name, 0.0) for name in NO_TENSOR),
        total=MemoryTerm(
            name="peak", measured=seen.memory.peak_bytes,
            predicted=sum(size for name, size in predicted.items() if name not in NO_TENSOR),
        ),
        resident_bytes=process.resident_bytes if process else None,
        allocated_bytes=process.allocated_bytes if process else None,
        reserved_bytes=process.reserved_bytes if process else None,
    )  # fmt: skip


def _terms(predicted: Mapping[str, float], memory: Memory) -> Iterator[MemoryTerm]:
    left = float(memory.peak_bytes)
    for name in MEMORY_TERMS:
        if name not in (*AT_PEAK, *NO_TENSOR):
            largest = memory.largest.get(name, 0)
            measured = largest if name == SAVED else memory.at_peak.get(name, 0)
            left -= measured
            if predicted[name] or largest:
                yield MemoryTerm(name=name, predicted=predicted[name], measured=measured, largest=largest)
    beside = predicted["workspace"] + predicted["buffers"]
    if predicted["logits"]:
        logits = MemoryTerm(name="logits", predicted=predicted["logits"], measured=memory.at_peak.get("logits", 0))
        yield logits
        yield MemoryTerm(name="workspace", predicted=beside or None, measured=left - logits.measured)
    else:
        yield MemoryTerm(name="workspace", predicted=beside, measured=left)
