"""Broken action lists are refused with their first offending action; requirements on stages and micro-batches."""

from __future__ import annotations

import pytest

from shardwise.layout.layout import Layout
from shardwise.pipeline.actions import Action, ActionList, loop_placement
from shardwise.pipeline.clock import check_actions
from shardwise.pipeline.registry import ALL_SCHEDULES, SCHEDULES, OrderOptions, build_actions, resolve_schedule_name
from shardwise.pipeline.torch_csv import from_csv, to_csv
from shardwise.values.errors import InputError

BROKEN = {
    "0F0,0B0\n1B0,1F0": "rank 1, slot 0 (1B0) needs 1F0, which in slot 1 of the same rank comes later",
    "0F0,0F1\n1F0,1B0,1F1,1B1": "rank 0 runs F of micro-batch 0 on stage 0; every micro-batch passes every stage once each way",
    "0F0,0B0,0W0": "rank 0 runs F and B and W of micro-batch 0 on stage 0",
    "0F0,0F0,0B0": "rank 0, slot 1 (0F0): it is there already, in slot 0 of rank 0",
    "0F0,0B0\n0F1,0B1": "found 2 ranks for stages on 1",
    "0F0,0W0,0I0": "rank 0, slot 1 (0W0) needs 0I0, which in slot 2 of the same rank comes later",
    "0F0,2F0,2B0,0B0\n1B0,1F0": "rank 1, slot 0 (1B0) needs 2B0, which in slot 2 of rank 0 waits in turn: a deadlock",
    "(0F0;0F1)OVERLAP_F_B,0B0,0B1": "it runs together with 0F0, 0F1; a forward and a backward pass may run together",
    "0F0,0X0": "row 1, cell 2: found '0X0'; stage, kind (F, B, I or W) and micro-batch are required",
    "99999999F0,0B0": "row 1, cell 1: found '99999999F0'",
    "9F0,9B0": "found 2 actions for 10 stages and 1 micro-batches",
    "0F0,0B0,0F1,0B1\n2F0,2B0,2F1,2B1": "no rank has stage 1 of 3",
    ",,\n": "found no action",
    "0F0,1F0,1B0,0B0\n1F1,0F1,0B1,1B1": "rank 0, slot 1 (1F0): stage 1 of micro-batch 0 is on rank 1",
}


@pytest.mark.parametrize("text", BROKEN, ids=[f"{i}" for i in range(len(BROKEN))])
def test_a_broken_list_is_refused_with_its_first_offence(text: str) -> None:
    with pytest.raises(InputError) as caught:
        from_csv(text)
    assert BROKEN[text] in str(caught.value)


def test_a_deadlock_of_ranks_that_wait_for_each_other_is_refused() -> None:
    """Rank 0 sends micro-batch 1 only when micro-batch 0 is back; rank 1 sends 0 back only when it has 1."""
    text = "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"
    with pytest.raises(
        InputError, match=r"rank 0, slot 1 \(0B0\) needs 1B0, which in slot 2 of rank 1 waits in turn: a deadlock"
    ):
        from_csv(text)


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (Action("X", 0, 0), "found kind 'X'; one of F, B, I, W is required"),
        (Action("F", 2, 0), "stages are 0 to 1"),
        (Action("F", 0, 7), "micro-batches are 0 to 1"),
        (Action("F", 1, 0), "stage 1 of micro-batch 0 is on rank 1"),
    ],
)
def test_an_action_in_an_impossible_place_is_refused(action: Action, problem: str) -> None:
    good = build_actions("1f1b", 2, 2)
    order = ((*good.order[0], (action,)), good.order[1])
    broken = ActionList(name="own", order=order, placement=loop_placement(2, 1), num_micro_batches=2)
    with pytest.raises(InputError, match=rf"rank 0, slot 4 \({action}\): {problem}"):
        check_actions(broken)


@pytest.mark.parametrize("name", ALL_SCHEDULES)
def test_every_schedule_is_read_back(name: str) -> None:
    actions = build_actions(name, 1 if name == "none" else 4, 12)
    check_actions(actions)
    assert from_csv(to_csv(actions), name) == actions


def test_cells_of_other_tools_that_follow_from_the_order_are_skipped() -> None:
    """PyTorch pads with idle slots, and has rows with messages and with weights' gathers."""
    plain = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert (
        from_csv("0UNSHARD,0F0,0SEND_F0,0F1,,0B0,,0B1,0REDUCE_GRAD\n\n,1RECV_F0,1F0,1B0,1F1,1B1,,\n").order
        == plain.order
    )


def test_stages_may_be_placed_on_any_rank() -> None:
    actions = from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0")
    assert actions.placement.name == "v"
    actions = from_csv("0F0,1F0,1B0,0B0\n2F0,2B0")
    assert (actions.placement.name, actions.placement.ranks, actions.num_virtual_stages) == ("given", (0, 0, 1), 1.5)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("1f1b", 0, 4), "stages: found 0; at least 1 is required"),
        (
            ("1f1b", 1000, 1001),
            "stages: found 1,000 for 1,001 micro-batches; at most 300,000 passes of each kind are",
        ),
        (
            ("1f1b", 1, 4),
            "stages: 1f1b does not run on 1 stages with 1 virtual stages on each; another number of stages",
        ),
        (("1f1b", 4, 4, 2), "with 2 virtual stages on each; 1 virtual stages on each is required"),
        (("zb_v", 4, 4, 3), "with 3 virtual stages on each; 2 virtual stages on each is required"),
        (
            ("interleaved", 4, 6, 2),
            "micro-batches: found 6; interleaved requires at least 4 in multiples of 4 on 4 stages",
        ),
        (("dualpipe", 3, 12), "stages: dualpipe, of an even number of stages, does not run on 3 stages"),
        (("dualpipe", 4, 6), "micro-batches: found 6; dualpipe requires at least 8 in multiples of 2 on 4 stages"),
        (("dualpipe_v", 4, 7), "micro-batches: found 7; dualpipe_v requires at least 8 on 4 stages"),
        (("zb_h3", 4, 6), r"schedule: found 'zb_h3' \(did you mean 'zb_h1' or 'zb_h2'\?\); one of none, afab, 1f1b"),
    ],
)
def test_requirements_of_schedules(arguments: tuple[str, int, int], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        build_actions(*arguments)


def test_invalid_rounds_are_refused() -> None:
    with pytest.raises(InputError, match="found 16 in rounds of 2 on 4 stages; rounds of at least 4"):
        build_actions("interleaved", 4, 16, 2, options=OrderOptions(round_size=2))
    with pytest.raises(InputError, match="round size: found 4 for 1f1b, which has no rounds"):
        build_actions("1f1b", 4, 16, options=OrderOptions(round_size=4))


def test_a_memory_limit_is_kept_or_refused() -> None:
    assert build_actions("1f1b", 4, 16, options=OrderOptions(memory_limit=1.0)).name == "1f1b"
    with pytest.raises(
        InputError,
        match=r"memory limit: rank 0 of zb_h2 holds 1.75 times what 1F1B's first stage does; the limit is 1;",
    ):
        build_actions("zb_h2", 4, 16, options=OrderOptions(memory_limit=1.0))
    with pytest.raises(
        InputError, match=r"memory limit: found 0.2 of what 1F1B's first of 4 stages holds; at least 0.25"
    ):
        build_actions("zb_auto", 4, 16, options=OrderOptions(memory_limit=0.2))


def test_names_of_papers_and_engines_are_accepted() -> None:
    assert resolve_schedule_name("GPipe") == "afab"
    assert resolve_schedule_name("LoopedBFS") == "looped_bfs"
    names = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    assert [resolve_schedule_name(text) for text in names] == [
        "interleaved", "interleaved_zb", "zb_v", "dualpipe_v",
    ]  # fmt: skip


def test_layouts_may_name_schedules_with_closed_forms() -> None:
    """For other schedules the error states the reason."""
    assert set(ALL_SCHEDULES) - set(SCHEDULES) == {"naive", "zb_auto"}
    with pytest.raises(InputError, match="this one has no closed form; `shardwise schedule` plays it"):
        ALL_SCHEDULES["zb_auto"].in_flight(4, 1, 8, 0)
    with pytest.raises(
        InputError, match=r"schedule is 'zb_auto'.* is required \(zb_auto: its order is made for seconds and"
    ):
        Layout(pp=4, schedule="zb_auto")
    with pytest.raises(InputError, match=r"schedule is 'naive'.* is required \(naive: it waits in every micro-batch"):
        Layout(pp=4, schedule="naive")
