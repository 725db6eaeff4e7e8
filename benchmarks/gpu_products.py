"""Products of the FP8 and FP4 recipes beside those of bf16 on one device: whether tensor cores run them, their error and time.

For a layer's MLP, forward, its input's gradient and its weight's gradient: seconds of the product in bf16, and of the recipe's
with the casts of activations, the weight cast before as in a step. Errors are relative to the product in float32 of what was
cast (the kernel) and of what was not (the recipe).

Used by `gpu_check.py`, part `fp8`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.measure.microbenchmarks.device_timers import device_timer
from shardwise.measure.microbenchmarks.timing import time_cold_kernel
from shardwise.run.kernels.device_dispatch import device_capability
from shardwise.run.kernels.matmul import OperandCast, ProductFormats, QuantizedMatmul, product_formats
from shardwise.run.kernels.quantized_weights import CastWeight
from shardwise.values.precision import get_precision

RECIPES = ("fp8_current", "fp8_torchao_rowwise", "fp8_blockwise", "mxfp8", "nvfp4")
# Tokens, and the width and the hidden width of the MLP of Llama 3.2 3B.
SIZES, TINY_SIZES = {"T": 8192, "D": 3072, "F": 8192}, {"T": 128, "D": 128, "F": 256}
LAYOUTS = {
    "forward": (("T", "D"), ("D", "F"), ("T", "F")),
    "input gradient": (("T", "F"), ("D", "F"), ("T", "D")),
    "weight gradient": (("T", "D"), ("T", "F"), ("D", "F")),
}
KERNEL_ERROR = 0.01  # of a result in bf16 and sums in another order


def measure_products(recipe: str, where: str, sizes: dict[str, int]) -> dict[str, Any]:
    """Return by product what ran, errors and seconds. Raises `SystemExit` where a kernel's result is not the emulation's."""
    formats = product_formats(get_precision(recipe))
    assert formats is not None
    generator = torch.Generator().manual_seed(0)
    tensors = {
        dims: torch.randn([sizes[dim] for dim in dims], generator=generator).to(where, torch.bfloat16)
        for dims in (("T", "D"), ("T", "F"), ("D", "F"))
    }
    weight = cast_weight(formats, tensors["D", "F"])
    return {name: measure_product(formats, name, tensors, weight) for name in LAYOUTS}


def cast_weight(formats: ProductFormats, weight: Tensor) -> CastWeight:
    weight_format = formats.of_weight(weight.shape, 0, 1)
    assert weight_format is not None
    cast = CastWeight.empty(weight.shape, 0, 1, weight_format, weight.device)
    cast.store(weight)
    return cast


def measure_product(
    formats: ProductFormats, name: str, tensors: dict[tuple[str, ...], Tensor], weight: CastWeight
) -> dict[str, Any]:
    left_dims, right_dims, result_dims = LAYOUTS[name]
    operands: list[Any] = [weight if dims == ("D", "F") else tensors[dims] for dims in (left_dims, right_dims)]
    casts = [
        OperandCast(
            formats.gradient if dims == ("T", "F") and name != "forward" else formats.operand,
            formats.scaling.weight_block if dims == ("D", "F") else formats.scaling.block,
        )
        for dims in (left_dims, right_dims)
    ]  # fmt: skip
    product = QuantizedMatmul(left_dims, right_dims, result_dims, (casts[0], casts[1]), formats.scaling)
    on_tensor_cores = product.describe_operands(*operands).run_on(device_capability(operands[0].device))
    plain = {
        "forward": lambda: tensors["T", "D"] @ tensors["D", "F"],
        "input gradient": lambda: tensors["T", "F"] @ tensors["D", "F"].t(),
        "weight gradient": lambda: tensors["T", "D"].t() @ tensors["T", "F"],
    }[name]
    computed, emulated = product.multiply(*operands, torch.bfloat16), product.multiply_in_fp32(*operands)
    error = relative(computed, emulated)
    if error > KERNEL_ERROR:
        raise SystemExit(f"{name}: off by {error:.4f} of the emulation in float32; {KERNEL_ERROR} at most is required")
    timer, seconds = device_timer(tensors["T", "D"].device.type), None
    if on_tensor_cores:  # an emulation's time says nothing
        seconds = time_cold_kernel(lambda: product.multiply(*operands, torch.bfloat16), timer).seconds
    bf16_seconds = time_cold_kernel(plain, timer).seconds
    return {
        "on_tensor_cores": on_tensor_cores, "kernel_error": error, "recipe_error": relative(computed, plain()),
        "seconds": seconds, "bf16_seconds": bf16_seconds, "gain": bf16_seconds / seconds if seconds else None,
    }  # fmt: skip


def relative(computed: Tensor, expected: Tensor) -> float:
    return float((computed.float() - expected.float()).norm() / expected.float().norm())
