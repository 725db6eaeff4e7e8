"""Polynomials of sizes and mesh degrees, evaluated with numbers or with arrays of them.

A derivation does not know the sizes. It says that a device holds `ceil(D / (fsdp*cp)) * ceil(F / tp)` elements: a
`Polynomial`, which `evaluate` turns into the number for one layout (Python integers) or for thousands (NumPy arrays), from
the same expression. Nothing here imports NumPy.

Elementwise arithmetic on numbers or NumPy arrays, from the same expressions.

NumPy is imported by the first call that has an array, so that `import shardwise` does not load it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class ElementPairs(str):
    """Dim with one element per pair of elements of a group of unsharded dims; 0 if the group exceeds `max_elements`.

    As text it is its name.

    >>> SymbolValues({"K": 4, "H": 8, "F": 64})[ElementPairs(("K", "H"), 32)]
    1024
    >>> SymbolValues({"F": 64})[ElementPairs(("F",), 32)]
    0
    """

    dims: tuple[str, ...]
    max_elements: int

    def __new__(cls, dims: tuple[str, ...], max_elements: int) -> ElementPairs:
        pairs = super().__new__(cls, f"pairs({'·'.join(dims)} up to {max_elements})")
        pairs.dims, pairs.max_elements = dims, max_elements
        return pairs

    def __getnewargs__(self) -> tuple[tuple[str, ...], int]:  # type: ignore[override]
        return self.dims, self.max_elements

    def evaluate(self, values: SymbolValues) -> Value:
        elements: Value = 1
        for dim in self.dims:
            elements = elements * values[dim]
        return where(elements <= self.max_elements, elements * elements, 0)


class SegmentDim(str):
    """Dim with one element per part of a sequence that is split over `axes`; 0 where the sequence is not split.

    Tensors with this dim are what the parts of a sequence hand to each other. A sequence in one part has none, so that they take
    no memory, no time and no communication there. A degree without a value is 1. As text it is its name.

    >>> SymbolValues({"cp": 4})[SegmentDim(("cp",))], SymbolValues({"cp": 1})[SegmentDim(("cp",))]
    (4, 0)
    """

    axes: tuple[str, ...]

    def __new__(cls, axes: tuple[str, ...]) -> SegmentDim:
        segments = super().__new__(cls, f"segments({'·'.join(axes)})")
        segments.axes = axes
        return segments

    def __getnewargs__(self) -> tuple[tuple[str, ...]]:  # type: ignore[override]
        return (self.axes,)

    def evaluate(self, values: SymbolValues) -> Value:
        degree: Value = 1
        for axis in self.axes:
            degree = degree * values.get(axis, 1)
        return where(degree > 1, degree, 0)


class QuotientDim(str):
    """Dim with one element per group of so many elements of another dim; a rest that fills no group has none. As text it is its
    name.

    >>> SymbolValues({"T": 11, "m": 4})[QuotientDim("T", "m")]
    2
    """

    dim: str
    divisor: str

    def __new__(cls, dim: str, divisor: str) -> QuotientDim:
        quotient = super().__new__(cls, f"{dim}/{divisor}")
        quotient.dim, quotient.divisor = dim, divisor
        return quotient

    def __getnewargs__(self) -> tuple[str, str]:  # type: ignore[override]
        return self.dim, self.divisor

    def evaluate(self, values: SymbolValues) -> Value:
        return values[self.dim] // values[self.divisor]


class LocalDim(NamedTuple):
    """Size of a dim on the fullest device: `ceil(dim / product of the axes' degrees)`."""

    dim: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return self.dim if not self.axes else f"({self.dim}/{'·'.join(self.axes)})"

    def evaluate(self, values: SymbolValues) -> Value:
        return -(-values[self.dim] // values.group_degree(self.axes))


class FewestElements(NamedTuple):
    """Smaller of the element counts of two groups of unsharded dims."""

    left: tuple[str, ...]
    right: tuple[str, ...]

    def __str__(self) -> str:
        return f"min({'·'.join(self.left)}, {'·'.join(self.right)})"

    def evaluate(self, values: SymbolValues) -> Value:
        return minimum(*(multiply_symbols([LocalDim(dim, ()) for dim in dims]).evaluate(values) for dims in self))


Symbol = str | LocalDim | FewestElements


class IdentityCache:
    """Cache of results by the identity of the objects that they were computed from."""

    def __init__(self) -> None:
        self._cache: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Any]] = {}

    def compute_once(self, objects: tuple[object, ...], make: Callable[[], Result], key: Hashable = None) -> Result:
        """Return `make()`, computed once for the same objects and an equal `key`."""
        # By id(): hashing deep frozen values costs more than pricing them. The objects are stored with the result, since
        # the id of a freed object may be reused.
        cache_key = key, *map(id, objects)
        if cache_key not in self._cache:
            self._cache[cache_key] = objects, make()
        result: Result = self._cache[cache_key][1]
        return result


Value = Any  # an int, a float, or a NumPy array of them


class SymbolValues(dict[Symbol, Value]):
    """Values of symbols; a missing one that is no plain name is computed once from dims and degrees."""

    def __missing__(self, symbol: Symbol) -> Value:
        if isinstance(symbol, str) and not isinstance(symbol, ElementPairs | SegmentDim | QuotientDim):
            raise KeyError(symbol)
        value = symbol.evaluate(self)
        self[symbol] = value
        return value

    def compute_once(self, objects: tuple[object, ...], make: Callable[[], Result], key: Hashable = None) -> Result:
        """Return `make()`, which must depend on these values, the objects and `key` alone; subclasses cache it."""
        return make()

    def compute_rate_independent(
        self, objects: tuple[object, ...], make: Callable[[], Result], key: Hashable = None
    ) -> Result:
        """Return `make()`, which must not depend on a rate; only `RepricedSymbolValues` caches it."""
        return make()

    def group_degree(self, axes: Iterable[str]) -> Value:
        """Return the number of devices of a group along some axes."""
        degree: Value = 1
        for axis in axes:
            degree = degree * self[axis]
        return degree


class CachedSymbolValues(SymbolValues):
    """Values that do not change, so that each expression is evaluated once: for repeated prices at the same sizes."""

    def __init__(self, values: SymbolValues) -> None:
        super().__init__(values)
        self._cache: dict[int, tuple[Polynomial, Value]] = {}
        self._results = IdentityCache()

    def compute_once(self, objects: tuple[object, ...], make: Callable[[], Result], key: Hashable = None) -> Result:
        """Return `make()`, computed once for the same objects and an equal `key`."""
        return self._results.compute_once(objects, make, key)

    def evaluate_cached(self, polynomial: Polynomial) -> Value:
        """Return the value of a polynomial, evaluated once per polynomial object."""
        cached = self._cache.get(id(polynomial))  # by id(), as in `IdentityCache`; the polynomial is kept alive
        if cached is None:
            cached = self._cache[id(polynomial)] = polynomial, polynomial.sum_monomials(self)
        return cached[1]


class RepricedSymbolValues(CachedSymbolValues):
    """Values of one layout that is priced at many rates: results that do not depend on a rate are cached too.

    Not for the arrays of a search, which prices them at one rate: the cached arrays would outgrow its tables.
    """

    compute_rate_independent = CachedSymbolValues.compute_once


@dataclass(frozen=True, slots=True)
class Monomial:
    """`coefficient` times the product of the factors, each to its exponent."""

    coefficient: float
    factors: tuple[tuple[Symbol, int], ...] = ()

    def __mul__(self, monomial: Monomial) -> Monomial:
        return Monomial(self.coefficient * monomial.coefficient, _factors(self.factors + monomial.factors))

    def evaluate(self, values: Mapping[Symbol, Value]) -> Value:
        result: Value = self.coefficient
        for symbol, exponent in self.factors:
            value = values[symbol]
            for _ in range(abs(exponent)):
                result = result * value if exponent > 0 else result / value
        return result

    def __str__(self) -> str:
        parts = [f"{self.coefficient:g}"] if self.coefficient != 1 or not self.factors else []
        parts += [str(s) if e == 1 else f"{s}^{e}" for s, e in self.factors]
        return "·".join(parts)


@lru_cache(maxsize=2**14)
def _factors(powers: tuple[tuple[Symbol, int], ...]) -> tuple[tuple[Symbol, int], ...]:
    """Merge factors: each symbol once, in canonical order."""
    exponents: dict[Symbol, int] = {}
    for symbol, exponent in powers:
        exponents[symbol] = exponents.get(symbol, 0) + exponent
    return tuple(sorted(((s, e) for s, e in exponents.items() if e), key=_sort_key))


# Symbols of several types do not compare, so `repr` orders them. The order of the factors decides the last bits of every price,
# and `repr` begins with the class name: `FewestElements` must sort before `LocalDim`.
@lru_cache(maxsize=4096)
def _sort_key(factor: tuple[Symbol, int]) -> str:
    return repr(factor[0])


@dataclass(frozen=True, slots=True)
class Polynomial:
    """Sum of monomials; like terms are merged."""

    monomials: tuple[Monomial, ...] = ()

    def __add__(self, summand: Polynomial) -> Polynomial:
        return sum_polynomials((self, summand)) if self and summand else self or summand

    def __mul__(self, factor: Polynomial | float) -> Polynomial:
        if isinstance(factor, Polynomial):
            return sum_polynomials(Polynomial((a * b,)) for a in self.monomials for b in factor.monomials)
        if factor == 1:
            return self
        return Polynomial(tuple(Monomial(m.coefficient * factor, m.factors) for m in self.monomials if factor))

    def evaluate(self, values: Mapping[Symbol, Value]) -> Value:
        """Return the number (or array) of the polynomial for these values of its symbols."""
        if isinstance(values, CachedSymbolValues):
            return values.evaluate_cached(self)
        return self.sum_monomials(values)

    def sum_monomials(self, values: Mapping[Symbol, Value]) -> Value:
        """Evaluate without a cache."""
        result: Value = 0.0
        for monomial in self.monomials:
            result = result + monomial.evaluate(values)
        return result

    def __bool__(self) -> bool:
        return bool(self.monomials)

    def __str__(self) -> str:
        return " + ".join(map(str, self.monomials)) or "0"


ZERO = Polynomial()


def constant(coefficient: float) -> Polynomial:
    """Return a polynomial without symbols."""
    return Polynomial((Monomial(coefficient),)) if coefficient else ZERO


def multiply_symbols(symbols: Iterable[Symbol], coefficient: float = 1.0) -> Polynomial:
    """Return the product of symbols times a coefficient."""
    return Polynomial((Monomial(coefficient, _factors(tuple((symbol, 1) for symbol in symbols))),))


def sum_polynomials(polynomials: Iterable[Polynomial]) -> Polynomial:
    """Return the sum of polynomials, with like terms merged."""
    merged: dict[tuple[tuple[Symbol, int], ...], float] = {}
    for polynomial in polynomials:
        for monomial in polynomial.monomials:
            merged[monomial.factors] = merged.get(monomial.factors, 0.0) + monomial.coefficient
    return Polynomial(tuple(Monomial(c, f) for f, c in merged.items() if c))


def _numpy() -> Any:
    import numpy as np  # not at the top: `import shardwise` must not load NumPy

    return np


def maximum(first: Value, *operands: Value) -> Value:
    """Return the elementwise maximum of numbers or arrays."""
    result = first
    for operand in operands:
        if hasattr(result, "dtype") or hasattr(operand, "dtype"):
            result = _numpy().maximum(result, operand)
        else:
            result = max(result, operand)
    return result


def sum_values(terms: Iterable[Value]) -> Value:
    """Return the sum of numbers or arrays. Plain zeros are skipped: adding each would cost an operation on an array."""
    result: Value = None
    for term in terms:
        if not (isinstance(term, float) and term == 0.0):
            result = term if result is None else result + term
    return 0.0 if result is None else result


def minimum(first: Value, second: Value) -> Value:
    """Return the elementwise minimum of numbers or arrays."""
    return -maximum(-first, -second)


def where(condition: Value, if_true: Value, if_false: Value) -> Value:
    """Choose elementwise between numbers or arrays."""
    if any(hasattr(operand, "dtype") for operand in (condition, if_true, if_false)):
        return _numpy().where(condition, if_true, if_false)
    return if_true if condition else if_false


def ceil_div(numerator: Value, denominator: Value) -> Value:
    """Return the integer quotient rounded up, of numbers or arrays. Floating-point operands must be below 2^53."""
    if getattr(getattr(numerator, "dtype", None), "kind", "") == "f":
        # Below 2^53 the quotient is exact enough: none is rounded up or down to an integer that it is not.
        return _numpy().ceil(numerator / denominator)
    return -(-numerator // denominator)


def gcd(first: Value, second: Value) -> Value:
    """Return the greatest common divisor of integers or arrays of them."""
    if hasattr(first, "dtype") or hasattr(second, "dtype"):
        return _numpy().gcd(first, second)
    return math.gcd(first, second)
