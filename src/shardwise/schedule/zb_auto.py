"""The automatic zero-bubble scheduler: an order of F, I and W for given durations, messages and memory.

The best of three searches is taken: by makespan, then by what a rank waits between its first pass and its last (the source's
measure, for optimizers that do not wait for all ranks), then by live memory.

- Qi et al. 2023, section 3: forward passes to warm up as far as memory allows, or fewer, then one forward and one
  backward pass for activations in turn; weights' gradients fill gaps and make room. The number of passes ahead and the
  share of W that a gap must have are tried over a grid (`zb_fill.py`).
- A beam over active schedules, as wide as its budget allows: exact or near it where there are few passes; none where there
  are many (`zb_beam.py`).
- ZB-H1 and ZB-H2 as they are, where they fit into the memory: the answer is never worse than theirs.

For passes that take alike the answer is ZB-H2's order, so no layout names it.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import InputError
from shardwise.schedule import zb_h1, zb_h2
from shardwise.schedule.action import ActionList, Order, loop
from shardwise.schedule.durations import Durations
from shardwise.schedule.form import Schedule, alone
from shardwise.schedule.held import held_by_rank
from shardwise.schedule.zb_beam import beam_order, beam_width
from shardwise.schedule.zb_fill import filled_orders


def actions(
    p: int, m: int, v: int = 1, durations: Durations | None = None, memory_limit: float | None = None
) -> ActionList:  # fmt: skip
    """The best order that is found. `memory_limit` is in activations of 1F1B's first stage: 1.0 holds p micro-batches, None all.

    Raises `InputError` for a limit under one micro-batch.
    """
    from shardwise.schedule.play import play

    durations = durations or Durations.even(p)
    durations.check(p)
    most = m if memory_limit is None else min(m, int(memory_limit * p * (1 + 1e-9)))
    if most < 1:
        raise InputError(
            f"memory limit: found {memory_limit:.3g} of what 1F1B's first of {p} stages holds; at least {1 / p:.3g}, "
            "one micro-batch, is required"
        )
    lists = (
        ActionList(name="zb_auto", order=order, placement=loop(p, v), num_micro_batches=m)
        for order in _orders(p, m, durations, most)
    )
    lines = (play(one, durations) for one in lists if max(held.peak for held in held_by_rank(one)) <= most)
    return min(lines, key=lambda line: (line.makespan, line.longest_wait, sum(held.peak for held in line.held))).actions


def _orders(p: int, m: int, durations: Durations, most: int) -> Iterator[Order]:
    yield zb_h1.actions(p, m).order
    yield zb_h2.actions(p, m).order
    yield from filled_orders(p, m, durations, most)
    if beam_width(p, m) > 1:
        yield beam_order(p, m, durations, most)


SCHEDULE = Schedule(
    goes_with=alone, actions=actions, splits_backward=True, aliases=("zero_bubble", "zb_heuristic"),
    unpriced="its order is made for seconds and memory that are given, and a layout is neither",
)  # fmt: skip
