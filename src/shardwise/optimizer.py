"""Optimizers: what each keeps of a weight, and how a step updates it. One table; jobs, costs, recipes, engines and help read it.

A formula is arithmetic alone (+ - * / ** and comparisons), so that it takes NumPy arrays and PyTorch's tensors alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from shardwise.errors import chosen, require
from shardwise.names import did_you_mean

Array = TypeVar("Array")
MASTER, GRADIENT = "master", "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A number that a recipe may set: its default, its minimum, the first value that is too large, and what it means.

    `of_matrices`: it is 0 for what is no matrix (norms, biases), as GPT-2 and its successors have their decay.
    """

    default: float
    limits: tuple[float, float]
    help: str
    of_matrices: bool = False


class Update(NamedTuple):
    """A step of one tensor of the state: `formula` takes the values (`values_of`) and the tensors that it `reads`.

    These are tensors of the state as the step finds them, with a prime ("master'") as it leaves them, or the `GRADIENT`.
    `of_squares`: a moment of squared gradients, which a precision recipe may keep in a format of its own.
    """

    reads: tuple[str, ...]
    formula: Callable[..., Any]
    of_squares: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """All that an optimizer decides: the `fields` that people may set, and the `updates` of its state in order.

    The state are the `MASTER` copy of the weight (the weight itself where a recipe keeps no copy) and the moments, called as in
    PyTorch; checkpoints have them under these names.
    """

    fields: Mapping[str, Field]
    updates: Mapping[str, Update]
    source: str

    @property
    def moments(self) -> Mapping[str, Update]:
        """What it keeps beside the master copy."""
        return {name: update for name, update in self.updates.items() if name != MASTER}

    @property
    def state(self) -> tuple[str, ...]:
        """Everything that it keeps, the master copy first."""
        return (MASTER, *self.moments)

    def given(self, fields: Mapping[str, float]) -> dict[str, float]:
        """The value of every field; those that are left out have their defaults. Raises `InputError` with all that is wrong."""
        wrong = [f"recipe: found {name!r}{did_you_mean(name, self.fields)}; the plan's optimizer has {', '.join(self.fields)}"
                 for name in fields if name not in self.fields]  # fmt: skip
        found = {name: fields.get(name, one.default) for name, one in self.fields.items()}
        for name, value in found.items():
            low, high = self.fields[name].limits
            wrong += [] if low <= value < high else [
                f"recipe: {name} is {value!r}; a number of at least {low:g}, below {high:g}, is required"
            ]  # fmt: skip
        require(wrong)
        return found

    def of_kind(self, fields: Mapping[str, float], *, matrix: bool) -> dict[str, float]:
        """The values of the fields for matrices, or for all else."""
        return {name: value if matrix or not self.fields[name].of_matrices else 0.0 for name, value in fields.items()}

    def updated(self, values: Any, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The state after a step, by name, from the state before it and the gradient; see `values_of`."""
        found = dict(tensors)
        for name, update in self.updates.items():
            found[f"{name}'"] = update.formula(values, *(found[read] for read in update.reads))
        return {name: found[f"{name}'"] for name in self.updates}


def values_of(fields: Mapping[str, float], *, learning_rate: float, step: int) -> Any:
    """What formulas take: fields, `learning_rate` and `step` (from 1) as attributes."""
    return SimpleNamespace(**fields, learning_rate=learning_rate, step=step)


def _adamw(v: Any, weight: Any, average: Any, squares: Any) -> Any:
    corrected = average / (1.0 - v.beta1**v.step), squares / (1.0 - v.beta2**v.step)
    return weight - v.learning_rate * (corrected[0] / (corrected[1] ** 0.5 + v.epsilon) + v.weight_decay * weight)


def _lion(v: Any, weight: Any, average: Any, gradient: Any) -> Any:
    towards = v.beta1 * average + (1.0 - v.beta1) * gradient
    return weight - v.learning_rate * ((towards > 0) * 1.0 - (towards < 0) * 1.0 + v.weight_decay * weight)


_BETA = (0.0, 1.0)
_DECAY = Field(
    default=0.1, limits=(0.0, 1e3), help="decay of a matrix in a step, times the learning rate", of_matrices=True
)

# The first is the one that a job has by default.
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": Optimizer(
        fields={
            "beta1": Field(default=0.9, limits=_BETA, help="decay of the average of gradients"),
            "beta2": Field(default=0.95, limits=_BETA, help="decay of the average of squared gradients"),
            "epsilon": Field(default=1e-8, limits=(0.0, 1.0), help="what is added to the root of the average of squares"),
            "weight_decay": _DECAY,
        },
        updates={
            "exp_avg": Update(("exp_avg", GRADIENT), lambda v, average, g: v.beta1 * average + (1.0 - v.beta1) * g),
            "exp_avg_sq": Update(
                ("exp_avg_sq", GRADIENT), lambda v, squares, g: v.beta2 * squares + (1.0 - v.beta2) * g**2, of_squares=True
            ),
            MASTER: Update((MASTER, "exp_avg'", "exp_avg_sq'"), _adamw),
        },
        source="Loshchilov and Hutter 2019, algorithm 2; beta2 and decay as in GPT-3 (Brown et al. 2020, appendix B) and Llama",
    ),
    "lion": Optimizer(
        fields={
            "beta1": Field(default=0.9, limits=_BETA, help="share of the average in the sum whose sign is the step"),
            "beta2": Field(default=0.99, limits=_BETA, help="decay of the average of gradients"),
            "weight_decay": _DECAY,
        },
        updates={
            MASTER: Update((MASTER, "exp_avg", GRADIENT), _lion),
            "exp_avg": Update(("exp_avg", GRADIENT), lambda v, average, g: v.beta2 * average + (1.0 - v.beta2) * g),
        },
        source="Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, program 1; its learning rate is 3 to 10 times "
        "smaller than AdamW's and its decay as much larger",
    ),
}  # fmt: skip


def optimizer_names() -> tuple[str, ...]:
    """All that a job may name."""
    return tuple(OPTIMIZERS)


DEFAULT = optimizer_names()[0]


def optimizer_named(name: str) -> Optimizer:
    """An optimizer by name. Raises `InputError` that lists the names.

    >>> optimizer_named("lion").state
    ('master', 'exp_avg')
    """
    return chosen(OPTIMIZERS, name, "optimizer")


def optimizer_fields() -> dict[str, str]:
    """The fields of all optimizers by name, with their text for help: the meaning, the optimizers that have it, the defaults."""
    found: dict[str, dict[str, list[str]]] = {}
    for optimizer, one in OPTIMIZERS.items():
        for name, field in one.fields.items():
            found.setdefault(name, {}).setdefault(field.help, []).append(f"{optimizer} {field.default:g}")
    return {
        name: "; ".join(f"{words} ({', '.join(defaults)})" for words, defaults in helps.items())
        for name, helps in found.items()
    }
