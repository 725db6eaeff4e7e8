"""A hundred random products: both programs, run on virtual devices, give the unsharded product."""

from __future__ import annotations

import pytest
from expressions import LARGEST_ERROR, largest_error, multiplications, received_bytes, solve
from random_expressions import LARGEST_MESH, random_expressions
from thinned import part_of

from shardwise.derive.sharded_einsum import ShardedExpression, derive_by_cases
from shardwise.sharding.notation import parse_expression
from shardwise.verify.product_runs import run_products

EXPRESSIONS = list(random_expressions(100))


@pytest.mark.parametrize("sharded", EXPRESSIONS, ids=lambda sharded: str(sharded.expression))
def test_solved_and_derived_programs_give_the_product(sharded: ShardedExpression) -> None:
    solved, derived = solve(sharded), derive_by_cases(sharded)
    assert largest_error(solved.expression, solved.program) <= LARGEST_ERROR
    assert largest_error(sharded, derived) <= LARGEST_ERROR
    if sharded.goal is not None:
        assert received_bytes(solved.expression, solved.program) <= received_bytes(sharded, derived) * (1 + 1e-9)


def test_thirty_give_the_product_on_jax() -> None:
    """The solved programs, as the source that is written for JAX, on its host devices."""
    small = [sharded for sharded in EXPRESSIONS if sharded.mesh.num_devices <= 8][:30]
    assert len(small) == 30
    solved = [solve(sharded) for sharded in part_of(small)]
    errors = run_products([(solution.expression, solution.program) for solution in solved], "jax")
    assert len(errors) == len(solved)
    assert max(errors) <= 1e-5


def test_solving_for_flops_first_never_multiplies_more() -> None:
    for sharded in part_of(EXPRESSIONS[:30]):
        fewest_flops, fewest_bytes = solve(sharded, flops_first=True), solve(sharded)
        assert multiplications(fewest_flops.expression, fewest_flops.program) <= multiplications(
            fewest_bytes.expression, fewest_bytes.program
        )


def test_products_are_the_same_for_the_same_seed_and_of_every_kind() -> None:
    again = [str(sharded.expression) for sharded in random_expressions(50)]
    assert again == [str(sharded.expression) for sharded in EXPRESSIONS[:50]]
    assert again != [str(sharded.expression) for sharded in random_expressions(50, seed=1)]
    assert {len(sharded.operands) for sharded in EXPRESSIONS} == {2, 3}
    assert {len(sharded.mesh.axes) for sharded in EXPRESSIONS} == {1, 2, 3}
    assert any(len(axes) > 1 for sharded in EXPRESSIONS for spec in sharded.operands for axes in spec.axes)
    assert any(spec.partial for sharded in EXPRESSIONS for spec in sharded.operands)
    assert all(sharded.mesh.num_devices <= LARGEST_MESH for sharded in EXPRESSIONS)


def test_an_expression_prints_as_what_parses_to_it() -> None:
    for sharded in EXPRESSIONS:
        assert parse_expression(str(sharded.expression)) == sharded.expression
