"""Dynamic tree quantisation in blocks: NumPy's and PyTorch's against an exhaustive search over the numbers, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from plain import adamw_8bit

from shardwise.run.kernels.optimizers import BlockwiseMoment
from shardwise.values.dtypes import BLOCK_SCALED_DTYPES, bytes_per_element
from shardwise.values.errors import InputError
from shardwise.values.quantization import (
    DYNAMIC_TREE_FORMATS,
    BlockCodes,
    dequantize_dynamic_tree,
    get_dynamic_tree_format,
    quantize_dynamic_tree,
)

SIZES = (1, 255, 256, 257, 1000, 4096)


def values(size: int, *, signed: bool) -> NDArray[np.float32]:
    """Elements of all sizes that squares of gradients have, with blocks of zeros, of one element and of equal ones."""
    random = np.random.default_rng(size)
    elements = random.normal(size=size) * 10.0 ** random.uniform(-24, 3, size // 256 + 1).repeat(256)[:size]
    elements[256:512] = 0.0
    elements[513:600] = 0.0
    elements[768:900] = elements[768:769]
    return (elements if signed else np.abs(elements)).astype(np.float32)


def middles(name: str) -> NDArray[np.float32]:
    """Blocks whose scale is 1: values halfway between two numbers, the floats next to them, and the numbers themselves."""
    numbers = DYNAMIC_TREE_FORMATS[name].values.astype(np.float64)
    halfway = ((numbers[:-1] + numbers[1:]) / 2).astype(np.float32)
    adjacent = [np.nextafter(halfway, np.float32(way)) for way in (-2, 2)]
    blocks = [np.append(part, np.float32(1)) for part in (halfway, *adjacent)]
    return np.concatenate([*blocks, DYNAMIC_TREE_FORMATS[name].values])


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
def test_the_numbers_equal_the_papers(name: str) -> None:
    numbers, signed = DYNAMIC_TREE_FORMATS[name], DYNAMIC_TREE_FORMATS[name].signed
    assert np.array_equal(numbers.values, adamw_8bit.table(signed))
    assert len(numbers.values) == 256 == len(np.unique(numbers.values))
    assert {0.0, 1.0} <= set(numbers.values.tolist())
    # bitsandbytes.functional.create_dynamic_map: the least above 0, the one below 1, and the one furthest below 0
    ends = (numbers.values[numbers.values > 0].min(), numbers.values[-2], numbers.values[0])
    assert ends == pytest.approx((5.5e-7, 0.99296875, -0.99296875) if signed else (3.25e-7, 0.996484375, 0.0), rel=1e-6)


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
@pytest.mark.parametrize("size", [*SIZES, None])
def test_codes_and_scales_equal_those_of_the_nearest_numbers(name: str, size: int | None) -> None:
    signed = DYNAMIC_TREE_FORMATS[name].signed
    elements = middles(name) if size is None else values(size, signed=signed)
    codes, scales = adamw_8bit.coded(elements, signed=signed)
    quantized, moment = (
        quantize_dynamic_tree(elements, DYNAMIC_TREE_FORMATS[name]),
        BlockwiseMoment.zeros(len(elements), name, torch.device("cpu")),
    )
    assert moment.to(torch.float32).eq(0.0).all()
    moment.copy_(torch.from_numpy(elements))
    for block_codes in (quantized, BlockCodes(moment.codes.numpy(), moment.scales.numpy())):
        assert block_codes.codes.dtype == np.uint8
        np.testing.assert_array_equal(block_codes.codes, codes)
        np.testing.assert_array_equal(block_codes.scales, scales)
    expected = adamw_8bit.decoded(codes, scales, signed=signed)
    np.testing.assert_array_equal(dequantize_dynamic_tree(quantized, DYNAMIC_TREE_FORMATS[name]), expected)
    np.testing.assert_array_equal(moment.to(torch.float32).numpy(), expected)


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
def test_errors_are_at_most_half_of_the_distance_between_numbers(name: str) -> None:
    """0.7% of the block's largest magnitude or, without a sign, 0.35%; a third of an element within six decades of it."""
    signed = DYNAMIC_TREE_FORMATS[name].signed
    elements = values(2**14, signed=signed)
    quantized = quantize_dynamic_tree(elements, DYNAMIC_TREE_FORMATS[name])
    scales = np.repeat(quantized.scales, 256)
    error = np.abs(dequantize_dynamic_tree(quantized, DYNAMIC_TREE_FORMATS[name]).astype(np.float64) - elements)
    assert (error <= (0.9 / (128 if signed else 256) + 1e-6) * scales).all()
    large = np.abs(elements) > 1e-5 * scales
    decade = 0.45 if signed else 0.225  # half of the distance in the lowest decades, over the smallest number in it
    assert (error[large] <= decade * np.abs(elements[large])).all()


def test_slices_must_start_at_block_boundaries() -> None:
    moment = BlockwiseMoment.zeros(1000, "dynamic8", torch.device("cpu"))
    moment.copy_(torch.linspace(-3.0, 5.0, 1000))
    decoded = torch.cat([moment[start : start + 512].to(torch.float64) for start in (0, 512)])
    assert torch.equal(decoded, moment.to(torch.float64))
    moment[512:].copy_(torch.zeros(488))
    assert moment.scales.tolist()[2:] == [0.0, 0.0]
    assert moment.scales.gt(0).sum() == 2
    with pytest.raises(ValueError, match="a part begins at element 100; a multiple of 256 is required"):
        moment[100:]


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
def test_a_format_allocates_the_bytes_that_it_states(name: str) -> None:
    moment = BlockwiseMoment.zeros(1024, name, torch.device("cpu"))
    assert moment.codes.nbytes + moment.scales.nbytes == 1024 * bytes_per_element(name) == 1040
    assert set(DYNAMIC_TREE_FORMATS) < set(BLOCK_SCALED_DTYPES), "the other formats belong to frozen base weights"
    with pytest.raises(InputError, match=r"format.*one of dynamic8, unsigned_dynamic8"):
        get_dynamic_tree_format("dynamic4")
