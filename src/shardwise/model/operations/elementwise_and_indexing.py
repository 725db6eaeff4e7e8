"""Elementwise operations (functions with or without a reduction, sums of gradients, concatenation), and lookups in tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardwise.model.operations.base import Dims, LastInputShapeOnly, Operation, OperationKind, OperationSharding
from shardwise.model.operations.elementwise_functions import FUNCTIONS, LINEAR_IN_FIRST_INPUT
from shardwise.sharding import Spec
from shardwise.values import ZERO, LocalDim, Polynomial, multiply_symbols


@dataclass(frozen=True, slots=True)
class Map(Operation):
    """`result = function(*inputs)` elementwise over the union of their dims, reduced over the dims the result lacks.

    `over` are the dims that a norm is taken over: their size is all that the function knows of them.
    """

    kind: ClassVar[OperationKind] = "map"
    function: str = "identity"
    reduction: str = "sum"
    over: Dims = ("D",)

    @property
    def missing_kernel(self) -> str:
        definition = FUNCTIONS.get(self.function)
        return "" if definition is None or definition.runnable else self.function

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        if self._adds_aligned_partial_sums(specs):
            return OperationSharding(tuple(specs), (specs[0],))
        partial_operand = next((position for position in self._linear_inputs() if specs[position].partial), None)
        if len(specs) == 1 or partial_operand is not None:
            anchor = specs[partial_operand or 0]
        else:
            movable = [s for s, name in zip(specs, self.inputs, strict=True) if not s.partial and not fixed(name)]
            anchor = max(movable or specs, key=lambda spec: len(spec.dims))
        linear = self._linear_inputs()
        aligned = []
        for position, spec in enumerate(specs):
            partial = spec.partial if position in linear and spec is anchor else ()
            axes = {d: anchor.axes_of(d) if d in anchor.dims else spec.axes_of(d) for d in spec.dims}
            aligned.append(Spec.of(spec.dims, axes, partial))
        return OperationSharding(tuple(aligned), (self._result(aligned, dims[self.outputs[0]]),))

    def _linear_inputs(self) -> tuple[int, ...]:
        if self.function in LINEAR_IN_FIRST_INPUT:
            return (0,)
        return FUNCTIONS[self.function].linear if self.function in FUNCTIONS else ()

    def _adds_aligned_partial_sums(self, specs: Sequence[Spec]) -> bool:
        """Return whether the function adds partial sums of one spec: their sum is reduced once, where it has to be."""
        additive = self.function in FUNCTIONS and FUNCTIONS[self.function].additive
        are_equal = all(spec == specs[0] for spec in specs)
        return additive and are_equal and bool(specs[0].partial) and specs[0].reduction == "sum"

    def _result(self, aligned: Sequence[Spec], dims: Dims) -> Spec:
        split: dict[str, tuple[str, ...]] = {}
        for spec in aligned:
            split.update({d: a for d, a in zip(spec.dims, spec.axes, strict=True) if a})
        partial = {axis for d, axes in split.items() if d not in dims for axis in axes}
        partial |= {axis for spec in aligned for axis in spec.partial}
        return Spec.of(dims, {d: a for d, a in split.items() if d in dims}).with_partial(partial, self.reduction)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy = cotangents[self.outputs[0]]
        gradients: list[tuple[str, Operation]] = []
        for name, gradient in zip(self.inputs, FUNCTIONS[self.function].gradients, strict=True):
            if gradient is not None:
                operands = tuple(self.inputs[i] for i in gradient.operands)
                gradients.append((name, Map((dy, *operands), ("?",), gradient.function, over=self.over)))
        return gradients

    def flops(self, sharding: OperationSharding) -> Polynomial:
        sizes = {LocalDim(d, a) for spec in sharding.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        definition = FUNCTIONS.get(self.function)
        return multiply_symbols(sizes, definition.flops_per_element if definition else 1.0)


@dataclass(frozen=True, slots=True)
class Accumulate(LastInputShapeOnly):
    """The sum of the gradients from all uses of one tensor. The last input, the tensor, gives only the sharding to meet in.

    Gradients of equal specs are added as they are, partial or not; others are brought to the tensor's own sharding.
    """

    kind: ClassVar[OperationKind] = "map"

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        *gradients, tensor = specs
        target = gradients[0] if all(gradient == gradients[0] for gradient in gradients) else tensor.with_partial(())
        return OperationSharding((*(target for _ in gradients), tensor), (target,))

    def flops(self, sharding: OperationSharding) -> Polynomial:
        return sharding.outputs[0].local_elements() * float(len(sharding.inputs) - 2)


@dataclass(frozen=True, slots=True)
class Concatenate(Operation):
    """The operands concatenated along a dim that only the result has; `parts` are their own dims, in order.

    An operand that lacks another dim of the result is repeated along it (a key's rotary part is one for all heads).
    """

    kind: ClassVar[OperationKind] = "map"
    parts: Dims = ()

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        fullest = max(specs, key=lambda spec: len(spec.dims))
        rows = {d: fullest.axes_of(d) for d in fullest.dims if d not in self.parts}
        aligned = tuple(Spec.of(s.dims, {d: a for d, a in rows.items() if d in s.dims}) for s in specs)
        return OperationSharding(aligned, (Spec.of(dims[self.outputs[0]], rows),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (result,) = self.outputs
        joined = next(d for d in dims[result] if all(d not in dims[name] for name in self.inputs))
        return [
            (name, ConcatenateGradient((cotangents[result], name), ("?",), self.parts, joined, position))
            for position, name in enumerate(self.inputs)
        ]


@dataclass(frozen=True, slots=True)
class ConcatenateGradient(LastInputShapeOnly):
    """The transpose of a concatenation: one operand's part along `joined`, summed over the dims that the operand lacks.

    The second input gives the shape only.
    """

    kind: ClassVar[OperationKind] = "map"
    parts: Dims
    joined: str
    position: int

    def propagate_sharding(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> OperationSharding:
        dy, like = specs
        summed = {a for d in dy.dims if d not in (*like.dims, self.joined) for a in dy.axes_of(d)}
        rows = {d: dy.axes_of(d) for d in like.dims if d in dy.dims}
        return OperationSharding((dy, like), (Spec.of(like.dims, rows, summed | set(dy.partial)),))


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

    def read_elements(self, sharding: OperationSharding) -> tuple[Polynomial, ...]:
        """Return the elements of the index alone: the rows that are read of the table are as many as the result's."""
        return ZERO, sharding.inputs[1].local_elements()

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
