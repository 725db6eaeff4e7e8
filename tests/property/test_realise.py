"""Fusing moves no byte: what an engine issues carries what was derived, for every kind, axes, role and scope."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.derive.derivation import Unit, derive, derive_unit
from shardwise.derive.walk import Communicate
from shardwise.engine.numpy.step import derived_moves
from shardwise.layout.family import Family
from shardwise.lowering.realise import WEIGHT_ROLES, Realised, realise
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import whole_program
from shardwise.model.program import Role
from shardwise.sharding.collective import Kind, received
from shardwise.symbolic import ZERO, Polynomial, Values

from .training_step import AXES, Mesh

FAMILIES = [
    Family(zero, sp, recompute)
    for zero, sp, recompute in itertools.product((0, 1, 2, 3), (False, True), ("none", "selective", "full"))
]
Key = tuple[Kind, tuple[str, ...], Role, str, str]


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


def charged_to(phase: str, step: Communicate) -> str:
    """Weights of the recomputed slice are gathered once for it and the backward pass; a scalar is summed per step."""
    if not step.tensor.dims:
        return "update"
    return "backward" if phase == "recompute" and step.tensor.role in WEIGHT_ROLES else phase


def derived_payload(unit: Unit) -> dict[Key, Polynomial]:
    found: dict[Key, Polynomial] = {}
    for phase, steps in unit.phases().items():
        for step in steps:
            if isinstance(step, Communicate) and step.collective.kind is not Kind.SLICE:
                at = charged_to(phase, step)
                scope = "step" if at == "update" else "micro_batch"
                key = (step.collective.kind, step.collective.axes, step.tensor.role, scope, at)
                found[key] = found.get(key, ZERO) + step.collective.payload_elements
    return found


def realised_payload(realised: tuple[Realised, ...]) -> dict[Key, Polynomial]:
    found: dict[Key, Polynomial] = {}
    for one in realised:
        key = (one.kind, one.axes, one.role, one.scope, one.phase)
        found[key] = found.get(key, ZERO) + one.payload
    return found


def same(first: dict[Key, Polynomial], second: dict[Key, Polynomial]) -> bool:
    """Equal as polynomials, whatever the order of their terms."""
    return first.keys() == second.keys() and not any(first[key] + second[key] * -1.0 for key in first)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_fusing_conserves_payload(family: Family, mlp: str) -> None:
    for unit in derive(architecture(mlp), family).values():
        derived = derived_payload(unit)
        assert same(derived, realised_payload(realise(unit))), unit.name
        if unit.name == "block":
            assert derived


@given(
    st.sampled_from(FAMILIES),
    st.sampled_from(sorted(derive(architecture(), FAMILIES[0]))),
    st.tuples(*(st.integers(1, 4) for _ in AXES)),
)
def test_received_elements_are_conserved_at_any_degrees(family: Family, name: str, degrees: tuple[int, ...]) -> None:
    unit = derive(architecture(), family)[name]
    values = Values({**architecture().dims, "B": 64, "T": 64, "pp": 2, **dict(zip(AXES, degrees, strict=True))})
    moved = {
        scope: sum(
            received(one.kind, one.axes, one.payload).evaluate(values) for one in realise(unit) if one.scope == scope
        )
        for scope in ("micro_batch", "step")
    }
    derived = {"micro_batch": 0.0, "step": 0.0}
    for phase, steps in unit.phases().items():
        for step in steps:
            if isinstance(step, Communicate):
                scope = "step" if charged_to(phase, step) == "update" else "micro_batch"
                derived[scope] += step.collective.received_elements.evaluate(values)
    assert moved == pytest.approx(derived, rel=1e-12)


def test_a_lost_collective_is_noticed() -> None:
    unit = derive(architecture(), Family(3, True, "selective"))["block"]
    realised = realise(unit)
    assert len(realised) > 3
    for index in range(len(realised)):
        fewer = (*realised[:index], *realised[index + 1 :])
        assert not same(derived_payload(unit), realised_payload(fewer))


def test_weights_of_a_unit_travel_together() -> None:
    """ZeRO-3: one AllGather of all weights forward, one backward, one ReduceScatter of all gradients."""
    unit = derive(architecture(), Family(3, False, "none"))["block"]
    fused = [one for one in realise(unit) if one.axes == ("fsdp", "cp") and one.carries_weights]
    assert [(one.phase, one.kind) for one in fused] == [
        ("forward", Kind.ALL_GATHER),
        ("backward", Kind.ALL_GATHER),
        ("backward", Kind.REDUCE_SCATTER),
    ]
    assert set(fused[0].tensors) == set(unit.weights)
    assert set(fused[2].tensors) == set(unit.gradients.values())


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mlp", ["swiglu", "relu"])
def test_priced_units_add_up_to_the_whole_program(mlp: str, zero_stage: int) -> None:
    """Embedding, L blocks and head move what the whole program moves, which as one unit gathers the head's weights again.

    With sequence parallelism they differ: only between units is the hidden state brought to rest split over tp.
    """
    shape = architecture(mlp)
    family = Family(zero_stage, False, "none")
    mesh = Mesh((("dp", 2), ("fsdp", 3 if zero_stage else 1), ("cp", 2), ("tp_kv", 4), ("tp_rep", 2)))
    sizes = {**shape.dims, "B": 12, "T": 32}
    whole = derived_moves(derive_unit("whole", whole_program(shape), family, recompute="none"), mesh, sizes, 2)
    units = derive(shape, family)
    times = {"embedding": 1, "block": shape.num_layers, "head": 1}
    for scope, expected in whole.items():
        found: dict[object, int] = {}
        for name, count in times.items():
            for key, elements in derived_moves(units[name], mesh, sizes, 2)[scope].items():
                found[key] = found.get(key, 0) + elements * count
        kept = (
            derived_moves(replace(units["head"], backward_steps=()), mesh, sizes, 2)[scope] if zero_stage == 3 else {}
        )
        for key in ((Kind.ALL_GATHER, ("fsdp", "cp")),) if scope == "micro_batch" else ():
            found[key] = found.get(key, 0) + kept.get(key, 0)
        assert {k: v for k, v in found.items() if v} == {k: v for k, v in expected.items() if v}, scope
