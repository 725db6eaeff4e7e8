"""The ladders, at sizes that fill a GPU or at small ones. PyTorch and Triton are loaded when a rung runs.

Sources: Ultra-Scale Playbook, "Diving in the GPUs" (ELU three ways, coalescing, tiling, fused kernels, FlashAttention); Boehm
2022, "How to Optimize a CUDA Matmul Kernel" (the order of the steps of a product); Milakov et al. 2018 (online softmax); Dao et
al. 2022 and Dao 2023 (FlashAttention).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.measure.kernel_ladders.closed_forms import (
    Tiles,
    flash_backward_loads,
    flash_forward_loads,
    row_loads,
    tile_loads,
)
from shardwise.measure.kernel_ladders.ladder import Ladder, Rung
from shardwise.run.triton_kernels.traffic import STATISTIC_BYTES, norm_forward_traffic

ITEM_BYTES = 2  # of bf16 or fp16
EPSILON = 1e-5


def _triton(module: str, function: str, *parameters: Any) -> Callable[..., Any]:
    """Return a launcher of a Triton module, which is loaded at the first call."""

    def run(*operands: Any) -> Any:
        from importlib import import_module

        return getattr(import_module(f"shardwise.measure.kernel_ladders.{module}"), function)(*operands, *parameters)

    return run


def _operands(*shapes: tuple[int, ...], scale: float = 1.0) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that makes normal operands of these shapes in bf16 on a GPU, in fp16 elsewhere: Triton's interpreter
    multiplies no bf16."""

    def make(device: str) -> tuple[Any, ...]:
        import torch

        dtype = torch.bfloat16 if device == "cuda" else torch.float16
        generator = torch.Generator().manual_seed(0)
        return tuple((scale * torch.randn(shape, generator=generator)).to(device, dtype) for shape in shapes)

    return make


def elu_ladder(size: int = 2**26) -> Ladder:
    """Return ELU of `size` elements: separate kernels, neighbours far apart, one coalesced kernel."""
    data = size * ITEM_BYTES

    def separate(x: Any) -> Any:
        import torch

        return torch.where(x > 0, x, torch.exp(x) - 1.0)

    def reference(x: Any) -> Any:
        import torch

        return torch.nn.functional.elu(x.double())

    return Ladder(
        name="elu", title="a pointwise function", sizes=f"{size:,} elements", flops=3.0 * size, least_bytes=2 * data,
        make_operands=_operands((size,)), reference=reference,
        rungs=(
            Rung(name="separate kernels", lesson="exp, subtraction, comparison and choice each pass through memory",
                 run=separate, loaded_bytes=5 * data + size, stored_bytes=3 * data + size, num_launches=4,
                 uses_triton=False),
            Rung(name="one kernel, strided", lesson="one pass, but lanes of a warp read elements far apart: each load brings "
                 "32 bytes for 2", run=_triton("triton_pointwise", "strided_elu"), loaded_bytes=data, stored_bytes=data),
            Rung(name="one kernel, coalesced", lesson="neighbouring lanes read neighbouring elements",
                 run=_triton("triton_pointwise", "elu"), loaded_bytes=data, stored_bytes=data),
        ),
    )  # fmt: skip


def softmax_ladder(rows: int = 8192, width: int = 8192) -> Ladder:
    """Return the softmax of rows: separate kernels, then three reads of a row, two and one."""
    data = rows * width * ITEM_BYTES

    def separate(x: Any) -> Any:
        exponentials = (x - x.amax(dim=-1, keepdim=True)).exp()
        return exponentials / exponentials.sum(dim=-1, keepdim=True)

    def reference(x: Any) -> Any:
        return x.double().softmax(dim=-1)

    statistics = 2 * rows * ITEM_BYTES
    return Ladder(
        name="softmax", title="a function of rows", sizes=f"{rows:,} rows of {width:,}", flops=5.0 * rows * width,
        least_bytes=2 * data, make_operands=_operands((rows, width)), reference=reference,
        rungs=(
            Rung(name="separate kernels", lesson="maximum, difference, exp, sum and quotient each pass through memory",
                 run=separate, loaded_bytes=5 * data + statistics, stored_bytes=3 * data + statistics, num_launches=5,
                 uses_triton=False),
            Rung(name="one kernel, three reads", lesson="nothing but the result is written",
                 run=_triton("triton_pointwise", "softmax_in_passes"), loaded_bytes=3 * data, stored_bytes=data),
            Rung(name="online softmax", lesson="maximum and sum together, the sum rescaled where the maximum grows",
                 run=_triton("triton_pointwise", "online_softmax"), loaded_bytes=2 * data, stored_bytes=data),
            Rung(name="row in registers", lesson="a row that fits is read once",
                 run=_triton("triton_pointwise", "softmax_in_registers"), loaded_bytes=data, stored_bytes=data),
        ),
    )  # fmt: skip


def norm_ladder(rows: int = 16384, width: int = 4096) -> Ladder:
    """Return LayerNorm after a residual sum: separate kernels, PyTorch's norm, one kernel. Each row loads the weight, which
    caches answer."""
    data, row = rows * width * ITEM_BYTES, width * ITEM_BYTES
    statistics = 2 * rows * STATISTIC_BYTES
    fused = norm_forward_traffic(rows, width, ITEM_BYTES, is_layer=True, has_residual=True)

    def separate(x: Any, residual: Any, weight: Any) -> Any:
        total = x + residual
        centred = total - total.mean(dim=-1, keepdim=True)
        return centred * (centred.square().mean(dim=-1, keepdim=True) + EPSILON).rsqrt() * weight

    def two_kernels(x: Any, residual: Any, weight: Any) -> Any:
        import torch

        return torch.nn.functional.layer_norm(x + residual, weight.shape, weight, None, EPSILON)

    def fused_norm(x: Any, residual: Any, weight: Any) -> Any:
        from shardwise.run.triton_kernels.norms import norm_forward

        return norm_forward(x, residual, weight, EPSILON, is_layer=True)[1]

    def reference(x: Any, residual: Any, weight: Any) -> Any:
        return two_kernels((x + residual).double(), 0.0, weight.double())

    return Ladder(
        name="norm", title="LayerNorm after the residual sum", sizes=f"{rows:,} rows of {width:,}",
        flops=8.0 * rows * width, least_bytes=4 * data + row,
        make_operands=_operands((rows, width), (rows, width), (width,)), reference=reference,
        rungs=(
            Rung(name="separate kernels", lesson="sum, mean, difference, square, mean, two products: each through memory",
                 run=separate, loaded_bytes=9 * data, stored_bytes=5 * data, num_launches=9, uses_triton=False),
            Rung(name="sum and norm", lesson="PyTorch's norm reads the sum once", run=two_kernels,
                 loaded_bytes=4 * data, stored_bytes=2 * data + statistics, num_launches=2, uses_triton=False),
            Rung(name="one kernel", lesson="the sum stays in registers for the norm", run=fused_norm,
                 loaded_bytes=fused.loaded_bytes, stored_bytes=fused.stored_bytes),
        ),
    )  # fmt: skip


# Tile sizes and pipeline depth: as large as registers and shared memory allow (Boehm 2022, kernels 3 to 10).
SMALL, LARGE = Tiles(32, 32, 32, num_warps=2), Tiles(128, 128, 64, num_warps=8)
PRODUCT_TILES: Mapping[str, tuple[Tiles, str]] = {
    "tiles of 32": (
        SMALL,
        "a tile's operands are loaded once for 32 rows and 32 columns, and tensor cores multiply them",
    ),
    "tiles of 128": (LARGE, "four times fewer loads"),
    "tiles in groups": (replace(LARGE, group=8), "tiles that run together share operands in the L2 cache"),
    "pipelined": (replace(LARGE, group=8, num_stages=3), "the next tiles are on their way while these are multiplied"),
}


def product_ladder(rows: int = 4096, depth: int = 4096, columns: int = 4096) -> Ladder:
    """Return a product of matrices: by rows, in tiles, in groups of tiles, pipelined, and PyTorch's."""
    shape = rows, depth, columns
    stored = rows * columns * ITEM_BYTES
    least = (rows * depth + depth * columns) * ITEM_BYTES

    def library(left: Any, right: Any) -> Any:
        return left @ right

    def reference(left: Any, right: Any) -> Any:
        return left.double() @ right.double()

    return Ladder(
        name="product", title="a product of matrices", sizes=f"[{rows:,}, {depth:,}] x [{depth:,}, {columns:,}]",
        flops=2.0 * rows * depth * columns, least_bytes=least + stored, product_flops=True,
        make_operands=_operands((rows, depth), (depth, columns)), reference=reference,
        rungs=(
            Rung(name="by rows", lesson="each row loads all of the right matrix; no tensor cores",
                 run=_triton("triton_products", "multiply_by_rows"), loaded_bytes=row_loads(shape) * ITEM_BYTES,
                 stored_bytes=stored),
            *(
                Rung(name=name, lesson=lesson, run=_triton("triton_products", "multiply_by_tiles", tiles),
                     loaded_bytes=tile_loads(shape, tiles) * ITEM_BYTES, stored_bytes=stored)
                for name, (tiles, lesson) in PRODUCT_TILES.items()
            ),
            Rung(name="PyTorch", lesson="cuBLAS on a GPU; what it loads is not known, operands once at least", run=library,
                 loaded_bytes=least, stored_bytes=stored, uses_triton=False),
        ),
    )  # fmt: skip


def attention_ladder(heads: int = 64, length: int = 4096, width: int = 128) -> Ladder:
    """Return causal attention forward: scores in memory, then none."""
    data, scores = heads * length * width * ITEM_BYTES, heads * length * length * ITEM_BYTES
    statistics = heads * length * STATISTIC_BYTES

    def separate(query: Any, key: Any, value: Any) -> Any:
        import torch

        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
        logits = (query @ key.transpose(-1, -2) * width**-0.5).masked_fill(~mask, float("-inf"))
        return logits.softmax(dim=-1) @ value

    def flash(query: Any, key: Any, value: Any) -> Any:
        return _triton("triton_attention", "flash_forward")(query, key, value)[0]

    def reference(query: Any, key: Any, value: Any) -> Any:
        return separate(query.double(), key.double(), value.double())

    return Ladder(
        name="attention", title="causal attention, forward", sizes=f"{heads} heads of {width}, {length:,} tokens",
        flops=2.0 * heads * length * length * width, least_bytes=4 * data + statistics, product_flops=True,
        make_operands=_operands(*[(heads, length, width)] * 3), reference=reference,
        rungs=(
            Rung(name="scores in memory", lesson="scores, scaled, masked and as weights: T x T elements four times each way",
                 run=separate, loaded_bytes=3 * data + 4 * scores, stored_bytes=data + 4 * scores, num_launches=5,
                 uses_triton=False),
            Rung(name="blocks with an online softmax", lesson="scores stay on the chip; keys come again for each block",
                 run=flash, loaded_bytes=flash_forward_loads(heads, length, width) * ITEM_BYTES,
                 stored_bytes=data + statistics),
        ),
    )  # fmt: skip


def attention_gradient_ladder(heads: int = 64, length: int = 4096, width: int = 128) -> Ladder:
    """Return the gradients of causal attention: autograd over scores in memory, then scores built again."""
    data, scores = heads * length * width * ITEM_BYTES, heads * length * length * ITEM_BYTES
    matrices, statistics = flash_backward_loads(heads, length, width)

    def leaves(tensors: tuple[Any, ...]) -> list[Any]:
        return [tensor.detach().requires_grad_() for tensor in tensors]

    def autograd(dy: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
        import torch

        operands = leaves((query, key, value))
        out = attention_ladder(heads, length, width).rungs[0].run(*operands)
        return torch.autograd.grad(out, operands, dy)

    def flash(dy: Any, query: Any, key: Any, value: Any, out: Any, lse: Any) -> Any:
        return _triton("triton_attention", "flash_backward")(dy, (query, key, value), out, lse)

    def reference(dy: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:
        return autograd(dy.double(), query.double(), key.double(), value.double())

    def make(device: str) -> tuple[Any, ...]:
        dy, query, key, value = _operands(*[(heads, length, width)] * 4)(device)
        return (dy, query, key, value, *_triton("triton_attention", "flash_forward")(query, key, value))

    stored = 3 * data + heads * length * STATISTIC_BYTES
    return Ladder(
        name="attention-gradient", title="causal attention, backward", sizes=f"{heads} heads of {width}, {length:,} tokens",
        flops=5.0 * heads * length * length * width, least_bytes=8 * data + heads * length * STATISTIC_BYTES,
        product_flops=True, make_operands=make, reference=reference,
        rungs=(
            Rung(name="autograd", lesson="runs the forward pass, and keeps and reads weights of T x T elements",
                 run=autograd, loaded_bytes=8 * data + 11 * scores, stored_bytes=4 * data + 8 * scores, num_launches=12,
                 uses_triton=False),
            Rung(name="scores built again", lesson="dO · O replaces a sum over keys; two kernels rebuild the scores, one for the "
                 "queries' gradient, one for the keys' and values'", run=flash,
                 loaded_bytes=matrices * ITEM_BYTES + statistics * STATISTIC_BYTES, stored_bytes=stored, num_launches=3),
        ),
    )  # fmt: skip


LADDERS: Mapping[str, Callable[[], Ladder]] = {
    "elu": elu_ladder, "softmax": softmax_ladder, "norm": norm_ladder, "product": product_ladder,
    "attention": attention_ladder, "attention-gradient": attention_gradient_ladder,
}  # fmt: skip
# The same at sizes that Triton's interpreter takes a moment for: none divides its blocks.
SMALL_LADDERS: Mapping[str, Callable[[], Ladder]] = {
    "elu": partial(elu_ladder, 3001), "softmax": partial(softmax_ladder, 5, 1500), "norm": partial(norm_ladder, 5, 100),
    "product": partial(product_ladder, 70, 50, 300), "attention": partial(attention_ladder, 2, 150, 32),
    "attention-gradient": partial(attention_gradient_ladder, 2, 150, 32),
}  # fmt: skip
