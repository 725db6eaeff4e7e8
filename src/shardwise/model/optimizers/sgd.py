"""Gradient descent with momentum, plain or Nesterov's."""

from __future__ import annotations

from typing import Any

from shardwise.model.optimizers.definition import (
    DECAY_LIMITS,
    GRADIENT,
    MASTER,
    Hyperparameter,
    Optimizer,
    StateUpdate,
    matrix_weight_decay,
)


def _accumulate(v: Any, momentum: Any, gradient: Any, weight: Any) -> Any:
    return v.momentum * momentum + gradient + v.weight_decay * weight


def _step(v: Any, weight: Any, momentum: Any, gradient: Any) -> Any:
    """Take a step. Nesterov's uses the gradient as if the momentum had already moved the weight."""
    ahead = gradient + v.weight_decay * weight + v.momentum * momentum if v.nesterov else momentum
    return weight - v.learning_rate * ahead


OPTIMIZER = Optimizer(
    fields={
        "momentum": Hyperparameter(default=0.9, limits=DECAY_LIMITS, help="decay of the sum of gradients"),
        "nesterov": Hyperparameter(
            default=0.0, limits=(0.0, 2.0), help="1: the gradient is added once more, as Nesterov does", integer_only=True
        ),
        "weight_decay": matrix_weight_decay(0.0, "part of a matrix that is added to its gradient"),
    },
    updates={
        "momentum_buffer": StateUpdate(("momentum_buffer", GRADIENT, MASTER), _accumulate),
        MASTER: StateUpdate((MASTER, "momentum_buffer'", GRADIENT), _step),
    },
    source="Sutskever et al. 2013, On the importance of initialization and momentum in deep learning; PyTorch, torch.optim.SGD",
)  # fmt: skip
