"""The list of each stage of a pipeline: its units, its parameters, its collectives and messages; backward passes in two."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from schemes import scheme_id, scheme_of

from shardwise.derive.sharded_program import ShardedTensor
from shardwise.layout.layout import Layout
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.program import Role
from shardwise.pipeline.messages import order_messages
from shardwise.pipeline.registry import build_actions
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.instructions import (
    FreeTensors,
    Kernel,
    LocalSlice,
    StartCollective,
    WaitCollective,
    unroll_rings,
)
from shardwise.step.issued_collectives import count_collectives
from shardwise.step.parameters import list_parameters
from shardwise.step.rank_program import RankProgram
from shardwise.step.unit_instructions import UnitInstructions, lower_unit
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.precision import PRECISIONS

DENSE = Architecture(
    name="dense", num_layers=8, d_model=16, d_ff=32, num_heads=4, num_kv_heads=4, head_dim=4, vocab_size=64
)
MODELS = {
    "dense": DENSE,
    "tied": replace(DENSE, tied_embeddings=True),
    "experts": replace(DENSE, num_experts=4, experts_per_token=2, sinks=True),
    "adapters": replace(DENSE, lora_rank=2, lora_targets=("qkv", "mlp")),
    "predicting": replace(DENSE, num_predict_layers=1),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "afab": {}, "1f1b": {}, "interleaved": {"num_virtual_stages": 2}, "looped_bfs": {"num_virtual_stages": 2}, "zb_h1": {},
    "zb_h2": {}, "dualpipe": {}, "interleaved_breadth_first": {"num_virtual_stages": 2},
    "interleaved_zb": {"num_virtual_stages": 2},
}  # fmt: skip
SCHEMES = [
    scheme_of(DENSE.structure), scheme_of(DENSE.structure, 0, True, "selective"), scheme_of(DENSE.structure, 3, False, "full"),
]  # fmt: skip


def staged(model: str, schedule: str, pp: int = 4, **layout: Any) -> list[RankProgram]:
    """That of each rank along `pp`."""
    shape = Layout(pp=pp, schedule=schedule, **SCHEDULES[schedule], **layout)
    one = RankProgram(architecture=MODELS[model], layout=shape, precision=PRECISIONS["fp32"], seq_len=16)
    return [one.for_pp_rank(rank) for rank in range(pp)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_stages_together_hold_the_model(model: str, schedule: str) -> None:
    """Each parameter once; but with micro-batches from both ends, and where the first stage lends it to the last, twice."""
    ranks = staged(model, schedule)
    whole = {one.name for one in list_parameters(MODELS[model], ranks[0].scheme)}
    held = Counter(one.name for rank in ranks for one in rank.parameters)
    assert held.keys() == whole
    lent = {"tied": {"embedding.embedding"}, "predicting": {"embedding.embedding"}}.get(model, set())
    twice = whole if schedule == "dualpipe" else lent
    assert {name for name, count in held.items() if count == 2} == twice
    assert max(held.values()) <= 2
    trained = {one.name for rank in ranks for one in rank.parameters if one.trained}
    for rank, opposite in zip(ranks, ranks[::-1], strict=True):
        assert rank.mirrored_names == opposite.mirrored_names
        assert rank.mirrored_names <= twice & trained


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_sent_is_received(schedule: str) -> None:
    """As many messages, of a hidden state of a micro-batch each."""
    issued = [count_collectives(rank, 8) for rank in staged("dense", schedule)]
    sent, received = (
        Counter({one.num_bytes: count for each in issued for one, count in each.items() if one.kind is kind})
        for kind in (CollectiveKind.SEND, CollectiveKind.RECEIVE)
    )
    assert sent.keys() == received.keys() == {1 * 16 * 16 * 4}
    totals = [
        sum(count for each in issued for one, count in each.items() if one.kind is kind)
        for kind in (CollectiveKind.SEND, CollectiveKind.RECEIVE)
    ]
    actions = build_actions(schedule, 4, 8, SCHEDULES[schedule].get("num_virtual_stages", 1))
    assert totals == [2 * 8 * (actions.num_stages - 1)] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_where_the_backward_pass_follows_at_once(schedule: str) -> None:
    turns = {rank.backward_follows_forward for rank in staged("dense", schedule)}
    assert turns == {schedule not in ("afab", "looped_bfs", "dualpipe")}


def test_weights_of_the_head_are_gathered_again_where_its_backward_pass_does_not_follow() -> None:
    found = {}
    for schedule in ("1f1b", "afab"):
        *_, last = staged("dense", schedule, fsdp=2, zero_stage=3)
        elements = 64 * 16  # of the head
        weights = [
            count
            for one, count in count_collectives(last, 8).items()
            if one.kind is CollectiveKind.ALL_GATHER and one.num_bytes == elements * 4
        ]
        found[schedule] = sum(weights)
        gathered = [last.gathered("head", "head", phase) for phase in ("forward", "backward")]
        assert bool(gathered[1]) is (schedule == "afab")
        assert last.keeps_gathered("head") is (schedule == "1f1b")
    assert (found["1f1b"], found["afab"]) == (8, 16)


def templates(model: str, scheme: ShardingScheme) -> list[UnitInstructions]:
    architecture = MODELS[model]
    scheme = replace(scheme, structure=architecture.structure)
    return [
        lower_unit(scheme, "block", IssuePolicy(), single)
        for single in (frozenset[str](), frozenset({"tp_kv", "tp_rep", "cp", "ep"}))
    ]


@pytest.mark.parametrize("model", ["dense", "experts", "adapters"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
def test_a_backward_pass_in_two_is_the_whole_one(model: str, scheme: ShardingScheme) -> None:
    """Every instruction is in one part, in the same order; the first needs nothing of the second, which reads no weight and makes
    the products that give weights' gradients."""
    for template in templates(model, scheme):
        whole = [one for one in unroll_rings(template.passes["backward"]) if not isinstance(one, FreeTensors)]
        first, second = (tuple(unroll_rings(part)) for part in (template.backward_input, template.backward_weight))
        assert sorted(map(whole.index, (*first, *second))) == sorted(whole.index(one) for one in whole)
        assert [whole.index(one) for one in first] == sorted(whole.index(one) for one in first)
        assert [whole.index(one) for one in second] == sorted(whole.index(one) for one in second)
        made = {held for one in second for held in written(one)}
        assert made.isdisjoint(held for one in first for held in read(one))
        tensors = template.unit.tensors
        assert not any(tensors[held.name].role is Role.WEIGHT for one in second for held in read(one))
        gradients = {held.name for held in made if tensors[held.name].role is Role.WEIGHT_GRADIENT}
        matrices = {name for name in template.unit.gradients if "norm" not in name and name != "sinks"}
        if not MODELS[model].lora_rank:
            assert {template.unit.tensors[name].gradient_of for name in gradients} >= matrices - {"router"}


def read(one: Any) -> list[ShardedTensor]:
    return _held(one, "operands", "inputs", "before")


def written(one: Any) -> list[ShardedTensor]:
    return _held(one, "outputs", "outputs", "after")


def _held(one: Any, tensors: str, specs: str, side: str) -> list[ShardedTensor]:
    """The tensors on one side of an instruction, as they lie."""
    match one:
        case Kernel():
            return [
                ShardedTensor(*each)
                for step in one.steps
                for each in zip(getattr(step.operation, tensors), getattr(step.placed, specs), strict=False)
            ]
        case StartCollective() | WaitCollective():
            return [ShardedTensor(each.tensor.name, getattr(each.collective, side)) for each in one.collective.derived]
        case LocalSlice():
            return [ShardedTensor(one.step.tensor.name, getattr(one.step.collective, side))]
    return []


@pytest.mark.parametrize(("schedule", "p", "m", "v"), [
    ("1f1b", 4, 12, 1), ("zb_h2", 4, 12, 1), ("interleaved", 4, 12, 2), ("dualpipe", 4, 12, 1), ("zb_v", 4, 12, 2),
    ("afab", 3, 5, 1),
])  # fmt: skip
def test_what_has_arrived_was_sent_before_and_taken_by_then(schedule: str, p: int, m: int, v: int) -> None:
    steps = order_messages(build_actions(schedule, p, m, v))
    taken = {one: place for of_rank in steps for place, step in enumerate(of_rank) for one in step.receives}
    for of_rank in steps:
        on_way: set[Any] = set()
        most = 0
        for step in of_rank:
            assert set(step.acknowledged) <= on_way
            on_way = on_way - set(step.acknowledged) | set(step.sends)
            most = max(most, len(on_way))
            assert all(one in taken for one in step.sends)
        if schedule == "1f1b":
            assert most <= p  # and not all of the step's
