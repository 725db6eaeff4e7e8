"""Dynamic tree quantisation in blocks: NumPy's and PyTorch's against one that looks at every number, bit for bit."""

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
    found = random.normal(size=size) * 10.0 ** random.uniform(-24, 3, size // 256 + 1).repeat(256)[:size]
    found[256:512] = 0.0
    found[513:600] = 0.0
    found[768:900] = found[768:769]
    return (found if signed else np.abs(found)).astype(np.float32)


def middles(name: str) -> NDArray[np.float32]:
    """A block whose scale is 1, of what lies halfway between two numbers, of what is next to that, and of numbers themselves."""
    numbers = DYNAMIC_TREE_FORMATS[name].values.astype(np.float64)
    halfway = ((numbers[:-1] + numbers[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(halfway, np.float32(way)) for way in (-2, 2)]
    blocks = [np.append(part, np.float32(1)) for part in (halfway, *beside)]
    return np.concatenate([*blocks, DYNAMIC_TREE_FORMATS[name].values])


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
def test_the_numbers_are_those_of_the_paper(name: str) -> None:
    numbers, signed = DYNAMIC_TREE_FORMATS[name], DYNAMIC_TREE_FORMATS[name].signed
    assert np.array_equal(numbers.values, adamw_8bit.table(signed))
    assert len(numbers.values) == 256 == len(np.unique(numbers.values))
    assert {0.0, 1.0} <= set(numbers.values.tolist())
    # bitsandbytes.functional.create_dynamic_map: the least above 0, the one below 1, and the one furthest below 0
    ends = (numbers.values[numbers.values > 0].min(), numbers.values[-2], numbers.values[0])
    assert ends == pytest.approx((5.5e-7, 0.99296875, -0.99296875) if signed else (3.25e-7, 0.996484375, 0.0), rel=1e-6)


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
@pytest.mark.parametrize("size", [*SIZES, None])
def test_codes_and_scales_are_those_of_the_nearest_numbers(name: str, size: int | None) -> None:
    signed = DYNAMIC_TREE_FORMATS[name].signed
    given = middles(name) if size is None else values(size, signed=signed)
    codes, scales = adamw_8bit.coded(given, signed=signed)
    found, made = (
        quantize_dynamic_tree(given, DYNAMIC_TREE_FORMATS[name]),
        BlockwiseMoment.zeros(len(given), name, torch.device("cpu")),
    )
    assert made.to(torch.float32).eq(0.0).all()
    made.copy_(torch.from_numpy(given))
    for own in (found, BlockCodes(made.codes.numpy(), made.scales.numpy())):
        assert own.codes.dtype == np.uint8
        np.testing.assert_array_equal(own.codes, codes)
        np.testing.assert_array_equal(own.scales, scales)
    wanted = adamw_8bit.decoded(codes, scales, signed=signed)
    np.testing.assert_array_equal(dequantize_dynamic_tree(found, DYNAMIC_TREE_FORMATS[name]), wanted)
    np.testing.assert_array_equal(made.to(torch.float32).numpy(), wanted)


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
def test_an_element_is_off_by_half_of_the_distance_between_numbers_at_most(name: str) -> None:
    """Of the block's largest size 0.7% or, without a sign, 0.35%; of an element within six decades of that a third of itself."""
    signed = DYNAMIC_TREE_FORMATS[name].signed
    given = values(2**14, signed=signed)
    found = quantize_dynamic_tree(given, DYNAMIC_TREE_FORMATS[name])
    scales = np.repeat(found.scales, 256)
    off = np.abs(dequantize_dynamic_tree(found, DYNAMIC_TREE_FORMATS[name]).astype(np.float64) - given)
    assert (off <= (0.9 / (128 if signed else 256) + 1e-6) * scales).all()
    large = np.abs(given) > 1e-5 * scales
    decade = 0.45 if signed else 0.225  # half of the distance in the lowest decades, over the least number there
    assert (off[large] <= decade * np.abs(given[large])).all()


def test_parts_begin_between_blocks() -> None:
    whole = BlockwiseMoment.zeros(1000, "dynamic8", torch.device("cpu"))
    whole.copy_(torch.linspace(-3.0, 5.0, 1000))
    found = torch.cat([whole[start : start + 512].to(torch.float64) for start in (0, 512)])
    assert torch.equal(found, whole.to(torch.float64))
    whole[512:].copy_(torch.zeros(488))
    assert whole.scales.tolist()[2:] == [0.0, 0.0]
    assert whole.scales.gt(0).sum() == 2
    with pytest.raises(ValueError, match="a part begins at element 100; a multiple of 256 is required"):
        whole[100:]


@pytest.mark.parametrize("name", DYNAMIC_TREE_FORMATS)
def test_a_format_takes_the_bytes_that_it_counts(name: str) -> None:
    made = BlockwiseMoment.zeros(1024, name, torch.device("cpu"))
    assert made.codes.nbytes + made.scales.nbytes == 1024 * bytes_per_element(name) == 1040
    assert set(DYNAMIC_TREE_FORMATS) < set(BLOCK_SCALED_DTYPES), "further ones are those of a frozen base"
    with pytest.raises(InputError, match=r"format.*one of dynamic8, unsigned_dynamic8"):
        get_dynamic_tree_format("dynamic4")
