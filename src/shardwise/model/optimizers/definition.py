"""What an optimizer decides: what it keeps of a weight, and how a step updates it.

A formula is arithmetic alone (+ - * / ** and comparisons), so that it takes NumPy arrays and PyTorch's tensors alike; those of
whole matrices have products too, and methods that both kinds of arrays have (`sum`, `mean`, `clip`, `cumsum`, `mT`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from shardwise.values.dtypes import BLOCKS
from shardwise.values.errors import did_you_mean, require
from shardwise.values.symbolic import ZERO, Polynomial

Array = TypeVar("Array")
MASTER, GRADIENT = "master", "gradient"


class Per(StrEnum):
    """What a tensor of an update has one number for. Of a matrix: each element, each row, each column, the matrix, or each two of
    its rows or of its columns; of what is no matrix each element, or the tensor."""

    ELEMENT = "element"
    ROW = "row"
    COLUMN = "column"
    TENSOR = "tensor"
    ROW_PAIR = "pair of rows"
    COLUMN_PAIR = "pair of columns"


PAIRS = (Per.ROW_PAIR, Per.COLUMN_PAIR)


class MatrixSizes(NamedTuple):
    """Of a matrix its rows, its columns and the fewer of these; and the pairs of rows and of columns that an update has numbers
    for, none where there are too many rows or columns (`Optimizer.largest_side`)."""

    rows: Polynomial
    columns: Polynomial
    least: Polynomial
    row_pairs: Polynomial = ZERO
    column_pairs: Polynomial = ZERO


def _nothing(of: MatrixSizes) -> Polynomial:
    return ZERO


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
    matrices: of one tensor that is not kept [..., rows, columns], and of those that have a number for each two rows [..., rows,
    rows] or columns, which any device has whole and only such functions read and make. Of these, `flops` are those of the
    products for a matrix, as a mean over steps, and `passing` the elements that are there while it is made.

    `per`: what it makes has one number for each element, or fewer. Formulas are elementwise over all that they read; what has
    fewer numbers than that is the mean of the formula: of one per row over the columns, and so on. Means are not kept.

    `format`: of a moment one of `values.dtypes.BLOCKS`, which it is kept in whatever the precision recipe;
    None: in the recipe's.
    """

    reads: tuple[str, ...]
    formula: Callable[..., Any]
    of_squares: bool = False
    kept: bool = True
    whole: bool = False
    per: Per = Per.ELEMENT
    format: str | None = None
    flops: Callable[[MatrixSizes], Polynomial] = _nothing
    passing: Callable[[MatrixSizes], Polynomial] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """All that an optimizer decides: the `fields` that people may set, and the `updates` of its state in order.

    The state are the `MASTER` copy of the weight (the weight itself where a recipe keeps no copy) and the moments, called as in
    PyTorch; checkpoints have them under these names. With `others`, whose fields it has too, the `updates` are for matrices of
    products between the embedding and the head alone (`model.optimizer_program`), with `tables` also for those over the
    vocabulary, and all else is updated by that one. Of a matrix with more rows than `largest_side`, or columns, tensors that have
    numbers for two of these are empty.
    """

    fields: Mapping[str, Field]
    updates: Mapping[str, Update]
    source: str
    others: Optimizer | None = None
    tables: bool = False
    largest_side: int = 0

    def __post_init__(self) -> None:
        formats = [update.format for update in self.updates.values() if update.format is not None]
        if formats and (self.takes_whole or any(map(self.is_mean, self.updates))):
            raise ValueError(
                f"moments in {', '.join(formats)}: found means or functions of matrices; neither is required"
            )

    def of(self, *, matrix: bool) -> Optimizer:
        """What updates the matrices of products, or all else."""
        return self if matrix or self.others is None else self.others

    @property
    def moments(self) -> Mapping[str, Update]:
        """What it keeps beside the master copy."""
        return {name: update for name, update in self.updates.items() if name != MASTER and update.kept}

    @property
    def block(self) -> int:
        """How many elements of its moments a part of a flat array holds a multiple of, so that none cuts a block whose elements
        share a scale.

        >>> from shardwise.model.optimizers.registry import optimizer_named
        >>> optimizer_named("adamw").block, optimizer_named("adamw_8bit").block
        (1, 256)
        """
        return math.lcm(*(BLOCKS[update.format].size for update in self.updates.values() if update.format is not None))

    @property
    def takes_whole(self) -> bool:
        """Whether any of its updates is a function of whole matrices."""
        return any(update.whole for update in self.updates.values())

    @property
    def gathered(self) -> frozenset[str]:
        """What functions of whole matrices read and elementwise updates made, with a prime: what comes together for them."""
        read = (read for update in self.updates.values() if update.whole for read in update.reads)
        return frozenset(
            name for name in read
            if name.endswith("'") and self.per(name) is Per.ELEMENT and not self.updates[name.removesuffix("'")].whole
        )  # fmt: skip

    def per(self, read: str) -> Per:
        """What a tensor that an update reads has one number for."""
        update = self.updates.get(read.removesuffix("'"))
        return Per.ELEMENT if update is None else update.per

    def is_mean(self, name: str) -> bool:
        """Whether an update makes the mean of its formula: it reads a tensor that has more numbers."""
        update = self.updates[name]
        return any(self.per(read) in MORE[update.per] for read in update.reads)

    @property
    def takes_means(self) -> bool:
        """Whether any of its updates, or of those of all else, does."""
        return any(map(self.is_mean, self.updates)) or (self.others is not None and self.others.takes_means)

    @property
    def rounds(self) -> tuple[tuple[str, ...], ...]:
        """The updates in order, in as many parts as something has to come together in between: before one that reads a mean, or
        matrices whole.

        >>> from shardwise.model.optimizers.registry import optimizer_named
        >>> optimizer_named("lion").rounds
        (('master', 'exp_avg'),)
        >>> optimizer_named("muon").rounds
        (('momentum_buffer', 'direction'), ('orthogonal', 'master'))
        """
        found: list[list[str]] = [[]]
        for name, update in self.updates.items():
            parted = {f"{made}'" for made in found[-1] if self.is_mean(made) or f"{made}'" in self.gathered}
            if not parted.isdisjoint(update.reads):
                found.append([])
            found[-1].append(name)
        return tuple(map(tuple, found))

    @property
    def passed(self) -> frozenset[str]:
        """The tensors of elements that functions of whole matrices read and make, which are not kept."""
        made = {f"{name}'" for name, update in self.updates.items() if update.whole and update.per is Per.ELEMENT}
        return self.gathered | made

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
        """The state after a step, by name, from the state before it and the gradient; see `values_of`. Of matrices [..., rows,
        columns], moments of rows are [..., rows, 1], those of columns [..., 1, columns], of two rows [..., rows, rows]; what is
        no matrix is [n]."""
        found: dict[str, Any] = dict(tensors)
        for name, update in self.updates.items():
            made = update.formula(values, *(found[read] for read in update.reads))
            axes = tuple(range(-min(2, made.ndim), 0)) if update.per is Per.TENSOR else MEAN_OVER[update.per]
            found[f"{name}'"] = made.mean(axis=axes, keepdims=True) if self.is_mean(name) else made
        return {name: found[f"{name}'"] for name in self.updates if self.updates[name].kept}


def values_of(fields: Mapping[str, float], *, learning_rate: float, step: int) -> Any:
    """What formulas take: fields, `learning_rate` and `step` (from 1) as attributes."""
    return SimpleNamespace(**fields, learning_rate=learning_rate, step=step)


MEAN_OVER: Mapping[Per, tuple[int, ...]] = {
    Per.ELEMENT: (), Per.ROW: (-1,), Per.COLUMN: (-2,), Per.ROW_PAIR: (), Per.COLUMN_PAIR: (),
}  # fmt: skip
# Of what has one number for each of these, what has more.
MORE: Mapping[Per, tuple[Per, ...]] = {
    Per.ELEMENT: (), Per.ROW: (Per.ELEMENT,), Per.COLUMN: (Per.ELEMENT,), Per.TENSOR: (Per.ELEMENT, Per.ROW, Per.COLUMN),
    Per.ROW_PAIR: (), Per.COLUMN_PAIR: (),
}  # fmt: skip
BETA = (0.0, 1.0)  # limits of the decay of an average


def decay_of_matrices(default: float, help: str = "decay of a matrix in a step, times the learning rate") -> Field:
    """The field of a weight decay, which matrices alone have."""
    return Field(default=default, limits=(0.0, 1e3), help=help, of_matrices=True)
