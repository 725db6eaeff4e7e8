"""Adafactor: the squares of a matrix's gradients are kept as their means over each row and each column."""

from __future__ import annotations

from typing import Any

from shardwise.model.optimizers.definition import (
    GRADIENT,
    MASTER,
    Granularity,
    Hyperparameter,
    Optimizer,
    StateUpdate,
    matrix_weight_decay,
)


def _update_average(v: Any, average: Any, statistic: Any) -> Any:
    """Return an average whose decay begins at 0 and approaches 1."""
    share = v.step**v.beta2_decay
    return (1.0 - share) * average + share * statistic


def _scale_by_factors(v: Any, gradient: Any, rows: Any, columns: Any, mean: Any) -> Any:
    """Divide the gradient by the root of its mean square, which factors into those of its row and its column."""
    return _scale_by_root(v, gradient, rows * columns / mean.clip(v.epsilon1))


def _scale_by_root(v: Any, gradient: Any, squares: Any) -> Any:
    return gradient * squares.clip(v.epsilon1**2) ** -0.5


def _step(v: Any, weight: Any, weight_square: Any, step: Any, step_square: Any) -> Any:
    """Take a step in proportion to the weight's root mean square, clipped where its own is above `clip`."""
    # Algorithm 4: a relative step of at most 1/sqrt(step), times the weight's root mean square (epsilon2 at least).
    size = min(v.learning_rate, v.step**-0.5) * (weight_square**0.5).clip(v.epsilon2)
    clipped = step / (step_square**0.5 / v.clip).clip(1.0)
    return (1.0 - v.learning_rate * v.weight_decay) * weight - size * clipped


def _square(v: Any, tensor: Any) -> Any:
    return tensor * tensor


FIELDS = {
    "beta2_decay": Hyperparameter(
        default=-0.8, limits=(-1e3, 0.0), help="power of the step that is the share of new squares in their averages"
    ),
    "epsilon1": Hyperparameter(  # of float32, which PyTorch takes where none is given
        default=2.0**-23, limits=(0.0, 1.0), help="the least root of an average of squares"
    ),
    "epsilon2": Hyperparameter(default=1e-3, limits=(0.0, 1e3), help="the least root mean square of a weight"),
    "clip": Hyperparameter(default=1.0, limits=(1.0, 1e6), help="root mean square of a step above which it is clipped"),
    "weight_decay": matrix_weight_decay(0.0),
}
WEIGHT_SQUARE = StateUpdate((MASTER,), _square, is_state=False, granularity=Granularity.TENSOR)
STEP_SQUARE = StateUpdate(("step'",), _square, is_state=False, granularity=Granularity.TENSOR)
MASTER_UPDATE = StateUpdate((MASTER, "weight_square'", "step'", "step_square'"), _step)
SOURCE = (
    "Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, algorithms 4 and 5, without "
    "momentum; PyTorch, torch.optim.Adafactor, whose defaults these are"
)
VECTOR_OPTIMIZER = Optimizer(
    fields=FIELDS,
    updates={
        "variance": StateUpdate(
            ("variance", GRADIENT), lambda v, squares, g: _update_average(v, squares, g * g), is_second_moment=True
        ),
        "weight_square": WEIGHT_SQUARE,
        "step": StateUpdate((GRADIENT, "variance'"), _scale_by_root, is_state=False),
        "step_square": STEP_SQUARE,
        MASTER: MASTER_UPDATE,
    },
    source=SOURCE,
)
OPTIMIZER = Optimizer(
    fields=FIELDS,
    updates={
        "row_mean": StateUpdate((GRADIENT,), _square, is_state=False, granularity=Granularity.ROW),
        "col_mean": StateUpdate((GRADIENT,), _square, is_state=False, granularity=Granularity.COLUMN),
        "weight_square": WEIGHT_SQUARE,
        "row_var": StateUpdate(
            ("row_var", "row_mean'"), _update_average, is_second_moment=True, granularity=Granularity.ROW
        ),
        "col_var": StateUpdate(
            ("col_var", "col_mean'"), _update_average, is_second_moment=True, granularity=Granularity.COLUMN
        ),
        "mean_var": StateUpdate(("row_var'",), lambda v, rows: rows, is_state=False, granularity=Granularity.TENSOR),
        "step": StateUpdate((GRADIENT, "row_var'", "col_var'", "mean_var'"), _scale_by_factors, is_state=False),
        "step_square": STEP_SQUARE,
        MASTER: MASTER_UPDATE,
    },
    fallback=VECTOR_OPTIMIZER,
    covers_vocabulary=True,
    source=SOURCE,
)
