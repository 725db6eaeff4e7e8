"""Choices of the experts that a token takes, and their gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.sharding import Spec


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """Gates from a router's logits [B, T, E]: the softmax over the k largest of each token, zero for the other experts.

    A second input is a bias [E] that is added to the scores while experts are chosen, and not to the gates: it has no gradient
    (Wang et al. 2024). The experts' dim is needed unsharded; tokens are independent. Source: Jiang et al. 2024 (Mixtral),
    section 2.1.
    """

    kind: ClassVar[OperationKind] = "route"
    num_chosen: str = "k"
    dim: str = "E"

    @property
    def missing_kernel(self) -> str:
        return "a bias of the choice of experts" if len(self.inputs) > 1 else ""

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        unsharded = [spec.with_axes(self.dim, ()).with_partial(()) for spec in specs]
        return OperationSharding(tuple(unsharded), (unsharded[0],))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (gates,) = self.outputs
        return [(self.inputs[0], RouteGradient((cotangents[gates], gates), ("?",), self.num_chosen, self.dim))]


@dataclass(frozen=True, slots=True)
class HashedRoute(Route):
    """Gates of experts that the token itself chooses: a second input has their numbers [B, T, k], scores give their weights.

    Source: DeepSeek-AI 2026 (DeepSeek-V4, section 2.1), after Roller et al. 2021 (hash layers).
    """

    @property
    def missing_kernel(self) -> str:
        return "experts that the token chooses"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        logits, experts = specs
        logits = logits.with_axes(self.dim, ()).with_partial(())
        tokens = {dim: logits.axes_of(dim) for dim in logits.dims if dim in experts.dims}
        return OperationSharding((logits, Spec.of(experts.dims, tokens)), (logits,))


@dataclass(frozen=True, slots=True)
class RouteGradient(Route):
    """The gradient of the softmax over the chosen experts, from that of the gates and the gates."""

    @property
    def missing_kernel(self) -> str:
        return ""

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        return []
