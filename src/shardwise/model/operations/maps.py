"""Elementwise functions, with or without a reduction, and sums of gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.functions import FUNCTIONS, LINEAR_IN_FIRST
from shardwise.model.operations.base import Dims, Operation, Placed, ShapeLast
from shardwise.sharding.spec import Spec
from shardwise.symbolic import Local, Polynomial, product


@dataclass(frozen=True, slots=True)
class Map(Operation):
    """`result = function(*inputs)` elementwise over the union of their dims, reduced over the dims the result lacks.

    `over` are the dims that a norm is taken over: their size is all that the function knows of them.
    """

    function: str = "identity"
    reduction: str = "sum"
    over: Dims = ("D",)

    @property
    def kind(self) -> str:
        return "map"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        if self._adds_alike(specs):
            return Placed(tuple(specs), (specs[0],))
        if len(specs) == 1 or self._passes_partial(specs, fixed):
            anchor = specs[0]
        else:
            whole = [s for s, name in zip(specs, self.inputs, strict=True) if not s.partial and not fixed(name)]
            anchor = max(whole or specs, key=lambda spec: len(spec.dims))
        linear = self._linear()
        aligned = []
        for position, spec in enumerate(specs):
            partial = spec.partial if position in linear and spec is anchor else ()
            axes = {d: anchor.axes_of(d) if d in anchor.dims else spec.axes_of(d) for d in spec.dims}
            aligned.append(Spec.of(spec.dims, axes, partial))
        return Placed(tuple(aligned), (self._result(aligned, dims[self.outputs[0]]),))

    def _linear(self) -> tuple[int, ...]:
        if self.function in LINEAR_IN_FIRST:
            return (0,)
        return FUNCTIONS[self.function].linear if self.function in FUNCTIONS else ()

    def _passes_partial(self, specs: Sequence[Spec], fixed: Callable[[str], bool]) -> bool:
        return 0 in self._linear() and bool(specs[0].partial)

    def _adds_alike(self, specs: Sequence[Spec]) -> bool:
        """Whether partial sums are added that lie alike: the sum is made whole once, where it has to be."""
        additive = self.function in FUNCTIONS and FUNCTIONS[self.function].additive
        alike = all(spec == specs[0] for spec in specs)
        return additive and alike and bool(specs[0].partial) and specs[0].reduction == "sum"

    def _result(self, aligned: Sequence[Spec], dims: Dims) -> Spec:
        split: dict[str, tuple[str, ...]] = {}
        for spec in aligned:
            split.update({d: a for d, a in zip(spec.dims, spec.axes, strict=True) if a})
        partial = {axis for d, axes in split.items() if d not in dims for axis in axes}
        partial |= {axis for spec in aligned for axis in spec.partial}
        return Spec.of(dims, {d: a for d, a in split.items() if d in dims}).with_partial(partial, self.reduction)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy = cotangents[self.outputs[0]]
        found: list[tuple[str, Operation]] = []
        for name, gradient in zip(self.inputs, FUNCTIONS[self.function].gradients, strict=True):
            if gradient is not None:
                operands = tuple(self.inputs[i] for i in gradient.operands)
                found.append((name, Map((dy, *operands), ("?",), gradient.function, over=self.over)))
        return found

    def flops(self, placed: Placed) -> Polynomial:
        sizes = {Local(d, a) for spec in placed.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        known = FUNCTIONS.get(self.function)
        return product(sizes, known.flops_per_element if known else 1.0)


@dataclass(frozen=True, slots=True)
class Accumulate(ShapeLast):
    """The sum of the gradients from all uses of one tensor. The last input gives the sharding to meet in only.

    Gradients that lie alike are added as they are, partial or not; others are brought to the tensor's own sharding.
    """

    @property
    def kind(self) -> str:
        return "map"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        *parts, like = specs
        meet = parts[0] if all(part == parts[0] for part in parts) else like.with_partial(())
        return Placed((*(meet for _ in parts), like), (meet,))

    def flops(self, placed: Placed) -> Polynomial:
        return placed.outputs[0].local_elements() * float(len(placed.inputs) - 2)
