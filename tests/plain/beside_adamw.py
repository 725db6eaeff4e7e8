"""An optimizer of some parameters that a test writes out, beside PyTorch's AdamW for all others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch


class BesideAdamW(torch.optim.Optimizer, ABC):
    """`own` are updated by `update(rate)`, which subclasses have; those of all `named` parameters that are left by AdamW,
    `vectors` without decay. `values` are those of recipes."""

    def __init__(
        self, named: Iterable[Any], updated: Iterable[Any], vectors: Iterable[Any], values: Mapping[str, float]
    ) -> None:
        self.values = {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1, **values}
        updated, plain = list(updated), {id(vector) for vector in vectors}
        known, adamw_parameters = {id(weight) for weight in updated}, ([], [])
        for weight in named:
            if id(weight) not in known:
                adamw_parameters[id(weight) in plain].append(weight)
        decays = self.values["weight_decay"], 0.0
        groups = [
            {"params": parameters, "weight_decay": decay}
            for parameters, decay in zip(adamw_parameters, decays, strict=True)
            if parameters
        ]
        betas = self.values["beta1"], self.values["beta2"]
        self.adamw = torch.optim.AdamW(groups, betas=betas, eps=self.values["epsilon"]) if groups else None
        super().__init__(updated, {"lr": 1.0})
        self.num_steps = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.adamw is not None:
            self.adamw.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        rate = self.param_groups[0]["lr"]
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        self.num_steps += 1
        self.update(rate)

    @abstractmethod
    def update(self, rate: float) -> None:
        """One step of those that are its own."""
