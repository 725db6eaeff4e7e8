"""A ladder of casts: a gated activation as operand of a product in MXFP8 and, in the other order, of its weight's gradient.

Source of the format: OCP Microscaling Formats 1.0, sections 5.3.1 and 6.3: E4M3, and a power of two for 32 elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from shardwise.measure.kernel_ladders.ladder import ITEM_BYTES, Ladder, Rung
from shardwise.run.triton_kernels.traffic import (
    FormSizes,
    block_cast_traffic,
    gated_activation_traffic,
    gated_forms_traffic,
)
from shardwise.values.dtypes import NUMBER_FORMATS
from shardwise.values.scalings import SCALINGS

ACTIVATION = "gated_relu2"  # of powers of two it gives powers of two, which no cast has to round
MX = SCALINGS["mx"]
WIDTH, SCALE_BYTES = 32, 1  # elements of a block, and bytes of an E8M0 scale
LARGEST_EXPONENT = math.floor(math.log2(NUMBER_FORMATS["e4m3"].max))


def gated_cast_ladder(rows: int = 16384, width: int = 8192) -> Ladder:
    """Return max(gate, 0)² · up of `rows` x `width` in MXFP8, in both orders: a kernel for each step, one cast for both orders,
    and casts in the kernel of the activation."""
    gated = gated_activation_traffic(rows * width, ITEM_BYTES, backward=False)
    by_rows = block_cast_traffic(rows, width, ITEM_BYTES, (1, WIDTH), SCALE_BYTES, has_transposed=False)
    by_columns = block_cast_traffic(width, rows, ITEM_BYTES, (1, WIDTH), SCALE_BYTES, has_transposed=False)
    stored = FormSizes(plain=False, rows=True, columns=True, block=WIDTH, scale_bytes=SCALE_BYTES)
    fused = gated_forms_traffic(rows, width, ITEM_BYTES, stored, backward=False)

    return Ladder(
        name="gated-cast", title="a gated activation cast for products", sizes=f"{rows:,} tokens of {width:,}, MXFP8",
        flops=3.0 * rows * width, least_bytes=fused.loaded_bytes + fused.stored_bytes, make_operands=_powers_of_two(rows, width),
        reference=_reference,
        rungs=(
            Rung(name="a cast for each order", lesson="written in 16 bits, and read again for rows and for columns",
                 run=_cast_apart, loaded_bytes=gated.loaded_bytes + by_rows.loaded_bytes + by_columns.loaded_bytes,
                 stored_bytes=gated.stored_bytes + by_rows.stored_bytes + by_columns.stored_bytes, num_launches=3),
            Rung(name="one cast for both orders", lesson="a tile in registers is cast by its rows and by its columns",
                 run=_cast_together, loaded_bytes=gated.loaded_bytes + by_rows.loaded_bytes,
                 stored_bytes=gated.stored_bytes + by_rows.stored_bytes + by_columns.stored_bytes, num_launches=2),
            Rung(name="casts in the activation", lesson="the tile is cast where it is made, and never written in 16 bits",
                 run=_cast_in_activation, loaded_bytes=fused.loaded_bytes, stored_bytes=fused.stored_bytes),
        ),
    )  # fmt: skip


def _powers_of_two(rows: int, width: int) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that makes gate and up of ±2^-2 to ±2^2, in bf16 on a GPU and in fp16 elsewhere."""

    def make(device: str) -> tuple[Any, ...]:
        import torch

        dtype, generator = torch.bfloat16 if device == "cuda" else torch.float16, torch.Generator().manual_seed(0)
        exponents, signs = (
            torch.randint(*bounds, (2, rows, width), generator=generator) for bounds in ((-2, 3), (0, 2))
        )
        operands = (1.0 - 2.0 * signs) * torch.exp2(exponents.float())
        return tuple(operands.to(device, dtype))

    return make


def _reference(gate: Any, up: Any) -> Any:
    """Return the elements of rows and of columns in float64, which a power of two for each block has scaled."""
    import torch

    values = gate.double().clamp(min=0.0).square() * up.double()

    def scale(matrix: Any) -> Any:
        padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % WIDTH)).unflatten(1, (-1, WIDTH))
        exponents = torch.log2(padded.abs().amax(dim=2, keepdim=True)).floor() - LARGEST_EXPONENT
        return (padded * torch.exp2(-exponents)).nan_to_num(0.0).flatten(1)[:, : matrix.shape[1]]

    return scale(values), scale(values.t())


def _cast_apart(gate: Any, up: Any) -> Any:
    from shardwise.run.triton_kernels.gated_activation import gated_forward

    result = gated_forward(ACTIVATION, gate, up)
    return tuple(_cast(matrix)[0][0] for matrix in (result, result.t()))


def _cast_together(gate: Any, up: Any) -> Any:
    from shardwise.run.triton_kernels.gated_activation import gated_forward

    (rows, _), turned = _cast(gated_forward(ACTIVATION, gate, up), with_transposed=True)
    return rows, turned[0]


def _cast(matrix: Any, *, with_transposed: bool = False) -> Any:
    import torch

    from shardwise.run.triton_kernels.block_casts import cast_blocks

    return cast_blocks(matrix, torch.float8_e4m3fn, MX.block, MX.kind, with_transposed=with_transposed)


def _cast_in_activation(gate: Any, up: Any) -> Any:
    import torch

    from shardwise.run.triton_kernels.fused_casts import CastOptions, gated_forms

    options = CastOptions(torch.float8_e4m3fn, MX.block, MX.kind, plain=False, rows=True, columns=True)
    forms = gated_forms(ACTIVATION, gate, up, tuple(gate.shape), options)
    return forms.rows[0], forms.columns[0]
