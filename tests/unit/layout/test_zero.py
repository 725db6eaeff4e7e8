"""Traffic of ZeRO by the derivation: elements that move in a step of `a` micro-batches, in units of the parameters P."""

from __future__ import annotations

import pytest
from schemes import scheme_of

from shardwise.derive.sharded_program import CollectiveStep
from shardwise.derive.sharded_unit import ShardedUnit, derived_unit
from shardwise.model.architecture import Architecture
from shardwise.model.load import load_model
from shardwise.model.parameters_and_flops import weight_elements
from shardwise.run.numpy.step import derived_traffic
from shardwise.sharding import Mesh
from shardwise.sharding.collectives import CollectiveKind
from shardwise.step.flat_arrays import WEIGHT_ROLES
from shardwise.values.symbolic import SymbolValues

MODEL = load_model("llama-3-8b")
HUGE = 2**40  # (n-1)/n is 1 to twelve digits
SIZES = {**MODEL.dims, "D": 4 * HUGE, "B": HUGE, "T": 128}


def per_step(unit: ShardedUnit, mesh: dict[str, int], num_micro_batches: int) -> float:
    """Elements of weights and gradients that one device receives in a step, in units of the parameters."""
    values = SymbolValues({**SIZES, **dict.fromkeys(("dp", "fsdp", "cp", "tp_kv", "tp_rep"), 1), **mesh})
    received = 0.0
    for phase, steps in unit.phases().items():
        for step in steps:
            if isinstance(step, CollectiveStep) and step.tensor.role in WEIGHT_ROLES:
                times = 1 if phase == "update" else num_micro_batches
                received += times * step.collective.received_elements.evaluate(values)
    return received / weight_elements(unit.forward.program).evaluate(values)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 8])
@pytest.mark.parametrize("unit", ["block", "head"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_traffic_of_zero_stages_equals_the_closed_form(zero_stage: int, unit: str, num_micro_batches: int) -> None:
    """0 and 1: 2 per step; 2: a + 1; 3: 3a (S1's table, which has a = 1), and 2a of the head, which runs backward at once."""
    a = num_micro_batches
    expected = (2, 2, a + 1, (2 if unit == "head" else 3) * a)[zero_stage]
    mesh = {"fsdp": HUGE} if zero_stage else {"dp": HUGE}
    derived = derived_unit(scheme_of(MODEL.structure, zero_stage), unit)
    assert per_step(derived, mesh, a) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gathers_no_weight_again(recompute: str) -> None:
    """The recomputed slice and the backward pass need the same weights, gathered once for both."""
    derived = derived_unit(scheme_of(MODEL.structure, 3, False, recompute), "block")
    assert per_step(derived, {"fsdp": HUGE}, 4) == pytest.approx(12, rel=1e-9)


def test_zero_shards_over_context_parallelism_too() -> None:
    derived = derived_unit(scheme_of(MODEL.structure, 3), "block")
    assert per_step(derived, {"fsdp": HUGE // 2, "cp": 2}, 1) == pytest.approx(3, rel=1e-9)


def test_hybrid_sharding_reduces_the_shard_only() -> None:
    """Over dp each device reduces its 1/fsdp of the gradients, once per step."""
    derived = derived_unit(scheme_of(MODEL.structure, 3), "block")
    assert per_step(derived, {"fsdp": 4, "dp": HUGE}, 3) == pytest.approx(3 * 3 * 3 / 4 + 2 / 4, rel=1e-9)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_traffic_has_the_factor_n_minus_1_over_n(zero_stage: int) -> None:
    derived = derived_unit(scheme_of(MODEL.structure, zero_stage), "block")
    mesh = {"fsdp": 4} if zero_stage else {"dp": 4}
    assert per_step(derived, mesh, 1) == pytest.approx((2, 2, 2, 3)[zero_stage] * 3 / 4, rel=1e-9)


def test_traffic_of_tensor_parallelism_equals_s1() -> None:
    """S1: without sequence parallelism, two AllReduces of [B, T, D] forward and two backward in each block; with it
    AllGathers and ReduceScatters that move the same."""
    model = Architecture(
        name="m", num_layers=1, d_model=64, d_ff=64, num_heads=8, num_kv_heads=8, head_dim=8, vocab_size=64
    )
    mesh = Mesh((("dp", 1), ("fsdp", 1), ("cp", 1), ("tp_kv", 8), ("tp_rep", 1)))
    sizes = {**model.dims, "B": 2, "T": 32}
    hidden = 2 * 32 * 64
    tp = ("tp_kv", "tp_rep")
    plain = derived_traffic(derived_unit(scheme_of(model.structure), "block"), mesh, sizes, 1)["micro_batch"]
    split = derived_traffic(derived_unit(scheme_of(model.structure, 0, True), "block"), mesh, sizes, 1)["micro_batch"]
    # all eight devices receive 2 (n-1)/n of the hidden state in each of 4 AllReduces
    assert plain[CollectiveKind.ALL_REDUCE, tp] == 4 * 2 * 7 * hidden
    assert (CollectiveKind.ALL_GATHER, tp) not in plain
    assert split[CollectiveKind.REDUCE_SCATTER, tp] == 4 * 7 * hidden
    assert split[CollectiveKind.ALL_GATHER, tp] >= 4 * 7 * hidden
