"""Formulas under PyTorch's autograd, which kernels are compared with, and the size of the largest tensor made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Formula = Callable[..., Tensor]
EXACT = 1e-12
NARROW = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def gradients_of(formula: Formula, operands: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return a formula's result and its gradients by autograd."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    out = formula(*leaves)
    return out.detach(), torch.autograd.grad(out, leaves, dy)


def assert_near(actual: Any, expected: Any, tolerance: float = EXACT) -> None:
    """Require the same shape and format and a small relative error."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    assert float((actual - expected).double().norm()) <= tolerance * float(expected.double().norm())


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        outputs = [value for value in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(value, Tensor)]
        inputs = {value.untyped_storage().data_ptr() for value in args if isinstance(value, Tensor)}
        sizes = [value.numel() for value in outputs if value.untyped_storage().data_ptr() not in inputs]
        self.elements = max([self.elements, *sizes])
        return out
