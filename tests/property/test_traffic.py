"""Fusing moves no byte: what an engine issues carries what was derived, for every kind, axes, role and scope."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemes import scheme_id, scheme_of

from shardwise.derive.sharded_program import CollectiveStep
from shardwise.derive.sharded_unit import ShardedUnit, derive_unit, derive_units, derived_unit
from shardwise.derive.tensor_specs import weight_use_spec
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import model_program
from shardwise.model.program import Role
from shardwise.run.numpy.step import derived_traffic
from shardwise.sharding.collectives import CollectiveKind, received_elements
from shardwise.step.collectives import list_unit_collectives
from shardwise.step.flat_arrays import WEIGHT_ROLES
from shardwise.step.instructions import UnitCollective
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.symbolic import SymbolValues

from .training_step import AXES, Mesh

POLICY = IssuePolicy()
Key = tuple[CollectiveKind, tuple[str, ...], Role, str, str]


def architecture(mlp: str = "swiglu", **changes: int) -> Architecture:
    sizes = {
        "num_layers": 3,
        "d_model": 48,
        "d_ff": 32,
        "num_heads": 8,
        "num_kv_heads": 4,
        "head_dim": 4,
        "vocab_size": 64,
    }
    return Architecture(name="small", mlp=mlp, **(sizes | changes))  # type: ignore[arg-type]


SMALL = architecture().structure
SCHEMES = [
    scheme_of(SMALL, zero, sp, recompute)
    for zero, sp, recompute in itertools.product((0, 1, 2, 3), (False, True), ("none", "selective", "full"))
]


def charged_to(phase: str, step: CollectiveStep) -> str:
    """Weights of the recomputed slice are gathered once for it and the backward pass; a scalar is summed per step."""
    if not step.tensor.dims:
        return "update"
    return "backward" if phase == "recompute" and step.tensor.role in WEIGHT_ROLES else phase


# Every dim is a multiple of 8 times the degrees that may split it: nothing is padded.
EVEN = SymbolValues(
    {**architecture(d_model=768, d_ff=512, vocab_size=1024, head_dim=16).dims, "B": 64, "T": 64, "pp": 2}
)
EVEN |= {"dp": 2, "fsdp": 3, "cp": 2, "tp_kv": 4, "tp_rep": 2}


def derived_payload(unit: ShardedUnit) -> dict[Key, float]:
    payload: dict[Key, float] = {}
    for phase, steps in unit.phases().items():
        for step in steps:
            if isinstance(step, CollectiveStep) and step.collective.kind is not CollectiveKind.SLICE:
                at = charged_to(phase, step)
                scope = "step" if at == "update" else "micro_batch"
                key = (step.collective.kind, step.collective.axes, step.tensor.role, scope, at)
                payload[key] = payload.get(key, 0.0) + step.collective.payload_elements.evaluate(EVEN)
    return payload


def issued_payload(issued: tuple[UnitCollective, ...], most_elements: float = 1e4) -> dict[Key, float]:
    payload: dict[Key, float] = {}
    for collective in issued:
        key = (collective.kind, collective.axes, collective.role, collective.scope, collective.phase)
        payload[key] = payload.get(key, 0.0) + collective.extent(EVEN, most_elements).elements
    return payload


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
def test_fusing_conserves_payload(scheme: ShardingScheme, mlp: str) -> None:
    for unit in derive_units(replace(scheme, structure=architecture(mlp).structure)).values():
        derived = derived_payload(unit)
        assert derived == issued_payload(list_unit_collectives(unit, POLICY)), unit.name
        if unit.name == "block":
            assert derived


@given(
    st.sampled_from(SCHEMES),
    st.sampled_from(sorted(derive_units(SCHEMES[0]))),
    st.tuples(*(st.sampled_from((1, 2, 4)) for _ in AXES)),
)
def test_received_elements_are_conserved_at_any_degrees_that_divide(
    scheme: ShardingScheme, name: str, degrees: tuple[int, ...]
) -> None:
    unit = derived_unit(scheme, name)
    values = SymbolValues({**architecture().dims, "B": 64, "T": 64, "pp": 2, **dict(zip(AXES, degrees, strict=True))})
    moved = {
        scope: sum(
            received_elements(collective.kind, collective.axes, collective.elements).evaluate(values)
            for collective in list_unit_collectives(unit, POLICY)
            if collective.scope == scope
        )
        for scope in ("micro_batch", "step")
    }
    derived = {"micro_batch": 0.0, "step": 0.0}
    for phase, steps in unit.phases().items():
        for step in steps:
            if isinstance(step, CollectiveStep):
                scope = "step" if charged_to(phase, step) == "update" else "micro_batch"
                derived[scope] += step.collective.received_elements.evaluate(values)
    assert moved == pytest.approx(derived, rel=1e-12)


def test_a_lost_collective_is_noticed() -> None:
    unit = derived_unit(scheme_of(SMALL, 3, True, "selective"), "block")
    issued = list_unit_collectives(unit, POLICY)
    assert len(issued) > 3
    for index in range(len(issued)):
        fewer = (*issued[:index], *issued[index + 1 :])
        assert derived_payload(unit) != issued_payload(fewer)


@pytest.mark.parametrize(("tp_rep", "apart"), [(1, 0), (2, 1)])
def test_weights_of_a_unit_travel_together(tp_rep: int, apart: int) -> None:
    """ZeRO-3: one AllGather of all weights forward, one backward, one ReduceScatter of all gradients. Keys and values, whose
    gradients are summed over tp_rep too, travel apart where that is more than one device."""
    unit = derived_unit(scheme_of(SMALL, 3), "block")
    values = SymbolValues({**EVEN, "tp_rep": tp_rep})
    fused = [
        collective
        for collective in list_unit_collectives(unit, POLICY)
        if collective.axes == ("fsdp", "cp") and collective.moves_weights
    ]
    order = [
        ("forward", CollectiveKind.ALL_GATHER),
        ("backward", CollectiveKind.ALL_GATHER),
        ("backward", CollectiveKind.REDUCE_SCATTER),
    ]
    assert [(collective.phase, collective.kind) for collective in fused] == 2 * order
    assert [collective.extent(values, 1.0).count for collective in fused] == [1, 1, 1, apart, apart, apart]
    assert {*fused[0].tensors, *fused[3].tensors} == set(unit.weights)
    whole = sum(weight_use_spec(unit.scheme, dims).local_elements().evaluate(values) for dims in unit.weights.values())
    assert (
        sum(collective.extent(values, 1.0).elements for collective in fused if collective.phase == "forward") == whole
    )


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mlp", ["swiglu", "relu"])
def test_priced_units_add_up_to_the_whole_program(mlp: str, zero_stage: int) -> None:
    """Embedding, L blocks and head move what the whole program moves, which as one unit gathers the head's weights again.

    With sequence parallelism they differ: only between units is the hidden state brought to rest split over tp.
    """
    shape = architecture(mlp)
    scheme = scheme_of(shape.structure, zero_stage)
    mesh = Mesh((("dp", 2), ("fsdp", 3 if zero_stage else 1), ("cp", 2), ("tp_kv", 4), ("tp_rep", 2)))
    sizes = {**shape.dims, "B": 12, "T": 32}
    whole = derived_traffic(derive_unit("whole", model_program(shape), scheme), mesh, sizes, 2)
    units = derive_units(scheme)
    times = {"embedding": 1, "block": shape.num_layers, "head": 1}
    for scope, expected in whole.items():
        summed: dict[object, int] = {}
        for name, count in times.items():
            for key, elements in derived_traffic(units[name], mesh, sizes, 2)[scope].items():
                summed[key] = summed.get(key, 0) + elements * count
        kept = (
            derived_traffic(replace(units["head"], backward_nodes=()), mesh, sizes, 2)[scope] if zero_stage == 3 else {}
        )
        for key in ((CollectiveKind.ALL_GATHER, ("fsdp", "cp")),) if scope == "micro_batch" else ():
            summed[key] = summed.get(key, 0) + kept.get(key, 0)
        assert {k: v for k, v in summed.items() if v} == {k: v for k, v in expected.items() if v}, scope
