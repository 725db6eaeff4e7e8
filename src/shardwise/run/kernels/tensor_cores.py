"""Products of quantized matrices on a GPU's tensor cores (`torch.nn.functional.scaled_mm`): which a device has, and their
operands and scales in the memory order that it takes.

A product is left [M, K] by the transpose of right [N, K]. Elements of both are contiguous along K, so that a transposed view is
copied. A device multiplies these pairs of scales, with a sum in float32 and a result in bf16 (in float32 too where noted):

| a scale for each | of both operands | devices (compute capability) | order of the scales |
|---|---|---|---|
| matrix | float32; result in float32 too | 8.9 and later | one number |
| row | float32 | 8.9 and later | [M, 1] and [1, N] |
| 1x128, or 128x128 on one side | float32; result in float32 too | 9.x | columns of blocks contiguous; see below |
| 1x32 (MX) | E8M0 | 10.0 and later | tiles of 128 x 4, swizzled |
| 1x16 (NVFP4), and one for the matrix | E4M3, float32 | 10.0 and later | tiles of 128 x 4, swizzled |

Scales of 1x128 are [M, K/128] with strides (1, M); those of 128x128 are [L, M/128] with strides (1, L), where L is K/128 rounded
up to 4. A swizzled tile of 128 rows and 4 blocks has row r and block j at 16 (r mod 32) + 4 (r div 32) + j, and tiles follow
each other along K first.

Sources: PyTorch 2.13, aten/src/ATen/native/cuda/ScaledBlas.cpp (`_check_deepseek_support`, the checks of each scaling) and
torch/_meta_registrations.py (`_check_scaled_mm_sizes_v2`); NVIDIA, cuBLAS documentation, "Narrow Precision Data Types Usage",
for the orders; PyTorch, torch/testing/_internal/common_cuda.py (PLATFORM_SUPPORTS_FP8, PLATFORM_SUPPORTS_MX_GEMM) for devices.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.run.kernels.device_dispatch import Capability, has_triton
from shardwise.run.kernels.quantization import CASTS, QuantizedTensor, quantize_matrix
from shardwise.values import NumberFormat, ceil_div
from shardwise.values.scalings import WHOLE_MATRIX, ScaleBlock, ScaleKind

ScaleOrder = Literal["scalar", "row", "column_major", "padded_column_major", "swizzled"]
E4M3_ONLY = frozenset({("e4m3", "e4m3")})
TILE_ROWS, TILE_BLOCKS = 128, 4  # of swizzled scales
BLOCKS_ALIGNMENT = 4  # of 128x128 scales along K
ALIGNMENT = 16  # elements: cuBLASLt's 16 bytes, for both sizes of the right matrix


class TensorCoreScaling(NamedTuple):
    """A pair of scales that tensor cores multiply: devices from `first` to before `end`, pairs of formats, the multiple of K that
    is required, and whether results may be in float32."""

    first: Capability
    end: Capability
    formats: frozenset[tuple[str, str]]
    multiple: int = ALIGNMENT
    writes_fp32: bool = False


ANY_LATER: Capability = (10**6, 0)
BY_ROW: ScaleBlock = (1, None)
SCALINGS_OF_128: tuple[ScaleBlock, ...] = ((1, 128), (128, 128))
# The name of a block in `torch.nn.functional.ScalingType`, and the order of its scales.
SCALE_ORDERS: dict[ScaleBlock, tuple[str, ScaleOrder]] = {
    WHOLE_MATRIX: ("TensorWise", "scalar"),
    BY_ROW: ("RowWise", "row"),
    (1, 128): ("BlockWise1x128", "column_major"),
    (128, 128): ("BlockWise128x128", "padded_column_major"),
    (1, 32): ("BlockWise1x32", "swizzled"),
    (1, 16): ("BlockWise1x16", "swizzled"),
    (16, 16): ("BlockWise1x16", "swizzled"),  # each of its rows has a copy of the scale
}


def tensor_core_scaling(blocks: tuple[ScaleBlock, ScaleBlock], kind: ScaleKind) -> TensorCoreScaling | None:
    """Return what tensor cores require of operands with these blocks of scales; None: no device multiplies them.

    >>> tensor_core_scaling(((1, 128), (128, 128)), "fp32").first, tensor_core_scaling(((128, 128), (128, 128)), "fp32")
    ((9, 0), None)
    """
    if kind in ("fp32", "power_of_two"):
        if blocks == (WHOLE_MATRIX, WHOLE_MATRIX):
            pairs = frozenset({("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")})
            return TensorCoreScaling((8, 9), ANY_LATER, pairs, writes_fp32=True)
        if blocks == (BY_ROW, BY_ROW):
            return TensorCoreScaling((8, 9), ANY_LATER, E4M3_ONLY)
        if set(blocks) <= set(SCALINGS_OF_128) and blocks != ((128, 128), (128, 128)):
            return TensorCoreScaling((9, 0), (10, 0), E4M3_ONLY, multiple=128, writes_fp32=True)
    if kind == "e8m0" and blocks == ((1, 32), (1, 32)):
        return TensorCoreScaling((10, 0), ANY_LATER, E4M3_ONLY, multiple=32)
    if kind == "e4m3" and set(blocks) <= {(1, 16), (16, 16)}:
        return TensorCoreScaling((10, 0), ANY_LATER, frozenset({("e2m1", "e2m1")}), multiple=32)
    return None


class ProductOperands(NamedTuple):
    """Operands of a product of left [M, K] and right [N, K]: the sizes, formats and blocks of scales of both, and the kind of
    scale, which decide whether tensor cores take it."""

    sizes: tuple[int, int, int]
    formats: tuple[str, str]
    blocks: tuple[ScaleBlock, ScaleBlock]
    kind: ScaleKind

    def run_on(self, capability: Capability | None) -> bool:
        """Return whether a device of this compute capability multiplies them; None: one without tensor cores.

        Also False where PyTorch is older than 2.10, which has no `scaled_mm`.
        """
        scaling = tensor_core_scaling(self.blocks, self.kind)
        if scaling is None or capability is None or not hasattr(F, "scaled_mm"):
            return False
        is_aligned = all(size % multiple == 0 for size, multiple in zip(self.sizes, self.multiples, strict=True))
        return scaling.first <= capability < scaling.end and self.formats in scaling.formats and is_aligned

    @property
    def multiples(self) -> tuple[int, int, int]:
        """Multiples of M, N and K that tensor cores take."""
        scaling = tensor_core_scaling(self.blocks, self.kind)
        is_tiled = [block == (128, 128) for block in self.blocks]
        left = 128 if is_tiled[0] else ALIGNMENT if self.blocks[0] == (1, 128) else 1
        return left, 128 if is_tiled[1] else ALIGNMENT, ALIGNMENT if scaling is None else scaling.multiple

    def pad(self, *, left: bool, right: bool) -> ProductOperands:
        """Return the operands with zeros up to whole multiples, where `left` and `right` may have them: K where both may.

        >>> rows_of_an_expert = ProductOperands((64, 96, 37), ("e4m3", "e4m3"), ((1, 128), (1, 128)), "fp32")
        >>> rows_of_an_expert.pad(left=True, right=True).sizes
        (64, 96, 128)
        """
        num_rows, num_columns, width = (
            -(-size // multiple) * multiple if is_allowed else size
            for size, multiple, is_allowed in zip(
                self.sizes, self.multiples, (left, right, left and right), strict=True
            )
        )
        return self._replace(sizes=(num_rows, num_columns, width))

    def writes(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which tensor cores write a result that is wanted in `dtype`: bf16 or float32."""
        scaling = tensor_core_scaling(self.blocks, self.kind)
        return dtype if dtype == torch.float32 and scaling is not None and scaling.writes_fp32 else torch.bfloat16


_RAN: set[tuple[tuple[ScaleBlock, ScaleBlock], ScaleKind, str]] = set()


def record_product(operands: ProductOperands, *, on_tensor_cores: bool) -> None:
    """Record where a product runs, which `product_kernels` says."""
    _RAN.add((operands.blocks, operands.kind, "tensor cores" if on_tensor_cores else "float32"))


def product_kernels() -> dict[str, str]:
    """Return where the quantized products of this process have run: on tensor cores, or emulated in float32. Keys are their
    scales, such as "1x128 by 128x128 in fp32"."""
    names: dict[ScaleBlock, str] = {WHOLE_MATRIX: "tensor", BY_ROW: "row"}
    kernels: dict[str, set[str]] = {}
    for blocks, kind, kernel in _RAN:
        left, right = (names.get(block, f"{block[0]}x{block[1]}") for block in blocks)
        kernels.setdefault(f"{left} by {right} in {kind}", set()).add(kernel)
    return {scales: " and ".join(sorted(kernels[scales])) for scales in sorted(kernels)}


def cast_operand(
    matrix: Tensor, to: NumberFormat, block: ScaleBlock, kind: ScaleKind, factor: Tensor | None = None
) -> QuantizedTensor:
    """Return a matrix [M, K] in a narrow format as tensor cores take it, elements contiguous, with its scales [R, C] in their own
    dtype; by one kernel on a GPU with Triton. `factor` is that of earlier steps."""
    if to.name in CASTS and has_triton(matrix, any_strides=True):
        from shardwise.run.triton_kernels import block_casts, casts

        dtype, unscaled = CASTS[to.name], torch.ones((), device=matrix.device)
        if block == BY_ROW:
            elements, scales = casts.cast_rows(matrix, dtype, power_of_two=kind == "power_of_two")
            return QuantizedTensor(elements, scales, unscaled)
        if block == WHOLE_MATRIX:
            elements, scale = casts.cast_matrix(matrix, dtype, factor)
            return QuantizedTensor(elements, scale.view(1, 1), unscaled)
        if block in block_casts.BLOCKS and kind in block_casts.KINDS:
            (elements, scales), _ = block_casts.cast_blocks(matrix, dtype, block, kind)
            return QuantizedTensor(elements, scales, unscaled)
    return quantize_matrix(matrix, to, block, kind, factor).store(to, kind)


def tensor_core_product(
    left: QuantizedTensor, right: QuantizedTensor, blocks: tuple[ScaleBlock, ScaleBlock], dtype: torch.dtype
) -> Tensor:
    """Return left [M, K] by the transpose of right [N, K], both as stored, from `scaled_mm` in bf16 or float32."""
    first, second = (_scale_arguments(operand, block) for operand, block in zip((left, right), blocks, strict=True))
    right_scales = [second.scales[0].view(1, -1)] if blocks[1] == BY_ROW else second.scales
    product: Tensor = F.scaled_mm(
        left.elements.contiguous(), right.elements.contiguous().t(), first.scales, first.kinds, right_scales, second.kinds,
        swizzle_a=first.orders, swizzle_b=second.orders, output_dtype=dtype,
    )  # fmt: skip
    return product


class ScaleArguments(NamedTuple):
    """Scales of an operand as `scaled_mm` takes them: those of blocks, and one of the matrix where there is one."""

    scales: list[Tensor]
    kinds: list[F.ScalingType]
    orders: list[F.SwizzleType]


def _scale_arguments(operand: QuantizedTensor, block: ScaleBlock) -> ScaleArguments:
    name, order = SCALE_ORDERS[block]
    scales, swizzle = operand.scales, F.SwizzleType.NO_SWIZZLE
    if block == (16, 16):
        scales = scales.repeat_interleave(16, 0)
    match order:
        case "scalar":
            scales = scales.view(())
        case "row":
            scales = scales.contiguous()
        case "column_major":
            scales = scales.t().contiguous().t()
        case "padded_column_major":
            scales = F.pad(scales, (0, -scales.shape[1] % BLOCKS_ALIGNMENT)).contiguous().t()
        case "swizzled":
            scales, swizzle = swizzle_scales(scales), F.SwizzleType.SWIZZLE_32_4_4
    kinds, orders = [getattr(F.ScalingType, name)], [swizzle]
    if block[1] == 16:  # NVFP4
        scalar = F.ScalingType.TensorWise, F.SwizzleType.NO_SWIZZLE
        return ScaleArguments([scales, operand.tensor_scale], [*kinds, scalar[0]], [*orders, scalar[1]])
    return ScaleArguments([scales], kinds, orders)


def swizzle_scales(scales: Tensor) -> Tensor:
    """Return scales [M, C] of one byte as tensor cores read them, flat, in whole tiles of 128 x 4.

    >>> scales = torch.arange(128).repeat_interleave(4).view(128, 4).to(torch.float8_e4m3fn)
    >>> swizzle_scales(scales)[:17].int().tolist()  # rows 0, 32, 64 and 96 lie side by side
    [0, 0, 0, 0, 32, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 96, 1]
    """
    (num_rows, num_blocks), dtype = scales.shape, scales.dtype
    tiles = ceil_div(num_rows, TILE_ROWS), ceil_div(num_blocks, TILE_BLOCKS)
    padding = tiles[1] * TILE_BLOCKS - num_blocks, tiles[0] * TILE_ROWS - num_rows
    padded = F.pad(scales.contiguous().view(torch.uint8), (0, padding[0], 0, padding[1]))
    parts = padded.view(tiles[0], TILE_ROWS // 32, 32, tiles[1], TILE_BLOCKS)
    return parts.permute(0, 3, 2, 1, 4).reshape(-1).view(dtype)
