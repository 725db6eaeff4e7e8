"""Action lists as text, in the format of PyTorch's pipelining: a row for each rank, a cell for each slot.

`0F3` is stage, kind and micro-batch; `(0F5;1B3)OVERLAP_F_B` are two that run together. Empty cells are idle slots of its
own notion of time, and its cells for messages and weights (`2SEND_F0`, `1UNSHARD`) follow from the order: both are left
out. Source: PyTorch 2.13, torch/distributed/pipelining/schedules.py, `_Action` and `_dump_csv`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.pipeline.actions import (
    KINDS,
    Action,
    ActionList,
    Order,
    Slot,
    StagePlacement,
    bidirectional_placement,
    loop_placement,
    v_placement,
)
from shardwise.pipeline.clock import check_actions
from shardwise.values import InputError

CELL = re.compile(rf"(\d+)([{''.join(KINDS)}])(\d+)")
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
IGNORED_CELL = re.compile(r"\d+(?:(?:UN|RE)SHARD|REDUCE_GRAD|(?:SEND|RECV)_[FB]\d+)")
MAX_DIGITS = 7  # of a number in a cell: more is no stage or micro-batch


def to_csv(actions: ActionList) -> str:
    """Format a list as CSV.

    >>> from shardwise.pipeline.registry import build_actions
    >>> print(to_csv(build_actions("1f1b", 2, 2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    return "".join(",".join(map(_format_cell, slots)) + "\n" for slots in actions.order)


def _format_cell(slot: Slot) -> str:
    text = ";".join(map(str, slot))
    return text if len(slot) == 1 else f"({text})OVERLAP_F_B"


def from_csv(text: str, name: str = "csv") -> ActionList:
    """Parse and check a list; stages are on the ranks in whose rows they stand.

    Raises `InputError` with the first cell that cannot be read, or the first action that cannot run.

    >>> from_csv("0F0,,0B0\\n1F0,1B0\\n").order[0]
    ((Action(kind='F', stage=0, micro_batch=0),), (Action(kind='B', stage=0, micro_batch=0),))
    """
    rows = [row for row in text.splitlines() if row.strip(" ,")]
    order: Order = tuple(tuple(_parse_row(rank, row)) for rank, row in enumerate(rows))
    all_actions = [action for slots in order for slot in slots for action in slot]
    if not all_actions:
        raise InputError("action list: found no action; a row of cells such as 0F0,0B0 for each rank is required")
    num_stages = 1 + max(action.stage for action in all_actions)
    num_micro_batches = 1 + max(action.micro_batch for action in all_actions)
    if num_stages * num_micro_batches > len(all_actions):  # two actions of each at least
        raise InputError(
            f"action list: found {len(all_actions)} actions for {num_stages} stages and {num_micro_batches} micro-batches; every "
            "micro-batch passes every stage once each way: F and B, or F, I and W"
        )
    actions = ActionList(
        name=name, order=order, placement=_infer_placement(order, num_stages), num_micro_batches=num_micro_batches
    )
    check_actions(actions)
    return actions


def _parse_row(rank: int, row: str) -> Iterator[Slot]:
    for number, cell in enumerate(row.split(",")):
        cell = cell.strip().strip('"')
        pair = PAIR.fullmatch(cell)
        parts = [CELL.fullmatch(part.strip()) for part in (pair[1].split(";") if pair else [cell])]
        if all(part and max(len(part[1]), len(part[3])) <= MAX_DIGITS for part in parts):
            yield tuple(Action(part[2], int(part[1]), int(part[3])) for part in parts if part)
        elif cell and not IGNORED_CELL.fullmatch(cell):
            raise InputError(
                f"action list: row {rank + 1}, cell {number + 1}: found {cell[:40]!r}; stage, kind (F, B, I or W) and "
                "micro-batch are required, such as 0F3, or a pair such as (0F5;1B3)OVERLAP_F_B"
            )


def _infer_placement(order: Order, num_stages: int) -> StagePlacement:
    """Infer the ranks of stages from the rows that have them. Raises `InputError` for a stage that no row has."""
    rows: list[list[int]] = [[] for _ in range(num_stages)]
    for rank, slots in enumerate(order):
        for stage in sorted({action.stage for slot in slots for action in slot}):
            rows[stage].append(rank)
    empty = [stage for stage, ranks in enumerate(rows) if not ranks]
    if empty:
        raise InputError(f"action list: no rank has stage {empty[0]} of {num_stages}; every stage is required")
    p = len(order)
    if num_stages == p and any(len(ranks) > 1 for ranks in rows):
        return bidirectional_placement(p)
    ranks = tuple(stage_ranks[0] for stage_ranks in rows)
    candidates = [loop_placement(p, num_stages // p)] if num_stages % p == 0 else []
    candidates += [v_placement(p)] if num_stages == 2 * p else []
    return next((candidate for candidate in candidates if candidate.ranks == ranks), StagePlacement("given", ranks))
