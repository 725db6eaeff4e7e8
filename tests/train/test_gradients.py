"""Functions with backward passes of their own: against finite differences, and against PyTorch's in narrow formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.data.batches import IGNORED
from shardwise.train.model.functions import GATED_ACTIVATIONS, activate
from shardwise.train.model.gradients import Dispatch, HeadLoss, Reorder, RMSNorm, applied

TARGETS = torch.tensor([3, IGNORED, 0, 6, 3])
ORDER = torch.tensor([4, 0, 5, 2, 1, 3])
Made = Callable[..., Tensor]


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (lambda x, weight: applied(HeadLoss, x, weight, TARGETS, None, 1.0), [(5, 4), (7, 4)]),
        (lambda x, weight: applied(HeadLoss, x, weight, TARGETS, 1.5, 1 / 3) / 2, [(5, 4), (7, 4)]),
        (lambda x, weight: applied(RMSNorm, x, weight, 1e-5), [(2, 3, 4), (4,)]),
        (lambda x, weight: applied(RMSNorm, x, weight, 1e-5), [(2, 3, 2, 4), (2, 4)]),
        (lambda y: applied(Dispatch, y, ORDER, ORDER.argsort(), 2), [(3, 4)]),
        (lambda rows: applied(Reorder, rows, ORDER.argsort(), ORDER), [(6, 4)]),
        *((lambda gate, up, kind=kind: activate(kind, gate, up), [(3, 4), (3, 4)]) for kind in GATED_ACTIVATIONS),
        (lambda gate, up: activate("swiglu", gate, up), [(3, 4), (3, 4)]),
    ],
)
def test_gradients_are_those_of_finite_differences(function: Made, shapes: list[tuple[int, ...]]) -> None:
    operands = tuple(random(*shape, seed=seed) for seed, shape in enumerate(shapes))
    assert torch.autograd.gradcheck(function, operands)


def both(function: Made, reference: Made, *operands: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Results and gradients of the two, side by side."""
    found: list[list[Any]] = []
    for one in (function, reference):
        own = [operand.detach().clone().requires_grad_() for operand in operands]
        out = one(*own)
        out.float().square().sum().backward()
        found.append([out, *(operand.grad for operand in own)])
    return list(zip(*found, strict=True))


NARROW = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 1e-2)])


def assert_alike(pairs: list[tuple[Tensor, Tensor]], tolerance: float) -> None:
    for found, wanted in pairs:
        assert found.dtype == wanted.dtype
        assert (found - wanted).float().norm() <= tolerance * wanted.float().norm()


@NARROW
def test_norm_and_activation_are_pytorchs(dtype: torch.dtype, tolerance: float) -> None:
    x, weight, up = random(6, 8, dtype=dtype), random(8, dtype=dtype, seed=1), random(6, 8, dtype=dtype, seed=2)
    pairs = both(lambda x, w: applied(RMSNorm, x, w, 1e-5), lambda x, w: F.rms_norm(x, (8,), w, 1e-5), x, weight)
    pairs += both(lambda g, u: activate("swiglu", g, u), lambda g, u: F.silu(g) * u, x, up)
    assert_alike(pairs, tolerance)


@NARROW
def test_loss_in_parts_is_cross_entropy(dtype: torch.dtype, tolerance: float) -> None:
    """More rows than a part has, the last part shorter."""
    x, weight = random(301, 8, dtype=dtype), random(2000, 8, dtype=dtype, seed=1)
    targets = torch.randint(2000, (301,), generator=torch.Generator().manual_seed(2))
    targets[5:9] = IGNORED

    def reference(x: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight).float(), targets, ignore_index=IGNORED, reduction="sum") / 300

    pairs = both(lambda x, w: applied(HeadLoss, x, w, targets, None, 1 / 300), reference, x, weight)
    assert_alike(pairs, tolerance)


def test_a_loss_without_gradients_leaves_none() -> None:
    x, weight = random(5, 4), random(7, 4, seed=1)
    with torch.no_grad():
        loss = applied(HeadLoss, x, weight, TARGETS, None, 1.0)
    assert loss.grad_fn is None
    torch.testing.assert_close(loss, applied(HeadLoss, x, weight, TARGETS, None, 1.0).detach(), rtol=1e-14, atol=0)


def test_a_loss_over_many_targets_scales_its_gradient_in_float32() -> None:
    """1/3000 is no number of bf16: rounded to one, it would make the whole gradient 0.15% too large."""
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((3000, 16), (40, 16)))
    targets = torch.randint(40, (3000,), generator=generator)
    found = {}
    for dtype in (torch.float64, torch.bfloat16):
        own = weight.to(torch.bfloat16).to(dtype).requires_grad_()
        applied(HeadLoss, x.to(torch.bfloat16).to(dtype), own, targets, None, 1 / 3000).backward()
        assert own.grad is not None
        found[dtype] = own.grad.double().flatten()
    exact = found[torch.float64]
    assert torch.dot(found[torch.bfloat16], exact) / torch.dot(exact, exact) == pytest.approx(1.0, abs=5e-4)
