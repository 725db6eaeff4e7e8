"""The bytes of the fullest device by term, predicted against what tensors held in the watched step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwise.measurement.inspection import Measured, Memory
from shardwise.terms import MEMORY_TERMS

CLOSE = 0.05  # of a term, and of the peak
# What a plan has beside what rests and what is saved: of the first two, only the one that is there at the peak.
AT_PEAK = ("workspace", "logits", "buffers")
NO_TENSOR = ("runtime",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTerm:
    """One term in bytes; `predicted` is None for what no plan has."""

    name: str
    predicted: float | None
    measured: float

    @property
    def difference(self) -> float:
        return self.measured - (self.predicted or 0.0)

    @property
    def within(self) -> bool | None:
        """Whether the prediction holds; None where there is none."""
        return None if self.predicted is None else abs(self.difference) <= CLOSE * self.predicted


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

    Terms that rest, what is saved for the backward pass and what is gathered are compared by the most that each ever had. A
    plan's peak is at the loss or in a block's backward pass, and the term of the other is 0 (`cost.stage_memory`). Where it is
    at the loss, the logits are compared by the most that they had, and what is left of the measured peak is workspace that
    nothing predicts. Where it is in a block, all that is left of the measured peak beside the other terms is held against
    the workspace, logits too if the peak was at the loss after all. So what is measured adds up to the peak.
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
            term = MemoryTerm(name=name, predicted=predicted[name], measured=memory.largest.get(name, 0))
            left -= term.measured
            if term.predicted or term.measured:
                yield term
    beside = sum(predicted[name] for name in AT_PEAK)
    if predicted["logits"]:
        logits = MemoryTerm(name="logits", predicted=beside, measured=memory.largest.get("logits", 0))
        yield logits
        yield MemoryTerm(name="workspace", predicted=None, measured=left - logits.measured)
    else:
        yield MemoryTerm(name="workspace", predicted=beside, measured=left)
