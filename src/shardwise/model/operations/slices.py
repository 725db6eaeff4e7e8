"""One index of a dim: what a layer reads of a tensor of all layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, LastInputShapeOnly, Operation, OperationKind, OperationSharding
from shardwise.sharding import Spec


@dataclass(frozen=True, slots=True)
class TakeIndex(Operation):
    """`result = x[..., index, ...]` along `dim`, which is not split."""

    kind: ClassVar[OperationKind] = "map"
    dim: str
    index: int

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        (x,) = specs
        x = x.with_axes(self.dim, ())
        rows = {dim: x.axes_of(dim) for dim in dims[self.outputs[0]]}
        return OperationSharding((x,), (Spec.of(dims[self.outputs[0]], rows, x.partial),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (x,) = self.inputs
        return [(x, TakeIndexGradient((cotangents[self.outputs[0]], x), ("?",), self.dim, self.index))]


@dataclass(frozen=True, slots=True)
class TakeIndexGradient(LastInputShapeOnly):
    """The transpose of `TakeIndex`: zeros but for one index. The second input gives the shape only."""

    kind: ClassVar[OperationKind] = "map"
    dim: str
    index: int

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        dy, like = specs
        rows = {dim: dy.axes_of(dim) for dim in dy.dims}
        return OperationSharding((dy, like), (Spec.of(like.dims, rows, dy.partial),))
