"""Muon: of a matrix the nearest orthogonal one to its momentum is the step, whatever the size of its gradients."""

from __future__ import annotations

from typing import Any

from shardwise.model.optimizers.adamw import OPTIMIZER as ADAMW
from shardwise.model.optimizers.definition import (
    BETA,
    GRADIENT,
    MASTER,
    Field,
    MatrixSizes,
    Optimizer,
    Update,
    decay_of_matrices,
)
from shardwise.values.symbolic import Polynomial

# Of a Newton-Schulz step X -> aX + (bA + cA²)X with A = XXᵀ. Source: Jordan et al. 2024, "Muon", and torch.optim.Muon.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST_NORM = 1e-7  # torch.optim.Muon, eps
# The root mean square of AdamW's steps. Source: Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2.
RMS_OF_ADAMW = 0.2


def _ahead(v: Any, gradient: Any, momentum: Any) -> Any:
    """Nesterov's momentum: the average as it will be if the next gradient is the same."""
    return (1.0 - v.momentum) * gradient + v.momentum * momentum if v.nesterov else momentum


def _orthogonal(v: Any, matrices: Any) -> Any:
    """Of each matrix [..., rows, columns] U·Vᵀ of its singular value decomposition, by about as much as the coefficients allow,
    times what gives its elements the root mean square of AdamW's steps."""
    rows, columns = matrices.shape[-2:]
    x = matrices if rows <= columns else matrices.mT
    norms = (x * x).sum(axis=(-2, -1), keepdims=True) ** 0.5
    x = x / norms.clip(SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x if rows <= columns else x.mT) * (RMS_OF_ADAMW * max(rows, columns) ** 0.5)


def _flops(of: MatrixSizes) -> Polynomial:
    """Each step has three products: X·Xᵀ, its square, and with X, whose rows are the fewer."""
    return (of.least * of.rows * of.columns * 4.0 + of.least * of.least * of.least * 2.0) * float(STEPS)


def _passing(of: MatrixSizes) -> Polynomial:
    """The matrix, its multiple and a product's result; two squares of the fewer of rows and columns."""
    return of.rows * of.columns * 3.0 + of.least * of.least * 2.0


OPTIMIZER = Optimizer(
    fields={
        "momentum": Field(default=0.95, limits=BETA, help="decay of the average of a matrix's gradients"),
        "nesterov": Field(
            default=1.0, limits=(0.0, 2.0), help="1: the gradient is averaged in once more, as Nesterov does", whole=True
        ),
        **ADAMW.fields,
        "weight_decay": decay_of_matrices(0.1),
    },
    updates={
        "momentum_buffer": Update(
            ("momentum_buffer", GRADIENT), lambda v, momentum, g: v.momentum * momentum + (1.0 - v.momentum) * g
        ),
        "direction": Update((GRADIENT, "momentum_buffer'"), _ahead, kept=False),
        "orthogonal": Update(("direction'",), _orthogonal, kept=False, whole=True, flops=_flops, passing=_passing),
        MASTER: Update(
            (MASTER, "orthogonal'"), lambda v, weight, step: weight - v.learning_rate * (step + v.weight_decay * weight)
        ),
    },
    others=ADAMW,
    source="Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; steps of AdamW's size and decay as in "
    "Liu et al. 2025, Muon is Scalable for LLM Training; torch.optim.Muon with match_rms_adamw; the rest by AdamW, as there",
)  # fmt: skip
