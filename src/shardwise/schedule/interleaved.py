"""Interleaved 1F1B: each rank has v virtual stages, p apart, which take turns of `round_size` micro-batches.

`round_size` = p is depth-first, as Megatron-LM has it: micro-batches leave the model as early as they can. As many as there are
micro-batches is breadth-first. What is in between is Llama 3.1's: more in a row hide more of the messages, and hold more.

Sources: Narayanan et al. 2021, section 2.2.2; Llama Team 2024, "The Llama 3 Herd of Models", section 3.3.2; Megatron-LM,
`--microbatch-group-size-per-virtual-pipeline-stage`, whose rule for a shorter last round this is; PyTorch,
`microbatches_per_round`.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import InputError
from shardwise.schedule.action import ActionList, loop
from shardwise.schedule.form import Schedule
from shardwise.schedule.one_f_one_b import in_flight, whole_passes_s
from shardwise.schedule.rounds import one_then_one


def actions(
    p: int, m: int, v: int, durations: Any = None, memory_limit: float | None = None, *, round_size: int | None = None
) -> ActionList:  # fmt: skip
    """Rank i runs (v - 1) `round_size` + 2 (p - 1 - i) virtual stages ahead, then one forward and one backward pass in turn."""
    size = p if round_size is None else round_size
    check_round(p, m, size)
    order = one_then_one(p, m, v, ahead=[(v - 1) * size + 2 * (p - 1 - i) + 1 for i in range(p)], round_size=size)
    return ActionList(name="interleaved", order=order, placement=loop(p, v), num_micro_batches=m)


def check_round(p: int, m: int, size: int) -> None:
    """Refuse rounds with fewer micro-batches than ranks, unless there is one round only.

    The next virtual stage would wait for them. Raises `InputError`.
    """
    short = m % size if size < m else 0
    if size < min(p, m) or 0 < short < p:
        raise InputError(
            f"micro-batches: found {m} in rounds of {size} on {p} stages; rounds of at least {p}, the last one too, are "
            f"required: a multiple of {max(size, p)} micro-batches, or another --round-size"
        )


SCHEDULE = Schedule(
    goes_with=lambda p, v: v > 1, actions=actions, takes_round_size=True, multiple=lambda p, v: p, natural=True,
    bubble_s=whole_passes_s, bubble="((p - 1) / v + u) · (F + B)", in_flight=in_flight,
    aliases=("interleaved_1f1b", "depth_first"),
)  # fmt: skip
