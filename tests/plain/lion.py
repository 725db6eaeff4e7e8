"""Lion as its paper writes it, a parameter at a time. Source: Chen et al. 2023, program 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """The sign of an interpolation of momentum and gradient, with decoupled decay; the momentum follows."""

    def __init__(self, groups: Any, beta1: float, beta2: float) -> None:
        super().__init__(groups, {"lr": 1.0, "weight_decay": 0.0})
        self.beta1, self.beta2 = beta1, beta2
        self.momentum = {weight: torch.zeros_like(weight) for group in self.param_groups for weight in group["params"]}

    @classmethod
    def of_kinds(cls, kinds: list[Any], changes: Mapping[str, float]) -> Lion:
        """Over matrices, which decay, and all else, with the values that recipes have."""
        values = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, **changes}
        groups = [{"params": kinds[0], "weight_decay": values["weight_decay"]}, {"params": kinds[1]}]
        return cls(groups, values["beta1"], values["beta2"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.momentum[weight]
                update = torch.sign(torch.lerp(weight.grad, momentum, self.beta1))
                weight.sub_(group["lr"] * (update + group["weight_decay"] * weight))
                momentum.lerp_(weight.grad, 1.0 - self.beta2)
