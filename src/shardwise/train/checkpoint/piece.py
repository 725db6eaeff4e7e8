"""What a checkpoint is made of: a rank's parts of flattened tensors, and plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The interval of a flattened tensor of `size` elements that begins at `offset` and that this rank holds.

    `values` [n] may be empty, of any format, on any device. Ranks may hold the same interval (replicas), and otherwise
    theirs do not overlap. Raises `ValueError` for an interval outside the tensor.
    """

    size: int
    offset: int
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != 1:
            raise ValueError(f"a piece has {self.values.ndim} dims; 1 is required")
        if self.size < 1 or not 0 <= self.offset <= self.size - self.values.numel():
            raise ValueError(
                f"a piece of {self.values.numel()} elements begins at {self.offset} of {self.size}; one inside is required"
            )

    @property
    def kind(self) -> str:
        """What must agree between a checkpoint and who reads it, in words."""
        return described(self.size, self.values.dtype)


State = Mapping[str, Piece | Json]


def described(size: int, dtype: object) -> str:
    return f"{size:,} elements of {str(dtype).removeprefix('torch.')}"


def split(state: State) -> tuple[dict[str, Piece], dict[str, Any]]:
    """The pieces and the plain values of a state. Raises `ValueError` for a value that JSON would not give back as it is."""
    pieces = {name: value for name, value in state.items() if isinstance(value, Piece)}
    values = {name: value for name, value in state.items() if not isinstance(value, Piece)}
    for name, value in values.items():
        try:
            same = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ValueError(f"{name} is {value!r}; a Piece or a value that JSON keeps as it is is required")
    return pieces, values
