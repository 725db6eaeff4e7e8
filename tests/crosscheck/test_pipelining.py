"""Action lists against those of torch.distributed.pipelining, and its validators on ours; no device, no process group."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from shardwise.pipeline.actions import ActionList
from shardwise.pipeline.registry import ALL_SCHEDULES, OrderOptions, build_actions
from shardwise.pipeline.timeline import play_actions
from shardwise.pipeline.torch_csv import from_csv, to_csv

GRID = [(2, 4, 2), (4, 4, 2), (4, 8, 3), (8, 24, 2), (3, 9, 4)]


def single(kind: str, p: int, m: int) -> str:
    """The order of a schedule with one stage on each rank, as CSV."""
    schedule = getattr(torch_schedules, kind)
    order = schedule._get_pipeline_order(SimpleNamespace(_num_stages=p, _n_microbatches=m))
    return rows([order[rank] for rank in range(p)])


def several(kind: str, p: int, m: int, v: int) -> str:
    """The order of a schedule with v stages on each rank, as CSV."""
    rounds = max(1, m // p)
    schedule = SimpleNamespace(
        pp_group_size=p, n_local_stages=v, _stages=[None] * v, num_stages=p * v, _num_stages=p * v, _n_microbatches=m,
        number_of_rounds=rounds, microbatches_per_round=m // rounds,
    )  # fmt: skip
    of_rank = getattr(torch_schedules, kind)._calculate_single_rank_operations
    return rows([of_rank(schedule, rank) for rank in range(p)])


def rows(order: list[list[Any]]) -> str:
    cells = [[str(action) for action in actions if action is not None] for actions in order]
    return "".join(",".join(cell for cell in row if "REDUCE" not in cell) + "\n" for row in cells)


@pytest.mark.parametrize(("p", "m", "v"), GRID)
def test_gpipe_equals_pytorch(p: int, m: int, v: int) -> None:
    assert to_csv(build_actions("afab", p, m)) == single("ScheduleGPipe", p, m)


@pytest.mark.parametrize(("p", "m", "v"), GRID)
def test_1f1b_equals_pytorch(p: int, m: int, v: int) -> None:
    """PyTorch 2.13 numbers the forward passes of the last rank from 1 in the order that it prints; its runtime counts from 0."""
    *ours, last = to_csv(build_actions("1f1b", p, m)).splitlines()
    *theirs, their_last = single("Schedule1F1B", p, m).splitlines()
    assert ours == theirs
    assert re.sub(r"F(\d+)", lambda match: f"F{int(match[1]) + 1}", last) == their_last


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("interleaved", "ScheduleInterleaved1F1B"), ("interleaved_zb", "ScheduleInterleavedZeroBubble")],
)
@pytest.mark.parametrize(("p", "m", "v"), [*GRID, (4, 10, 2), (4, 3, 2), (4, 6, 3), (8, 20, 2)])
def test_interleaved_equals_pytorch(ours: str, theirs: str, p: int, m: int, v: int) -> None:
    """Rounds need not be as many micro-batches as ranks: 10 on 4 ranks are two of 5."""
    assert to_csv(build_actions(ours, p, m, v, options=OrderOptions(round_size=m // max(1, m // p)))) == several(
        theirs, p, m, v
    )


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 24)])
def test_zb_h1_is_their_interleaved_zero_bubble_of_one_stage(p: int, m: int) -> None:
    assert to_csv(build_actions("zb_h1", p, m)) == several("ScheduleInterleavedZeroBubble", p, m, 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "p", "m"),
    [("zb_v", "ScheduleZBVZeroBubble", p, m) for p, m in ((2, 3), (4, 7), (4, 16), (8, 20), (4, 4), (8, 5))]
    + [("dualpipe_v", "ScheduleDualPipeV", p, m) for p, m in ((2, 4), (3, 6), (4, 8), (4, 15), (8, 16))],
)
def test_v_shaped_schedules_equal_pytorch(ours: str, theirs: str, p: int, m: int) -> None:
    assert to_csv(build_actions(ours, p, m)) == several(theirs, p, m, 2)


@pytest.mark.parametrize(("p", "m", "v"), GRID)
def test_looped_bfs_takes_as_long_and_holds_as_much(p: int, m: int, v: int) -> None:
    """Theirs runs micro-batches backward from the last to the first; passes forward are the same."""
    ours, theirs = (
        play_actions(build_actions("looped_bfs", p, m, v)),
        play_actions(from_csv(several("ScheduleLoopedBFS", p, m, v))),
    )
    assert theirs.makespan == pytest.approx(ours.makespan)
    assert theirs.peak_activations == ours.peak_activations
    forward = [
        [[str(slot[0]) for slot in slots if slot[0].kind == "F"] for slots in line.actions.order]
        for line in (ours, theirs)
    ]
    assert forward[0] == forward[1]


def parse_actions(actions: ActionList) -> dict[int, list[Any]]:
    """Our CSV as their runtime reads it."""
    text = to_csv(actions).splitlines()
    return {rank: [torch_schedules._Action.from_str(cell) for cell in row.split(",")] for rank, row in enumerate(text)}


@pytest.mark.parametrize(
    "name",
    sorted(set(ALL_SCHEDULES) - {"none", "dualpipe"}),  # one has no ranks to send to, one has stages on two ranks each
)
def test_their_validators_take_our_csv(name: str) -> None:
    """Their check finds every stage on the rank that ours gives; their sends and receives are added and played to the end."""
    actions = build_actions(name, 4, 8)
    order = parse_actions(actions)
    ranks = torch_schedules._validate_schedule(order, 4, actions.num_stages, 8)
    assert tuple(ranks[stage] for stage in range(actions.num_stages)) == actions.placement.ranks
    added = torch_schedules._add_send_recv(order, ranks.__getitem__, actions.num_stages)
    sends = sum("SEND" in str(action) for row in added.values() for action in row)
    assert sends == 2 * 8 * sum(actions.crosses_ranks())
