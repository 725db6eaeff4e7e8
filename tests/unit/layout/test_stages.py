"""The distribution of blocks over pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.layout.layers_per_stage import (
    count_kinds,
    even_layers_on_placement,
    layer_ranges,
    layers_by_stage,
    layers_by_virtual_stage,
    min_layers_per_stage,
    natural_layers_by_stage,
    stage_placement,
)
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.pipeline.actions import StagePlacement, loop_placement, v_placement


def model(num_layers: int, **fields: int) -> Architecture:
    """A small model with a number of layers."""
    return Architecture(
        name="m", num_layers=num_layers, d_model=8, d_ff=8, num_heads=2, num_kv_heads=2, head_dim=4, vocab_size=8,
        **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def test_layers_of_llama_3_405b_on_16_stages_equal_s0() -> None:
    """S0: 126 blocks with the embedding and the head counted as one each: 7, 14 times 8, 7."""
    assert natural_layers_by_stage(model(126), loop_placement(16, 1)) == (7, *[8] * 14, 7)


@pytest.mark.parametrize(
    ("num_layers", "pp", "virtual", "expected"),
    [
        (32, 1, 1, (32,)),
        (32, 2, 1, (16, 16)),
        (80, 4, 1, (19, 21, 21, 19)),
        (8, 8, 1, (1,) * 8),
        (6, 4, 1, (1, 2, 2, 1)),
        (14, 2, 4, (7, 7)),
    ],
)
def test_stages_equal_published_splits(num_layers: int, pp: int, virtual: int, expected: tuple[int, ...]) -> None:
    assert natural_layers_by_stage(model(num_layers), loop_placement(pp, virtual)) == expected


@given(st.integers(1, 200), st.integers(1, 32), st.integers(1, 8))
def test_every_block_is_on_exactly_one_stage(num_layers: int, pp: int, virtual: int) -> None:
    assume(pp * virtual <= num_layers)
    layers = natural_layers_by_stage(model(num_layers), loop_placement(pp, virtual))
    assert len(layers) == pp
    assert sum(layers) == num_layers
    assert min(layers) >= 1


@given(st.integers(2, 200), st.integers(2, 32))
def test_stages_differ_by_at_most_one_layer_with_the_ends_counted(num_layers: int, pp: int) -> None:
    assume(num_layers + 2 >= 2 * pp)
    first, *inner, last = natural_layers_by_stage(model(num_layers), loop_placement(pp, 1))
    loads = [first + 1, *inner, last + 1]
    assert max(loads) - min(loads) <= 1


@given(st.integers(2, 200), st.integers(3, 32), st.integers(1, 8))
def test_no_interior_stage_holds_more_than_the_second(num_layers: int, pp: int, virtual: int) -> None:
    """The search prices the first, the second and the last stage only."""
    assume(pp * virtual <= num_layers)
    layers = natural_layers_by_stage(model(num_layers), loop_placement(pp, virtual))
    assert max(layers[1:-1]) == layers[1]


def dense_on(shape: Architecture, placement: StagePlacement) -> tuple[int, ...]:
    """The number of leading dense layers on each rank."""
    ranges = layer_ranges(even_layers_on_placement(shape, placement))
    return placement.sum_by_rank(tuple(count_kinds(shape, [layers]).get("dense_block", 0) for layers in ranges))


EXPERTS = {"num_experts": 2, "experts_per_token": 1, "dense_d_ff": 8}


def test_layers_of_deepseek_v3_on_16_stages() -> None:
    """61 layers; the last stage also has the head and the module of multi-token prediction, which count as three."""
    shape = model(61, num_dense_layers=3, num_predict_layers=1, **EXPERTS)
    assert natural_layers_by_stage(shape, loop_placement(16, 1)) == (3, 5, *[4] * 13, 1)
    assert dense_on(shape, loop_placement(16, 1)) == (3, *[0] * 15)


def test_dense_layers_are_the_first_of_the_model() -> None:
    """Four virtual stages of two layers: the first three layers are on virtual stages 0 and 1."""
    shape = model(6, num_dense_layers=3, **EXPERTS)
    assert natural_layers_by_stage(shape, loop_placement(2, 2)) == (3, 3)
    assert dense_on(shape, loop_placement(2, 2)) == (1, 2)


@given(st.integers(1, 100), st.integers(1, 32), st.integers(1, 8), st.integers(1, 8))
def test_the_stage_after_the_dense_layers_has_none(num_layers: int, pp: int, virtual: int, dense: int) -> None:
    """The search prices the stages up to that one, and the last; interior ones after it hold no more layers."""
    assume(pp * virtual <= num_layers and dense + 1 < pp and dense < num_layers)
    shape = model(num_layers, num_dense_layers=dense, **EXPERTS)
    layers, dense_layers = (
        natural_layers_by_stage(shape, loop_placement(pp, virtual)),
        dense_on(shape, loop_placement(pp, virtual)),
    )
    assert sum(dense_layers) == dense
    assert not any(dense_layers[dense:])
    assert max(layers[dense:-1]) == layers[dense]


V = Layout(pp=4, num_virtual_stages=2, schedule="zb_v")


def test_a_v_has_both_ends_of_the_model_on_its_first_rank() -> None:
    """Virtual stages s and 2p - 1 - s on rank s; the first rank has fewer layers, since the embedding and the head count."""
    assert stage_placement(V) == v_placement(4)
    assert layers_by_virtual_stage(model(14), V) == (1, 2, 2, 2, 2, 2, 2, 1)
    assert layers_by_stage(model(14), V) == (2, 4, 4, 4)
    shape = model(14, num_dense_layers=3, **EXPERTS)
    assert dense_on(shape, v_placement(4)) == (1, 2, 0, 0)


@pytest.mark.parametrize(
    ("layers", "by_virtual_stage"),
    [
        ((0, 5, 5, 4), (0, 3, 3, 2, 2, 2, 2, 0)),
        ((1, 4, 4, 5), (0, 2, 2, 3, 2, 2, 2, 1)),
        ((4, 3, 4, 3), (2, 2, 2, 2, 1, 2, 1, 2)),
    ],
)
def test_layers_per_stage_are_divided_over_both_virtual_stages(
    layers: tuple[int, ...], by_virtual_stage: tuple[int, ...]
) -> None:
    shape = Layout(pp=4, num_virtual_stages=2, schedule="zb_v", layers_per_stage=layers)
    assert layers_by_virtual_stage(model(14), shape) == by_virtual_stage
    assert v_placement(4).sum_by_rank(by_virtual_stage) == layers == layers_by_stage(model(14), shape)
    assert all(count >= minimum for count, minimum in zip(layers, min_layers_per_stage(v_placement(4)), strict=True))
