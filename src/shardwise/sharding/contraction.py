"""What a sharded product needs: the four cases of S2, for any number of dims and axes.

For each mesh axis, with `contracted` the dims that the result does not have:

1. it splits no contracted dim on either side, and not two dims of the result: nothing to do;
2. it splits a contracted dim of one operand only: gather that operand;
3. it splits the same contracted dim of both: multiply locally, the result is a partial sum `{U_X}`;
4. it splits different dims of the two operands: the result would use it twice, so gather one operand first.

A dim is one index of the whole expression, as in `numpy.einsum`: it is summed when no operand outside the product and not the
result has it (`remaining_dims`), so a dim of three operands is summed once, where the last of them is joined.

Which operand moves in case 4: never the one named `fixed` (a weight in its use sharding); else the one that leaves the
result split as it is wanted (`goal`: a weight's gradient lies as the weight does); else the one whose dim is shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shardwise.sharding.spec import Axes, Spec
from shardwise.values.errors import ShardingError


def remaining_dims(inside: Sequence[Axes], outside: Sequence[Axes], result: Axes) -> Axes:
    """Dims of the product of some operands of an expression: those that an operand outside or the result still has.

    `inside` and `outside` are the operands' dims. The product of all operands has the result's dims, in the result's order.

    >>> remaining_dims([("B", "T", "H"), ("B", "S", "H")], [("B", "S", "D")], ("B", "T", "D"))
    ('B', 'T', 'S')
    """
    if not outside:
        return result
    needed = set(result).union(*outside)
    return tuple(dim for dim in dict.fromkeys(d for dims in inside for d in dims) if dim in needed)


def infer_product_spec(operands: Sequence[Spec], dims: Axes) -> Spec:
    """The sharding of a local product of `operands`, which lie alike on the dims that they share, summed to `dims`.

    A dim keeps its axes; axes of a dim that is summed become partial, and partial operands make a partial product.
    Raises `ShardingError` where an axis would be used twice.

    >>> str(infer_product_spec([Spec.of("IJ", {"J": "X"})], ("I",)))
    '[I]{U_X}'
    """
    split = {dim: axes for spec in reversed(operands) for dim, axes in zip(spec.dims, spec.axes, strict=True) if axes}
    summed = {axis for dim, axes in split.items() if dim not in dims for axis in axes}
    partial = summed.union(*(spec.partial for spec in operands))
    return Spec.of(dims, {dim: split[dim] for dim in dims if dim in split}, partial)


@dataclass(frozen=True, slots=True)
class Contraction:
    """The shardings that the operands must have at the product, the result's natural sharding, and what moves why."""

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
    """Shardings for `left * right -> [dims]`.

    `fixed` is "left" or "right" for an operand that must not move, `goal` the sharding that the result is wanted in.

    The product is linear: where one operand is a partial sum, so is the result; of two over the same axis one is reduced.
    """
    dims = tuple(dims)
    unknown = [dim for dim in dims if dim not in (*left.dims, *right.dims)]
    if unknown:
        raise ShardingError(f"product: the result's dim {unknown[0]} is in neither operand")
    case = _ContractionBuilder(left, right, dims, fixed, goal)
    for axis in sorted(case.axes()):
        case.resolve(axis)
    case.align_shared_dims()
    return Contraction(case.left, case.right, case.result(), tuple(case.moves))


class _ContractionBuilder:
    """The operands' shardings while the axes are looked at one by one."""

    def __init__(self, left: Spec, right: Spec, dims: Axes, fixed: str | None, goal: Spec | None) -> None:
        self.left, self.right, self.dims, self.fixed, self.goal = left, right, dims, fixed, goal
        self.moves: list[tuple[str, str]] = []

    def axes(self) -> frozenset[str]:
        both_partial = set(self.left.partial) & set(self.right.partial)
        return self.left.sharded_axes | self.right.sharded_axes | both_partial

    def gather(self, side: str, axis: str, why: str) -> None:
        self.moves.append((side, f"{why}: gather {side} over {axis}"))
        setattr(self, side, getattr(self, side).gather_axis(axis))

    def reduce(self, side: str, axis: str, dim: str) -> None:
        """Sum a partial operand over `axis`, onto `dim` where it has it, because the other operand is split there."""
        spec = self.without_partial(side, axis)
        why = f"{side} is a partial sum over {axis}, which splits {dim} of the other operand: reduce it"
        self.moves.append((side, why))
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
            self.gather_if_contracted("left", "right", axis, str(on_left))
        elif on_left is None and on_right in self.left.dims:
            self.gather_if_contracted("right", "left", axis, str(on_right))

    def gather_if_contracted(self, side: str, other: str, axis: str, dim: str) -> None:
        """`axis` splits a shared dim of `side` only: a dim of the result is cut on the other side for nothing."""
        if dim not in self.dims:
            if self.fixed == side:
                raise ShardingError(f"product: {side} is fixed but its contracted dim {dim} is split over {axis}")
            self.gather(side, axis, f"case 2: {axis} splits the contracted dim {dim} of {side} only")

    def choose_operand_to_gather(self, axis: str, on_left: str, on_right: str) -> str:
        if self.fixed is not None:
            return "left" if self.fixed == "right" else "right"
        wanted = self.goal.dim_of(axis) if self.goal else None
        if wanted is not None and wanted in (on_left, on_right):
            return "right" if wanted == on_left else "left"
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
