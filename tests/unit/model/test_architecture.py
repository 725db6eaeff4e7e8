"""Architectures report all of their impossible values together."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.model.architecture import Architecture
from shardwise.values.errors import InputError

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "d_model": 64,
    "d_ff": 128,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
}


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(InputError) as caught:
        Architecture(name="m", mlp="silu", **(SIZES | {"d_model": 0, "head_dim": 8.0, "num_layers": True}))
    assert set(caught.value.problems) == {
        "model m: d_model is 0; a whole number of at least 1 is required",
        "model m: head_dim is 8.0; a whole number of at least 1 is required",
        "model m: num_layers is True; a whole number of at least 1 is required",
        "model m: mlp is 'silu' (did you mean 'swiglu'?); one of swiglu, geglu, gelu, relu, relu2, gated_relu2, "
        "clamped_swiglu, limited_swiglu, xielu is required",
    }


def test_query_heads_are_a_multiple_of_key_value_heads() -> None:
    with pytest.raises(InputError, match="num_heads = 8 is not a multiple of num_kv_heads = 3"):
        Architecture(name="m", **(SIZES | {"num_kv_heads": 3}))


def test_dims_have_letters() -> None:
    model = Architecture(name="m", **SIZES)
    assert model.dims == {
        "D": 64, "F": 128, "K": 2, "G": 4, "H": 8, "V": 100, "P": 1, "E": 1, "k": 1, "M": 128, "S": 1,
        "Q": 1, "C": 1, "I": 8, "R": 1, "U": 8, "J": 128, "r": 1, "y": 1,
    }  # fmt: skip
    assert model.structure.has_gated_mlp
    assert not Architecture(name="m", mlp="gelu", **SIZES).structure.has_gated_mlp
