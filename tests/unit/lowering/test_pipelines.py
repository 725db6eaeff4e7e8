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


def programs_by_rank(model: str, schedule: str, pp: int = 4, **layout: Any) -> list[RankProgram]:
    """The program of each rank along `pp`."""
    shape = Layout(pp=pp, schedule=schedule, **SCHEDULES[schedule], **layout)
    program = RankProgram(architecture=MODELS[model], layout=shape, precision=PRECISIONS["fp32"], seq_len=16)
    return [program.for_pp_rank(rank) for rank in range(pp)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_partition_the_models_parameters(model: str, schedule: str) -> None:
    """Each parameter once; twice with micro-batches from both ends, and where the first and the last stage share it."""
    ranks = programs_by_rank(model, schedule)
    names = {parameter.name for parameter in list_parameters(MODELS[model], ranks[0].scheme)}
    num_copies = Counter(parameter.name for rank in ranks for parameter in rank.parameters)
    assert num_copies.keys() == names
    lent = {"tied": {"embedding.embedding"}, "predicting": {"embedding.embedding"}}.get(model, set())
    twice = names if schedule == "dualpipe" else lent
    assert {name for name, count in num_copies.items() if count == 2} == twice
    assert max(num_copies.values()) <= 2
    trained = {parameter.name for rank in ranks for parameter in rank.parameters if parameter.trained}
    for rank, opposite in zip(ranks, ranks[::-1], strict=True):
        assert rank.mirrored_names == opposite.mirrored_names
        assert rank.mirrored_names <= twice & trained


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_sent_message_is_received(schedule: str) -> None:
    """Sends and receives are equally many; each moves a hidden state of a micro-batch."""
    issued = [count_collectives(rank, 8) for rank in programs_by_rank("dense", schedule)]
    sent, received = (
        Counter(
            {
                collective.num_bytes: count
                for counts_of_rank in issued
                for collective, count in counts_of_rank.items()
                if collective.kind is kind
            }
        )
        for kind in (CollectiveKind.SEND, CollectiveKind.RECEIVE)
    )
    assert sent.keys() == received.keys() == {1 * 16 * 16 * 4}
    totals = [
        sum(
            count
            for counts_of_rank in issued
            for collective, count in counts_of_rank.items()
            if collective.kind is kind
        )
        for kind in (CollectiveKind.SEND, CollectiveKind.RECEIVE)
    ]
    actions = build_actions(schedule, 4, 8, SCHEDULES[schedule].get("num_virtual_stages", 1))
    assert totals == [2 * 8 * (actions.num_stages - 1)] * 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_whose_backward_pass_follows_the_forward_pass(schedule: str) -> None:
    turns = {rank.backward_follows_forward for rank in programs_by_rank("dense", schedule)}
    assert turns == {schedule not in ("afab", "looped_bfs", "dualpipe")}


def test_weights_of_the_head_are_gathered_again_where_its_backward_pass_does_not_follow() -> None:
    num_gathers = {}
    for schedule in ("1f1b", "afab"):
        *_, last = programs_by_rank("dense", schedule, fsdp=2, zero_stage=3)
        elements = 64 * 16  # of the head
        weights = [
            count
            for collective, count in count_collectives(last, 8).items()
            if collective.kind is CollectiveKind.ALL_GATHER and collective.num_bytes == elements * 4
        ]
        num_gathers[schedule] = sum(weights)
        gathered = [last.gathered("head", "head", phase) for phase in ("forward", "backward")]
        assert bool(gathered[1]) is (schedule == "afab")
        assert last.keeps_gathered("head") is (schedule == "1f1b")
    assert (num_gathers["1f1b"], num_gathers["afab"]) == (8, 16)


def templates(model: str, scheme: ShardingScheme) -> list[UnitInstructions]:
    architecture = MODELS[model]
    scheme = replace(scheme, structure=architecture.structure)
    return [
        lower_unit(scheme, "block", IssuePolicy(), single)
        for single in (frozenset[str](), frozenset({"tp_kv", "tp_rep", "cp", "ep"}))
    ]


@pytest.mark.parametrize("model", ["dense", "experts", "adapters"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
def test_the_two_parts_of_a_backward_pass_are_the_whole_pass(model: str, scheme: ShardingScheme) -> None:
    """Every instruction is in one of the parts, in the same order; the first needs nothing of the second, which reads no
    weight and computes the weights' gradients."""
    for template in templates(model, scheme):
        instructions = [
            instruction
            for instruction in unroll_rings(template.passes["backward"])
            if not isinstance(instruction, FreeTensors)
        ]
        first, second = (tuple(unroll_rings(part)) for part in (template.backward_input, template.backward_weight))
        assert sorted(map(instructions.index, (*first, *second))) == sorted(
            instructions.index(instruction) for instruction in instructions
        )
        assert [instructions.index(instruction) for instruction in first] == sorted(
            instructions.index(instruction) for instruction in first
        )
        assert [instructions.index(instruction) for instruction in second] == sorted(
            instructions.index(instruction) for instruction in second
        )
        outputs = {tensor for instruction in second for tensor in tensors_written(instruction)}
        assert outputs.isdisjoint(tensor for instruction in first for tensor in tensors_read(instruction))
        tensors = template.unit.tensors
        assert not any(
            tensors[tensor.name].role is Role.WEIGHT for instruction in second for tensor in tensors_read(instruction)
        )
        gradients = {tensor.name for tensor in outputs if tensors[tensor.name].role is Role.WEIGHT_GRADIENT}
        matrices = {name for name in template.unit.gradients if "norm" not in name and name != "sinks"}
        if not MODELS[model].lora_rank:
            assert {template.unit.tensors[name].gradient_of for name in gradients} >= matrices - {"router"}


def tensors_read(instruction: Any) -> list[ShardedTensor]:
    return _tensors_on_side(instruction, "operands", "inputs", "before")


def tensors_written(instruction: Any) -> list[ShardedTensor]:
    return _tensors_on_side(instruction, "outputs", "outputs", "after")


def _tensors_on_side(instruction: Any, tensors: str, specs: str, side: str) -> list[ShardedTensor]:
    """The sharded tensors that an instruction reads or writes."""
    match instruction:
        case Kernel():
            return [
                ShardedTensor(*tensor_and_spec)
                for step in instruction.steps
                for tensor_and_spec in zip(getattr(step.operation, tensors), getattr(step.placed, specs), strict=False)
            ]
        case StartCollective() | WaitCollective():
            return [
                ShardedTensor(move.tensor.name, getattr(move.collective, side))
                for move in instruction.collective.derived
            ]
        case LocalSlice():
            return [ShardedTensor(instruction.step.tensor.name, getattr(instruction.step.collective, side))]
    return []


@pytest.mark.parametrize(("schedule", "p", "m", "v"), [
    ("1f1b", 4, 12, 1), ("zb_h2", 4, 12, 1), ("interleaved", 4, 12, 2), ("dualpipe", 4, 12, 1), ("zb_v", 4, 12, 2),
    ("afab", 3, 5, 1),
])  # fmt: skip
def test_messages_are_sent_before_they_are_acknowledged_and_received(schedule: str, p: int, m: int, v: int) -> None:
    steps = order_messages(build_actions(schedule, p, m, v))
    received_at = {
        message: place for rank_steps in steps for place, step in enumerate(rank_steps) for message in step.receives
    }
    for rank_steps in steps:
        in_flight: set[Any] = set()
        most_in_flight = 0
        for step in rank_steps:
            assert set(step.acknowledged) <= in_flight
            in_flight = in_flight - set(step.acknowledged) | set(step.sends)
            most_in_flight = max(most_in_flight, len(in_flight))
            assert all(message in received_at for message in step.sends)
        if schedule == "1f1b":
            assert most_in_flight <= p  # and not all of the step's
