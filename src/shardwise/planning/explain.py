"""Why one layout beats another, term by term."""

from __future__ import annotations

from shardwise.cost.estimate import Estimate
from shardwise.units import format_bytes, format_seconds


def why_slower(other: Estimate, best: Estimate) -> str:
    """One sentence: by how much `other` is slower than `best`, and which terms make the difference."""
    ratio = other.step_time_s / best.step_time_s - 1
    memory = other.memory_bytes - best.memory_bytes
    fuller = f"{format_bytes(abs(memory))} {'more' if memory > 0 else 'less'} memory"
    if ratio < 5e-4:
        return f"as fast within 0.05%, {fuller}"
    changes = {term: other.time[term] - best.time[term] for term in best.time}
    worst = sorted((term for term in changes if changes[term] > 0), key=lambda t: -changes[t])[:2]
    terms = " and ".join(f"{_label(term)} +{format_seconds(changes[term])}" for term in worst)
    return f"{ratio:.1%} slower: {terms}; {fuller}"


def _label(term: str) -> str:
    return f"exposed {term} communication" if term in ("tp", "cp", "pp", "fsdp", "dp", "control") else term


def smallest_miss(layout: object, estimate: Estimate) -> str:
    """What the leanest layout lacks, and what fills the memory."""
    largest = sorted(estimate.memory, key=lambda term: -estimate.memory[term])[:3]
    parts = ", ".join(f"{term} {format_bytes(estimate.memory[term])}" for term in largest)
    over = estimate.memory_bytes - estimate.memory_capacity_bytes
    return (
        f"no legal layout fits: the leanest ({layout}) needs {format_bytes(estimate.memory_bytes)} of "
        f"{format_bytes(estimate.memory_capacity_bytes)} on each device, {format_bytes(over)} too much ({parts}); "
        "use more devices, chips with more memory, a smaller sequence or a leaner precision recipe"
    )
