"""How micro-batches go through the stages of a pipeline. Numbers or arrays."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from shardwise.schedule.form import Moments
from shardwise.schedule.schedule import Passes, Schedule, schedule_of
from shardwise.symbolic import Value, minimum


class Pipeline(NamedTuple):
    """How micro-batches go through the stages.

    With a schedule that sends them from both ends, a device's two stages are taken as one, and so are two micro-batches,
    one from either end: `rounds` of them make a step. `uneven`: what virtual stages with different numbers of layers add to the
    bubble (`schedule.uneven`).
    """

    schedule: str
    pp: Annotated[Value, "pipeline stages", "p"]
    num_virtual_stages: Annotated[Value, "virtual stages of a stage", "v"]
    num_micro_batches: Annotated[Value, "micro-batches", "m"]
    uneven: Annotated[Value, "micro-batches that uneven virtual stages add", "u"] = 0.0

    @property
    def form(self) -> Schedule:
        """The schedule."""
        return schedule_of(self.schedule)

    @property
    def ends(self) -> int:
        """From how many ends micro-batches come in."""
        return 2 if self.form.both_ends else 1

    @property
    def passes_each(self) -> Value:
        """Forward passes of a device in a round: through each virtual stage, from each end."""
        return self.num_virtual_stages * self.ends

    @property
    def at_once(self) -> int:
        """Passes that run together on a device."""
        return 2 if self.form.pairs else 1

    @property
    def rounds(self) -> Value:
        return self._each(self.num_micro_batches)

    @property
    def overlapped(self) -> Value:
        """Rounds whose forward and backward passes run together with others'."""
        return self._each(self.form.num_overlapped(self.pp, self.num_virtual_stages, self.num_micro_batches))

    def bubble_s(self, passes: Passes) -> Value:
        """Seconds that the device waits; the passes of a round are as many as there are ends."""
        even = self._each(self.form.bubble_s(self.pp, self.num_virtual_stages, self.num_micro_batches, passes))
        if isinstance(self.uneven, float) and self.uneven == 0.0:
            return even
        return even + self.uneven * (passes.forward_s + passes.backward_s)

    def in_flight(self, stage: Value, holding: Value = 1.0) -> Value:
        """Rounds whose activations a stage holds; `holding`: so many times what it would with virtual stages that are alike."""
        return self._held(self.form.in_flight(self.pp, self.num_virtual_stages, self.num_micro_batches, stage), holding)

    def while_waiting(self, stage: Value, holding: Value = 1.0) -> Moments:
        """Other moments at which a device may be the fullest: rounds in flight, and those that wait beside the one at work."""
        moments = self.form.while_waiting(self.pp, self.num_virtual_stages, self.num_micro_batches, stage)
        return tuple((self._held(held, holding), self._each(waiting)) for held, waiting in moments)

    def _held(self, alike: Value, holding: Value) -> Value:
        if isinstance(holding, float) and holding == 1.0:
            return self._each(alike)
        return self._each(minimum(self.num_micro_batches, alike * holding))

    @property
    def at_end(self) -> Value:
        """Micro-batches between their forward and backward pass through head and multi-token prediction."""
        return self.form.num_at_end(self.pp, self.num_virtual_stages, self.num_micro_batches)

    def waiting(self, stage: Value) -> Value:
        """How many of these may wait for their weight gradients only."""
        return self._each(self.form.num_waiting(self.pp, self.num_virtual_stages, self.num_micro_batches, stage))

    def _each(self, number: Value) -> Value:
        """In rounds, what is counted in micro-batches."""
        return number / self.ends if self.ends > 1 else number
