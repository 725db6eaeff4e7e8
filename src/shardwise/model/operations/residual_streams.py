"""Weights with which layers read and write several residual streams (manifold-constrained hyper-connections).

Source: DeepSeek-AI 2026 (DeepSeek-V4, section 2.2); `DeepseekV4HyperConnection` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, Operation, OperationKind, OperationSharding
from shardwise.model.operations.recurrences import summed_axes
from shardwise.sharding import Spec


@dataclass(frozen=True, slots=True)
class StreamWeights(Operation):
    """Weights of f streams from logits of each token [B,T,l]: how they are read [B,T,f] and, in a layer, written [B,T,g] and,
    where layers mix them, mixed [B,T,f,g] (g as many as f).

    Inputs: logits, which have a bias [l] and a scale for each result. Reading is a sigmoid, writing twice a sigmoid, and mixing a
    matrix for each token whose rows and columns are made to sum to one (Sinkhorn and Knopp 1967). Tokens are independent; no
    other dim is split.
    """

    kind: ClassVar[OperationKind] = "map"

    @property
    def missing_kernel(self) -> str:
        return "several residual streams"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        logits, bias, scale = specs
        rows = _token_axes(logits)
        operands = (Spec.of(logits.dims, rows), Spec.of(bias.dims), Spec.of(scale.dims))
        return OperationSharding(operands, tuple(Spec.of(dims[name], rows) for name in self.outputs))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        gradient = StreamWeightsGradient(
            (*self.inputs, *(cotangents[name] for name in self.outputs)), ("?0", "?1", "?2")
        )
        return [(name, gradient) for name in self.inputs]


@dataclass(frozen=True, slots=True)
class StreamWeightsGradient(Operation):
    """The gradients of logits, bias and scales: (inputs of `StreamWeights`, gradients of its results) -> them. Those of bias and
    scales sum over tokens."""

    kind: ClassVar[OperationKind] = "map"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        logits, bias, scale, *gradients = specs
        rows = _token_axes(logits)
        dlogits = Spec.of(logits.dims, rows)
        vectors = [Spec.of(spec.dims) for spec in (bias, scale)]
        operands = (dlogits, *vectors, *(Spec.of(spec.dims, rows) for spec in gradients))
        sums = (spec.with_partial(summed_axes(dlogits, spec)) for spec in vectors)
        return OperationSharding(operands, (dlogits, *sums))


def _token_axes(logits: Spec) -> dict[str, tuple[str, ...]]:
    return {dim: logits.axes_of(dim) for dim in logits.dims[:2]}
