"""Formats against PyTorch, ml_dtypes and NumPy: every code, and the rounding of values of every kind."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardwise.values.dtypes import NUMBER_FORMATS, get_number_format
from shardwise.values.errors import InputError
from shardwise.values.precision import PRECISIONS
from shardwise.values.quantization import decode_bits, encode_bits, round_to_format
from shardwise.values.scalings import get_scaling

TORCH = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu, "fp32": torch.float32,
}  # fmt: skip
NUMPY = {
    "bf16": ml_dtypes.bfloat16, "fp16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
    "e2m1": ml_dtypes.float4_e2m1fn, "e8m0": ml_dtypes.float8_e8m0fnu, "fp32": np.float32,
}  # fmt: skip
NARROW = ("bf16", "fp16", "e4m3", "e5m2")
CODES = {1: torch.uint8, 2: torch.uint16}


def values(name: str) -> NDArray[np.float32]:
    """A million values: of all sizes, around the format's range, halfway between its numbers and next to that, and special."""
    random = np.random.default_rng(0)
    number_format = NUMBER_FORMATS[name]
    bits = random.integers(0, 2**32, 400_000, dtype=np.uint32).view(np.float32)
    spread = random.standard_normal(400_000) * np.exp2(random.uniform(-30, 20, 400_000))
    numbers = decode_bits(random.integers(0, number_format.largest_code, 100_000), number_format)
    following = numbers + np.diff(np.append(np.unique(numbers), np.inf))[np.searchsorted(np.unique(numbers), numbers)]
    with np.errstate(over="ignore", invalid="ignore"):
        ties = ((numbers + following) / 2).astype(np.float32)
        near = np.nextafter(ties, np.float32(0))
        special = [
            0.0,
            -0.0,
            np.inf,
            -np.inf,
            np.nan,
            number_format.max,
            number_format.max * 1.03,
            number_format.max * 1.05,
            number_format.min_subnormal / 2,
        ]
        return np.concatenate([bits, spread.astype(np.float32), ties, -near, np.array(special, np.float32)])


def assert_equal_numbers(actual: NDArray[np.float64], expected: NDArray[np.float64]) -> None:
    np.testing.assert_array_equal(actual, expected)
    is_number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(actual[is_number]), np.signbit(expected[is_number]))


@pytest.mark.parametrize("name", [name for name in TORCH if name != "fp32"])
def test_every_code_decodes_to_pytorchs_number(name: str) -> None:
    number_format = NUMBER_FORMATS[name]
    codes = torch.arange(2**number_format.bits, dtype=torch.int32)
    assert_equal_numbers(
        decode_bits(codes.numpy(), number_format),
        codes.to(CODES[number_format.bits // 8]).view(TORCH[name]).double().numpy(),
    )


@pytest.mark.parametrize("name", NUMPY)
def test_properties_of_a_format_equal_ml_dtypes(name: str) -> None:
    number_format, info = NUMBER_FORMATS[name], ml_dtypes.finfo(NUMPY[name])
    assert (number_format.max, number_format.epsilon) == (float(info.max), float(info.eps))
    assert (number_format.min_normal, number_format.min_subnormal) == (
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )
    assert number_format.mantissa_bits == info.nmant
    codes = (
        np.arange(2**number_format.bits)
        if number_format.bits <= 16
        else np.random.default_rng(0).integers(0, 2**32, 10**6)
    )
    wide = {4: np.uint8, 8: np.uint8, 16: np.uint16, 32: np.uint32}[number_format.bits]
    with np.errstate(invalid="ignore"):
        assert_equal_numbers(decode_bits(codes, number_format), codes.astype(wide).view(NUMPY[name]).astype(np.float64))
    if number_format.bits <= 16:
        assert number_format.num_finite == int(np.isfinite(decode_bits(codes, number_format)).sum())


@pytest.mark.parametrize("name", NARROW)
def test_rounding_equals_pytorchs_casts(name: str) -> None:
    x = values(name)
    expected = torch.from_numpy(x).to(TORCH[name]).double().numpy()
    assert_equal_numbers(round_to_format(x, NUMBER_FORMATS[name], saturating=name == "e4m3"), expected)


@pytest.mark.parametrize("name", [*NARROW, "e2m1"])
def test_rounding_and_codes_equal_ml_dtypes(name: str) -> None:
    x = values(name)
    x = x if NUMBER_FORMATS[name].has_nan else x[~np.isnan(x)]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(NUMPY[name])
        assert_equal_numbers(round_to_format(x, NUMBER_FORMATS[name]), expected.astype(np.float64))
    is_number = ~np.isnan(expected.astype(np.float64))
    codes = expected.view(np.uint8 if NUMBER_FORMATS[name].bits <= 8 else np.uint16)
    np.testing.assert_array_equal(encode_bits(x, NUMBER_FORMATS[name])[is_number], codes[is_number])


def test_rounding_to_powers_of_two_equals_pytorchs() -> None:
    x = np.abs(values("bf16"))
    x = x[(x > 0) & np.isfinite(x)]
    x = np.concatenate([x, np.exp2(np.arange(-127, 128), dtype=np.float64).astype(np.float32)])
    x = x[x >= 2.0**-126]  # of smaller ones others round fp32's field of exponents, which subnormals share
    with np.errstate(over="ignore", invalid="ignore"):
        assert_equal_numbers(round_to_format(x, NUMBER_FORMATS["e8m0"]), x.astype(NUMPY["e8m0"]).astype(np.float64))
    assert_equal_numbers(
        round_to_format(x, NUMBER_FORMATS["e8m0"]), torch.from_numpy(x).to(torch.float8_e8m0fnu).double().numpy()
    )


def test_tf32_keeps_ten_bits_of_the_mantissa_and_the_range_of_fp32() -> None:
    x, number_format = values("fp32")[:100_000], NUMBER_FORMATS["tf32"]
    x = x[np.isfinite(x)]
    rounded = round_to_format(x, number_format)
    assert (number_format.max, number_format.min_normal) == ((2 - 2**-10) * 2.0**127, NUMBER_FORMATS["fp32"].min_normal)
    assert not np.any(rounded.astype(np.float32).view(np.uint32) & 0x1FFF)  # the 13 lowest bits
    is_normal = (np.abs(x) >= number_format.min_normal) & np.isfinite(rounded)
    assert np.all(np.abs(rounded - x)[is_normal] <= np.abs(x)[is_normal] * 2.0**-11)


@pytest.mark.parametrize("name", [name for name in NUMBER_FORMATS if NUMBER_FORMATS[name].bits <= 16])
def test_encoding_inverts_decoding(name: str) -> None:
    number_format = NUMBER_FORMATS[name]
    codes = np.arange(2**number_format.bits)
    numbers = decode_bits(codes, number_format)
    is_number = ~np.isnan(numbers)
    np.testing.assert_array_equal(encode_bits(numbers[is_number], number_format), codes[is_number])
    assert np.all(np.isnan(decode_bits(encode_bits([np.nan], number_format), number_format))) == number_format.has_nan


def test_values_beyond_the_range_saturate_on_request() -> None:
    x = [500.0, -np.inf, 464.0]
    np.testing.assert_array_equal(round_to_format(x, NUMBER_FORMATS["e4m3"]), [np.nan, np.nan, 448.0])
    np.testing.assert_array_equal(round_to_format(x, NUMBER_FORMATS["e4m3"], saturating=True), [448.0, -448.0, 448.0])
    np.testing.assert_array_equal(round_to_format([np.inf, np.nan, -9.0], NUMBER_FORMATS["e2m1"]), [6.0, 6.0, -6.0])


def test_unknown_names_and_codes_are_refused() -> None:
    with pytest.raises(InputError, match=r"format: .*e4m3"):
        get_number_format("e4m4")
    with pytest.raises(InputError, match="found 256; 0 to 255 are those of e4m3"):
        decode_bits([256], NUMBER_FORMATS["e4m3"])


@pytest.mark.parametrize("name", [name for name, recipe in PRECISIONS.items() if recipe.scaling])
def test_a_recipe_counts_the_scales_of_its_scaling(name: str) -> None:
    """A block of elements shares a scale; in NVFP4 each row of a weight's block has a copy; scales of whole rows do not count."""
    recipe = PRECISIONS[name]
    scaling = get_scaling(str(recipe.scaling))
    weight_block = (1, 16) if name == "nvfp4" else scaling.weight_block
    for counted, block in ((recipe.block, scaling.block), (recipe.weight_block, weight_block)):
        assert counted == (None if None in block else math.prod(size for size in block if size))
