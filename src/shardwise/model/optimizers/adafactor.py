"""Adafactor: the squares of a matrix's gradients are kept as their means over each row and each column."""

from __future__ import annotations

from typing import Any

from shardwise.model.optimizers.definition import GRADIENT, MASTER, Field, Optimizer, Per, Update, decay_of_matrices


def _averaged(v: Any, average: Any, found: Any) -> Any:
    """An average whose decay begins at 0 and comes to 1."""
    share = v.step**v.beta2_decay
    return (1.0 - share) * average + share * found


def _factored(v: Any, gradient: Any, rows: Any, columns: Any, mean: Any) -> Any:
    """The gradient by the root of its average square, for which stands the product of those of its row and its column."""
    return _scaled(v, gradient, rows * columns / mean.clip(v.epsilon1))


def _scaled(v: Any, gradient: Any, squares: Any) -> Any:
    return gradient * squares.clip(v.epsilon1**2) ** -0.5


def _step(v: Any, weight: Any, weight_square: Any, step: Any, step_square: Any) -> Any:
    """A step as large as the weight's root mean square allows, clipped where its own is above `clip`."""
    size = min(v.learning_rate, v.step**-0.5) * (weight_square**0.5).clip(v.epsilon2)
    clipped = step / (step_square**0.5 / v.clip).clip(1.0)
    return (1.0 - v.learning_rate * v.weight_decay) * weight - size * clipped


def _square(v: Any, found: Any) -> Any:
    return found * found


FIELDS = {
    "beta2_decay": Field(
        default=-0.8, limits=(-1e3, 0.0), help="power of the step that is the share of new squares in their averages"
    ),
    "epsilon1": Field(  # of float32, which PyTorch takes where none is given
        default=2.0**-23, limits=(0.0, 1.0), help="the least root of an average of squares"
    ),
    "epsilon2": Field(default=1e-3, limits=(0.0, 1e3), help="the least root mean square of a weight"),
    "clip": Field(default=1.0, limits=(1.0, 1e6), help="root mean square of a step above which it is clipped"),
    "weight_decay": decay_of_matrices(0.0),
}
WEIGHT_SQUARE = Update((MASTER,), _square, kept=False, per=Per.TENSOR)
STEP_SQUARE = Update(("step'",), _square, kept=False, per=Per.TENSOR)
MASTER_UPDATE = Update((MASTER, "weight_square'", "step'", "step_square'"), _step)
SOURCE = (
    "Shazeer and Stern 2018, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, algorithms 4 and 5, without "
    "momentum; PyTorch, torch.optim.Adafactor, whose defaults these are"
)
VECTORS = Optimizer(
    fields=FIELDS,
    updates={
        "variance": Update(("variance", GRADIENT), lambda v, squares, g: _averaged(v, squares, g * g), of_squares=True),
        "weight_square": WEIGHT_SQUARE,
        "step": Update((GRADIENT, "variance'"), _scaled, kept=False),
        "step_square": STEP_SQUARE,
        MASTER: MASTER_UPDATE,
    },
    source=SOURCE,
)
OPTIMIZER = Optimizer(
    fields=FIELDS,
    updates={
        "row_mean": Update((GRADIENT,), _square, kept=False, per=Per.ROW),
        "col_mean": Update((GRADIENT,), _square, kept=False, per=Per.COLUMN),
        "weight_square": WEIGHT_SQUARE,
        "row_var": Update(("row_var", "row_mean'"), _averaged, of_squares=True, per=Per.ROW),
        "col_var": Update(("col_var", "col_mean'"), _averaged, of_squares=True, per=Per.COLUMN),
        "mean_var": Update(("row_var'",), lambda v, rows: rows, kept=False, per=Per.TENSOR),
        "step": Update((GRADIENT, "row_var'", "col_var'", "mean_var'"), _factored, kept=False),
        "step_square": STEP_SQUARE,
        MASTER: MASTER_UPDATE,
    },
    others=VECTORS,
    tables=True,
    source=SOURCE,
)
