"""Operand shardings that a sharded product needs: the four cases of S2, for any number of dims and axes.

For each mesh axis, where contracted dims are those that the result lacks:

1. it splits no contracted dim on either side, and not two dims of the result: nothing to do;
2. it splits a contracted dim of one operand only: gather that operand;
3. it splits the same contracted dim of both: multiply locally, the result is a partial sum `{U_X}`;
4. it splits different dims of the two operands: the result would use it twice, so gather one operand first.

A dim is one index of the whole expression, as in `numpy.einsum`: it is summed once neither the result nor an operand outside
the product has it (`remaining_dims`), so a dim of three operands is summed when the last of them is multiplied.

Which operand is gathered in case 4: never the one named `fixed` (a weight in its use sharding); else the one that leaves the
result in the `goal` sharding (a weight's gradient lies as the weight does); else the one whose dim is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.sharding.spec import Axes, Spec
from shardwise.values import ShardingError


def remaining_dims(inside: Sequence[Axes], outside: Sequence[Axes], result: Axes) -> Axes:
    """Return the dims of the product of some operands: those that the result or an operand outside still has.

    `inside` and `outside` are the operands' dims. The product of all operands has the result's dims, in the result's order.

    >>> remaining_dims([("B", "T", "H"), ("B", "S", "H")], [("B", "S", "D")], ("B", "T", "D"))
    ('B', 'T', 'S')
    """
    if not outside:
        return result
    required_dims = set(result).union(*outside)
    return tuple(dim for dim in dict.fromkeys(d for dims in inside for d in dims) if dim in required_dims)


def infer_product_spec(operands: Sequence[Spec], dims: Axes) -> Spec:
    """Return the sharding of a local product of `operands`, which are split alike on their shared dims, summed to `dims`.

    A dim keeps its axes; axes of a summed dim become partial, and partial operands make a partial product. Raises
    `ShardingError` where an axis would be used twice.

    >>> str(infer_product_spec([Spec.of("IJ", {"J": "X"})], ("I",)))
    '[I]{U_X}'
    """
    split = {dim: axes for spec in reversed(operands) for dim, axes in zip(spec.dims, spec.axes, strict=True) if axes}
    summed = {axis for dim, axes in split.items() if dim not in dims for axis in axes}
    partial = summed.union(*(spec.partial for spec in operands))
    return Spec.of(dims, {dim: split[dim] for dim in dims if dim in split}, partial)


@dataclass(frozen=True, slots=True)
class Contraction:
    """Shardings of the operands at the product, the natural sharding of the result, and which operand moves for which reason."""

    left: Spec
    right: Spec
    result: Spec
    moves: tuple[tuple[str, str], ...]  # ("left" or "right", the reason)

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(reason for _, reason in self.moves)


def contract(
    left: Spec, right: Spec, dims: Iterable[str], *, fixed: str | None = None, goal: Spec | None = None
) -> Contraction:
    """Return the shardings for `left * right -> [dims]`.

    `fixed` is "left" or "right" for an operand that must not move, `goal` the sharding that the result should have. If one
    operand is a partial sum, so is the result; if both are over the same axis, one is reduced first.
    """
    dims = tuple(dims)
    unknown = [dim for dim in dims if dim not in (*left.dims, *right.dims)]
    if unknown:
        raise ShardingError(f"product: the result's dim {unknown[0]} is in neither operand")
    builder = _ContractionBuilder(left, right, dims, fixed, goal)
    # A fixed order, as gathering one axis also gathers the axes minor to it (`Spec.gather_axis`), which changes later cases.
    for axis in sorted(builder.axes()):
        builder.resolve(axis)
    builder.align_shared_dims()
    return Contraction(builder.left, builder.right, builder.result(), tuple(builder.moves))


class _ContractionBuilder:
    """Shardings of the operands while the axes are resolved one by one."""

    def __init__(self, left: Spec, right: Spec, dims: Axes, fixed: str | None, goal: Spec | None) -> None:
        self.left, self.right, self.dims, self.fixed, self.goal = left, right, dims, fixed, goal
        self.moves: list[tuple[str, str]] = []

    def axes(self) -> frozenset[str]:
        both_partial = set(self.left.partial) & set(self.right.partial)
        return self.left.sharded_axes | self.right.sharded_axes | both_partial

    def gather(self, side: str, axis: str, reason: str) -> None:
        self.moves.append((side, f"{reason}: gather {side} over {axis}"))
        setattr(self, side, getattr(self, side).gather_axis(axis))

    def reduce(self, side: str, axis: str, dim: str) -> None:
        """Sum a partial operand over `axis`, scattered onto `dim` if it has it, because the axis splits the other operand."""
        spec = self.without_partial(side, axis)
        reason = f"{side} is a partial sum over {axis}, which splits {dim} of the other operand: reduce it"
        self.moves.append((side, reason))
        setattr(self, side, spec.with_axes(dim, (*spec.axes_of(dim), axis)) if dim in spec.dims else spec)

    def without_partial(self, side: str, axis: str) -> Spec:
        spec: Spec = getattr(self, side)
        return spec.with_partial(a for a in spec.partial if a != axis)

    def resolve(self, axis: str) -> None:
        on_left, on_right = self.left.dim_of(axis), self.right.dim_of(axis)
        if axis in self.left.partial and axis in self.right.partial:
            side = "left" if self.fixed == "right" else "right"
            setattr(self, side, self.without_partial(side, axis))
            self.moves.append((side, f"both operands are partial sums over {axis}: reduce {side}"))
        if on_left is not None and axis in self.right.partial:
            self.reduce("right", axis, on_left)
        elif on_right is not None and axis in self.left.partial:
            self.reduce("left", axis, on_right)
        elif on_left is not None and on_right is not None and on_left != on_right:
            self.gather(
                self.choose_operand_to_gather(axis, on_left, on_right),
                axis,
                f"case 4: {axis} splits {on_left} of left and {on_right} of right",
            )
        elif on_right is None and on_left in self.right.dims:
            self.gather_if_contracted("left", axis, str(on_left))
        elif on_left is None and on_right in self.left.dims:
            self.gather_if_contracted("right", axis, str(on_right))

    def gather_if_contracted(self, side: str, axis: str, dim: str) -> None:
        """Gather `side`, whose shared dim is split over an axis that the other side lacks, unless the result keeps the dim:
        then the other side is sliced for free."""
        if dim not in self.dims:
            if self.fixed == side:
                raise ShardingError(f"product: {side} is fixed but its contracted dim {dim} is split over {axis}")
            self.gather(side, axis, f"case 2: {axis} splits the contracted dim {dim} of {side} only")

    def choose_operand_to_gather(self, axis: str, on_left: str, on_right: str) -> str:
        """Return the operand that gives up an axis both have: never the fixed one; else the one whose dim the goal does not
        shard by it; else the one whose dim the other operand shares."""
        if self.fixed is not None:
            return "left" if self.fixed == "right" else "right"
        goal_dim = self.goal.dim_of(axis) if self.goal else None
        if goal_dim is not None and goal_dim in (on_left, on_right):
            return "right" if goal_dim == on_left else "left"
        return "left" if on_left in self.right.dims else "right"

    def align_shared_dims(self) -> None:
        """Give both operands the same axes, in the same order, on each dim that they share."""
        for dim in self.left.dims:
            if dim in self.right.dims and self.left.axes_of(dim) != self.right.axes_of(dim):
                finer = max((self.left.axes_of(dim), self.right.axes_of(dim)), key=len)
                self.left = self.left.with_axes(dim, finer)
                self.right = self.right.with_axes(dim, finer)

    def result(self) -> Spec:
        return infer_product_spec((self.left, self.right), self.dims)
