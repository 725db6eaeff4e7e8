"""Quantisers on tensors against the reference in NumPy, bit for bit, and both against what the papers say."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardwise.run.kernels import quantization
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.errors import InputError
from shardwise.values.quantization import quantize_blocks
from shardwise.values.scalings import SCALINGS, get_scaling

SHAPES = ((128, 256), (5, 40), (130, 300), (1, 1), (33, 17))
FORMATS_OF = {"nvfp4": ("e2m1",)}
CASES = [(s, b, f) for s in SCALINGS for b in ("block", "weight_block") for f in FORMATS_OF.get(s, ("e4m3", "e5m2"))]


def matrix(shape: tuple[int, int], seed: int = 0) -> NDArray[np.float32]:
    """Values over many powers of two, outliers, zeros, a row and a column of zeros."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * np.exp2(random.uniform(-20, 8, shape))
    values[random.random(shape) < 0.1] = 0
    if shape[0] > 2:
        values[1], values[:, -1] = 0, 0
    return values.astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "which", "to"), CASES)
def test_tensors_are_quantised_as_in_numpy(name: str, which: str, to: str, shape: tuple[int, int]) -> None:
    scaling, x = SCALINGS[name], matrix(shape)
    block = getattr(scaling, which)
    expected = quantize_blocks(x, NUMBER_FORMATS[to], block, scaling.kind)
    quantized = quantization.quantize_matrix(torch.from_numpy(x), NUMBER_FORMATS[to], block, scaling.kind)
    for part, expected_part in zip(quantized, expected, strict=True):
        assert part.numpy().tobytes() == np.asarray(expected_part, np.float32).tobytes()


def test_a_scale_of_earlier_steps_saturates_what_is_larger() -> None:
    x = matrix((64, 64))
    factor = np.float32(448) / (np.abs(x).max() / 3)
    expected = quantize_blocks(x, NUMBER_FORMATS["e4m3"], (None, None), "fp32", float(factor))
    quantized = quantization.quantize_matrix(
        torch.from_numpy(x), NUMBER_FORMATS["e4m3"], (None, None), "fp32", torch.tensor(factor)
    )
    for part, expected_part in zip(quantized, expected, strict=True):
        assert part.numpy().tobytes() == np.asarray(expected_part, np.float32).tobytes()
    assert np.abs(expected.elements).max() == 448


@pytest.mark.parametrize(("name", "which", "to"), CASES)
def test_quantised_values_are_near_their_originals(name: str, which: str, to: str) -> None:
    """Of the largest in a block half a step of the format at most, and that of an E4M3 scale."""
    scaling, x, number_format = SCALINGS[name], matrix((130, 300)), NUMBER_FORMATS[to]
    block = getattr(scaling, which)
    dequantized = quantize_blocks(x, number_format, block, scaling.kind).dequantize(block)
    from shardwise.values.quantization import block_amax, expand_scales

    largest = expand_scales(block_amax(x, block), x.shape, block)
    # MX scales may leave the largest just above the format's, which saturates: by less than 2 / max's leading digits
    slack = {"e8m0": 2.0 ** (np.floor(np.log2(number_format.max)) + 1) / number_format.max - 1, "e4m3": 2.0**-4}.get(
        scaling.kind, 0.0
    )
    assert np.all(np.abs(dequantized - x) <= largest * (number_format.epsilon / 2 + slack) * (1 + slack) + 1e-30)


def test_mx_scales_are_those_of_the_specification() -> None:
    """OCP MX 1.0, section 6.3: X = 2^(floor(log2(max |V|)) - emax), with emax 8 for E4M3, 15 for E5M2, 2 for E2M1."""
    x = matrix((7, 64))
    for to, emax in (("e4m3", 8), ("e5m2", 15), ("e2m1", 2)):
        quantized = quantize_blocks(x, NUMBER_FORMATS[to], (1, 32), "e8m0")
        for row in range(7):
            for at in range(2):
                largest = np.abs(x[row, 32 * at : 32 * at + 32]).max()
                if largest > 0:
                    assert quantized.scales[row, at] == 2.0 ** (np.floor(np.log2(np.float64(largest))) - emax)


def test_elements_are_those_of_ml_dtypes_casts() -> None:
    x = matrix((32, 64))
    with np.errstate(over="ignore"):
        quantized = quantize_blocks(x, NUMBER_FORMATS["e2m1"], (1, 32), "e8m0")
        scaled = x / np.repeat(quantized.scales, 32, axis=1)
        expected = scaled.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(quantized.elements, expected)


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_products_equal_those_of_dequantised_operands(name: str) -> None:
    scaling = SCALINGS[name]
    to = NUMBER_FORMATS[FORMATS_OF.get(name, ("e4m3",))[0]]
    x, w = matrix((37, 300), 1), matrix((130, 300), 2)
    blocks = (scaling.block, scaling.weight_block)
    exact = quantize_blocks(x, to, blocks[0], scaling.kind).dequantize(blocks[0])
    exact = exact @ quantize_blocks(w, to, blocks[1], scaling.kind).dequantize(blocks[1]).T
    quantized_x, quantized_w = (
        quantization.quantize_matrix(torch.from_numpy(operand), to, block, scaling.kind)
        for operand, block in zip((x, w), blocks, strict=True)
    )
    product = quantization.scaled_product(
        quantized_x, blocks[0], quantized_w, blocks[1], is_local=scaling.scales_inside_matmul
    )
    scale = np.abs(x) @ np.abs(w).T
    assert np.abs(product.numpy() - exact).max() <= 1e-6 * scale.max()


def test_an_unknown_scaling_is_refused() -> None:
    with pytest.raises(InputError, match=r"scaling: .*tile"):
        get_scaling("tiles")
