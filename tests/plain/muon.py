"""Muon as PyTorch has it, a matrix at a time, beside AdamW for all else.

Source: torch.optim.Muon with match_rms_adamw (Liu et al. 2025, arXiv 2502.16982); its products run in the format of the weights
here, not in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from plain.beside_adamw import BesideAdamW


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps of one matrix."""
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / max(torch.linalg.matrix_norm(x).item(), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    return x.T if tall else x


# Of the matrices of a block by name: how many dims stack them, and where their rows end.
DIMS = {
    "wq": (0, 3), "wk": (0, 2), "wv": (0, 2), "wo": (0, 3), "w_up": (0, 1), "w_gate": (0, 1), "w_down": (0, 1),
    "router": (0, 1), "experts_up": (1, 2), "experts_gate": (1, 2), "experts_down": (1, 2), "shared_up": (0, 1),
    "shared_gate": (0, 1), "shared_down": (0, 1), "w_q_down": (0, 1), "w_q_plain": (0, 3), "w_q_rotary": (0, 3),
    "w_kv_down": (0, 1), "w_k_rotary": (0, 1), "w_k_up": (0, 2), "w_v_up": (0, 2), "pair_projection": (0, 1),
}  # fmt: skip


class Muon(BesideAdamW):
    """Of a model's parameters by name: the matrices of its blocks by Muon, all else by AdamW, whose vectors do not decay."""

    def __init__(
        self, named: Mapping[str, torch.nn.Parameter], vectors: Iterable[Any], changes: Mapping[str, float]
    ) -> None:
        last = {name: name.rpartition(".")[2].removeprefix("block_") for name in named}
        self.matrices = {weight: DIMS[last[name]] for name, weight in named.items() if last[name] in DIMS}
        super().__init__(named.values(), self.matrices, vectors, {"momentum": 0.95, "nesterov": 1.0, **changes})
        self.momentum = {weight: torch.zeros_like(weight) for weight in self.matrices}

    def update(self, rate: float) -> None:
        momentum, decay = self.values["momentum"], self.values["weight_decay"]
        for weight, (stack, rows) in self.matrices.items():
            average = self.momentum[weight].lerp_(weight.grad, 1.0 - momentum)
            ahead = weight.grad.lerp(average, momentum) if self.values["nesterov"] else average
            front = ahead.reshape(-1, ahead.shape[stack:rows].numel(), ahead.shape[rows:].numel())
            directions = torch.stack([orthogonal(matrix) for matrix in front])
            size = 0.2 * max(directions.shape[1:]) ** 0.5
            weight.mul_(1.0 - rate * decay).sub_(rate * size * directions.view_as(weight))
