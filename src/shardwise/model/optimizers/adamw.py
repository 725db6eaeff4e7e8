"""AdamW: averages of gradients and of their squares, and decay apart from both."""

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


def _step(v: Any, weight: Any, average: Any, squares: Any) -> Any:
    corrected = average / (1.0 - v.beta1**v.step), squares / (1.0 - v.beta2**v.step)
    return weight - v.learning_rate * (corrected[0] / (corrected[1] ** 0.5 + v.epsilon) + v.weight_decay * weight)


OPTIMIZER = Optimizer(
    fields={
        "beta1": Hyperparameter(default=0.9, limits=DECAY_LIMITS, help="decay of the average of gradients"),
        "beta2": Hyperparameter(default=0.95, limits=DECAY_LIMITS, help="decay of the average of squared gradients"),
        "epsilon": Hyperparameter(default=1e-8, limits=(0.0, 1.0), help="what is added to the root of the average of squares"),
        "weight_decay": matrix_weight_decay(0.1),
    },
    updates={
        "exp_avg": StateUpdate(("exp_avg", GRADIENT), lambda v, average, g: v.beta1 * average + (1.0 - v.beta1) * g),
        "exp_avg_sq": StateUpdate(
            ("exp_avg_sq", GRADIENT), lambda v, squares, g: v.beta2 * squares + (1.0 - v.beta2) * g**2, is_second_moment=True
        ),
        MASTER: StateUpdate((MASTER, "exp_avg'", "exp_avg_sq'"), _step),
    },
    source="Loshchilov and Hutter 2019, algorithm 2; beta2 and decay as in GPT-3 (Brown et al. 2020, appendix B) and Llama",
)  # fmt: skip
