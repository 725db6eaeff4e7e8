"""Shampoo a matrix at a time, with eigenvectors, beside AdamW for all else.

Source: Gupta, Koren and Singer 2018, algorithm 1, with averages of Shi et al. 2023 (arXiv 2309.06497) in place of sums. Steps
have a root mean square of 1 (SQRT_N among the graftings of google-research/scalable_shampoo), and are then averaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from plain.muon import Muon


def inverse_root(square: torch.Tensor, damping: float) -> torch.Tensor:
    """Of a symmetric matrix with its norm's share added to the diagonal, to the power of -1/4; of nothing any multiple of 1."""
    if not square.any():
        return torch.eye(len(square), dtype=square.dtype)
    values, vectors = torch.linalg.eigh(square)
    damped = values + damping * torch.linalg.matrix_norm(square)
    return vectors @ torch.diag(damped**-0.25) @ vectors.T


class Shampoo(Muon):
    """Of a model's parameters by name: the matrices of its blocks by Shampoo, all else by AdamW, whose vectors do not decay."""

    def __init__(
        self, named: Mapping[str, torch.nn.Parameter], vectors: Iterable[Any], changes: Mapping[str, float]
    ) -> None:
        super().__init__(named, vectors, {"damping": 1e-4, "precondition_every": 10, **changes})
        self.state_of = dict[tuple[int, int], dict[str, torch.Tensor]]()

    def preconditioned(self, key: tuple[int, int], gradient: torch.Tensor) -> torch.Tensor:
        """One matrix's gradient, with the averages and inverse roots that are kept under a key."""
        state = self.state_of.setdefault(key, {})
        beta = self.values["beta2"]
        for side, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
            average = state.get(side, torch.zeros_like(product)).mul(beta) + product * (1.0 - beta)
            state[side] = average
            if self.num_steps % self.values["precondition_every"] == 1 or self.values["precondition_every"] == 1:
                state[f"{side} root"] = inverse_root(average / (1.0 - beta**self.num_steps), self.values["damping"])
        direction = state["left root"] @ gradient @ state["right root"]
        return direction / direction.square().mean().sqrt() if gradient.any() else direction

    def update(self, rate: float) -> None:
        beta, decay = self.values["beta1"], self.values["weight_decay"]
        for number, (weight, (stack, rows)) in enumerate(self.matrices.items()):
            front = weight.grad.reshape(-1, weight.shape[stack:rows].numel(), weight.shape[rows:].numel())
            directions = torch.stack(
                [self.preconditioned((number, place), matrix) for place, matrix in enumerate(front)]
            )
            average = self.momentum[weight].lerp_(directions.view_as(weight), 1.0 - beta)
            weight.mul_(1.0 - rate * decay).sub_(rate / (1.0 - beta**self.num_steps) * average)
