"""Ladders of products: from an element at a time to tensor descriptors, a long sum, many products, and a layer against its batch.

Source of the order of the steps: Boehm 2022, "How to Optimize a CUDA Matmul Kernel". Where a rung of it is the compiler's choice
in Triton (which thread has which results, how warps divide a tile, where operands lie in shared memory) it has no rung here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.measure.kernel_ladders.closed_forms import (
    SCALE_BYTES,
    Tiles,
    element_loads,
    element_sectors,
    int8_parts,
    int8_product_traffic,
    row_loads,
    row_sectors,
    tile_loads,
)
from shardwise.measure.kernel_ladders.ladder import ITEM_BYTES, Ladder, RowCost, Rung, normal_operands, triton_call
from shardwise.values import pluralize

FP32_BYTES = 4
# Tile sizes and pipeline depth: as large as registers and shared memory allow (Boehm 2022, kernels 3 to 10).
NO_TENSOR_CORES = Tiles(32, 32, 16, num_warps=4, wide_loads=False, tensor_cores=False)
LARGE = Tiles(128, 128, 64, num_warps=8)
PRODUCT_TILES: Mapping[str, tuple[str, Tiles, str]] = {
    "tiles of 32": (
        "multiply_by_tiles", NO_TENSOR_CORES,
        "operands of a tile are loaded into shared memory once for 32 rows and 32 columns; a thread has 8 results",
    ),
    "tiles of 64": (
        "multiply_by_tiles", replace(NO_TENSOR_CORES, rows=64, columns=64),
        "half the loads; a thread has 32 results in registers, and each operand that it reads from shared memory serves several",
    ),
    "tiles of 128": (
        "multiply_by_tiles", replace(NO_TENSOR_CORES, rows=128, columns=128, num_warps=8),
        "half again; 64 results a thread: multiplications hide the reads of shared memory",
    ),
    "wide loads": (
        "multiply_by_tiles", replace(NO_TENSOR_CORES, rows=128, columns=128, num_warps=8, wide_loads=True),
        "the compiler uses that 16 divides the sizes: a thread loads 16 bytes at once, not 2",
    ),
    "tensor cores": ("multiply_by_tiles", LARGE, "they multiply 16-bit operands 15 times as fast on an H100"),
    "tiles in groups": (
        "multiply_by_tiles", replace(LARGE, group=8), "tiles that run together share operands in the L2 cache",
    ),
    "pipelined": (
        "multiply_by_tiles", replace(LARGE, group=8, num_stages=3),
        "the next tiles are on their way to shared memory while these are multiplied",
    ),
    "persistent": (
        "multiply_persistently", replace(LARGE, group=8, num_stages=3),
        "a program for each multiprocessor, tile after tile: one start, and no gap between tiles",
    ),
    "tensor descriptors": (
        "multiply_by_descriptors", replace(LARGE, group=8, num_stages=3),
        "hardware computes the addresses of a whole tile (TMA on Hopper and later); threads issue one copy",
    ),
}  # fmt: skip


def _multiply(left: Any, right: Any) -> Any:
    return left @ right


def _multiply_in_float64(left: Any, right: Any) -> Any:
    return left.double() @ right.double()


def product_ladder(rows: int = 4096, depth: int = 4096, columns: int = 4096) -> Ladder:
    """Return a product of matrices in twelve steps: by elements, by rows, in tiles, with tensor cores, pipelined, persistent,
    by descriptors, and PyTorch's."""
    shape = rows, depth, columns
    stored = rows * columns * ITEM_BYTES
    least = (rows * depth + depth * columns) * ITEM_BYTES
    return Ladder(
        name="product", title="a product of matrices", sizes=f"[{rows:,}, {depth:,}] x [{depth:,}, {columns:,}]",
        flops=2.0 * rows * depth * columns, least_bytes=least + stored, product_flops=True,
        make_operands=normal_operands((rows, depth), (depth, columns)), reference=_multiply_in_float64,
        benchmark={"bench": "matmul", "dtype": "bf16", "m": rows, "n": columns, "k": depth},
        rungs=(
            Rung(name="by elements", lesson="an element for each lane, neighbouring lanes in neighbouring rows: each load of a "
                 "warp comes from 32 rows", run=triton_call("triton_products", "multiply_by_elements"),
                 loaded_bytes=element_loads(shape) * ITEM_BYTES, stored_bytes=stored, loaded_sectors=element_sectors(shape)),
            Rung(name="by rows", lesson="neighbouring lanes read neighbouring columns; each row loads all of the right matrix",
                 run=triton_call("triton_products", "multiply_by_rows"), loaded_bytes=row_loads(shape) * ITEM_BYTES,
                 stored_bytes=stored, loaded_sectors=row_sectors(shape, ITEM_BYTES)),
            *(
                Rung(name=name, lesson=lesson, run=triton_call("triton_products", function, tiles),
                     loaded_bytes=tile_loads(shape, tiles) * ITEM_BYTES, stored_bytes=stored)
                for name, (function, tiles, lesson) in PRODUCT_TILES.items()
            ),
            Rung(name="PyTorch", lesson="cuBLAS on a GPU; what it loads is not known, operands once at least", run=_multiply,
                 loaded_bytes=least, stored_bytes=stored, uses_triton=False),
        ),
    )  # fmt: skip


def deep_product_ladder(rows: int = 256, depth: int = 131_072, columns: int = 256, num_parts: int = 32) -> Ladder:
    """Return a product with a long sum and few tiles: a program for each tile, then several that share its sum."""
    shape, tiles = (rows, depth, columns), replace(LARGE, num_stages=3)
    stored, parts = rows * columns * ITEM_BYTES, num_parts * rows * columns * FP32_BYTES
    least = (rows * depth + depth * columns) * ITEM_BYTES
    loaded = tile_loads(shape, tiles) * ITEM_BYTES
    num_tiles = tiles.count(rows, columns)
    return Ladder(
        name="deep-product", title="a product with a long sum", sizes=f"[{rows:,}, {depth:,}] x [{depth:,}, {columns:,}]",
        flops=2.0 * rows * depth * columns, least_bytes=least + stored, product_flops=True,
        make_operands=normal_operands((rows, depth), (depth, columns)), reference=_multiply_in_float64,
        rungs=(
            Rung(name="a program a tile", lesson=f"{num_tiles} tiles keep {num_tiles} multiprocessors busy, and the others idle",
                 run=triton_call("triton_products", "multiply_by_tiles", tiles), loaded_bytes=loaded, stored_bytes=stored),
            Rung(name="split over the sum", lesson=f"{num_parts} programs share the sum of a tile; their parts pass through "
                 "memory in float32 and are added in one order", num_launches=2,
                 run=triton_call("triton_products", "multiply_in_parts", tiles, num_parts), loaded_bytes=loaded + parts,
                 stored_bytes=stored + parts),
            Rung(name="PyTorch", lesson="cuBLAS chooses by shape", run=_multiply, loaded_bytes=least, stored_bytes=stored,
                 uses_triton=False),
        ),
    )  # fmt: skip


def batched_product_ladder(num_products: int = 512, rows: int = 128, depth: int = 128, columns: int = 128) -> Ladder:
    """Return many small products: a launch for each, PyTorch's batched product, one Triton kernel."""
    tiles = Tiles(64, 64, 64, num_warps=4, num_stages=2)
    stored = num_products * rows * columns * ITEM_BYTES
    least = num_products * (rows * depth + depth * columns) * ITEM_BYTES
    loaded = num_products * tile_loads((rows, depth, columns), tiles) * ITEM_BYTES

    def separate(left: Any, right: Any) -> Any:
        import torch

        out = left.new_empty((num_products, rows, columns))
        for index in range(num_products):
            torch.mm(left[index], right[index], out=out[index])
        return out

    def batched(left: Any, right: Any) -> Any:
        import torch

        return torch.bmm(left, right)

    return Ladder(
        name="batched-product", title="many small products",
        sizes=f"{num_products:,} times [{rows:,}, {depth:,}] x [{depth:,}, {columns:,}]",
        flops=2.0 * num_products * rows * depth * columns, least_bytes=least + stored, product_flops=True,
        make_operands=normal_operands((num_products, rows, depth), (num_products, depth, columns)),
        reference=_multiply_in_float64,
        rungs=(
            Rung(name="a launch each", lesson="a product is over before the next one is issued, and fills few multiprocessors",
                 run=separate, loaded_bytes=least, stored_bytes=stored, num_launches=num_products, uses_triton=False),
            Rung(name="one kernel, by tiles", lesson="a program for each tile of each product: one launch fills the GPU",
                 run=triton_call("triton_products", "multiply_batch", tiles), loaded_bytes=loaded, stored_bytes=stored),
            Rung(name="PyTorch", lesson="a batched product of cuBLAS", run=batched, loaded_bytes=least, stored_bytes=stored,
                 uses_triton=False),
        ),
    )  # fmt: skip


BATCHES = (1, 8, 32, 64, 128, 192, 256, 384, 512, 1024, 2048)


def layer_batch_ladder(width: int = 4096, hidden: int = 14_336, batches: Sequence[int] = BATCHES) -> Ladder:
    """Return a gated MLP on more and more tokens: memory reads the weights whatever their number, until computing takes as
    long (Austin et al., How to Scale Your Model, 2025: the critical batch of inference)."""
    weight_bytes = 3 * width * hidden * ITEM_BYTES

    def layer(x: Any, gate: Any, up: Any, down: Any) -> Any:
        import torch

        return torch.mm(torch.nn.functional.silu(torch.mm(x, gate)) * torch.mm(x, up), down)

    def reference(x: Any, gate: Any, up: Any, down: Any) -> Any:
        return layer(x.double(), gate.double(), up.double(), down.double())

    def rung(num_tokens: int) -> Rung:
        rows, wide = num_tokens * width * ITEM_BYTES, num_tokens * hidden * ITEM_BYTES
        return Rung(
            name=pluralize(num_tokens, "token"), lesson="", run=_on_first_rows(layer, num_tokens), num_rows=num_tokens,
            num_launches=5, loaded_bytes=weight_bytes + 2 * rows + 4 * wide, stored_bytes=rows + 4 * wide, uses_triton=False,
        )  # fmt: skip

    shapes = (max(batches), width), (width, hidden), (width, hidden), (hidden, width)
    return Ladder(
        name="layer-batch", title="a layer against its batch", sizes=f"a gated MLP, {width:,} and {hidden:,} wide",
        make_operands=normal_operands(*shapes, scale=0.1), reference=reference,
        rungs=tuple(rung(num_tokens) for num_tokens in batches), **_layer_costs(width, hidden, max(batches), weight_bytes),
    )  # fmt: skip


def int8_layer_ladder(width: int = 4096, hidden: int = 14_336, batches: Sequence[int] = BATCHES) -> Ladder:
    """Return the same layer with int8 weights, which become 16-bit numbers in registers: memory reads half as much, and
    computing takes as long from half the batch on (Austin et al., All About Rooflines, question 2)."""
    weight_bytes = 3 * width * hidden + (2 * hidden + width) * SCALE_BYTES

    def make(device: str) -> tuple[Any, ...]:
        x, wide, down = normal_operands((max(batches), width), (2 * hidden, width), (width, hidden), scale=0.1)(device)
        quantize = triton_call("triton_int8", "quantize_features")
        return (x, *quantize(wide), *quantize(down))

    def reference(x: Any, wide: Any, wide_scales: Any, down: Any, down_scales: Any) -> Any:
        import torch

        products = x.double() @ (wide.double() * wide_scales.double()[:, None]).t()
        gate, up = products[:, :hidden], products[:, hidden:]
        return (torch.nn.functional.silu(gate) * up) @ (down.double() * down_scales.double()[:, None]).t()

    def rung(num_tokens: int) -> Rung:
        gated = int8_product_traffic((num_tokens, width, hidden), ITEM_BYTES, num_weights=2)
        down = int8_product_traffic((num_tokens, hidden, width), ITEM_BYTES)
        return Rung(
            name=pluralize(num_tokens, "token"), lesson="", num_rows=num_tokens,
            num_launches=3 if int8_parts((num_tokens, hidden, width)) > 1 else 2,
            loaded_bytes=gated.loaded_bytes + down.loaded_bytes, stored_bytes=gated.stored_bytes + down.stored_bytes,
            run=_on_first_rows(triton_call("triton_int8", "gated_layer"), num_tokens),
        )  # fmt: skip

    return Ladder(
        name="int8-layer-batch", title="a layer with int8 weights against its batch",
        sizes=f"a gated MLP, {width:,} and {hidden:,} wide, int8 weights", make_operands=make, reference=reference,
        rungs=tuple(rung(num_tokens) for num_tokens in batches), **_layer_costs(width, hidden, max(batches), weight_bytes),
    )  # fmt: skip


def _on_first_rows(layer: Callable[..., Any], num_rows: int) -> Callable[..., Any]:
    """Return a layer on the first rows of its input."""

    def run(x: Any, *weights: Any) -> Any:
        return layer(x[:num_rows], *weights)

    return run


def _layer_costs(width: int, hidden: int, num_tokens: int, weight_bytes: int) -> dict[str, Any]:
    """Return the cost of a gated MLP: weights read once, and a row in and a row out for each token."""
    return {
        "flops": 6.0 * num_tokens * width * hidden, "least_bytes": weight_bytes + 2 * num_tokens * width * ITEM_BYTES,
        "product_flops": True, "row_cost": RowCost(num_rows=num_tokens, fixed_bytes=weight_bytes),
    }  # fmt: skip
