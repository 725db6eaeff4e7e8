"""Products in pieces beside collectives of tensor parallelism: which products, and in what order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import pytest
from schemes import scheme_of

from shardwise.derive.ring_attention_and_matmul import group_rings
from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ProgramNode, Ring
from shardwise.derive.sharded_unit import ShardedUnit, derived_unit
from shardwise.layout.layout import Layout
from shardwise.layout.sharding_scheme import TP_AXES, ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import units_of_structure
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.issued_collectives import ordered_activation_collectives
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import get_precision

SMALL = Architecture(
    name="small", num_layers=2, d_model=24, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=96
)
MODELS = {
    "dense": SMALL,
    "adapters": replace(SMALL, lora_rank=4, lora_targets=("qkv", "mlp")),
    "latent": replace(SMALL, kv_lora_rank=8, rope_head_dim=2, v_head_dim=4, q_lora_rank=6, num_kv_heads=4),
    "experts": replace(SMALL, num_experts=4, experts_per_token=2, shared_expert_width=8),
    "parallel": replace(SMALL, norm="layer", norm_bias=True, bias=("qkv", "mlp"), mlp="gelu", parallel=True),
}
PLAIN = scheme_of(SMALL.structure, 1, sequence_parallel=True)
ASYNC = replace(PLAIN, async_tp=True)


def unit_of(scheme: ShardingScheme, model: str = "dense") -> ShardedUnit:
    return derived_unit(replace(scheme, structure=MODELS[model].structure), "block")


def rings_among(nodes: Iterable[ProgramNode]) -> list[Ring]:
    return [node for node in nodes if isinstance(node, Ring)]


def products_of(rings: list[Ring]) -> list[tuple[str, ...]]:
    return [ring.first_results for ring in rings]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_rings_keep_every_step_exactly_once(model: str, recompute: str) -> None:
    structure = MODELS[model].structure
    for name in units_of_structure(structure):
        plain, pieces = (
            derived_unit(replace(scheme, structure=structure, recompute=recompute), name) for scheme in (PLAIN, ASYNC)
        )
        for phase, steps in plain.phases().items():
            assert Counter(map(str, steps)) == Counter(map(str, pieces.phases()[phase]))


def test_rings_of_the_forward_pass_are_those_with_products() -> None:
    unit = unit_of(ASYNC)
    rings = rings_among(unit.forward.nodes)
    assert products_of(rings) == [("q_flat", "k_flat", "v"), ("attention_out",), ("up", "gate"), ("mlp_out",)]
    assert not rings_among(unit_of(PLAIN).forward.nodes)


def test_rings_of_the_backward_pass_are_those_with_products() -> None:
    """Sums stand before the gradients of weights with the same operand, after which the engine frees the weights."""
    unit = unit_of(ASYNC)
    rings = rings_among(unit.backward_nodes)
    assert products_of(rings) == [
        ("d.act#0", "d.w_down#0"), ("d.mlp_norm.out#0", "d.mlp_norm.out#1"), ("d.w_gate#0", "d.w_up#0"),
        ("d.attended#0", "d.wo#0"), ("d.attention_norm.out#0", "d.attention_norm.out#1", "d.attention_norm.out#2"),
        ("d.wv#0", "d.wk#0", "d.wq#0"),
    ]  # fmt: skip
    assert [ring.sum is not None for ring in rings] == [False, True, False, False, True, False]


@pytest.mark.parametrize("model", MODELS)
def test_last_uses_of_weights_come_before_their_gradients(model: str) -> None:
    for recompute in ("none", "full"):
        unit = unit_of(replace(ASYNC, recompute=recompute), model)
        products = [step for step in unit.backward_steps if isinstance(step, ComputeStep)]
        last_used_at = {name: place for place, step in enumerate(products) for name in step.operation.operands}
        produced_at = {name: place for place, step in enumerate(products) for name in step.operation.outputs}
        within = [set(ring.first_results) for ring in rings_among(unit.backward_nodes)]
        for weight, gradient in unit.gradients.items():
            is_in_ring = any(
                {gradient, products[last_used_at[weight]].operation.outputs[0]} <= ring
                for ring in within
                if weight in last_used_at
            )
            assert is_in_ring or produced_at[gradient] >= last_used_at.get(weight, 0), weight


def test_collectives_without_a_product_are_not_split() -> None:
    embedding = derived_unit(ASYNC, "embedding")
    collectives = [
        step for step in embedding.forward.steps if isinstance(step, CollectiveStep) and step.collective.axes == TP_AXES
    ]
    assert [step.collective.kind for step in collectives] == [CollectiveKind.REDUCE_SCATTER]
    assert not rings_among(embedding.forward.nodes)


def test_a_product_that_depends_on_another_result_stays_out_of_the_ring() -> None:
    """A product whose result is read before another's operand is made stays out of its ring."""
    steps = list(unit_of(PLAIN).forward.steps)
    gather = next(p for p, step in enumerate(steps) if isinstance(step, CollectiveStep))
    product = next(
        p for p, step in enumerate(steps) if isinstance(step, ComputeStep) and step.operation.outputs == ("up",)
    )
    late = steps.pop(product)
    gather_step = steps[gather]
    assert isinstance(late, ComputeStep)
    assert isinstance(gather_step, CollectiveStep)
    operation = replace(late.operation, inputs=("attention_norm.out", "attended"))
    scan = next(step for step in steps if isinstance(step, ComputeStep) and "attended" in step.operation.outputs)
    late = ComputeStep(operation, replace(late.placed, inputs=(gather_step.collective.after, scan.placed.outputs[0])))
    steps.insert(steps.index(scan) + 1, late)
    rings = [ring for ring in rings_among(group_rings(steps, ASYNC)) if gather_step in ring.collectives]
    assert products_of(rings) == [("q_flat", "k_flat", "v")]


def test_the_instruction_list_has_permutes_instead_of_collectives() -> None:
    """An AllGather or a ReduceScatter becomes a permute for each block but the rank's own."""
    for tp in (2, 4):
        programs = {
            pieces: RankProgram(
                architecture=SMALL, layout=Layout(tp=tp, sequence_parallel=True, async_tp=pieces),
                precision=get_precision("fp32"), seq_len=16,
            )
            for pieces in (False, True)
        }  # fmt: skip
        listed = {pieces: list(ordered_activation_collectives(program, 1)) for pieces, program in programs.items()}
        collectives = [
            instruction
            for instruction in listed[False]
            if instruction.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        ]
        permutes = [instruction for instruction in listed[True] if instruction.kind is CollectiveKind.PERMUTE]
        remaining = [
            instruction
            for instruction in listed[True]
            if instruction.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)
        ]
        assert [instruction.kind for instruction in remaining] == [
            CollectiveKind.REDUCE_SCATTER,
            CollectiveKind.ALL_GATHER,
        ]  # of the embedding, there and back
        assert len(permutes) == (tp - 1) * (len(collectives) - len(remaining))
        assert {instruction.num_bytes for instruction in permutes} == {16 // tp * 24 * 4}
