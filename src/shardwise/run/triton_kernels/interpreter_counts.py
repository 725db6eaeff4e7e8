"""Loads and stores of kernels, counted while Triton's interpreter runs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.runtime.interpreter import InterpreterBuilder

from shardwise.run.triton_kernels.traffic import Traffic


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
