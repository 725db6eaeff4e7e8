"""Instructions of a unit: in an order that a device may follow, with everything that was derived and nothing else."""

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
def test_an_order_that_a_device_may_follow(model: str, scheme: ShardingScheme) -> None:
    """Whoever reads a tensor, or moves it on, has waited for what brings it; a gradient leaves when it is made; and what is freed
    is there, is read no more, and is all that no later pass reads."""
    for policy in POLICIES:
        for template in templates(model, scheme, policy):
            for name, instructions in template.passes.items():
                follow(template, name, instructions)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("model", "scheme"), CASES, ids=scheme_id)
def test_everything_is_there_and_nothing_else(model: str, scheme: ShardingScheme) -> None:
    for policy in POLICIES:
        for template in templates(model, scheme, policy):
            unit = template.unit
            issued = list_unit_collectives(unit, policy)
            if unit.name == CONTROL_UNIT:
                issued += control_collectives(replace(scheme, structure=MODELS[model].structure), policy)
            assert Counter(template.collectives) == Counter(issued)
            assert template.kernels == list_kernels(unit)


def follow(template: UnitInstructions, name: str, listed: tuple[Instruction, ...]) -> None:
    unit = template.unit
    instructions = tuple(unroll_rings(listed))
    made_here = {out for one in instructions if isinstance(one, Kernel) for out in one.outputs}
    made: set[str] = set()
    freed: set[ShardedTensor] = set()
    held: set[ShardedTensor] = set()
    moving: list[StartCollective] = []
    for one in instructions:
        names = set(touched_tensors(one))
        assert freed.isdisjoint(names)
        held |= names
        match one:
            case Kernel():
                on_the_way = {each for start in moving for each in payload_tensors(unit, start.collective)}
                assert on_the_way.isdisjoint(one.reads), (unit.name, name, one)
                assert {each for each in one.reads if each in made_here} <= made
                made |= set(one.outputs)
            case StartCollective():
                wanted = set(payload_tensors(unit, one.collective))
                assert all(wanted.isdisjoint(payload_tensors(unit, start.collective)) for start in moving)
                assert wanted & made_here <= made
                moving.append(one)
            case WaitCollective():
                moving.remove(StartCollective(one.collective))
            case LocalSlice():
                assert one.step.tensor.name not in {
                    each for start in moving for each in payload_tensors(unit, start.collective)
                }
            case FreeTensors():
                assert set(one.sharded_tensors) <= held
                freed |= set(one.sharded_tensors)
    assert not moving
    if name == "update":
        assert not freed
        return
    left = {each for each in held - freed if unit.tensors[each.name].role is not Role.CONSTANT}
    assert left <= _live_out(unit, name), (unit.name, name)
    assert all(unit.tensors[each.name].role is not Role.CONSTANT for each in freed), "constants are the batch's"


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("model", "scheme"), CASES, ids=scheme_id)
def test_of_partial_sums_the_loss_alone_outlasts_the_forward_pass(model: str, scheme: ShardingScheme) -> None:
    """It is summed in the update; what products and embeddings leave is freed as soon as it has been summed."""
    for template in templates(model, scheme, IssuePolicy()):
        forward = list(unroll_rings(template.passes["forward"]))
        partial = {each for one in forward for each in touched_tensors(one) if each.spec.partial}
        freed = {each for one in forward if isinstance(one, FreeTensors) for each in one.sharded_tensors}
        assert {each.name for each in partial - freed} == {"loss"} & set(template.unit.forward.program.tensors)
        assert template.unit.name == "embedding" or partial & freed, template.unit.name


def test_weights_are_gathered_at_the_head_and_scattered_where_the_last_is_made() -> None:
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
        for place, one in enumerate(backward)
        if isinstance(one, StartCollective) and one.collective.kind is CollectiveKind.REDUCE_SCATTER
    ]
    made = [place for place, one in enumerate(backward) if isinstance(one, Kernel) and one.makes_weight_grads]
    assert min(scatters) > min(made)
    assert not any(isinstance(one, Kernel) and one.makes_weight_grads for one in backward[max(scatters) :])
    assert not [
        one
        for one in head.passes["backward"]
        if isinstance(one, StartCollective) and one.collective.kind is CollectiveKind.ALL_GATHER
    ]
    assert "head" not in {
        name for one in head.passes["forward"] if isinstance(one, FreeTensors) for name in one.tensors
    }
    assert "head" in {name for one in head.passes["backward"] if isinstance(one, FreeTensors) for name in one.tensors}
