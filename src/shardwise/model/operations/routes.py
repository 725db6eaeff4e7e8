"""A router's choice of experts, and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.operations.base import Dims, Operation, Placed
from shardwise.sharding.spec import Spec


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """Gates from a router's logits [B, T, E]: the softmax over the k largest of each token, zero for the other experts.

    The experts' dim is needed whole; tokens are independent. Source: Jiang et al. 2024 (Mixtral), section 2.1.
    """

    num_chosen: str = "k"
    dim: str = "E"

    @property
    def kind(self) -> str:
        return "route"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        whole = [spec.with_axes(self.dim, ()).with_partial(()) for spec in specs]
        return Placed(tuple(whole), (whole[0],))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (gates,) = self.outputs
        return [(self.inputs[0], RouteGradient((cotangents[gates], gates), ("?",), self.num_chosen, self.dim))]


@dataclass(frozen=True, slots=True)
class RouteGradient(Route):
    """The gradient of the softmax over the chosen experts, from that of the gates and the gates."""

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        return []
