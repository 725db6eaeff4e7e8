"""A unit is derived once for all schemes that agree in everything that it depends on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schemes import scheme_id, scheme_of

from shardwise.derive.sharded_unit import derived_unit
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import units_of_structure
from shardwise.model.layer_pattern import is_layer

EXPERTS = Architecture(
    name="small", num_layers=3, d_model=24, d_ff=32, num_heads=4, num_kv_heads=2, head_dim=8, vocab_size=96,
    num_experts=4, experts_per_token=2, num_dense_layers=1, dense_d_ff=32,
)  # fmt: skip
STRUCTURE = EXPERTS.structure
PLAIN = scheme_of(STRUCTURE, 1, sequence_parallel=True)
ABOUT_LAYERS = [replace(PLAIN, recompute="full"), replace(PLAIN, cp_variant="ring")]
UNITS = units_of_structure(STRUCTURE)


@pytest.mark.parametrize("unit", UNITS)
def test_shared_scales_do_not_affect_derivations(unit: str) -> None:
    assert derived_unit(replace(PLAIN, shares_amax=True), unit) is derived_unit(PLAIN, unit)


@pytest.mark.parametrize("scheme", ABOUT_LAYERS, ids=scheme_id)
@pytest.mark.parametrize("unit", UNITS)
def test_recomputation_and_attention_variants_affect_layers_only(unit: str, scheme: ShardingScheme) -> None:
    same = derived_unit(scheme, unit) is derived_unit(PLAIN, unit)
    assert same is (not is_layer(unit))


@pytest.mark.parametrize("unit", UNITS)
def test_whole_experts_affect_units_with_experts_only(unit: str) -> None:
    same = derived_unit(replace(PLAIN, whole_experts=True), unit) is derived_unit(PLAIN, unit)
    assert same is (unit != "block")
