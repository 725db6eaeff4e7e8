"""One index of a dim, and all others: a layer reads one of a tensor of all layers, and streams beside the first are projected."""

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


@dataclass(frozen=True, slots=True)
class DropIndex(Operation):
    """`x` without one index of `dim`, which is not split. The result's dims are those of `x` in order, under other names where a
    product that follows needs them."""

    kind: ClassVar[OperationKind] = "map"
    dim: str
    index: int

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        (x,), out = specs, dims[self.outputs[0]]
        for dim in _renamed(x.dims, out):
            x = x.with_axes(dim, ())
        rows = {dim: x.axes_of(dim) for dim in out if dim in x.dims}
        return OperationSharding((x,), (Spec.of(out, rows, x.partial),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (x,) = self.inputs
        return [(x, DropIndexGradient((cotangents[self.outputs[0]], x), ("?",), self.dim, self.index))]


@dataclass(frozen=True, slots=True)
class DropIndexGradient(LastInputShapeOnly):
    """The transpose of `DropIndex`: the gradient with zeros at the index. The second input gives the shape only."""

    kind: ClassVar[OperationKind] = "map"
    dim: str
    index: int

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        dy, like = specs
        for dim in _renamed(dy.dims, like.dims):
            dy = dy.with_axes(dim, ())
        rows = {dim: dy.axes_of(dim) for dim in like.dims if dim in dy.dims}
        return OperationSharding((dy, like), (Spec.of(like.dims, rows, dy.partial),))


def _renamed(dims: Dims, names: Dims) -> Dims:
    """Return the dims that have a different name in a tensor of the same order."""
    return tuple(dim for dim, name in zip(dims, names, strict=True) if dim != name)
