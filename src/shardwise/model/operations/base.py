"""The interface of every kind of operation, what its sharding rule returns, and `Carry`, the transfer between pipeline stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from shardwise.sharding import Spec
from shardwise.values import Polynomial, constant

Dims = tuple[str, ...]
ONCE = constant(1.0)
OperationKind = Literal[
    "contract",
    "map",
    "lookup",
    "scatter",
    "scan",
    "select",
    "recurrence",
    "route",
    "carry",
    "of_matrix",
    "append",
    "cached_attention",
]


@dataclass(frozen=True, slots=True)
class OperationSharding:
    """Shardings of the operands at the operation, natural shardings of the results, and why each operand moves."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    reasons: tuple[str, ...] = ()  # one for each operand, empty where it stays


@dataclass(frozen=True, slots=True)
class Operation(ABC):
    """Reads `inputs` and defines `outputs`, by name."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kind: ClassVar[OperationKind]

    @property
    def missing_kernel(self) -> str:
        """The kernel that the engine would need and lacks; empty where it runs the operation."""
        return ""

    @property
    def operands(self) -> tuple[str, ...]:
        """Inputs whose values are read; any input after them gives only its sharding or shape."""
        return self.inputs

    @abstractmethod
    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        """Return the shardings of operands and results for operands that come in `specs`.

        `fixed(name)` says which operands may not move; `goal` is the sharding that the result is wanted in, if known.
        """

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        """Return, for each input that a gradient flows into, the operation that computes it from the outputs' gradients.

        The result's name is left open: the operation's `outputs` are `("?",)` or, for several at once, `("?0", ...)`, the
        gradients of the first inputs. An operation may read what one before it in the list has computed for `x`, as `?x`.
        """
        return []

    def flops(self, sharding: OperationSharding) -> Polynomial:
        """Return the floating-point operations on one device."""
        return Polynomial()

    def read_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return the elements that one device reads of each operand: all that it has, but for rows that are picked out."""
        return tuple(spec.local_elements() for spec in sharding.inputs)

    def written_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return the elements that one device writes of each result: all that it has, but for results that are changed in
        place."""
        return tuple(spec.local_elements() for spec in sharding.outputs)

    def num_parts(self, sharding: OperationSharding) -> Polynomial:
        """Return how often the operation runs on one device: once, or not at all where devices have nothing to hand on."""
        return ONCE


@dataclass(frozen=True, slots=True)
class LastInputShapeOnly(Operation):
    """An operation whose last input gives only its shape or sharding."""

    @property
    def operands(self) -> tuple[str, ...]:
        return self.inputs[:-1]


@dataclass(frozen=True, slots=True)
class Carry(Operation):
    """Hands a tensor to the next pipeline stage unchanged: a send and a receive over `pp`."""

    kind: ClassVar[OperationKind] = "carry"
    axis: str = "pp"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        return OperationSharding(tuple(specs), tuple(specs))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        return [(self.inputs[0], Carry((cotangents[self.outputs[0]],), ("?",), self.axis))]
