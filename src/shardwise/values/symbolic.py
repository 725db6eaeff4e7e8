"""Sums of products of sizes and degrees, evaluated with numbers or with arrays of them.

A derivation does not know the sizes. It says that a device holds `ceil(D / (fsdp*cp)) * ceil(F / tp)` elements; a
`Polynomial` says so, and `evaluate` gives the number for one layout (plain Python integers) or for thousands (NumPy
arrays), from the same expression. Nothing here imports NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from shardwise.values.elementwise import Value, minimum, where

Result = TypeVar("Result")


class ElementPairs(str):
    """A dim with an element for each two elements of a group of whole dims, where the group has at most `most`; none where it has
    more. As text it is its name.

    >>> SymbolValues({"K": 4, "H": 8, "F": 64})[ElementPairs(("K", "H"), 32)]
    1024
    >>> SymbolValues({"F": 64})[ElementPairs(("F",), 32)]
    0
    """

    dims: tuple[str, ...]
    most: int

    def __new__(cls, dims: tuple[str, ...], most: int) -> ElementPairs:
        made = super().__new__(cls, f"pairs({'·'.join(dims)} up to {most})")
        made.dims, made.most = dims, most
        return made

    def __getnewargs__(self) -> tuple[tuple[str, ...], int]:  # type: ignore[override]
        return self.dims, self.most

    def evaluate(self, values: SymbolValues) -> Value:
        elements: Value = 1
        for dim in self.dims:
            elements = elements * values[dim]
        return where(elements <= self.most, elements * elements, 0)


class LocalDim(NamedTuple):
    """Size of a dim on the fullest device: `ceil(dim / product of the axes' degrees)`."""

    dim: str
    axes: tuple[str, ...]

    def __str__(self) -> str:
        return self.dim if not self.axes else f"({self.dim}/{'·'.join(self.axes)})"

    def evaluate(self, values: SymbolValues) -> Value:
        return -(-values[self.dim] // values.group_degree(self.axes))


class FewestElements(NamedTuple):
    """The fewer of the elements of two groups of whole dims."""

    left: tuple[str, ...]
    right: tuple[str, ...]

    def __str__(self) -> str:
        return f"min({'·'.join(self.left)}, {'·'.join(self.right)})"

    def evaluate(self, values: SymbolValues) -> Value:
        return minimum(*(multiply_symbols([LocalDim(dim, ()) for dim in dims]).evaluate(values) for dims in self))


Symbol = str | LocalDim | FewestElements


class IdentityCache:
    """What was made of objects, by their identities; they are kept, so that these stay their own."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], tuple[tuple[object, ...], Any]] = {}

    def compute_once(self, of: tuple[object, ...], make: Callable[[], Result], at: Hashable = None) -> Result:
        """What `make` gives, made once for the same objects `of` and equal `at`."""
        key = at, *map(id, of)
        if key not in self._known:
            self._known[key] = of, make()
        found: Result = self._known[key][1]
        return found


class SymbolValues(dict[Symbol, Value]):
    """What the symbols stand for; a `LocalDim`, `FewestElements` or `ElementPairs` that is not given is worked out from
    dims and degrees, once."""

    def __missing__(self, symbol: Symbol) -> Value:
        if isinstance(symbol, str) and not isinstance(symbol, ElementPairs):
            raise KeyError(symbol)
        value = symbol.evaluate(self)
        self[symbol] = value
        return value

    def compute_once(self, of: tuple[object, ...], make: Callable[[], Result], at: Hashable = None) -> Result:
        """What `make` gives at these values, which depends on nothing but them, the objects `of` and what is equal to `at`."""
        return make()

    def compute_once_at_any_rate(
        self, of: tuple[object, ...], make: Callable[[], Result], at: Hashable = None
    ) -> Result:
        """The same of what prices are made of before rates come in, which only `RepricedSymbolValues` keep."""
        return make()

    def group_degree(self, axes: Iterable[str]) -> Value:
        """Devices of a group along some axes."""
        degree: Value = 1
        for axis in axes:
            degree = degree * self[axis]
        return degree


class CachedSymbolValues(SymbolValues):
    """Values that stay as they are: each expression is evaluated once, for whoever prices the same sizes again and again."""

    def __init__(self, values: SymbolValues) -> None:
        super().__init__(values)
        self._known: dict[int, tuple[Polynomial, Value]] = {}
        self._made = IdentityCache()

    def compute_once(self, of: tuple[object, ...], make: Callable[[], Result], at: Hashable = None) -> Result:
        """The same, made once."""
        return self._made.compute_once(of, make, at)

    def evaluate_cached(self, polynomial: Polynomial) -> Value:
        """The number that a polynomial has; by identity, and the polynomial is kept so that its identity stays its own."""
        found = self._known.get(id(polynomial))
        if found is None:
            found = self._known[id(polynomial)] = polynomial, polynomial.sum_monomials(self)
        return found[1]


class RepricedSymbolValues(CachedSymbolValues):
    """Those of a layout that is priced at many rates: what does not depend on rates is made once too.

    Not for the arrays of a search, which prices them at one rate: what they kept would be larger than its tables.
    """

    compute_once_at_any_rate = CachedSymbolValues.compute_once


@dataclass(frozen=True, slots=True)
class Monomial:
    """`coefficient` times the product of the factors, each to its exponent."""

    coefficient: float
    factors: tuple[tuple[Symbol, int], ...] = ()

    def __mul__(self, other: Monomial) -> Monomial:
        return Monomial(self.coefficient * other.coefficient, _factors(self.factors + other.factors))

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
def _factors(parts: tuple[tuple[Symbol, int], ...]) -> tuple[tuple[Symbol, int], ...]:
    """Factors in one order, each symbol once."""
    exponents: dict[Symbol, int] = {}
    for symbol, exponent in parts:
        exponents[symbol] = exponents.get(symbol, 0) + exponent
    return tuple(sorted(((s, e) for s, e in exponents.items() if e), key=_sort_key))


@lru_cache(maxsize=4096)
def _sort_key(factor: tuple[Symbol, int]) -> str:
    return repr(factor[0])


@dataclass(frozen=True, slots=True)
class Polynomial:
    """A sum of monomials; like terms are merged."""

    monomials: tuple[Monomial, ...] = ()

    def __add__(self, other: Polynomial) -> Polynomial:
        return sum_polynomials((self, other)) if self and other else self or other

    def __mul__(self, other: Polynomial | float) -> Polynomial:
        if isinstance(other, Polynomial):
            return sum_polynomials(Polynomial((a * b,)) for a in self.monomials for b in other.monomials)
        if other == 1:
            return self
        return Polynomial(tuple(Monomial(m.coefficient * other, m.factors) for m in self.monomials if other))

    def evaluate(self, values: Mapping[Symbol, Value]) -> Value:
        """The number (or array) that the polynomial has when its symbols have these values."""
        if isinstance(values, CachedSymbolValues):
            return values.evaluate_cached(self)
        return self.sum_monomials(values)

    def sum_monomials(self, values: Mapping[Symbol, Value]) -> Value:
        """The sum of the monomials."""
        result: Value = 0.0
        for monomial in self.monomials:
            result = result + monomial.evaluate(values)
        return result

    def __bool__(self) -> bool:
        return bool(self.monomials)

    def __str__(self) -> str:
        return " + ".join(map(str, self.monomials)) or "0"


ZERO = Polynomial()


def constant(value: float) -> Polynomial:
    """A polynomial without symbols."""
    return Polynomial((Monomial(value),)) if value else ZERO


def multiply_symbols(symbols: Iterable[Symbol], coefficient: float = 1.0) -> Polynomial:
    """The product of the symbols times a coefficient."""
    return Polynomial((Monomial(coefficient, _factors(tuple((symbol, 1) for symbol in symbols))),))


def sum_polynomials(polynomials: Iterable[Polynomial]) -> Polynomial:
    """The sum of polynomials."""
    merged: dict[tuple[tuple[Symbol, int], ...], float] = {}
    for polynomial in polynomials:
        for monomial in polynomial.monomials:
            merged[monomial.factors] = merged.get(monomial.factors, 0.0) + monomial.coefficient
    return Polynomial(tuple(Monomial(c, f) for f, c in merged.items() if c))
