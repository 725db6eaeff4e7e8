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


@pytest.mark.parametrize("made", EXPRESSIONS, ids=lambda made: str(made.expression))
def test_solved_and_derived_programs_give_the_product(made: ShardedExpression) -> None:
    solved, derived = solve(made), derive_by_cases(made)
    assert largest_error(solved.made, solved.program) <= LARGEST_ERROR
    assert largest_error(made, derived) <= LARGEST_ERROR
    if made.goal is not None:
        assert received_bytes(solved.made, solved.program) <= received_bytes(made, derived) * (1 + 1e-9)


def test_thirty_give_the_product_on_jax() -> None:
    """The solved programs, as the source that is written for JAX, on its host devices."""
    small = [made for made in EXPRESSIONS if made.mesh.num_devices <= 8][:30]
    assert len(small) == 30
    solved = [solve(made) for made in part_of(small)]
    errors = run_products([(found.made, found.program) for found in solved], "jax")
    assert len(errors) == len(solved)
    assert max(errors) <= 1e-5


def test_solving_for_flops_first_never_multiplies_more() -> None:
    for made in part_of(EXPRESSIONS[:30]):
        least, fewest_bytes = solve(made, flops_first=True), solve(made)
        assert multiplications(least.made, least.program) <= multiplications(fewest_bytes.made, fewest_bytes.program)


def test_products_are_the_same_for_the_same_seed_and_of_every_kind() -> None:
    again = [str(made.expression) for made in random_expressions(50)]
    assert again == [str(made.expression) for made in EXPRESSIONS[:50]]
    assert again != [str(made.expression) for made in random_expressions(50, seed=1)]
    assert {len(made.operands) for made in EXPRESSIONS} == {2, 3}
    assert {len(made.mesh.axes) for made in EXPRESSIONS} == {1, 2, 3}
    assert any(len(axes) > 1 for made in EXPRESSIONS for spec in made.operands for axes in spec.axes)
    assert any(spec.partial for made in EXPRESSIONS for spec in made.operands)
    assert all(made.mesh.num_devices <= LARGEST_MESH for made in EXPRESSIONS)


def test_an_expression_prints_as_what_parses_to_it() -> None:
    for made in EXPRESSIONS:
        assert parse_expression(str(made.expression)) == made.expression
