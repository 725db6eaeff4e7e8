"""Extra bubble and memory of virtual stages with unequal numbers of layers, measured on played action lists.

The closed forms of bubbles assume virtual stages of equal duration. A rank alternates between a forward pass through
one virtual stage and a backward pass through another, while its neighbours are at others: where some have a layer more,
ranks with less wait for them in every micro-batch, not only at the ends of the step. Llama-3-405B on 16 ranks with 7
virtual stages of one or two layers takes 11% longer than its slowest rank computes, in a step of 128 micro-batches;
with 8 of one layer each 1.5%.

The closed forms also assume that a rank holds as many micro-batches of one virtual stage as of another. It holds more
of those that are first forward and last backward, its earliest ones, which are those with a layer more. In a
bidirectional pipeline, rank i of p holds p - i of its stage i and i + 1 of its copy of the mirror rank's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.pipeline.registry import ALL_SCHEDULES, build_actions, find_problems, get_schedule
from shardwise.pipeline.schedule_definition import PassSeconds
from shardwise.pipeline.timeline import Durations, peak_layers, play_actions
from shardwise.values import Value, maximum

# Ranks that are played: of more, so many from the first to the last (tests/unit/schedule/test_uneven.py: within 5%).
MAX_RANKS_PLAYED = 16
EQUAL_THIRDS = PassSeconds(1 / 3, 2 / 3, 1 / 3, 1.0)  # a micro-batch of a second on the fullest rank, F, I and W alike


class UnevenBubble(NamedTuple):
    """Extra length of a step in micro-batches: `fixed`, plus `per_micro_batch` for each of them. Numbers or arrays."""

    fixed: Value
    per_micro_batch: Value

    def for_micro_batches(self, num_micro_batches: Value) -> Value:
        """Return the extra length of a step with so many micro-batches."""
        return maximum(self.fixed + self.per_micro_batch * num_micro_batches, 0.0)

    def of(self, rows: Any) -> UnevenBubble:
        """Select rows, when the fields are arrays."""
        return UnevenBubble(*(column.take(rows) for column in self))


NO_UNEVEN_BUBBLE = UnevenBubble(0.0, 0.0)


def uneven_bubble(schedule: str, layers: Sequence[int], num_ranks: int) -> UnevenBubble:
    """Return what virtual stages with these layers, in the model's order, add to the closed form of a schedule's bubble.

    The first and the last, which have the embedding and the head, count as if they had at least as many layers as the
    smallest of the others.

    >>> uneven_bubble("interleaved", (1, 2, 2, 2, 2, 1), 2), uneven_bubble("interleaved", (2, 2, 2, 2), 2)
    (UnevenBubble(fixed=0.0, per_micro_batch=0.0), UnevenBubble(fixed=0.0, per_micro_batch=0.0))
    """
    if num_ranks == 1 or len(layers) == num_ranks:
        return NO_UNEVEN_BUBBLE
    min_layers = min(layers[1:-1])
    sizes = (max(layers[0], min_layers), *layers[1:-1], max(layers[-1], min_layers))
    return NO_UNEVEN_BUBBLE if len(set(sizes)) == 1 else _play_uneven_bubble(schedule, sizes, num_ranks)


def uneven_in_flight(schedule: str, layers: Sequence[int], num_ranks: int) -> tuple[float, ...]:
    """Return for each rank the layers of micro-batches that it holds, over what the closed form of the schedule says.

    >>> [round(times, 3) for times in uneven_in_flight("interleaved", (1, 2, 2, 1, 1, 1, 1, 1, 1, 1), 2)]
    [1.136, 1.204]
    >>> uneven_in_flight("interleaved", (2, 2, 2, 2), 2), uneven_in_flight("dualpipe", (3, 2, 2, 2), 4)
    ((1.0, 1.0), (1.12, 1.0, 1.0, 1.12))
    """
    is_even = len(set(layers)) == 1
    if not is_even and len(layers) == num_ranks:  # one of two copies is held for more micro-batches than the other
        is_even = not get_schedule(schedule).bidirectional or tuple(layers) == tuple(layers)[::-1]
    return (1.0,) * num_ranks if is_even else _play_uneven_in_flight(schedule, tuple(layers), num_ranks)


@lru_cache(maxsize=4096)
def _play_uneven_in_flight(schedule: str, layers: tuple[int, ...], num_ranks: int) -> tuple[float, ...]:
    v, p = len(layers) // num_ranks, min(num_ranks, MAX_RANKS_PLAYED)
    if find_problems(schedule, p, 4 * p, v):
        return (1.0,) * num_ranks
    form, sizes = ALL_SCHEDULES[schedule], _sample_ranks(schedule, layers, num_ranks, p)
    placement, copies = form.placement(p, v), 2 if form.bidirectional else 1
    layers_by_rank = [sum(sizes[stage] for stage in placement.stages_of_rank(rank)) / copies for rank in range(p)]
    peaks = peak_layers(build_actions(schedule, p, 4 * p, v), sizes)
    ratios = [
        peaks[rank] / float(form.in_flight(p, v, 4 * p, rank) * max(layers_by_rank[rank], 1)) for rank in range(p)
    ]
    return tuple(ratios[round(rank * (p - 1) / (num_ranks - 1))] for rank in range(num_ranks))


def _sample_ranks(schedule: str, sizes: Sequence[int], num_ranks: int, p: int) -> tuple[int, ...]:
    """Return the sizes of the virtual stages of p ranks, evenly spaced from the first to the last."""
    ranks = {round(rank * (num_ranks - 1) / (p - 1)) for rank in range(p)}
    placed = zip(sizes, ALL_SCHEDULES[schedule].placement(num_ranks, len(sizes) // num_ranks).ranks, strict=True)
    return tuple(size for size, rank in placed if rank in ranks)


@lru_cache(maxsize=4096)
def _play_uneven_bubble(schedule: str, sizes: tuple[int, ...], num_ranks: int) -> UnevenBubble:
    v, p = len(sizes) // num_ranks, min(num_ranks, MAX_RANKS_PLAYED)
    if find_problems(schedule, p, 2 * p, v):
        return NO_UNEVEN_BUBBLE
    form = ALL_SCHEDULES[schedule]
    sizes = _sample_ranks(schedule, sizes, num_ranks, p)
    max_layers = max(form.placement(p, v).sum_by_rank(sizes))
    seconds = tuple(size / max_layers / 3.0 for size in sizes)  # of the fullest rank's micro-batch, a third forward
    durations = Durations(forward=seconds, input=seconds, weight=seconds)
    # A step grows along a line in its micro-batches, so two lengths give both parts. Of more ranks than are played, the bubble
    # grows with p - 1.
    short_s, long_s = (play_actions(build_actions(schedule, p, m, v), durations).makespan for m in (2 * p, 4 * p))
    per_micro_batch = (long_s - short_s) / (2 * p)
    fixed, closed_form = short_s - 2 * p * per_micro_batch, form.bubble_s(p, v, 2 * p, EQUAL_THIRDS)
    return UnevenBubble((fixed - closed_form) * (num_ranks - 1) / (p - 1), per_micro_batch - 1.0)
