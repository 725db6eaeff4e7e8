"""The full noise scale is the formula with matrices, of a quadratic and of a small network by autograd."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shardwise.batch_size.hessian_noise import estimate_hessian_noise, quadratic_step
from shardwise.values.errors import InputError

RANDOM = np.random.default_rng(3)
SIZE, EXAMPLES = 12, 64
ROOT = RANDOM.standard_normal((SIZE, SIZE))
HESSIAN = ROOT @ ROOT.T
GRADIENTS = RANDOM.standard_normal(SIZE) + RANDOM.standard_normal((EXAMPLES, SIZE)) @ RANDOM.standard_normal(
    (SIZE, SIZE)
)


def test_the_noise_of_all_examples_equals_the_formula() -> None:
    estimate = estimate_hessian_noise(GRADIENTS, lambda v: HESSIAN @ v, is_population=True)
    exact = quadratic_step(GRADIENTS.mean(axis=0), HESSIAN, np.cov(GRADIENTS.T, bias=True))
    assert estimate.noise_scale == pytest.approx(exact.noise_scale, rel=1e-10)


def test_trace_and_curvature_of_a_sample_are_unbiased() -> None:
    exact = estimate_hessian_noise(GRADIENTS, lambda v: HESSIAN @ v, is_population=True)
    estimates = [
        estimate_hessian_noise(GRADIENTS[RANDOM.integers(EXAMPLES, size=8)], lambda v: HESSIAN @ v) for _ in range(4000)
    ]
    for values, truth in (
        ([estimate.trace for estimate in estimates], exact.trace),
        ([estimate.curvature for estimate in estimates], exact.curvature),
    ):
        assert abs(np.mean(values) - truth) < 3.5 * np.std(values) / np.sqrt(len(values))


def test_the_noise_of_a_network_equals_the_formula() -> None:
    """Gradients of single examples and products with the Hessian by autograd, against the whole Hessian."""
    random = torch.Generator().manual_seed(0)
    point = torch.randn(3 * 5 + 5 * 2, generator=random, dtype=torch.float64)
    inputs = torch.randn(40, 3, generator=random, dtype=torch.float64)
    labels = torch.randint(2, (40,), generator=random)

    def losses(flat: torch.Tensor) -> torch.Tensor:
        first, second = flat[:15].view(3, 5), flat[15:].view(5, 2)
        return torch.nn.functional.cross_entropy((inputs @ first).tanh() @ second, labels, reduction="none")

    def product(v: NDArray[np.float64]) -> NDArray[np.float64]:
        flat = point.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(losses(flat).mean(), flat, create_graph=True)
        return torch.autograd.grad(gradient @ torch.from_numpy(v), flat)[0].numpy()

    gradients = torch.autograd.functional.jacobian(losses, point).numpy()
    estimate = estimate_hessian_noise(gradients, product, is_population=True)
    hessian = torch.autograd.functional.hessian(lambda flat: losses(flat).mean(), point).numpy()
    centred = gradients - gradients.mean(axis=0)
    mean = gradients.mean(axis=0)
    assert estimate.trace == pytest.approx(np.trace(hessian @ centred.T @ centred) / len(gradients), rel=1e-10)
    assert estimate.curvature == pytest.approx(mean @ hessian @ mean, rel=1e-10)


def test_a_single_example_is_refused() -> None:
    with pytest.raises(InputError, match="two examples"):
        estimate_hessian_noise(np.ones((1, 3)), lambda v: v)
