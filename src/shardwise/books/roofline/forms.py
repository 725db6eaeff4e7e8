"""The kernels by name: the letters of their sizes, what they cost, which matrix products they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.books.rules import (
    KernelCost,
    MatrixProduct,
    attention_cost,
    batched_matmul_cost,
    dot_product_cost,
    elementwise_cost,
    experts_cost,
    matmul_cost,
)
from shardwise.errors import InputError

Sizes = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One kind of kernel.

    `letters` says what each size counts; `defaults` gives those that may be left out a number, or the letter that they
    follow. `critical` is the letter that raises the intensity, none where no size does. `text` writes the kernel with its
    sizes. `products` are what a matrix unit multiplies, none where the vector unit works.
    """

    name: str
    text: str
    letters: Mapping[str, str]
    cost: Callable[[Sizes, float, float, bool, bool], KernelCost]
    defaults: Mapping[str, int | str] = field(default_factory=dict)
    critical: str | None = None
    products: Callable[[Sizes], tuple[MatrixProduct, ...]] = lambda sizes: ()
    weights: bool = False
    attention: bool = False

    def filled(self, given: Sizes) -> dict[str, float]:
        """All sizes in the order of `letters`. Raises `InputError` for letters that are missing or not known."""
        problems = [
            f"SIZES: {self.name} has no {letter!r}; {self.usage}" for letter in given if letter not in self.letters
        ]
        missing = [letter for letter in self.letters if letter not in given and letter not in self.defaults]
        if missing:
            problems.append(f"SIZES: {', '.join(missing)} missing; {self.usage}")
        if problems:
            raise InputError(*problems)
        found = dict(given)
        for letter in self.letters:
            default = self.defaults.get(letter, 0)
            found.setdefault(letter, found[default] if isinstance(default, str) else float(default))
        sizes = {letter: found[letter] for letter in self.letters}
        self._check(sizes)
        return sizes

    def _check(self, sizes: Sizes) -> None:
        if self.attention and sizes["N"] % sizes["K"]:
            raise InputError(
                f"SIZES: found N={sizes['N']:g} query heads on K={sizes['K']:g}; a multiple of K heads is required"
            )
        if "k" in self.letters and sizes["k"] > sizes["E"]:
            raise InputError(
                f"SIZES: found k={sizes['k']:g} of E={sizes['E']:g} experts; at most all of them are required"
            )

    @property
    def usage(self) -> str:
        """The letters as an error or a help text lists them."""
        optional = [letter for letter in self.letters if letter in self.defaults]
        required = [letter for letter in self.letters if letter not in self.defaults]
        return f"{', '.join(required)} are required" + (f", {', '.join(optional)} optional" if optional else "")

    def tied(self, given: Sizes) -> tuple[str, ...]:
        """The critical letter, and the letters left out that follow it."""
        follow = [
            letter for letter, default in self.defaults.items() if default == self.critical and letter not in given
        ]
        return (*([self.critical] if self.critical else []), *follow)


def _attention_products(s: Sizes) -> tuple[MatrixProduct, ...]:
    """Query heads that share keys are rows of one product; keys, then values, are what the unit holds."""
    rows, count = s["T"] * s["N"] / s["K"], s["B"] * s["K"]
    return (
        MatrixProduct(rows=rows, d_in=s["H"], d_out=s["S"], count=count),
        MatrixProduct(rows=rows, d_in=s["S"], d_out=s["H"], count=count),
    )


def _attention(s: Sizes, width: float, weight: float, causal: bool, fused: bool) -> KernelCost:
    return attention_cost(s["B"], s["T"], s["S"], s["N"], s["K"], s["H"], width, causal=causal, fused=fused)


_FORMS = (
    Form(
        name="dot", text="[{N}] · [{N}]", letters={"N": "elements of each vector"},
        cost=lambda s, width, weight, causal, fused: dot_product_cost(s["N"], width),
    ),
    Form(
        name="elementwise", text="{A} x [{N}] -> [{N}]", letters={"N": "elements", "A": "arrays that are read (2)"},
        defaults={"A": 2},
        cost=lambda s, width, weight, causal, fused: elementwise_cost(s["N"], s["A"], width),
    ),
    Form(
        name="matmul", text="[{B}, {D}] · [{D}, {F}]", critical="B", weights=True,
        letters={"B": "rows of activations", "D": "width in", "F": "width out"},
        cost=lambda s, width, weight, causal, fused: matmul_cost(s["B"], s["D"], s["F"], width, weight),
        products=lambda s: (MatrixProduct(rows=s["B"], d_in=s["D"], d_out=s["F"]),),
    ),
    Form(
        name="bmm", text="[{B}, {T}, {D}] · [{B}, {D}, {F}]", critical="T", weights=True, defaults={"T": 1},
        letters={"B": "products", "T": "rows of each (1)", "D": "width in", "F": "width out"},
        cost=lambda s, width, weight, causal, fused: batched_matmul_cost(s["B"], s["T"], s["D"], s["F"], width, weight),
        products=lambda s: (MatrixProduct(rows=s["T"], d_in=s["D"], d_out=s["F"], count=s["B"]),),
    ),
    Form(
        name="moe", text="[{B}, {D}] · [{k} of {E}, {D}, {F}]", critical="B", weights=True,
        letters={"B": "tokens", "D": "width in", "F": "width out", "E": "experts", "k": "experts of each token"},
        cost=lambda s, width, weight, causal, fused: experts_cost(
            s["B"], s["D"], s["F"], s["E"], s["k"], width, weight
        ),
        products=lambda s: (
            MatrixProduct(rows=s["B"] * s["k"] / s["E"], d_in=s["D"], d_out=s["F"], count=s["E"]),
        ),
    ),
    Form(
        name="attention", text="Q [{B}, {T}, {N}, {H}], K and V [{B}, {S}, {K}, {H}]", critical="T", attention=True,
        letters={"B": "sequences (1)", "T": "queries of each; 1 to decode", "S": "keys of each (T)", "N": "query heads",
                 "K": "key-value heads (N)", "H": "width of a head"},
        defaults={"B": 1, "S": "T", "K": "N"}, cost=_attention, products=_attention_products,
    ),
)  # fmt: skip
FORMS: Mapping[str, Form] = {form.name: form for form in _FORMS}


def kernel_form(name: str) -> Form:
    """A kind of kernel by name. Raises `InputError` that lists the names."""
    if name not in FORMS:
        raise InputError(f"KERNEL: found {name!r}; one of {', '.join(FORMS)} is required")
    return FORMS[name]
