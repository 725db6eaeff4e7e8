"""Instructions of a unit are in an executable order, and are exactly the derived ones."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from schemes import scheme_id, scheme_of

from shardwise.derive.sharded_program import ShardedTensor
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import units_of_structure
from shardwise.model.program import Role
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.collectives import CONTROL_UNIT, control_collectives, list_unit_collectives
from shardwise.step.instructions import (
    FreeTensors,
    Instruction,
    Kernel,
    LocalSlice,
    StartCollective,
    WaitCollective,
    unroll_rings,
)
from shardwise.step.kernel_fusion import list_kernels
from shardwise.step.unit_instructions import UnitInstructions, _live_out, lower_unit, payload_tensors, touched_tensors
from shardwise.values.engine_policies import IssuePolicy

SMALL = Architecture(
    name="small", num_layers=3, d_model=24, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=96
)
MODELS = {
    "dense": SMALL,
    "experts": replace(SMALL, num_experts=4, experts_per_token=2, num_dense_layers=1, dense_d_ff=32),
    "adapters": replace(SMALL, lora_rank=4, lora_targets=("qkv",)),
    "biased": replace(SMALL, norm="layer", norm_bias=True, bias=("qkv", "mlp"), mlp="gelu", parallel=True),
    "predicting": replace(SMALL, num_predict_layers=1),
}
SCHEMES = [
    scheme_of(SMALL.structure, zero, sp, recompute, cp_variant=variant, async_tp=zero == 1)
    for zero, sp, recompute, variant in itertools.product(
        (0, 1, 2, 3), (False, True), ("none", "full"), ("all_gather", "ring", "ulysses")
    )
]
POLICIES = [
    IssuePolicy(),
    IssuePolicy(reduce_each_micro_batch=True, statistics="micro_batch", noise_scale=True),
]


CASES = list(itertools.product(MODELS, SCHEMES))


def templates(model: str, scheme: ShardingScheme, policy: IssuePolicy) -> list[UnitInstructions]:
    scheme = replace(scheme, structure=MODELS[model].structure)
    return [lower_unit(scheme, name, policy) for name in units_of_structure(scheme.structure)]


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("model", "scheme"), CASES, ids=scheme_id)
def test_instructions_are_in_an_executable_order(model: str, scheme: ShardingScheme) -> None:
    """Instructions that read or move a tensor come after the wait for its collective; gradients leave after they are computed;
    freed tensors are live, are not read again, and are all that no later pass reads."""
    for policy in POLICIES:
        for template in templates(model, scheme, policy):
            for name, instructions in template.passes.items():
                check_order(template, name, instructions)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("model", "scheme"), CASES, ids=scheme_id)
def test_instructions_are_exactly_the_derived_ones(model: str, scheme: ShardingScheme) -> None:
    for policy in POLICIES:
        for template in templates(model, scheme, policy):
            unit = template.unit
            issued = list_unit_collectives(unit, policy)
            if unit.name == CONTROL_UNIT:
                issued += control_collectives(replace(scheme, structure=MODELS[model].structure), policy)
            assert Counter(template.collectives) == Counter(issued)
            assert template.kernels == list_kernels(unit)


def check_order(template: UnitInstructions, name: str, listed: tuple[Instruction, ...]) -> None:
    unit = template.unit
    instructions = tuple(unroll_rings(listed))
    produced_here = {
        out for instruction in instructions if isinstance(instruction, Kernel) for out in instruction.outputs
    }
    produced: set[str] = set()
    freed: set[ShardedTensor] = set()
    live: set[ShardedTensor] = set()
    moving: list[StartCollective] = []
    for instruction in instructions:
        names = set(touched_tensors(instruction))
        assert freed.isdisjoint(names)
        live |= names
        match instruction:
            case Kernel():
                in_transit = {tensor for start in moving for tensor in payload_tensors(unit, start.collective)}
                assert in_transit.isdisjoint(instruction.reads), (unit.name, name, instruction)
                assert {tensor for tensor in instruction.reads if tensor in produced_here} <= produced
                produced |= set(instruction.outputs)
            case StartCollective():
                payload = set(payload_tensors(unit, instruction.collective))
                assert all(payload.isdisjoint(payload_tensors(unit, start.collective)) for start in moving)
                assert payload & produced_here <= produced
                moving.append(instruction)
            case WaitCollective():
                moving.remove(StartCollective(instruction.collective))
            case LocalSlice():
                assert instruction.step.tensor.name not in {
                    tensor for start in moving for tensor in payload_tensors(unit, start.collective)
                }
            case FreeTensors():
                assert set(instruction.sharded_tensors) <= live
                freed |= set(instruction.sharded_tensors)
    assert not moving
    if name == "update":
        assert not freed
        return
    remaining = {tensor for tensor in live - freed if unit.tensors[tensor.name].role is not Role.CONSTANT}
    assert remaining <= _live_out(unit, name), (unit.name, name)
    assert all(unit.tensors[tensor.name].role is not Role.CONSTANT for tensor in freed), (
        "constants belong to the batch and are not freed"
    )


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("model", "scheme"), CASES, ids=scheme_id)
def test_the_loss_is_the_only_partial_sum_that_outlives_the_forward_pass(model: str, scheme: ShardingScheme) -> None:
    """It is summed in the update; partial sums of products and embeddings are freed as soon as they have been summed."""
    for template in templates(model, scheme, IssuePolicy()):
        forward = list(unroll_rings(template.passes["forward"]))
        partial = {tensor for instruction in forward for tensor in touched_tensors(instruction) if tensor.spec.partial}
        freed = {
            tensor
            for instruction in forward
            if isinstance(instruction, FreeTensors)
            for tensor in instruction.sharded_tensors
        }
        assert {tensor.name for tensor in partial - freed} == {"loss"} & set(template.unit.forward.program.tensors)
        assert template.unit.name == "embedding" or partial & freed, template.unit.name


def test_weights_are_gathered_first_and_gradients_scattered_after_the_last() -> None:
    """ZeRO-3: the block's gather leads each pass, waited for before the first kernel that reads a weight; the head's weights stay
    for its backward pass."""
    block, head = (lower_unit(scheme_of(SMALL.structure, 3), name, IssuePolicy()) for name in ("block", "head"))
    for name in ("forward", "backward"):
        first = block.passes[name][0]
        assert isinstance(first, StartCollective)
        assert first.collective.kind is CollectiveKind.ALL_GATHER
    backward = block.passes["backward"]
    scatters = [
        place
        for place, instruction in enumerate(backward)
        if isinstance(instruction, StartCollective) and instruction.collective.kind is CollectiveKind.REDUCE_SCATTER
    ]
    gradient_places = [
        place
        for place, instruction in enumerate(backward)
        if isinstance(instruction, Kernel) and instruction.makes_weight_grads
    ]
    assert min(scatters) > min(gradient_places)
    assert not any(
        isinstance(instruction, Kernel) and instruction.makes_weight_grads for instruction in backward[max(scatters) :]
    )
    assert not [
        instruction
        for instruction in head.passes["backward"]
        if isinstance(instruction, StartCollective) and instruction.collective.kind is CollectiveKind.ALL_GATHER
    ]
    assert "head" not in {
        name
        for instruction in head.passes["forward"]
        if isinstance(instruction, FreeTensors)
        for name in instruction.tensors
    }
    assert "head" in {
        name
        for instruction in head.passes["backward"]
        if isinstance(instruction, FreeTensors)
        for name in instruction.tensors
    }
