"""Expressions have equal values for numbers and for arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.values.symbolic import (
    ZERO,
    LocalDim,
    Monomial,
    Polynomial,
    SymbolValues,
    ceil_div,
    constant,
    gcd,
    maximum,
    minimum,
    multiply_symbols,
    sum_polynomials,
    where,
)

SYMBOLS = ("D", "F", "X", "Y", LocalDim("D", ("X",)), LocalDim("D", ("X", "Y")), LocalDim("F", ()))

monomials = st.builds(
    lambda coefficient, factors: Monomial(coefficient, tuple(factors.items())),
    st.integers(-4, 4).map(float),
    st.dictionaries(st.sampled_from(SYMBOLS), st.integers(-2, 3), max_size=3),
)
polynomials = st.lists(monomials, max_size=4).map(lambda ms: sum_polynomials(Polynomial((m,)) for m in ms))
rows = st.lists(st.tuples(*(st.integers(1, 40) for _ in range(4))), min_size=1, max_size=6)


@given(polynomials, rows)
def test_values_of_arrays_equal_those_of_numbers(polynomial: Polynomial, table: list[tuple[int, ...]]) -> None:
    columns = np.array(table, dtype=np.int64).T
    batched = polynomial.evaluate(SymbolValues(dict(zip("DFXY", columns, strict=True))))
    for index, row in enumerate(table):
        single = polynomial.evaluate(SymbolValues(dict(zip("DFXY", row, strict=True))))
        assert np.broadcast_to(batched, len(table))[index] == pytest.approx(single, rel=1e-13, abs=1e-300)


@given(polynomials, polynomials, st.tuples(*(st.integers(1, 40) for _ in range(4))))
def test_sums_and_products_evaluate_as_such(a: Polynomial, b: Polynomial, row: tuple[int, ...]) -> None:
    values: Any = SymbolValues(dict(zip("DFXY", row, strict=True)))
    x, y = a.evaluate(values), b.evaluate(values)
    scale = max(abs(m.evaluate(values)) for m in (*a.monomials, *b.monomials, Monomial(1.0)))
    assert (a + b).evaluate(values) == pytest.approx(x + y, rel=1e-12, abs=1e-12 * scale)
    assert (a * b).evaluate(values) == pytest.approx(x * y, rel=1e-12, abs=1e-12 * scale**2)
    assert (a * 3.0).evaluate(values) == pytest.approx(3 * x, rel=1e-12, abs=1e-12 * scale)


def test_like_terms_merge_and_cancel() -> None:
    area = multiply_symbols(["D", "F"])
    assert area + area == area * 2.0
    assert area + area * -1.0 == ZERO
    assert not ZERO
    assert multiply_symbols(["D", "F"]) == multiply_symbols(["F", "D"])
    assert constant(0) == ZERO
    assert str(multiply_symbols(["D", LocalDim("F", ("X",))], 2.0)) == "2·D·(F/X)"


def test_a_local_size_is_the_fullest_device_s() -> None:
    values = SymbolValues({"D": 10, "X": 4, "Y": 2})
    assert values[LocalDim("D", ("X",))] == 3
    assert values[LocalDim("D", ("X", "Y"))] == 2
    assert values[LocalDim("D", ())] == 10
    with pytest.raises(KeyError):
        values["Z"]


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_functions_agree_on_numbers_and_arrays(a: int, b: int) -> None:
    x, y = np.array([a]), np.array([b])
    assert maximum(a, b) == maximum(x, b)[0] == maximum(a, y)[0] == max(a, b)
    assert minimum(a, b) == minimum(x, y)[0] == min(a, b)
    assert gcd(a, b) == gcd(x, y)[0] == np.gcd(a, b)
    assert ceil_div(a, b) == ceil_div(x, y)[0] == (a + b - 1) // b
    assert where(a > b, a, b) == where(x > b, a, b)[0] == max(a, b)
