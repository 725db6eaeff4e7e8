"""A sharded product as users write it: checked against its mesh, as a program of steps, and its cheapest strategies.

The room `sharding` says what the text means. Each operand is first summed over the dims that only it has and the result lacks;
products then join two tensors, and sum the dims that no other tensor has.

`solve_expression` searches on the mesh as given and, where that is small, on its axes split into factors, prime ones where these
are few: an axis X of 4 becomes X1 and X2 of 2, the first the major one, with the same device numbers, and `I_X` becomes
`I_{X1,X2}`. A strategy may then use a part of an axis. A split mesh is used only where it is cheaper, since its programs are
harder to read.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from shardwise.derive.sharded_program import CollectiveStep, ComputeStep, ShardedProgram, ShardingTargets, shard_program
from shardwise.model import Contract, Operation, Program, Role, Tensor
from shardwise.model.operations import OperationSharding
from shardwise.model.program import ProgramBuilder
from shardwise.sharding import Axes, Mesh, Spec
from shardwise.sharding.contraction import remaining_dims
from shardwise.sharding.matmul_search.cheapest_paths import CostVector, PriceCollective
from shardwise.sharding.matmul_search.cheapest_strategies import (
    PriceProduct,
    ProductCollective,
    ProductProblem,
    ProductStep,
    ProductStrategy,
    find_cheapest_strategies,
    summed_name,
)
from shardwise.sharding.notation import EinsumExpression, result_dims
from shardwise.values import InputError, ShardingError, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedExpression:
    """A product with its mesh and sizes. `operands` are the specs at the start, `goal` is the spec wanted of the result (None:
    any)."""

    expression: EinsumExpression
    mesh: Mesh
    sizes: Mapping[str, int]
    dtype: str
    names: tuple[str, ...]
    operands: tuple[Spec, ...]
    result_name: str
    result_dims: tuple[str, ...]
    goal: Spec | None

    def problem(self, free: Sequence[str] = ()) -> ProductProblem:
        """Return the input of the search for the cheapest strategy. Operands named in `free` may start in any sharding."""
        unknown = [name for name in free if name not in self.names]
        if unknown:
            raise InputError(f"--free: no operand {unknown[0]!r}; the operands are {', '.join(self.names)}")
        return ProductProblem(
            names=self.names, operands=self.operands, result=self.result_dims, goal=self.goal, mesh=self.mesh,
            sizes=self.sizes, free=frozenset(free),
        )  # fmt: skip


def shard_expression(
    expression: EinsumExpression, mesh: Mesh, sizes: Mapping[str, int], dtype: str = "bf16"
) -> ShardedExpression:
    """Check an expression against its mesh and sizes. Raises `InputError` with everything that is wrong."""
    names = _operand_names(expression)
    all_sizes = _dim_sizes(expression, sizes)
    result = expression.result
    output_dims = result_dims(expression)
    dims = dict.fromkeys(dim for operand in expression.operands for dim in operand.spec.dims)
    missing = sorted(dim for dim in dims if dim not in all_sizes)
    if missing:
        raise InputError(f"sizes: none for {', '.join(missing)}; give it inline (I = 8192) or by --size I=8192")
    dtypes = {t.dtype for t in (*expression.operands, result) if t is not None and t.dtype}
    if len(dtypes) > 1:
        raise InputError(f"dtype: found {', '.join(sorted(dtypes))}; one number format for all tensors is required")
    sharded = ShardedExpression(
        expression=expression, mesh=mesh, sizes={dim: all_sizes[dim] for dim in dims}, dtype=dtypes.pop() if dtypes else dtype,
        names=names, operands=tuple(operand.spec for operand in expression.operands),
        result_name=_result_name(expression, names), result_dims=output_dims, goal=result.spec if result is not None else None,
    )  # fmt: skip
    raise_problems(_expression_problems(sharded))
    return sharded


def _operand_names(expression: EinsumExpression) -> tuple[str, ...]:
    names = [operand.name for operand in expression.operands]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"{expression}: two operands are called {repeated[0]}; each needs a name of its own")
    if len(names) > 1 and expression.result is not None and expression.result.name in names:
        raise InputError(
            f"{expression}: the result is called {expression.result.name}, as an operand is; each needs a name of its own"
        )
    return tuple(names)


def _result_name(expression: EinsumExpression, names: Sequence[str]) -> str:
    """Return the name of the result. A single tensor keeps its name if it is only resharded; otherwise `A` becomes `A'`."""
    if len(names) == 1:
        return _resharded_name(expression)
    if expression.result is not None:
        return expression.result.name
    return next(name for name in ("C", "Z", "Out", "Result") if name not in names)


def _resharded_name(expression: EinsumExpression) -> str:
    (operand,), result = expression.operands, expression.result
    if result is None or result.spec.dims == operand.spec.dims:
        return operand.name
    return result.name if result.name != operand.name else f"{operand.name}'"


def _dim_sizes(expression: EinsumExpression, sizes: Mapping[str, int]) -> dict[str, int]:
    all_sizes = dict(sizes)
    problems = []
    tensors = [*expression.operands, *([expression.result] if expression.result is not None else [])]
    for tensor in tensors:
        for dim, size in tensor.sizes.items():
            if all_sizes.setdefault(dim, size) != size:
                problems.append(f"sizes: {dim} is {all_sizes[dim]} and {size}; one size for each dim is required")
    raise_problems(problems)
    return all_sizes


def _expression_problems(sharded: ShardedExpression) -> list[str]:
    specs = [
        *zip(sharded.names, sharded.operands, strict=True),
        *([(sharded.result_name, sharded.goal)] if sharded.goal else []),
    ]
    problems = []
    for name, spec in specs:
        try:
            spec.local_shape(sharded.mesh, sharded.sizes)
            sharded.mesh.size(spec.partial)
        except ShardingError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if sharded.goal is not None and sharded.goal.partial:
        problems.append(f"{sharded.result_name}: a result that is a partial sum is not finished; leave {{U_...}} out")
    return problems


def expression_program(sharded: ShardedExpression) -> Program:
    """Return the expression as a program of contractions, multiplied from the left."""
    builder = ProgramBuilder()
    for name, spec in zip(sharded.names, sharded.operands, strict=True):
        builder.input(name, spec.dims, Role.ACTIVATION)
    operand_dims = [spec.dims for spec in sharded.operands]
    (product, dims), *remaining = list(_sum_unshared_dims(sharded, builder))
    for index, (name, added_dims) in enumerate(remaining, start=1):
        is_last = index == len(remaining)
        dims = remaining_dims([dims, added_dims], operand_dims[index + 1 :], sharded.result_dims)
        target = sharded.result_name if is_last else "*".join(sharded.names[: index + 1])
        product = builder.add(Contract((product, name), (builder.tensor(target, dims, Role.ACTIVATION),)))
    return builder.build([product])


def _sum_unshared_dims(sharded: ShardedExpression, builder: ProgramBuilder) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each operand's name and dims after the sum over the dims that only it has and the result lacks.

    A single operand is brought to the result's dims, in their order.
    """
    operand_dims = [spec.dims for spec in sharded.operands]
    for index, (name, dims) in enumerate(zip(sharded.names, operand_dims, strict=True)):
        shared_dims = remaining_dims([dims], operand_dims[:index] + operand_dims[index + 1 :], sharded.result_dims)
        if shared_dims != dims:
            target = sharded.result_name if len(operand_dims) == 1 else summed_name(name)
            builder.add(Contract((name,), (builder.tensor(target, shared_dims, Role.ACTIVATION),)))
            name = target
        yield name, shared_dims


def derive_by_cases(sharded: ShardedExpression) -> ShardedProgram:
    """Shard a product as the book does: each product by the four cases, from the left, and then the result brought to its
    goal."""
    program = expression_program(sharded)
    resting = dict(zip(sharded.names, sharded.operands, strict=True))
    final = {sharded.result_name: sharded.goal if sharded.goal is not None else _without_partial_sums}
    return shard_program(program, resting, ShardingTargets(final=final))


def _without_partial_sums(spec: Spec) -> Spec:
    return spec.with_partial(())


def strategy_program(sharded: ShardedExpression, strategy: ProductStrategy) -> ShardedProgram:
    """Return the steps of a strategy, ready to run on devices."""

    def final_name(name: str) -> str:
        return sharded.result_name if name == strategy.tensor else name

    tensors = {n: Tensor(n, s.dims, Role.ACTIVATION) for n, s in zip(sharded.names, sharded.operands, strict=True)}
    operations: list[Operation] = []
    steps: list[CollectiveStep | ComputeStep] = []
    specs = dict(strategy.starts)
    for action in strategy.actions:
        name = final_name(action.result if isinstance(action, ProductStep) else action.tensor)
        if isinstance(action, ProductCollective):
            steps.append(CollectiveStep(tensors[name], action.collective))
            specs[name] = action.collective.after
            continue
        tensors[name] = Tensor(name, action.result_spec.dims, Role.ACTIVATION)
        operations.append(Contract(tuple(map(final_name, action.operands)), (name,)))
        steps.append(ComputeStep(operations[-1], OperationSharding(action.specs, (action.result_spec,))))
        specs[name] = action.result_spec
    program = Program(tensors, tuple(operations), sharded.names, (sharded.result_name,))
    return ShardedProgram(program, tuple(steps), specs)


# More factors make the graphs of shardings too large to search for each product; so does a chain on three axes.
MAX_PRIME_FACTORS = 4
# A search for each takes up to 0.2 s.
MAX_REFINEMENTS = 10
# Axes of the mesh as it is given: the search of a product of matrices takes 0.2 s on 4 axes, 10 s on 5.
MAX_AXES = 4
PriceFunctions = Callable[[ShardedExpression], tuple[PriceCollective, PriceProduct]]


@dataclass(frozen=True, slots=True)
class ExpressionSolution:
    """The strategies of a product, cheapest first, and the expression on the mesh whose axes they name."""

    expression: ShardedExpression
    strategies: tuple[ProductStrategy, ...]


def solve_expression(
    sharded: ShardedExpression, prices: PriceFunctions, *, free: Sequence[str] = (), alternatives: int = 3
) -> ExpressionSolution:
    """Return the cheapest strategies of a product; `prices` gives the price functions of a mesh. Raises `ShardingError`."""
    if len(sharded.mesh.axes) > MAX_AXES:
        raise ShardingError(
            f"mesh: found {len(sharded.mesh.axes)} axes ({', '.join(axis for axis, _ in sharded.mesh.axes)}); at most {MAX_AXES} "
            "are required, as every sharding over them is searched: join axes that are used together, and leave out those of "
            "size 1"
        )
    solution = _solve_on_mesh(sharded, prices, free, alternatives)
    if solution.strategies[0].cost[0] == 0:
        return solution
    for finer in refine_mesh(sharded):
        lowest = solution.strategies[0].cost
        # A program that is as cheap by the first part of the cost may be cheaper by the next: the bound lets it pass.
        bound = (lowest[0] * (1 + COST_ROUNDING), *lowest[1:])
        refined = _solve_on_mesh(finer, prices, free, alternatives, bound=bound)
        if refined.strategies and _is_cheaper(refined.strategies[0].cost, lowest):
            solution = refined
    return solution


COST_ROUNDING = 1e-9  # relative: two orders of adding the same costs differ by less


def _is_cheaper(cost: CostVector, lowest: CostVector) -> bool:
    """Return whether a cost is lower by more than rounding. Its last part, the number of collectives, is no reason to name the
    factors of axes."""
    for part, lowest_part in zip(cost[:-1], lowest[:-1], strict=True):
        if not math.isclose(part, lowest_part, rel_tol=COST_ROUNDING):
            return part < lowest_part
    return False


def _solve_on_mesh(
    sharded: ShardedExpression,
    prices: PriceFunctions,
    free: Sequence[str],
    alternatives: int,
    bound: CostVector | None = None,
) -> ExpressionSolution:
    collective, product = prices(sharded)
    problem = replace(sharded.problem(free), bound=bound)
    return ExpressionSolution(
        sharded, tuple(find_cheapest_strategies(problem, collective, product, alternatives=alternatives))
    )


def refine_mesh(sharded: ShardedExpression) -> Iterator[ShardedExpression]:
    """Yield the same product with axes split into factors: into primes where these are at most `MAX_PRIME_FACTORS`, otherwise
    in every way into as many factors as leave at most `MAX_REFINEMENTS` ways. None for a long chain.

    >>> from shardwise.sharding.notation import parse_expression
    >>> sharded = shard_expression(parse_expression("A[I_X, J] -> B[I, J]"), Mesh((("X", 32),)), {"I": 32, "J": 32}, "bf16")
    >>> [[size for _, size in finer.mesh.axes] for finer in refine_mesh(sharded)]
    [[2, 2, 2, 4], [2, 2, 4, 2], [2, 4, 2, 2], [4, 2, 2, 2]]
    """
    sizes = dict(sharded.mesh.axes)
    if len(sharded.operands) > 2 and len(sizes) > 2:
        return
    num_primes = sum(len(_prime_factors(size)) or 1 for size in sizes.values())
    for num_factors in range(min(num_primes, MAX_PRIME_FACTORS), len(sizes), -1):
        ways = list(_ways_to_split(tuple(sizes.values()), num_factors))
        if len(ways) <= MAX_REFINEMENTS:
            yield from (_split_axes(sharded, dict(zip(sizes, factors, strict=True))) for factors in ways)
            return


def _ways_to_split(sizes: Sequence[int], num_factors: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield every way to write sizes as products of so many factors in all, in order."""
    for factors in itertools.product(*map(_ordered_factors, sizes)):
        if sum(map(len, factors)) == num_factors:
            yield factors


def _ordered_factors(size: int) -> list[tuple[int, ...]]:
    """Return every way to write a size as a product of factors above 1, in order; (1,) for 1. The primes in rising order come
    first among those of their number."""
    if size == 1:
        return [(1,)]
    divisors = (divisor for divisor in range(2, size + 1) if size % divisor == 0)
    return [
        (divisor, *rest)
        for divisor in divisors
        for rest in (_ordered_factors(size // divisor) if divisor < size else [()])
    ]


def _split_axes(sharded: ShardedExpression, factors: Mapping[str, Sequence[int]]) -> ShardedExpression:
    names = {axis: factor_names(axis, len(sizes)) for axis, sizes in factors.items()}
    axes = [pair for axis, sizes in factors.items() for pair in zip(names[axis], sizes, strict=True)]
    return replace(
        sharded, mesh=Mesh(tuple(axes)), operands=tuple(_split_spec(spec, names) for spec in sharded.operands),
        goal=_split_spec(sharded.goal, names) if sharded.goal is not None else None,
    )  # fmt: skip


def factor_names(axis: str, count: int) -> Axes:
    """Return the names of an axis's factors, the major one first: X1, X2. An axis that is not split keeps its name."""
    return (axis,) if count < 2 else tuple(f"{axis}{i + 1}" for i in range(count))


def _split_spec(spec: Spec, names: dict[str, Axes]) -> Spec:
    def split(axes: Iterable[str]) -> Axes:
        return tuple(prime_axis for axis in axes for prime_axis in names[axis])

    return Spec(spec.dims, tuple(split(axes) for axes in spec.axes), split(spec.partial), spec.reduction)


@cache
def _prime_factors(number: int) -> tuple[int, ...]:
    factors: list[int] = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return tuple(factors)
