"""What an optimizer decides: what it keeps of a weight, and how a step updates it.

A formula is arithmetic alone (+ - * / ** and comparisons), so that it takes NumPy arrays and PyTorch's tensors alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from shardwise.errors import require
from shardwise.names import did_you_mean

Array = TypeVar("Array")
MASTER, GRADIENT = "master", "gradient"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A number that a recipe may set: its default, its minimum, the first value that is too large, and what it means.

    `of_matrices`: it is 0 for what is no matrix (norms, biases), as GPT-2 and its successors have their decay. `whole`: no
    fraction is meant.
    """

    default: float
    limits: tuple[float, float]
    help: str
    of_matrices: bool = False
    whole: bool = False

    @property
    def required(self) -> str:
        """What values are allowed, in words."""
        low, high = self.limits
        return f"a {'whole ' if self.whole else ''}number of at least {low:g}, below {high:g}, is required"

    def allows(self, value: float) -> bool:
        low, high = self.limits
        return low <= value < high and (not self.whole or value == int(value))


class Update(NamedTuple):
    """A step of one tensor of the state: `formula` takes the values (`values_of`) and the tensors that it `reads`.

    These are tensors of the state as the step finds them, with a prime ("master'") as it leaves them, or the `GRADIENT`.
    `of_squares`: a moment of squared gradients, which a precision recipe may keep in a format of its own. `kept`: whether it is
    state; what is not is made for another update of the step. `whole`: the formula is not elementwise, but a function of whole
    matrices [..., rows, columns], and reads one tensor, which is not kept.
    """

    reads: tuple[str, ...]
    formula: Callable[..., Any]
    of_squares: bool = False
    kept: bool = True
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """All that an optimizer decides: the `fields` that people may set, and the `updates` of its state in order.

    The state are the `MASTER` copy of the weight (the weight itself where a recipe keeps no copy) and the moments, called as in
    PyTorch; checkpoints have them under these names. With `others`, whose fields it has too, the `updates` are for matrices of
    products between the embedding and the head alone (`model.matrices`), and all else is updated by that one.
    """

    fields: Mapping[str, Field]
    updates: Mapping[str, Update]
    source: str
    others: Optimizer | None = None

    def of(self, *, matrix: bool) -> Optimizer:
        """What updates the matrices of products, or all else."""
        return self if matrix or self.others is None else self.others

    @property
    def moments(self) -> Mapping[str, Update]:
        """What it keeps beside the master copy."""
        return {name: update for name, update in self.updates.items() if name != MASTER and update.kept}

    @property
    def whole(self) -> str | None:
        """The update that takes matrices whole; None: all are elementwise."""
        return next((name for name, update in self.updates.items() if update.whole), None)

    @property
    def before_whole(self) -> tuple[str, ...]:
        """The updates in front of that one, all elementwise; none where there is none."""
        names = tuple(self.updates)
        return () if self.whole is None else names[: names.index(self.whole)]

    @property
    def passed(self) -> frozenset[str]:
        """The tensors that the update of whole matrices reads and makes, which are not kept."""
        return frozenset() if self.whole is None else frozenset({*self.updates[self.whole].reads, f"{self.whole}'"})

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
            field = self.fields[name]
            wrong += [] if field.allows(value) else [f"recipe: {name} is {value!r}; {field.required}"]
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
        return {name: found[f"{name}'"] for name in self.updates if self.updates[name].kept}


def values_of(fields: Mapping[str, float], *, learning_rate: float, step: int) -> Any:
    """What formulas take: fields, `learning_rate` and `step` (from 1) as attributes."""
    return SimpleNamespace(**fields, learning_rate=learning_rate, step=step)


BETA = (0.0, 1.0)  # limits of the decay of an average


def decay_of_matrices(default: float, help: str = "decay of a matrix in a step, times the learning rate") -> Field:
    """The field of a weight decay, which matrices alone have."""
    return Field(default=default, limits=(0.0, 1e3), help=help, of_matrices=True)
