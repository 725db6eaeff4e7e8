"""Solve a sharded product, on the mesh as given and, where that is small, on its axes cut into prime factors.

An axis of 4 is two axes of 2, the first the major one, with the same device numbers: `I_X` is `I_{X1,X2}`. A strategy may then
work on a part of an axis. The cut mesh is used only where it is cheaper, since its programs are harder to read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from shardwise.derive.expression import ShardedExpression
from shardwise.errors import ShardingError
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.paths import Cost, PriceCollective
from shardwise.sharding.spec import Axes, Spec
from shardwise.sharding.strategy import PriceProduct, Strategy, cheapest

# More prime factors make the graphs of shardings too large to search for each product; so does a chain on three axes.
MOST_FACTORS = 4
# Axes of the mesh as it is given: the search of a product of matrices takes 0.2 s on 4 axes, 10 s on 5.
MOST_AXES = 4
Prices = Callable[[ShardedExpression], tuple[PriceCollective, PriceProduct]]


@dataclass(frozen=True, slots=True)
class Solution:
    """The product on the mesh that its strategies speak of, and the strategies, the cheapest first."""

    made: ShardedExpression
    strategies: tuple[Strategy, ...]


def solve(made: ShardedExpression, prices: Prices, *, free: Sequence[str] = (), alternatives: int = 3) -> Solution:
    """The cheapest strategies of a product. `prices` gives the prices on a mesh. Raises `ShardingError`."""
    if len(made.mesh.axes) > MOST_AXES:
        raise ShardingError(
            f"mesh: found {len(made.mesh.axes)} axes ({', '.join(axis for axis, _ in made.mesh.axes)}); at most {MOST_AXES} are "
            "required, as every sharding over them is searched: join axes that are used together, and leave out those of size 1"
        )
    plain = _solved(made, prices, free, alternatives)
    cut = cut_axes(made)
    least = plain.strategies[0].cost
    if cut is None or least[0] == 0:
        return plain
    finer = _solved(cut, prices, free, alternatives, bound=(least[0] * (1 - 1e-9), *least[1:]))
    return finer if finer.strategies else plain


def _solved(
    made: ShardedExpression, prices: Prices, free: Sequence[str], alternatives: int, bound: Cost | None = None
) -> Solution:
    collective, product = prices(made)
    problem = replace(made.problem(free), bound=bound)
    return Solution(made, tuple(cheapest(problem, collective, product, alternatives=alternatives)))


def cut_axes(made: ShardedExpression) -> ShardedExpression | None:
    """The same product with every axis cut into prime factors; None where that changes nothing or gives too many axes."""
    parts = {axis: _primes(size) for axis, size in made.mesh.axes}
    count = sum(map(len, parts.values()))
    long_chain = len(made.operands) > 2 and len(parts) > 2
    if count > MOST_FACTORS or long_chain or all(len(factors) < 2 for factors in parts.values()):
        return None
    names = {axis: part_names(axis, len(factors)) for axis, factors in parts.items()}
    axes = [
        (name, size) for axis, factors in parts.items() for name, size in zip(names[axis], factors or (1,), strict=True)
    ]
    return replace(
        made, mesh=Mesh(tuple(axes)), operands=tuple(_cut(spec, names) for spec in made.operands),
        goal=_cut(made.goal, names) if made.goal is not None else None,
    )  # fmt: skip


def part_names(axis: str, count: int) -> Axes:
    """Names of an axis's parts, the major one first: X1, X2; an axis that is not cut keeps its name."""
    return (axis,) if count < 2 else tuple(f"{axis}{i + 1}" for i in range(count))


def _cut(spec: Spec, names: dict[str, Axes]) -> Spec:
    def parts(axes: Iterable[str]) -> Axes:
        return tuple(part for axis in axes for part in names[axis])

    return Spec(spec.dims, tuple(parts(axes) for axes in spec.axes), parts(spec.partial), spec.reduction)


def _primes(number: int) -> tuple[int, ...]:
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)
