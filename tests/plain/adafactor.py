"""PyTorch's Adafactor over a model: every matrix two-dimensional and by itself, every other parameter as a vector."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from plain.muon import DIMS

TABLES = {"embedding": (0, 1), "position_embedding": (0, 1), "head": (0, 1)}
VALUES = {"beta2_decay": -0.8, "epsilon1": 2.0**-23, "epsilon2": 1e-3, "clip": 1.0, "weight_decay": 0.0}


class Adafactor(torch.optim.Optimizer):
    """Of a model's parameters by name; `vectors`, such as biases of experts, do not decay."""

    def __init__(
        self, named: Mapping[str, torch.nn.Parameter], vectors: Iterable[Any], changes: Mapping[str, float]
    ) -> None:
        super().__init__(list(named.values()), {"lr": 1.0})
        values, plain = {**VALUES, **changes}, {id(vector) for vector in vectors}
        self.parts: list[tuple[torch.Tensor, torch.nn.Parameter, tuple[int, ...], int]] = []
        decays: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
        for name, weight in named.items():
            stack, rows = {**DIMS, **TABLES}.get(name.rpartition(".")[2].removeprefix("block_"), (None, None))
            shape = (
                (1, weight.numel())
                if rows is None
                else (-1, weight.shape[stack:rows].numel(), weight.shape[rows:].numel())
            )
            for place, part in enumerate(weight.detach().view(shape)):
                slice_parameter = torch.nn.Parameter(part)
                self.parts.append((weight, slice_parameter, shape, place))
                decays[id(weight) not in plain].append(slice_parameter)
        groups = [
            {"params": parameters, "weight_decay": values["weight_decay"] if decay else 0.0}
            for decay, parameters in decays.items()
            if parameters
        ]
        self.judge = torch.optim.Adafactor(
            groups, beta2_decay=values["beta2_decay"], eps=(values["epsilon1"], values["epsilon2"]), d=values["clip"],
            foreach=False,
        )  # fmt: skip

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.judge.param_groups:
            group["lr"] = self.param_groups[0]["lr"]
        for weight, slice_parameter, shape, place in self.parts:
            slice_parameter.grad = weight.grad.view(shape)[place].clone()
        self.judge.step()
