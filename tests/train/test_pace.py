"""A rank that takes longer than others with the same work is named during the run."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from train import in_float64
from train.float64 import DENSE, make_plan
from train.launching import launch_copy, pids_of
from train.stand_in import SEQ_LEN, write_inputs

from shardwise.layout.layout import Layout
from shardwise.records.run_folder import read_json
from shardwise.records.step_log import SLOW_EVENT, read_log
from shardwise.run.trainer.stragglers import slow_ranks, stage_flops

LAYOUTS = [
    Layout(dp=2, micro_batch_seqs=4),
    Layout(fsdp=2, zero_stage=3, micro_batch_seqs=4),
    Layout(tp=2, micro_batch_seqs=8),
    Layout(pp=2, schedule="1f1b", micro_batch_seqs=4),
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_rank_that_is_three_times_as_slow_is_named(layout: Layout, tmp_path: Path) -> None:
    flags = [*write_inputs(tmp_path, make_plan(DENSE, layout, 8)), "--device", "cpu", "--steps", "20", "--elastic"]
    out = Path(flags[4])
    run = launch_copy(in_float64.main, flags, SLOW="1", PRODUCT_S="0.002")
    named = run.matches(
        r"^step 10: rank 1 \(process (\d+) on (.+)\) works (\S+) times as long as others with the same work \(.+ a step\)$"
    )
    assert run.ended() == 0, run.err
    assert (int(named[1]), named[2]) == (pids_of(out)[1], socket.gethostname())
    (event,) = [event for event in read_log(out / "log.jsonl").events if event["event"] == SLOW_EVENT]
    (slow_rank,) = event["ranks"]
    assert (event["step"], slow_rank["rank"], slow_rank["host"]) == (10, 1, socket.gethostname())
    assert slow_rank["factor"] == pytest.approx(3.0, rel=0.25)
    assert read_json(out / "summary.json")["slow"] == [
        {"rank": 1, "host": socket.gethostname(), "step": 10, "factor": slow_rank["factor"]}
    ]
    assert re.search(rf"^  slow       rank 1 on {re.escape(socket.gethostname())}, at step 10 ", run.out, re.MULTILINE)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equally_slow_ranks_are_not_named(layout: Layout, tmp_path: Path) -> None:
    flags = [*write_inputs(tmp_path, make_plan(DENSE, layout, 8)), "--device", "cpu", "--steps", "20", "--elastic"]
    run = launch_copy(in_float64.main, flags, PRODUCT_S="0.004")
    assert run.ended() == 0, run.err
    assert not [event for event in read_log(Path(flags[4]) / "log.jsonl").events if event["event"] == SLOW_EVENT]


def test_ranks_are_compared_with_ranks_of_the_same_work() -> None:
    """Two stages of three ranks each, of which the second has twice the work: the median of a stage is that of its ranks."""
    stages, flops = [0, 0, 0, 1, 1, 1], [1.0, 2.0]
    assert slow_ranks([1.0, 1.1, 1.0, 2.0, 2.2, 1.9], stages, flops, 1.5) == {}
    assert slow_ranks([1.0, 1.0, 3.0, 2.0, 2.0, 2.0], stages, flops, 2.0) == {2: 3.0}
    assert slow_ranks([1.0, 8.0, 1.1], [0, 1, 2], [1.0, 2.0, 1.0], 2.0) == {1: 3.64}


def test_flops_of_stages_count_layers_and_logits() -> None:
    """By hand: 6 times the weights and the tokens, and attention's products of all pairs."""
    plan = make_plan(DENSE, Layout(pp=2, schedule="1f1b", micro_batch_seqs=4), 8)
    first, last = stage_flops(plan)
    tokens, width, vocabulary = 4 * SEQ_LEN, plan.model.d_model, plan.model.vocab_size
    assert last - first == pytest.approx(6 * tokens * width * vocabulary)
