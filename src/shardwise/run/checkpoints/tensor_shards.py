"""The content of a checkpoint: a rank's boxes of tensors, and plain values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardwise.values import Box, Shape, interval_boxes

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """A rank's box of a tensor of full shape `shape`: it begins at `offsets` and has the shape of `values`.

    With one offset it is an interval of the flattened tensor (row-major), and `values` are [n]; otherwise offsets and
    values have the dims of the tensor. `values` may be empty, of any dtype, on any device. Boxes of two ranks are equal
    (replicas) or do not overlap. Raises `ValueError` for a box outside the tensor.

    >>> import torch
    >>> TensorShard((4, 6), (2, 0), torch.zeros(2, 6)).box
    Box(offsets=(2, 0), lengths=(2, 6))
    >>> TensorShard((4, 6), (13,), torch.zeros(8)).view
    (24,)
    """

    shape: Shape
    offsets: Shape
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.ndim != len(self.offsets) or len(self.offsets) not in (1, len(self.shape)):
            raise ValueError(
                f"a piece of {self.values.ndim} dims has {len(self.offsets)} offsets in a tensor of shape {self.shape}; one "
                "offset for each dim is required, or one in the flattened tensor"
            )
        if not self.box.fits(self.view):
            raise ValueError(f"a piece is {self.box} of shape {self.view}; one inside is required")

    @property
    def box(self) -> Box:
        """The box, in the shape `view`."""
        return Box(self.offsets, tuple(self.values.shape))

    @property
    def view(self) -> Shape:
        """The shape that offsets count in: the tensor's own, or that of the flattened tensor."""
        return view_shape(self.shape, len(self.offsets))

    @property
    def kind(self) -> str:
        """Shape and dtype in words, which must agree between a checkpoint and its reader."""
        return describe_tensor(self.shape, self.values.dtype)


CheckpointState = Mapping[str, TensorShard | tuple[TensorShard, ...] | Json]  # a tuple: several shards of one tensor


def view_shape(shape: Shape, num_offsets: int) -> Shape:
    """Return the shape in which a box with so many offsets lies."""
    return shape if len(shape) == num_offsets else (math.prod(shape),)


def split_into_boxes(shape: Shape, box: Box, values: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """Yield the boxes of `shape` that make up a box or an interval of the flattened tensor, each with a view of its
    values."""
    if len(box.offsets) == len(shape):
        yield box, values
        return
    (start,), (length,) = box.offsets, box.lengths
    position = 0
    for part_box in interval_boxes(shape, start, start + length):
        yield part_box, values[position : position + part_box.volume].view(part_box.lengths)
        position += part_box.volume


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype without "torch."; a name stays as it is."""
    return str(dtype).removeprefix("torch.")


def describe_tensor(shape: Shape, dtype: object) -> str:
    return f"{list(shape)} of {dtype_name(dtype)}"


def split_state(state: CheckpointState) -> tuple[list[tuple[str, TensorShard]], dict[str, Any]]:
    """Return the named shards and the plain values of a state. Raises `ValueError` for a value that JSON does not
    restore exactly."""
    shards_by_name = {name: _shards_of(value) for name, value in state.items()}
    named_shards = [(name, shard) for name, shards in shards_by_name.items() for shard in shards]
    values = {name: value for name, value in state.items() if not shards_by_name[name]}
    for name, value in values.items():
        try:
            survives_json = json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError):
            survives_json = False
        if not survives_json:
            raise ValueError(f"{name} is {value!r}; a Piece or a value that JSON keeps as it is is required")
    return named_shards, values


def _shards_of(value: object) -> tuple[TensorShard, ...]:
    candidates = value if isinstance(value, tuple) else (value,)
    return tuple(candidate for candidate in candidates if isinstance(candidate, TensorShard))
