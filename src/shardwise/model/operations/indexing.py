"""Operations that index: rows of a table and their gradient, and a router's choice of the k best experts and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, LastInputShapeOnly, Operation, OperationKind, OperationSharding
from shardwise.sharding import Spec


@dataclass(frozen=True, slots=True)
class Lookup(Operation):
    """`result[...] = table[index[...]]` along `dim`: an embedding, or the target's logit.

    Where `dim` is split, each device answers for its own rows and gives zero for the others: a partial sum.
    """

    kind: ClassVar[OperationKind] = "lookup"
    dim: str = "V"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        table, index = specs
        dim_axes = table.axes_of(self.dim)
        shared = {
            d: table.axes_of(d) if d in table.dims else index.gather_axes(dim_axes).axes_of(d) for d in index.dims
        }
        index = Spec.of(index.dims, shared)
        out = dims[self.outputs[0]]
        split = {d: index.axes_of(d) if d in index.dims else table.axes_of(d) for d in out}
        return OperationSharding((table, index), (Spec.of(out, split, dim_axes),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        table, index = self.inputs
        return [(table, Scatter((cotangents[self.outputs[0]], index, table), ("?",), self.dim))]


@dataclass(frozen=True, slots=True)
class Scatter(LastInputShapeOnly):
    """The transpose of a lookup: adds each row of `dy` at its index. The third input gives the shape and sharding only."""

    kind: ClassVar[OperationKind] = "scatter"
    dim: str = "V"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        dy, index, table = specs
        dim_axes = table.axes_of(self.dim)
        dy = dy.gather_axes(dim_axes)
        index = Spec.of(index.dims, {d: dy.axes_of(d) for d in index.dims})
        summed = {a for d in dy.dims if d not in table.dims for a in dy.axes_of(d)}
        split = {d: dim_axes if d == self.dim else dy.axes_of(d) for d in table.dims}
        out = Spec.of(table.dims, split, summed | set(dy.partial))
        return OperationSharding((dy, index, table), (out,))


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """Gates from a router's logits [B, T, E]: the softmax over the k largest of each token, zero for the other experts.

    The experts' dim is needed unsharded; tokens are independent. Source: Jiang et al. 2024 (Mixtral), section 2.1.
    """

    kind: ClassVar[OperationKind] = "route"
    num_chosen: str = "k"
    dim: str = "E"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        unsharded = [spec.with_axes(self.dim, ()).with_partial(()) for spec in specs]
        return OperationSharding(tuple(unsharded), (unsharded[0],))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (gates,) = self.outputs
        return [(self.inputs[0], RouteGradient((cotangents[gates], gates), ("?",), self.num_chosen, self.dim))]


@dataclass(frozen=True, slots=True)
class RouteGradient(Route):
    """The gradient of the softmax over the chosen experts, from that of the gates and the gates."""

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        return []
