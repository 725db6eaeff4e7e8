"""Layouts of arrays in HLO, by XLA's own reader and by the array itself, padded and cut into tiles by NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from shardwise.values import InputError
from shardwise.verify.hlo_layout import HloShape, read_hlo_shape

TEXTS = (
    "f32[3,5]{1,0:T(2,2)}", "f32[3,5]", "bf16[10,130]{1,0:T(8,128)(2,1)}", "bf16[16,3,130]{2,0,1:T(8,128)(2,1)S(1)}",
    "s4[17,9]{0,1:T(4,2)E(4)}", "f32[700]{0:T(256)}", "s8[40,129]{1,0:T(32,128)(4,1)S(5)}", "u8[5,7,11]{0,1,2}", "f32[]",
    "bf16[0,4]{1,0:T(8,128)(2,1)}",
)  # fmt: skip


def tiled_places(shape: HloShape) -> np.ndarray[Any, Any]:
    """Return which element lies at each place of memory, -1 where there is padding: slow, by copying the tiles."""
    array = np.arange(np.prod(shape.dims, dtype=int)).reshape(shape.dims).transpose(shape.minor_to_major[::-1])
    for tile in shape.tiles:
        split = array.ndim - len(tile)
        array = np.pad(
            array, [(0, 0)] * split + [(0, -n % t) for n, t in zip(array.shape[split:], tile, strict=True)],
            constant_values=-1,
        )  # fmt: skip
        cut = [(n // t, t) for n, t in zip(array.shape[split:], tile, strict=True)]
        array = array.reshape(*array.shape[:split], *itertools.chain(*cut))
        order = [*range(split), *range(split, array.ndim, 2), *range(split + 1, array.ndim, 2)]
        array = array.transpose(order)
    return array


@pytest.mark.parametrize("text", TEXTS)
def test_shapes_as_xla_reads_them(text: str) -> None:
    xla_client = pytest.importorskip("jax._src.lib").xla_client
    theirs, ours = xla_client.Shape(text), read_hlo_shape(text)
    assert ours.dims == theirs.dimensions()
    assert ours.minor_to_major == tuple(theirs.layout().minor_to_major())
    assert ours.tiles == tuple(map(tuple, theirs.layout().tiling()))
    assert ours.element_bits == (theirs.layout().element_size_in_bits() or 8 * theirs.numpy_dtype().itemsize)


@pytest.mark.parametrize("text", TEXTS)
def test_places_of_elements(text: str) -> None:
    """Every element lies where the padded and tiled array has it, and the memory is as large as that array."""
    shape = read_hlo_shape(text)
    places = tiled_places(shape)
    assert shape.physical_dims == places.shape
    assert shape.padded_bytes == -(-places.size * shape.element_bits // 8)
    elements = places.reshape(-1)
    for number, index in enumerate(np.ndindex(shape.dims)):
        assert elements[shape.offset(*index)] == number


def test_padding_and_memory_spaces() -> None:
    """By hand: 1,000 rows are 125 tiles of 8, 3,000 columns 23.4 of 128; XLA's own example of 3 by 5 becomes 4 by 6."""
    assert read_hlo_shape("f32[3,5]{1,0:T(2,2)}").padded_dims == (4, 6)
    shape = read_hlo_shape("bf16[1000,3000]{1,0:T(8,128)(2,1)S(1)}")
    assert (shape.padded_dims, shape.num_bytes, shape.padded_bytes) == ((1000, 3072), 6_000_000, 1000 * 3072 * 2)
    assert shape.memory.startswith("on-chip")
    assert read_hlo_shape("bf16[8,128]{1,0:T(8,128)(2,1)S(5)}").memory == "host memory"
    assert read_hlo_shape("bf16[8,128]{1,0:S(3)}").memory == "memory space 3 of its backend"
    assert read_hlo_shape("s4[4,2]{1,0:E(4)}").num_bytes == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bf16", "an array such as"), ("bf16[2,3]{0}", "each of its 2 dims once"), ("bf16[2,3]{1,1}", "each of its 2 dims"),
        ("bfl16[2]", "did you mean 'bf16'"), ("f32[2]{0:T(0)}", "at least 1"), ("f32[2]{0:T(2)Q(1)}", "the field Q"),
        ("f32[2]{0:T(a)}", "whole numbers"), ("f32[2]{0:T(2)x}", "ends with 'x'"), ("(f32[2], f32[3])", "an array such as"),
    ],
)  # fmt: skip
def test_other_texts_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_hlo_shape(text)


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(InputError, match=r"within \(3, 5\)"):
        read_hlo_shape("f32[3,5]").offset(3, 0)
