"""Random sharded products: is what was derived right, how fast was it found, and does XLA move fewer bytes?

    python benchmarks/expressions.py [--count 1000] [--seed 0] [--jax 100] [--xla 200]

Every product is solved for the fewest bytes, and derived by the four cases; both programs run on virtual devices in NumPy and
must give the unsharded product (relative error 1e-5), the first `--jax` also on JAX's host devices. How long either takes is
measured in CPU seconds, and its distribution printed: of all products, and of those that are also searched on a mesh with
its axes cut into parts. The first `--xla` products that XLA can take are compiled by its CPU backend, and bytes compared where
both do the same multiplications on a device. Exit
status 1 if a program is wrong or raises, or XLA moves fewer bytes.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from random_expressions import random_expressions

from shardwise.derive.sharded_einsum import ShardedExpression, derive_by_cases, refine_mesh, strategy_program
from shardwise.derive.sharded_einsum import solve_expression as solve_product
from shardwise.derive.sharded_program import ComputeStep, ShardedProgram
from shardwise.sharding.collectives import CollectiveKind
from shardwise.sharding.matmul_search.cheapest_paths import CostVector, PriceCollective
from shardwise.sharding.matmul_search.cheapest_strategies import PriceProduct
from shardwise.sharding.spec import Axes
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.errors import ShardwiseError
from shardwise.values.symbolic import SymbolValues
from shardwise.verify.product_runs import run_product, run_products
from shardwise.verify.xla_compile import XlaReport, compile_products

LARGEST_ERROR = 1e-5
DERIVE_LIMIT_S = 5e-3  # wanted of the 99th percentile
SOLVE_LIMIT_S = 0.5
BATCH = 50
SAME = 1e-9  # relative difference below which two counts are the same


@dataclass(frozen=True, slots=True)
class Solved:
    """A program, and the product on the mesh whose axes it speaks of (which may be cut into parts)."""

    expression: ShardedExpression
    program: ShardedProgram


@dataclass(slots=True)
class Tally:
    """What was found so far."""

    problems: list[str] = field(default_factory=list)
    derive_s: list[float] = field(default_factory=list)
    solve_s: list[float] = field(default_factory=list)
    cut_s: list[float] = field(default_factory=list)  # the part of `solve_s` on cut axes
    against_xla: Counter[str] = field(default_factory=Counter)
    jax_errors: list[float] = field(default_factory=list)
    solved: dict[int, Solved] = field(default_factory=dict)


# Solving and deriving


def solve(expression: ShardedExpression, *, flops_first: bool = False) -> Solved:
    """The program with the fewest bytes, then FLOPs, then collectives; with `flops_first`, FLOPs before bytes."""

    def prices(on: ShardedExpression) -> tuple[PriceCollective, PriceProduct]:
        def collective(kind: CollectiveKind, axes: Axes, payload: float) -> CostVector:
            moved, count = received(kind, on.mesh.size(axes), payload), float(kind is not CollectiveKind.SLICE)
            return (0.0, moved, count) if flops_first else (moved, 0.0, count)

        def product(flops: float) -> CostVector:
            return (flops, 0.0, 0.0) if flops_first else (0.0, flops, 0.0)

        return collective, product

    solution = solve_product(expression, prices)
    return Solved(solution.expression, strategy_program(solution.expression, solution.strategies[0]))


def received(kind: CollectiveKind, degree: int, payload: float) -> float:
    """Elements that one device receives: `sharding.collectives.received_elements` in numbers."""
    if kind in (CollectiveKind.SLICE, CollectiveKind.PERMUTE):
        return payload if kind is CollectiveKind.PERMUTE else 0.0
    return payload * (degree - 1) / degree * (2.0 if kind is CollectiveKind.ALL_REDUCE else 1.0)


def received_bytes(expression: ShardedExpression, program: ShardedProgram) -> float:
    """Bytes that one device receives in a program's collectives."""
    values = SymbolValues({**expression.sizes, **dict(expression.mesh.axes)})
    elements = sum(float(step.collective.received_elements.evaluate(values)) for step in program.communication)
    return elements * bytes_per_element(expression.dtype)


def multiplications(expression: ShardedExpression, program: ShardedProgram) -> float:
    """Multiplications on one device in a program's products."""
    total = 0.0
    for step in program.steps:
        if isinstance(step, ComputeStep):
            axes = {dim: spec.axes_of(dim) for spec in step.placed.inputs for dim in spec.dims}
            total += math.prod(
                expression.sizes[dim] // expression.mesh.size(axes_of_dim) for dim, axes_of_dim in axes.items()
            )
    return total


# Running


def largest_error(expression: ShardedExpression, program: ShardedProgram, seed: int = 0) -> float:
    """Largest difference of any virtual device's result from its part of the unsharded product, over the largest element."""
    end = program.specs[expression.result_name]
    if end.partial or (expression.goal is not None and end != expression.goal):
        return math.inf
    return run_product(expression, program, "numpy", seed=seed).max_relative_error


def check(expression: ShardedExpression, index: int, tally: Tally) -> None:
    """Solve, derive and run one product."""

    def solved() -> Solved:
        tally.solved[index] = solve(expression)
        return tally.solved[index]

    def derived() -> Solved:
        program = derive_by_cases(expression)
        received_bytes(expression, program)
        return Solved(expression, program)

    ways: tuple[tuple[str, Callable[[], Solved], list[float]], ...] = (
        ("solved", solved, tally.solve_s),
        ("derived by cases", derived, tally.derive_s),
    )
    for way, find, seconds in ways:
        try:
            start = time.process_time()
            solution = find()
            seconds.append(time.process_time() - start)
            if way == "solved" and searched_in_parts(expression, solution):
                tally.cut_s.append(seconds[-1])
            error = largest_error(solution.expression, solution.program, index)
        except (ShardwiseError, ArithmeticError, LookupError, ValueError) as raised:
            tally.problems.append(f"{way}: {type(raised).__name__} {raised}: {describe(expression)}")
            continue
        if not error <= LARGEST_ERROR:
            tally.problems.append(f"{way}: error {error:g}: {describe(expression)}")


def searched_in_parts(expression: ShardedExpression, solution: Solved) -> bool:
    """Whether the mesh with its axes cut into parts was searched too: where it can be, and something has to move."""
    return any(refine_mesh(expression)) and bool(
        solution.expression is not expression or received_bytes(expression, solution.program)
    )


def describe(expression: ShardedExpression) -> str:
    def pairs(sizes: dict[str, int]) -> str:
        return " ".join(f"{name}={size}" for name, size in sizes.items())

    return f"{expression.expression}   mesh {pairs(dict(expression.mesh.axes))}   sizes {pairs(dict(expression.sizes))}"


def run_on_jax(cases: Sequence[tuple[int, ShardedExpression]], tally: Tally) -> None:
    """Run the solved programs as the source that is written for JAX."""
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        programs = [(tally.solved[index].expression, tally.solved[index].program) for index, _ in batch]
        for (_, expression), error in zip(batch, run_products(programs, "jax", timeout_s=600), strict=True):
            tally.jax_errors.append(error)
            if not error <= LARGEST_ERROR:
                tally.problems.append(f"on JAX: error {error:g}: {describe(expression)}")
        progress(f"JAX {min(start + BATCH, len(cases))}/{len(cases)}")


# Against XLA


def for_xla(expression: ShardedExpression) -> bool:
    return expression.goal is not None and not any(spec.partial for spec in expression.operands)


def verdict(expression: ShardedExpression, solved: Solved, report: XlaReport) -> str:
    """How the fewest bytes compare with XLA's.

    Where the strategy with the fewest bytes multiplies more than XLA does, the one with the fewest FLOPs is held against it.
    """
    theirs = report.bytes_per_device
    ours, work = _bytes_and_work(solved)
    if _less(theirs, ours):
        return "losses"
    if _less(report.multiplications_per_device, work):
        ours, work = _bytes_and_work(solve(expression, flops_first=True))
    if _less(work, report.multiplications_per_device):
        return "different FLOPs: fewer, " + ("more bytes" if _less(theirs, ours) else "and no more bytes")
    if _less(report.multiplications_per_device, work):
        return "different FLOPs: more"
    return "losses" if _less(theirs, ours) else "wins" if _less(ours, theirs) else "ties"


def _bytes_and_work(solved: Solved) -> tuple[float, float]:
    return received_bytes(solved.expression, solved.program), multiplications(solved.expression, solved.program)


def _less(a: float, b: float) -> bool:
    return a < b - SAME * max(a, b)


def compare(cases: Sequence[tuple[int, ShardedExpression]], tally: Tally) -> None:
    for start in range(0, len(cases), BATCH):
        batch = cases[start : start + BATCH]
        reports = compile_products([expression for _, expression in batch])
        for (index, expression), choice in zip(batch, reports, strict=True):
            outcome = verdict(expression, tally.solved[index], choice)
            tally.against_xla[outcome] += 1
            if outcome == "losses":
                chosen = ", ".join(map(str, choice.collectives))
                tally.problems.append(f"XLA moves {choice.bytes_per_device:g} bytes ({chosen}): {describe(expression)}")
        progress(f"XLA {min(start + BATCH, len(cases))}/{len(cases)}")


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The command


def report(tally: Tally, count: int) -> None:
    print(f"{count} products, both ways on virtual devices: {len(tally.problems)} problems")
    for name, seconds, limit in (
        ("derive by cases and price", tally.derive_s, DERIVE_LIMIT_S),
        ("solve exactly", tally.solve_s, SOLVE_LIMIT_S),
        ("of these, on cut axes too", tally.cut_s, SOLVE_LIMIT_S),
    ):
        if len(seconds) > 1:
            print(f"{name}, {len(seconds)} products: {distribution(seconds)} (wanted: 99% below {limit * 1e3:g} ms)")
    if tally.jax_errors:
        print(
            f"on JAX's host devices: {len(tally.jax_errors)} products, largest relative error {max(tally.jax_errors):.2g}"
        )
    compared = sum(tally.against_xla.values())
    if compared:
        equal = {name: tally.against_xla[name] for name in ("ties", "wins", "losses")}
        counts = ", ".join(f"{number} {name}" for name, number in equal.items())
        print(f"against XLA on CPU, {compared} products; bytes at equal FLOPs: {counts}")
        for name, number in sorted(tally.against_xla.items()):
            if name not in equal:
                print(f"  {name}: {number}")
    for problem in tally.problems:
        print(problem)


def distribution(seconds: Sequence[float]) -> str:
    """Percentiles of CPU time."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    shown = {"median": cuts[49], "90%": cuts[89], "95%": cuts[94], "99%": cuts[98], "worst": max(seconds)}
    return ", ".join(f"{name} {value * 1e3:.2f} ms" for name, value in shown.items()) + " of CPU time"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="random products")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jax", type=int, default=100, help="how many of them to run on JAX's host devices")
    parser.add_argument("--xla", type=int, default=200, help="how many of them to compile with XLA")
    options = parser.parse_args(arguments)
    tally = Tally()
    cases = list(enumerate(random_expressions(options.count, options.seed)))
    for index, expression in cases:
        check(expression, index, tally)
        if (index + 1) % 100 == 0:
            progress(f"{index + 1}/{options.count}")
    run_on_jax([(i, expression) for i, expression in cases if i in tally.solved][: options.jax], tally)
    compare(
        [(i, expression) for i, expression in cases if i in tally.solved and for_xla(expression)][: options.xla], tally
    )
    report(tally, options.count)
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main())
