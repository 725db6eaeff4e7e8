"""The choice between kernels of attention: the fastest whose results agree with the reference's, and the reference otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.run.kernels.attention_backends import (
    FLASH,
    AttentionBackend,
    BackwardInputs,
    choose_backend,
    fastest_agreeing,
    fused_backward,
    fused_forward,
)

Gradients = tuple[Tensor, Tensor, Tensor]


def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return fused_forward(query, key, value, None, scale, causal=causal)


def backward(inputs: BackwardInputs, causal: bool, scale: float) -> Gradients:
    return fused_backward(inputs, None, scale, causal=causal)


def wrong_gradient(inputs: BackwardInputs, causal: bool, scale: float) -> Gradients:
    dq, dk, dv = backward(inputs, causal, scale)
    return dq, dk * 1.1, dv


def other_logarithm(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = forward(query, key, value, causal, scale)
    return out, lse / torch.log(torch.tensor(2.0))


def refuse_kernel(*_: Any) -> tuple[Tensor, Tensor]:
    raise RuntimeError("no kernel for this head")


def nan_forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = forward(query, key, value, causal, scale)
    return out * float("nan"), lse


REFERENCE = AttentionBackend("reference", forward, backward)
SAME = AttentionBackend("same", forward, backward)


def make_clock(seconds: dict[str, float]) -> Callable[[Callable[[], Any]], float]:
    """Return a clock for backends in the order in which they run: the reference three times, then each rival that agrees."""
    turns = iter([*[seconds["reference"]] * 3, *[seconds["rival"]] * 3])

    def elapsed_s(function: Callable[[], Any]) -> float:
        function()
        return next(turns)

    return elapsed_s


def choose(rival: AttentionBackend, seconds: float, *, causal: bool = True) -> str:
    generator = torch.Generator().manual_seed(3)
    shapes = (1, 4, 33, 16), (1, 2, 33, 16), (1, 2, 33, 16)
    q, k, v = (torch.randn(shape, generator=generator).repeat_interleave(1, 1) for shape in shapes)
    k, v = (tensor.repeat_interleave(2, dim=1) for tensor in (k, v))  # CPUs have no grouped kernel
    return fastest_agreeing(REFERENCE, [rival], q, k, v, causal, make_clock({"reference": 1.0, "rival": seconds})).name


@pytest.mark.parametrize("causal", [True, False])
def test_a_faster_kernel_that_agrees_is_taken(causal: bool) -> None:
    assert choose(SAME, 0.5, causal=causal) == "same"


def test_a_gain_within_noise_changes_nothing() -> None:
    assert choose(SAME, 0.97) == "reference"


@pytest.mark.parametrize(
    "rival",
    [
        AttentionBackend("wrong gradient", forward, wrong_gradient),
        AttentionBackend("other logarithm", other_logarithm, backward),
        AttentionBackend("refusing", refuse_kernel, backward),
        AttentionBackend("not finite", nan_forward, backward),
    ],
)
def test_a_kernel_that_differs_or_raises_is_never_taken(rival: AttentionBackend) -> None:
    assert choose(rival, 0.01) == "reference"


def test_without_a_gpu_nothing_is_measured() -> None:
    query = torch.empty(1, 2, 8, 16)
    assert choose_backend(query, query, causal=True) is FLASH
