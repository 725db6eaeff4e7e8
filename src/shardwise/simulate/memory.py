"""What the devices of each rank hold over a simulated step: what rests, what passes keep for others, what backward passes
work in.

The terms of the price say how much of each there is, the simulated step when: activations are there from the start of their
forward pass to the end of the pass that reads them last, as `schedule.play` has it; the working set of a unit, and the loss
over the logits, while a backward pass runs. Of micro-batches whose weights' gradients wait, what those are made of is held,
and no more, where the price keeps all that was saved; and a virtual stage holds what its own units save, where the price
counts a rank's layers as alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.cost.memory_terms import MEMORY
from shardwise.cost.stage_memory import Memory
from shardwise.schedule.action import BACKWARD, FORWARD, INPUT, Slot
from shardwise.simulate.stages import Stage
from shardwise.simulate.step import Simulated
from shardwise.simulate.streams import Played

WORKING = ("workspace", "logits")  # terms of a backward pass; others but activations are there all the time
ACTIVATIONS = "activations"


class RankMemory(NamedTuple):
    """Bytes on a device of a rank: the constant part, and the rest over time as (seconds, live bytes from then on)."""

    constant_bytes: float
    curve: tuple[tuple[float, float], ...]

    @property
    def peak_bytes(self) -> float:
        """The peak."""
        return max(held for _, held in self.curve)


def memory_over_time(found: Simulated) -> tuple[RankMemory, ...]:
    """Memory over time of every rank."""
    memories = found.pricing.memories(found.pricing.stages())
    return tuple(_of_rank(found, rank, memory) for rank, memory in enumerate(memories))


def _of_rank(found: Simulated, rank: int, memory: Memory) -> RankMemory:
    terms = MEMORY.values(memory)
    on_host = terms[ACTIVATIONS] if memory.stage.host.activations else 0.0  # those of the layers on their way
    working = sum(terms[name] for name in WORKING)
    constant = on_host + sum(held for name, held in terms.items() if name not in (*WORKING, ACTIVATIONS))
    known: dict[Played, tuple[float, float]] = {}
    now, held = 0.0, constant
    curve: list[tuple[float, float]] = []
    for slot, played, start, end in found.slots(rank):
        changes = known.get(played)
        if changes is None:
            changes = known[played] = _changes(found.stages, slot, working)
        if start > now or not curve:
            curve.append((now, held))
        held += changes[0]
        curve.append((start, held))
        held += changes[1]
        now = end
    return RankMemory(constant, (*curve, (now, held), (found.step_time_s, held)))


def _changes(stages: Sequence[Stage], slot: Slot, working: float) -> tuple[float, float]:
    """Changes of a rank's live bytes as a slot starts, and as it ends."""
    both = [_kept(stages, one.kind, one.stage) for one in slot]
    beside = working if any(one.kind in (BACKWARD, INPUT) for one in slot) else 0.0
    return sum(taken for taken, _ in both) + beside, sum(left for _, left in both) - beside


def _kept(stages: Sequence[Stage], kind: str, number: int) -> tuple[float, float]:
    """Changes of the saved bytes as a pass starts, and as it ends."""
    stage = stages[number]
    if kind == FORWARD:
        return stage.saved_bytes, 0.0
    if kind == BACKWARD:
        return 0.0, -stage.saved_bytes
    return (0.0, stage.waiting_bytes - stage.saved_bytes) if kind == INPUT else (0.0, -stage.waiting_bytes)
