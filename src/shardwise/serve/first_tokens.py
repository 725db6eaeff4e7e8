"""First tokens: how many inputs are there at once, and how long an input waits for a pass, for the others, and computes.

At a fixed concurrency all requests start together, and the n-th request of a client starts when its predecessor ends. Ends
spread by the lengths of outputs, more with each wave, and by the passes that the inputs of a wave took one after the other
(`wave_crowding`). While a wave ends its inputs come by that much faster than at an even pace, so that an input meets others at
the next pass, or at the next at which the engine admits requests (`Arrivals.num_inputs`). Random arrivals come at an even pace.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwise.serve.pass_work import Column

# Benchmarks send 10 requests for each that is in the system, one after the other (InferenceX: num-prompts = 10 concurrency).
# The nine waves after the first are summed up by their thirds.
LATER_WAVES = (2.0, 5.0, 8.0)
LARGEST_LOAD = 0.95  # share of passes with inputs, beyond which the bound by the requests that are there holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Requests that an instance has: `life_passes` of each, `crowding` of their starts over an even pace, of which `randomness`
    is at random, and the passes between two admissions (`admission_passes`, 1: at each), at fixed times where the engine polls
    (`polls`), else since the first."""

    life_passes: Column
    crowding: Column
    randomness: Column
    admission_passes: Column = 1.0
    polls: Column = False

    def num_inputs(self, other_requests: Column) -> Column:
        """Return how many inputs an admission has, an input among them."""
        meets: Column = 1.0 + other_requests * np.minimum(self.admission_passes * self.crowding / self.life_passes, 1.0)
        return meets

    def admission_wait(self, inputs: Column) -> Column:
        """Return the passes until an input is admitted: half of what is between polls; all of it for the first of those that an
        engine collects, and half for the others, on average."""
        between = np.maximum(self.admission_passes - 1.0, 0.0)
        wait: Column = between * np.where(self.polls, 0.5, 0.5 + 0.5 / inputs)
        return wait


def wave_crowding(length_spread: Column, stagger: Column) -> tuple[Column, Column]:
    """Return the mean rate at which requests start, over that of an even pace, where each is followed by another; and how much
    of the spread of starts is at random, 0 to 1.

    Outputs differ by `length_spread` of the longest, uniformly; after n waves ends spread by sqrt(n) times as much. `stagger` is
    the share of a life between the first and the last first token of a wave: inputs that took turns do so again. Where both are
    0 all start at once.

    >>> [round(float(value), 2) for value in wave_crowding(np.array(0.2), 0.0)]
    [2.51, 1.0]
    >>> [float(value) for value in wave_crowding(np.array(0.0), 1.0)]
    [1.0, 0.0]
    """
    crowding: Column = 0.0
    randomness: Column = 0.0
    for waves in LATER_WAVES:
        random = waves * length_spread**2
        total = np.maximum(random + stagger**2, 1e-18)
        crowding = crowding + 1.0 / np.minimum(np.sqrt(total), 1.0)
        randomness = randomness + random / total
    return crowding / len(LATER_WAVES), randomness / len(LATER_WAVES)


def queued_passes(load: Column, randomness: Column, limit: Column) -> Column:
    """Return the passes with inputs that an input waits for beside those that it meets, at a share of passes that have inputs:
    as behind service of one length (M/D/1), by how much of the starts is at random (Kingman 1961), and not more than half of all
    requests' inputs."""
    busy = np.minimum(load, LARGEST_LOAD)
    queued: Column = np.minimum(randomness * busy / (2.0 * (1.0 - busy)), limit / 2.0)
    return queued
