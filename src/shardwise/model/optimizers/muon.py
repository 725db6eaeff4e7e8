"""Muon: the step is the orthogonal matrix nearest to a matrix's momentum, whatever the size of its gradients."""

from __future__ import annotations

from typing import Any

from shardwise.model.optimizers.adamw import OPTIMIZER as ADAMW
from shardwise.model.optimizers.definition import (
    DECAY_LIMITS,
    GRADIENT,
    MASTER,
    Hyperparameter,
    MatrixSizes,
    Optimizer,
    StateUpdate,
    matrix_weight_decay,
)
from shardwise.values import Polynomial

# Of a Newton-Schulz step X -> aX + (bA + cA²)X with A = XXᵀ. Source: Jordan et al. 2024, "Muon", and torch.optim.Muon.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
MIN_NORM = 1e-7  # torch.optim.Muon, eps
# The root mean square of AdamW's steps. Source: Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.2.
ADAMW_STEP_RMS = 0.2


def _nesterov_momentum(v: Any, gradient: Any, momentum: Any) -> Any:
    """Return Nesterov's momentum: the average as it will be if the next gradient is the same."""
    return (1.0 - v.momentum) * gradient + v.momentum * momentum if v.nesterov else momentum


def _orthogonalize(v: Any, matrices: Any) -> Any:
    """Return U·Vᵀ of the singular value decomposition of each matrix [..., rows, columns], scaled to AdamW's steps.
    Newton-Schulz steps bring the singular values near 1, not to it; the root mean square of elements is then that of AdamW's
    steps."""
    rows, columns = matrices.shape[-2:]
    x = matrices if rows <= columns else matrices.mT
    norms = (x * x).sum(axis=(-2, -1), keepdims=True) ** 0.5
    x = x / norms.clip(MIN_NORM)
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x if rows <= columns else x.mT) * (ADAMW_STEP_RMS * max(rows, columns) ** 0.5)


def _flops(sizes: MatrixSizes) -> Polynomial:
    """Return the FLOPs of a matrix. Each step has three products: X·Xᵀ, its square, and with X, whose rows are the fewer."""
    return (sizes.least * sizes.rows * sizes.columns * 4.0 + sizes.least * sizes.least * sizes.least * 2.0) * float(
        NEWTON_SCHULZ_STEPS
    )


def _workspace(sizes: MatrixSizes) -> Polynomial:
    """Return the elements of the matrix, its multiple and a product's result, and of two squares of the shorter side."""
    return sizes.rows * sizes.columns * 3.0 + sizes.least * sizes.least * 2.0


OPTIMIZER = Optimizer(
    fields={
        "momentum": Hyperparameter(default=0.95, limits=DECAY_LIMITS, help="decay of the average of a matrix's gradients"),
        "nesterov": Hyperparameter(
            default=1.0, limits=(0.0, 2.0), help="1: the gradient is averaged in once more, as Nesterov does", integer_only=True
        ),
        **ADAMW.fields,
        "weight_decay": matrix_weight_decay(0.1),
    },
    updates={
        "momentum_buffer": StateUpdate(
            ("momentum_buffer", GRADIENT), lambda v, momentum, g: v.momentum * momentum + (1.0 - v.momentum) * g
        ),
        "direction": StateUpdate((GRADIENT, "momentum_buffer'"), _nesterov_momentum, is_state=False),
        "orthogonal": StateUpdate(
            ("direction'",), _orthogonalize, is_state=False, takes_whole_matrix=True, flops=_flops, workspace=_workspace
        ),
        MASTER: StateUpdate(
            (MASTER, "orthogonal'"), lambda v, weight, step: weight - v.learning_rate * (step + v.weight_decay * weight)
        ),
    },
    fallback=ADAMW,
    source="Jordan et al. 2024, Muon: An optimizer for hidden layers in neural networks; steps of AdamW's size and decay as in "
    "Liu et al. 2025, Muon is Scalable for LLM Training; torch.optim.Muon with match_rms_adamw; the rest by AdamW, as there",
)  # fmt: skip
