"""A sharded product as people write it, as a problem to solve and as a program of steps.

A chain multiplies from the left. A dim that the running product and the next operand share is summed when the result lacks
it, or when a later operand brings it back: `In[B, D] * W1[D, F] * W2[F, D] -> Out[B, D]` sums the first D, which is then
written D'. A shared dim that the result keeps is a batch dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.errors import InputError, ShardingError, require
from shardwise.layout.derive import Communicate, Compute, ShardedProgram, shard_program
from shardwise.model.operations import Contract, Operation, Placed
from shardwise.model.program import Program, ProgramBuilder, Role, Tensor
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.notation import Expression
from shardwise.sharding.spec import Spec
from shardwise.sharding.strategy import Move, Problem, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedExpression:
    """A product with its mesh and sizes. `operands` and `result` are in labels: summed dims of a chain are told apart."""

    expression: Expression
    mesh: Mesh
    sizes: Mapping[str, int]
    dtype: str
    names: tuple[str, ...]
    operands: tuple[Spec, ...]
    result_name: str
    result_dims: tuple[str, ...]
    goal: Spec | None

    def problem(self, free: Sequence[str] = ()) -> Problem:
        """What the search for the cheapest strategy takes."""
        unknown = [name for name in free if name not in self.names]
        if unknown:
            raise InputError(f"--free: no operand {unknown[0]!r}; the operands are {', '.join(self.names)}")
        return Problem(
            names=self.names, operands=self.operands, result=self.result_dims, goal=self.goal, mesh=self.mesh,
            sizes=self.sizes, free=frozenset(free),
        )  # fmt: skip


def shard_expression(
    expression: Expression, mesh: Mesh, sizes: Mapping[str, int], dtype: str = "bf16"
) -> ShardedExpression:
    """Check an expression against its mesh and sizes. Raises `InputError` with everything that is wrong."""
    labels, result_dims = _labels(expression)
    names = _names(expression)
    known = _sizes(expression, sizes)
    specs = tuple(o.spec.renamed(own) for o, own in zip(expression.operands, labels, strict=True))
    result = expression.result
    goal = result.spec if result is not None else None
    by_label = {label: known.get(dim) for own in labels for dim, label in own.items()}
    missing = sorted({dim for dim, size in by_label.items() if size is None})
    if missing:
        raise InputError(f"sizes: none for {', '.join(missing)}; give it inline (I = 8192) or by --size I=8192")
    whole = {label: size for label, size in by_label.items() if size is not None}
    dtypes = {t.dtype for t in (*expression.operands, result) if t is not None and t.dtype}
    if len(dtypes) > 1:
        raise InputError(f"dtype: found {', '.join(sorted(dtypes))}; one number format for all tensors is required")
    made = ShardedExpression(
        expression=expression, mesh=mesh, sizes=whole, dtype=dtypes.pop() if dtypes else dtype, names=names, operands=specs,
        result_name=_result_name(expression, names), result_dims=result_dims, goal=goal,
    )  # fmt: skip
    require(_violations(made))
    return made


def _labels(expression: Expression) -> tuple[list[dict[str, str]], tuple[str, ...]]:
    """For each operand its dims' labels, and the result's dims."""
    operands = expression.operands
    wanted = expression.result.spec.dims if expression.result is not None else None
    live: dict[str, list[int]] = {}
    labels: list[dict[str, str]] = []
    primes: dict[str, int] = {}
    for index, operand in enumerate(operands):
        labels.append({dim: dim for dim in operand.spec.dims})
        later = {d for other in operands[index + 1 :] for d in other.spec.dims}
        for dim in operand.spec.dims:
            holders = live.setdefault(dim, [])
            holders.append(index)
            if len(holders) > 1 and (dim in later or (wanted is not None and dim not in wanted)):
                if dim in later:
                    primes[dim] = primes.get(dim, 0) + 1
                    for holder in holders:
                        labels[holder][dim] = dim + "'" * primes[dim]
                live[dim] = []
    found = list(dict.fromkeys(label for own in labels for label in own.values()))
    if wanted is None:
        count = {label: sum(label in own.values() for own in labels) for label in found}
        return labels, tuple(label for label in found if count[label] == 1)
    absent = [dim for dim in wanted if dim not in found]
    if absent:
        raise InputError(f"{expression}: the result's dim {absent[0]} is in no operand")
    return labels, wanted


def _names(expression: Expression) -> tuple[str, ...]:
    names = [operand.name for operand in expression.operands]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InputError(f"{expression}: two operands are called {repeated[0]}; each needs a name of its own")
    return tuple(names)


def _result_name(expression: Expression, names: Sequence[str]) -> str:
    """The result's own name; of one tensor that is only resharded, its own."""
    if len(names) == 1:
        return names[0]
    if expression.result is not None:
        return expression.result.name
    return next(name for name in ("C", "Z", "Out", "Result") if name not in names)


def _sizes(expression: Expression, sizes: Mapping[str, int]) -> dict[str, int]:
    known = dict(sizes)
    problems = []
    tensors = [*expression.operands, *([expression.result] if expression.result is not None else [])]
    for tensor in tensors:
        for dim, size in tensor.sizes.items():
            if known.setdefault(dim, size) != size:
                problems.append(f"sizes: {dim} is {known[dim]} and {size}; one size for each dim is required")
    require(problems)
    return known


def _violations(made: ShardedExpression) -> list[str]:
    specs = [*zip(made.names, made.operands, strict=True), *([(made.result_name, made.goal)] if made.goal else [])]
    problems = []
    for name, spec in specs:
        try:
            spec.local_shape(made.mesh, made.sizes)
            made.mesh.size(spec.partial)
        except ShardingError as error:
            problems += [f"{name}: {problem}" for problem in error.problems]
    if made.goal is not None and made.goal.partial:
        problems.append(f"{made.result_name}: a result that is a partial sum is not finished; leave {{U_...}} out")
    return problems


def expression_program(made: ShardedExpression) -> Program:
    """The chain as a program of contractions, multiplied from the left."""
    builder = ProgramBuilder()
    for name, spec in zip(made.names, made.operands, strict=True):
        builder.input(name, spec.dims, Role.ACTIVATION)
    running, dims = made.names[0], made.operands[0].dims
    for index in range(1, len(made.names)):
        name, own = made.names[index], made.operands[index].dims
        outside = {d for spec in made.operands[index + 1 :] for d in spec.dims} | set(made.result_dims)
        last = index == len(made.names) - 1
        dims = made.result_dims if last else tuple(d for d in dict.fromkeys((*dims, *own)) if d in outside)
        target = made.result_name if last else f"{running}*{name}"
        running = builder.add(Contract((running, name), (builder.tensor(target, dims, Role.ACTIVATION),)))
    return builder.build([running])


def derive_by_cases(made: ShardedExpression) -> ShardedProgram:
    """The book's way: each product by the four cases, from the left, and the result brought to its sharding."""
    program = expression_program(made)
    rest = dict(zip(made.names, made.operands, strict=True))
    final = {made.result_name: made.goal if made.goal is not None else _whole}
    return shard_program(program, rest, final=final)


def _whole(natural: Spec) -> Spec:
    return natural.with_partial(())


def strategy_program(made: ShardedExpression, strategy: Strategy) -> ShardedProgram:
    """The steps of a strategy, ready to run on devices."""
    whole = "*".join(made.names)

    def named(name: str) -> str:
        return made.result_name if name == whole else name

    tensors = {n: Tensor(n, s.dims, Role.ACTIVATION) for n, s in zip(made.names, made.operands, strict=True)}
    operations: list[Operation] = []
    steps: list[Communicate | Compute] = []
    specs = dict(strategy.starts)
    for action in strategy.actions:
        if isinstance(action, Move):
            steps.append(Communicate(tensors[named(action.tensor)], action.collective))
            specs[named(action.tensor)] = action.collective.after
            continue
        result = named(action.result)
        tensors[result] = Tensor(result, action.result_spec.dims, Role.ACTIVATION)
        operations.append(Contract((named(action.left), named(action.right)), (result,)))
        steps.append(Compute(operations[-1], Placed((action.left_spec, action.right_spec), (action.result_spec,))))
        specs[result] = action.result_spec
    program = Program(tensors, tuple(operations), made.names, (made.result_name,))
    return ShardedProgram(program, tuple(steps), specs)
