"""Gradient descent with momentum, plain or Nesterov's."""

from __future__ import annotations

from typing import Any

from shardwise.model.optimizers.definition import BETA, GRADIENT, MASTER, Field, Optimizer, Update, decay_of_matrices


def _sum(v: Any, momentum: Any, gradient: Any, weight: Any) -> Any:
    return v.momentum * momentum + gradient + v.weight_decay * weight


def _step(v: Any, weight: Any, momentum: Any, gradient: Any) -> Any:
    """Nesterov's goes on from where the momentum will have taken the weight."""
    ahead = gradient + v.weight_decay * weight + v.momentum * momentum if v.nesterov else momentum
    return weight - v.learning_rate * ahead


OPTIMIZER = Optimizer(
    fields={
        "momentum": Field(default=0.9, limits=BETA, help="decay of the sum of gradients"),
        "nesterov": Field(
            default=0.0, limits=(0.0, 2.0), help="1: the gradient is added once more, as Nesterov does", whole=True
        ),
        "weight_decay": decay_of_matrices(0.0, "part of a matrix that is added to its gradient"),
    },
    updates={
        "momentum_buffer": Update(("momentum_buffer", GRADIENT, MASTER), _sum),
        MASTER: Update((MASTER, "momentum_buffer'", GRADIENT), _step),
    },
    source="Sutskever et al. 2013, On the importance of initialization and momentum in deep learning; PyTorch, torch.optim.SGD",
)  # fmt: skip
