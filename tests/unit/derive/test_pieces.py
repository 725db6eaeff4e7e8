"""Products in pieces beside collectives of tensor parallelism: which these are, and in what order."""

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


def beside(rings: list[Ring]) -> list[tuple[str, ...]]:
    return [ring.first_results for ring in rings]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("model", MODELS)
def test_every_step_stays_once(model: str, recompute: str) -> None:
    structure = MODELS[model].structure
    for name in units_of_structure(structure):
        plain, pieces = (
            derived_unit(replace(scheme, structure=structure, recompute=recompute), name) for scheme in (PLAIN, ASYNC)
        )
        for phase, steps in plain.phases().items():
            assert Counter(map(str, steps)) == Counter(map(str, pieces.phases()[phase]))


def test_products_forward() -> None:
    unit = unit_of(ASYNC)
    found = rings_among(unit.forward.nodes)
    assert beside(found) == [("q_flat", "k_flat", "v"), ("attention_out",), ("up", "gate"), ("mlp_out",)]
    assert not rings_among(unit_of(PLAIN).forward.nodes)


def test_products_backward() -> None:
    """Sums stand before the gradients of weights that take the same, with which an engine lets go of the weights."""
    unit = unit_of(ASYNC)
    found = rings_among(unit.backward_nodes)
    assert beside(found) == [
        ("d.act#0", "d.w_down#0"), ("d.mlp_norm.out#0", "d.mlp_norm.out#1"), ("d.w_gate#0", "d.w_up#0"),
        ("d.attended#0", "d.wo#0"), ("d.attention_norm.out#0", "d.attention_norm.out#1", "d.attention_norm.out#2"),
        ("d.wv#0", "d.wk#0", "d.wq#0"),
    ]  # fmt: skip
    assert [ring.sum is not None for ring in found] == [False, True, False, False, True, False]


@pytest.mark.parametrize("model", MODELS)
def test_weights_are_used_for_the_last_time_before_their_gradients_are_made(model: str) -> None:
    for recompute in ("none", "full"):
        unit = unit_of(replace(ASYNC, recompute=recompute), model)
        products = [step for step in unit.backward_steps if isinstance(step, ComputeStep)]
        used = {name: place for place, step in enumerate(products) for name in step.operation.operands}
        made = {name: place for place, step in enumerate(products) for name in step.operation.outputs}
        within = [set(ring.first_results) for ring in rings_among(unit.backward_nodes)]
        for weight, gradient in unit.gradients.items():
            own = any(
                {gradient, products[used[weight]].operation.outputs[0]} <= ring for ring in within if weight in used
            )
            assert own or made[gradient] >= used.get(weight, 0), weight


def test_what_has_no_product_stays_as_it_is() -> None:
    embedding = derived_unit(ASYNC, "embedding")
    moved = [
        one for one in embedding.forward.steps if isinstance(one, CollectiveStep) and one.collective.axes == TP_AXES
    ]
    assert [one.collective.kind for one in moved] == [CollectiveKind.REDUCE_SCATTER]
    assert not rings_among(embedding.forward.nodes)


def test_a_ring_is_not_put_between_what_reads_and_what_makes() -> None:
    """A product whose result is read before another's operand is made stays out of its ring."""
    steps = list(unit_of(PLAIN).forward.steps)
    gather = next(p for p, one in enumerate(steps) if isinstance(one, CollectiveStep))
    product = next(
        p for p, one in enumerate(steps) if isinstance(one, ComputeStep) and one.operation.outputs == ("up",)
    )
    late = steps.pop(product)
    taken = steps[gather]
    assert isinstance(late, ComputeStep)
    assert isinstance(taken, CollectiveStep)
    operation = replace(late.operation, inputs=("attention_norm.out", "attended"))
    scan = next(one for one in steps if isinstance(one, ComputeStep) and "attended" in one.operation.outputs)
    late = ComputeStep(operation, replace(late.placed, inputs=(taken.collective.after, scan.placed.outputs[0])))
    steps.insert(steps.index(scan) + 1, late)
    found = [ring for ring in rings_among(group_rings(steps, ASYNC)) if taken in ring.collectives]
    assert beside(found) == [("q_flat", "k_flat", "v")]


def test_the_list_has_blocks_in_place_of_collectives() -> None:
    """Of an AllGather, or a ReduceScatter, each block but the rank's own."""
    for tp in (2, 4):
        of = {
            pieces: RankProgram(
                architecture=SMALL, layout=Layout(tp=tp, sequence_parallel=True, async_tp=pieces),
                precision=get_precision("fp32"), seq_len=16,
            )
            for pieces in (False, True)
        }  # fmt: skip
        listed = {pieces: list(ordered_activation_collectives(one, 1)) for pieces, one in of.items()}
        whole = [one for one in listed[False] if one.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)]
        blocks = [one for one in listed[True] if one.kind is CollectiveKind.PERMUTE]
        left = [one for one in listed[True] if one.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER)]
        assert [one.kind for one in left] == [
            CollectiveKind.REDUCE_SCATTER,
            CollectiveKind.ALL_GATHER,
        ]  # of the embedding, there and back
        assert len(blocks) == (tp - 1) * (len(whole) - len(left))
        assert {one.num_bytes for one in blocks} == {16 // tp * 24 * 4}
