"""Collectives of tensor parallelism that run in pieces beside products: those of a Llama block, and what each replaces."""

from __future__ import annotations

from schemes import scheme_of

from shardwise.derive.sharded_program import Ring
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.load import load_model
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.instructions import RunRing
from shardwise.step.unit_instructions import lower_unit
from shardwise.values.engine_policies import IssuePolicy

STRUCTURE = load_model("llama-3-8b").structure
GATHER, SCATTER = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER


def rings(phase: str, scheme: ShardingScheme) -> list[Ring]:
    """Rings of products, without those of attention."""
    template = lower_unit(scheme, "block", IssuePolicy())
    runs = (instruction.ring for instruction in template.passes[phase] if isinstance(instruction, RunRing))
    return [ring for ring in runs if not ring.is_attention]


def describe_ring(ring: Ring) -> tuple[CollectiveKind, tuple[str, ...], int]:
    (step,) = ring.collectives
    return step.collective.kind, (step.tensor.name,), len(ring.computes)


def test_a_block_has_two_gathers_and_two_scatters_forward_and_gathers_its_inputs_again() -> None:
    """Queries, keys and values read the same gathered input; so do gate and up."""
    scheme = scheme_of(STRUCTURE, 1, True, "none", async_tp=True)
    forward = [describe_ring(ring) for ring in rings("forward", scheme)]
    assert forward == [
        (GATHER, ("attention_norm.out",), 3), (SCATTER, ("attention_out",), 1),
        (GATHER, ("mlp_norm.out",), 2), (SCATTER, ("mlp_out",), 1),
    ]  # fmt: skip
    backward = [describe_ring(ring) for ring in rings("backward", scheme)]
    assert backward == [
        (GATHER, ("d.x_out",), 2), (SCATTER, ("d.mlp_norm.out",), 2), (GATHER, ("mlp_norm.out",), 2),
        (GATHER, ("d.x_mid",), 2), (SCATTER, ("d.attention_norm.out",), 3), (GATHER, ("attention_norm.out",), 3),
    ]  # fmt: skip


def test_only_collectives_of_tensor_parallelism_run_in_pieces_of_products() -> None:
    """Not without `async_tp`, and not rings of context parallelism, whose pieces belong to attention."""
    for scheme in (scheme_of(STRUCTURE, 1, True), scheme_of(STRUCTURE, 1, True, "none", cp_variant="ring")):
        assert rings("forward", scheme) == rings("backward", scheme) == []
