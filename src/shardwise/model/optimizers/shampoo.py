"""Shampoo: a matrix's gradient is multiplied from both sides by inverse roots of averages of its rows' and columns' products."""

from __future__ import annotations

from typing import Any

from shardwise.model.optimizers.adamw import OPTIMIZER as ADAMW
from shardwise.model.optimizers.definition import (
    DECAY_LIMITS,
    GRADIENT,
    MASTER,
    Granularity,
    Hyperparameter,
    Optimizer,
    StateUpdate,
    matrix_weight_decay,
)
from shardwise.values import Polynomial

# A side of more rows, or columns, is left as it is. Source: Vyas et al. 2024, SOAP, whose implementation has `max_precond_dim`.
MAX_PRECONDITIONED_SIDE = 10_000
# Steps from one inverse root to the next. Source: Vyas et al. 2024, SOAP, section 6: preconditioning frequency.
ROOT_INTERVAL = 10
ROOT_POWER = 4  # of the inverse root for each of two sides. Source: Gupta et al. 2018, algorithm 1: exponents of -1/4
# Steps of a coupled Newton iteration. Each brings what is far below 1 nearer to it by (1 + 1/4)^4 = 2.4, and near 1 squares what
# is missing: from a damping of 1e-5 to 1 / 2.5 it takes 12, and 6 from there to double precision.
NEWTON_ITERATIONS = 20
PRODUCTS_PER_ITERATION = 4  # of each step
MIN_NORM = 1e-30  # of norms: what no gradient has reached is left as it is


def _identity(square: Any) -> Any:
    """Return an identity matrix of a square's size, from arithmetic that NumPy and PyTorch share: 1 where row equals column."""
    ones = square * 0.0 + 1.0
    return (ones.cumsum(-1) == ones.cumsum(-2)) * ones


def _inverse_root(damping: float, square: Any) -> Any:
    """Return the inverse fourth root of each symmetric square, with `damping` of its norm added to the diagonal.

    A coupled Newton iteration: `root` converges to the inverse root while `residual` converges to the identity. All factors
    are polynomials of one matrix, so they commute and every product is symmetric.
    """
    identity = _identity(square)
    norms = ((square * square).sum(axis=(-2, -1), keepdims=True) ** 0.5).clip(MIN_NORM)
    damped = square / norms + damping * identity  # its eigenvalues are between `damping` and 1 + `damping`
    scale = (ROOT_POWER + 1) / (2.0 * (1.0 + damping))
    residual, root = scale * damped, (scale / norms) ** (1.0 / ROOT_POWER) * identity
    for _ in range(NEWTON_ITERATIONS):
        correction = ((ROOT_POWER + 1) * identity - residual) / ROOT_POWER
        squared = correction @ correction
        root, residual = root @ correction, squared @ squared @ residual
    return root


def _update_average(v: Any, average: Any, statistic: Any) -> Any:
    return v.beta2 * average + (1.0 - v.beta2) * statistic


def _update_left(v: Any, average: Any, matrices: Any) -> Any:
    return _update_average(v, average, matrices @ matrices.mT) if average.shape[-1] else average


def _update_right(v: Any, average: Any, matrices: Any) -> Any:
    return _update_average(v, average, matrices.mT @ matrices) if average.shape[-1] else average


def _update_root(v: Any, root: Any, average: Any) -> Any:
    """Return the inverse root as it is, or, in the first of each `precondition_every` steps, a new one."""
    is_due = (v.step - 1) % v.precondition_every == 0 and average.shape[-1] > 0
    return _inverse_root(v.damping, average / (1.0 - v.beta2**v.step)) if is_due else root


def _precondition(v: Any, matrices: Any, left: Any, right: Any) -> Any:
    """Return the gradient between the inverse roots of both sides, scaled to a root mean square of 1."""
    preconditioned = left @ matrices if left.shape[-1] else matrices
    preconditioned = preconditioned @ right if right.shape[-1] else preconditioned
    return preconditioned / ((preconditioned * preconditioned).mean(axis=(-2, -1), keepdims=True) ** 0.5).clip(MIN_NORM)


def _step(v: Any, weight: Any, average: Any) -> Any:
    return weight - v.learning_rate * (average / (1.0 - v.beta1**v.step) + v.weight_decay * weight)


OPTIMIZER = Optimizer(
    fields={
        "beta1": Hyperparameter(default=0.9, limits=DECAY_LIMITS, help="decay of the average of preconditioned gradients"),
        "beta2": Hyperparameter(default=0.95, limits=DECAY_LIMITS, help="decay of the averages of products of gradients"),
        "damping": Hyperparameter(
            default=1e-4, limits=(1e-5, 1.0), help="share of a side's norm that is added to its diagonal before the root"
        ),
        "precondition_every": Hyperparameter(
            default=float(ROOT_INTERVAL), limits=(1.0, 1e6), help="steps from one inverse root to the next", integer_only=True
        ),
        "epsilon": ADAMW.fields["epsilon"],
        "weight_decay": matrix_weight_decay(0.1),
    },
    updates={
        "direction": StateUpdate((GRADIENT,), lambda v, gradient: gradient, is_state=False),
        "left": StateUpdate(
            ("left", "direction'"), _update_left, is_second_moment=True, takes_whole_matrix=True,
            granularity=Granularity.ROW_PAIR,
            flops=lambda sizes: sizes.row_pairs * sizes.columns * 2.0,
            workspace=lambda sizes: sizes.rows * sizes.columns + sizes.row_pairs * 2.0,
        ),
        "right": StateUpdate(
            ("right", "direction'"), _update_right, is_second_moment=True, takes_whole_matrix=True,
            granularity=Granularity.COLUMN_PAIR,
            flops=lambda sizes: sizes.column_pairs * sizes.rows * 2.0,
            workspace=lambda sizes: sizes.rows * sizes.columns + sizes.column_pairs * 2.0,
        ),
        "left_root": StateUpdate(
            ("left_root", "left'"), _update_root, is_second_moment=True, takes_whole_matrix=True,
            granularity=Granularity.ROW_PAIR,
            flops=lambda sizes: _root_flops(sizes.row_pairs, sizes.rows), workspace=lambda sizes: sizes.row_pairs * 6.0,
        ),
        "right_root": StateUpdate(
            ("right_root", "right'"), _update_root, is_second_moment=True, takes_whole_matrix=True,
            granularity=Granularity.COLUMN_PAIR,
            flops=lambda sizes: _root_flops(sizes.column_pairs, sizes.columns), workspace=lambda sizes: sizes.column_pairs * 6.0,
        ),
        "preconditioned": StateUpdate(
            ("direction'", "left_root'", "right_root'"), _precondition, is_state=False, takes_whole_matrix=True,
            flops=lambda sizes: sizes.row_pairs * sizes.columns * 2.0 + sizes.column_pairs * sizes.rows * 2.0,
            workspace=lambda sizes: sizes.rows * sizes.columns * 3.0,
        ),
        "exp_avg": StateUpdate(
            ("exp_avg", "preconditioned'"), lambda v, average, direction: v.beta1 * average + (1.0 - v.beta1) * direction
        ),
        MASTER: StateUpdate((MASTER, "exp_avg'"), _step),
    },
    fallback=ADAMW,
    max_preconditioned_side=MAX_PRECONDITIONED_SIDE,
    source="Gupta, Koren and Singer 2018, Shampoo: Preconditioned Stochastic Tensor Optimization, with averages in place of sums "
    "and bias correction as in Shi et al. 2023 (arXiv 2309.06497); steps of one size, SQRT_N among the graftings of Anil et al. "
    "2020 (arXiv 2002.09018); the rest by AdamW",
)  # fmt: skip


def _root_flops(pairs: Polynomial, side: Polynomial) -> Polynomial:
    """Return the FLOPs of the iteration, as a mean over the steps that use its result by default."""
    return pairs * side * (2.0 * PRODUCTS_PER_ITERATION * NEWTON_ITERATIONS / ROOT_INTERVAL)
