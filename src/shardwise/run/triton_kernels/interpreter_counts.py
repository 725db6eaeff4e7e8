"""Loads, stores, sectors and multiplications of kernels, counted while Triton's interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from triton.runtime.interpreter import InterpreterBuilder

from shardwise.run.triton_kernels.traffic import SECTOR_BYTES, WARP_LANES, Traffic


@dataclass(slots=True)
class WarpCounts:
    """Counts of warps: sectors that their loads touch, and multiplications of their lanes, masked off or not."""

    loaded_sectors: int = 0
    multiplications: int = 0


@contextmanager
def counted_warps() -> Iterator[WarpCounts]:
    """Count sectors and multiplications of kernels that the interpreter runs meanwhile, a lane for each element of a block.

    A warp has 32 neighbouring elements; an element that a whole program shares is one sector.
    """
    counts = WarpCounts()
    masked_load, multiply = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_fmul

    def load(builder: Any, pointers: Any, mask: Any, *arguments: Any, **options: Any) -> Any:
        addresses, loaded = pointers.data.reshape(-1), mask.data.reshape(-1)
        for first in range(0, addresses.size, WARP_LANES):
            warp = addresses[first : first + WARP_LANES][loaded[first : first + WARP_LANES]]
            counts.loaded_sectors += len(set((warp // SECTOR_BYTES).tolist()))
        return masked_load(builder, pointers, mask, *arguments, **options)

    def multiply_lanes(builder: Any, left: Any, right: Any) -> Any:
        counts.multiplications += left.data.size
        return multiply(builder, left, right)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", load),
        patch.object(InterpreterBuilder, "create_fmul", multiply_lanes),
    ):
        yield counts


@contextmanager
def counted_traffic() -> Iterator[Traffic]:
    """Count the loads and stores of kernels that the interpreter runs meanwhile; masked lanes do not count."""
    traffic = Traffic()
    masked_load, masked_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def load(builder: Any, pointers: Any, mask: Any, *arguments: Any, **options: Any) -> Any:
        result = masked_load(builder, pointers, mask, *arguments, **options)
        traffic.loaded_bytes += int(mask.data.sum()) * pointers.dtype.scalar.element_ty.primitive_bitwidth // 8
        return result

    def store(builder: Any, pointers: Any, value: Any, mask: Any, *arguments: Any, **options: Any) -> Any:
        traffic.stored_bytes += int(mask.data.sum()) * pointers.dtype.scalar.element_ty.primitive_bitwidth // 8
        return masked_store(builder, pointers, value, mask, *arguments, **options)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", load),
        patch.object(InterpreterBuilder, "create_masked_store", store),
    ):
        yield traffic
