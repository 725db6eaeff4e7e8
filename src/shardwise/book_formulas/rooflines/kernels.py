"""Roofline of one kernel on one chip: FLOPs, bytes, what binds, the size from which compute does, what padding wastes.

`KERNEL_FORMS` has the kinds of kernels by name: the letters of their sizes, their cost, and their matrix products."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwise.book_formulas import rules
from shardwise.book_formulas.rooflines.chip_bandwidths import Origin, link_bandwidths, transfer_rates
from shardwise.hardware import Chip
from shardwise.values import InputError, bytes_per_element

Sizes = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelForm:
    """One kind of kernel.

    `letters` says what each size counts; `defaults` gives optional ones a number, or the letter that they follow. `critical` is
    the letter that raises the intensity, None if no size does. `text` writes the kernel with its sizes. `products` are what a
    matrix unit multiplies, none if the vector unit works."""

    name: str
    text: str
    letters: Mapping[str, str]
    cost: Callable[[Sizes, float, float, bool, bool], rules.KernelCost]
    defaults: Mapping[str, int | str] = field(default_factory=dict)
    critical: str | None = None
    products: Callable[[Sizes], tuple[rules.MatrixProduct, ...]] = lambda sizes: ()
    weights: bool = False
    attention: bool = False

    def fill_sizes(self, arguments: Sizes) -> dict[str, float]:
        """Return all sizes in the order of `letters`. Raises `InputError` for letters that are missing or unknown."""
        problems = [
            f"SIZES: {self.name} has no {letter!r}; {self.usage}" for letter in arguments if letter not in self.letters
        ]
        missing = [letter for letter in self.letters if letter not in arguments and letter not in self.defaults]
        if missing:
            problems.append(f"SIZES: {', '.join(missing)} missing; {self.usage}")
        if problems:
            raise InputError(*problems)
        filled = dict(arguments)
        for letter in self.letters:
            default = self.defaults.get(letter, 0)
            filled.setdefault(letter, filled[default] if isinstance(default, str) else float(default))
        sizes = {letter: filled[letter] for letter in self.letters}
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

    def critical_letters(self, arguments: Sizes) -> tuple[str, ...]:
        """Return the critical letter, and the omitted letters that follow it."""
        following = [
            letter for letter, default in self.defaults.items() if default == self.critical and letter not in arguments
        ]
        return (*([self.critical] if self.critical else []), *following)


def _attention_products(s: Sizes) -> tuple[rules.MatrixProduct, ...]:
    """Query heads that share keys are rows of one product; keys, then values, are what the unit holds."""
    rows, count = s["T"] * s["N"] / s["K"], s["B"] * s["K"]
    return (
        rules.MatrixProduct(rows=rows, d_in=s["H"], d_out=s["S"], count=count),
        rules.MatrixProduct(rows=rows, d_in=s["S"], d_out=s["H"], count=count),
    )


def _attention(s: Sizes, width: float, weight: float, causal: bool, fused: bool) -> rules.KernelCost:
    return rules.attention_cost(s["B"], s["T"], s["S"], s["N"], s["K"], s["H"], width, causal=causal, fused=fused)


_FORM_LIST = (
    KernelForm(
        name="dot", text="[{N}] · [{N}]", letters={"N": "elements of each vector"},
        cost=lambda s, width, weight, causal, fused: rules.dot_product_cost(s["N"], width),
    ),
    KernelForm(
        name="elementwise", text="{A} x [{N}] -> [{N}]", letters={"N": "elements", "A": "arrays that are read (2)"},
        defaults={"A": 2},
        cost=lambda s, width, weight, causal, fused: rules.elementwise_cost(s["N"], s["A"], width),
    ),
    KernelForm(
        name="matmul", text="[{B}, {D}] · [{D}, {F}]", critical="B", weights=True,
        letters={"B": "rows of activations", "D": "width in", "F": "width out"},
        cost=lambda s, width, weight, causal, fused: rules.matmul_cost(s["B"], s["D"], s["F"], width, weight),
        products=lambda s: (rules.MatrixProduct(rows=s["B"], d_in=s["D"], d_out=s["F"]),),
    ),
    KernelForm(
        name="bmm", text="[{B}, {T}, {D}] · [{B}, {D}, {F}]", critical="T", weights=True, defaults={"T": 1},
        letters={"B": "products", "T": "rows of each (1)", "D": "width in", "F": "width out"},
        cost=lambda s, width, weight, causal, fused: rules.batched_matmul_cost(s["B"], s["T"], s["D"], s["F"], width, weight),
        products=lambda s: (rules.MatrixProduct(rows=s["T"], d_in=s["D"], d_out=s["F"], count=s["B"]),),
    ),
    KernelForm(
        name="moe", text="[{B}, {D}] · [{k} of {E}, {D}, {F}]", critical="B", weights=True,
        letters={"B": "tokens", "D": "width in", "F": "width out", "E": "experts", "k": "experts of each token"},
        cost=lambda s, width, weight, causal, fused: rules.experts_cost(
            s["B"], s["D"], s["F"], s["E"], s["k"], width, weight
        ),
        products=lambda s: (
            rules.MatrixProduct(rows=s["B"] * s["k"] / s["E"], d_in=s["D"], d_out=s["F"], count=s["E"]),
        ),
    ),
    KernelForm(
        name="attention", text="Q [{B}, {T}, {N}, {H}], K and V [{B}, {S}, {K}, {H}]", critical="T", attention=True,
        letters={"B": "sequences (1)", "T": "queries of each; 1 to decode", "S": "keys of each (T)", "N": "query heads",
                 "K": "key-value heads (N)", "H": "width of a head"},
        defaults={"B": 1, "S": "T", "K": "N"}, cost=_attention, products=_attention_products,
    ),
)  # fmt: skip
KERNEL_FORMS: Mapping[str, KernelForm] = {form.name: form for form in _FORM_LIST}


def get_kernel_form(name: str) -> KernelForm:
    """Return a kind of kernel by name. Raises `InputError` that lists the names."""
    if name not in KERNEL_FORMS:
        raise InputError(f"KERNEL: found {name!r}; one of {', '.join(KERNEL_FORMS)} is required")
    return KERNEL_FORMS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRoofline:
    """Roofline of one kernel on one chip: activations and arithmetic in one format, weights possibly in another.

    `transfers` are the bandwidths (bytes/s) between its operands and the matrix unit; `bytes_per_s` is the slowest. Source:
    "How to Scale Your Model", All About Rooflines.

    >>> import shardwise as sw
    >>> roofline = sw.roofline("matmul", "tpu-v5e", B=512, D=8192, F=28672)
    >>> roofline.cost.flops == 2 * 512 * 8192 * 28672, roofline.bound, round(roofline.critical_intensity)
    (True, 'compute', 243)
    """

    form: KernelForm
    arguments: Mapping[str, float]
    dtype: str
    weights: str
    causal: bool
    fused: bool
    flops_per_s: float
    transfers: Mapping[str, float]
    matrix_unit: int | None

    @property
    def sizes(self) -> dict[str, float]:
        """Sizes by letter, with the omitted ones filled in."""
        return self.form.fill_sizes(self.arguments)

    @property
    def label(self) -> str:
        """The kernel with its sizes, and its weights' format if it differs."""
        sizes = ", ".join(f"{letter} = {size:,.0f}" for letter, size in self.sizes.items())
        return f"{self.form.name} {sizes}" + (f", {self.weights} weights" if self.weights != self.dtype else "")

    @property
    def shapes(self) -> str:
        """The kernel's arrays with their shapes."""
        return self.form.text.format(**{letter: f"{size:,.0f}" for letter, size in self.sizes.items()})

    @property
    def options(self) -> tuple[str, ...]:
        """The kind of attention, such as ("causal", "flash"); empty for other kernels."""
        if not self.form.attention:
            return ()
        return "causal" if self.causal else "full", "flash" if self.fused else "unfused"

    @property
    def math_s(self) -> float:
        """Seconds of arithmetic."""
        return self.cost.math_s(self.flops_per_s)

    @property
    def memory_s(self) -> float:
        """Seconds of the slowest transfer."""
        return self.cost.moved_bytes / self.bytes_per_s

    @property
    def cost(self) -> rules.KernelCost:
        """FLOPs; the bytes of activations and of weights, each in its own format."""
        return self._cost(self.sizes)

    def _cost(self, sizes: Mapping[str, float]) -> rules.KernelCost:
        widths = bytes_per_element(self.dtype), bytes_per_element(self.weights)
        return self.form.cost(sizes, *widths, self.causal, self.fused)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the slowest transfer, in bytes/s."""
        return min(self.transfers.values())

    @property
    def critical_intensity(self) -> float:
        """Peak over bandwidth: the FLOPs per byte from which the kernel is bound by compute."""
        return rules.critical_intensity(self.flops_per_s, self.bytes_per_s)

    @property
    def staging(self) -> rules.Staging:
        """The transfers in order, then compute, each with its amount and rate."""
        transfers = (
            rules.TransferStage(name=name, amount=self.cost.moved_bytes, rate=rate)
            for name, rate in self.transfers.items()
        )
        return rules.Staging(
            stages=(*transfers, rules.TransferStage(name="compute", amount=self.cost.flops, rate=self.flops_per_s))
        )

    @property
    def bounds(self) -> rules.TimeBounds:
        """Seconds with compute and all transfers overlapped, and one after the other."""
        return rules.time_bounds(*(stage.seconds for stage in self.staging.stages))

    @property
    def bound(self) -> str:
        """The stage that takes the longest; "compute" in a tie."""
        slowest = min(self.transfers, key=lambda name: self.transfers[name])
        return "compute" if self.cost.intensity >= self.critical_intensity else slowest

    @property
    def attainable_flops_per_s(self) -> float:
        """The roofline at the kernel's intensity: the smaller of the peak and intensity times bandwidth, in FLOP/s."""
        return rules.attainable_flops_per_s(self.cost.intensity, self.flops_per_s, self.bytes_per_s)

    @property
    def critical_letters(self) -> tuple[str, ...]:
        """Letters that `critical_size` sets: the critical one and those tied to it; none if no size raises the intensity."""
        return self.form.critical_letters(self.arguments)

    @property
    def critical_size(self) -> float:
        """Size of the critical letter from which the kernel is bound by compute; infinite if no size is enough.

        Source: the book, "All About Rooflines" (batch 240 on v5e, half of it with int8 weights); "Transformers", question 4."""
        letters, sizes = self.critical_letters, self.sizes
        if not letters:
            return math.inf
        crossover = rules.critical_size(
            lambda size: self._cost(sizes | dict.fromkeys(letters, size)), self.flops_per_s, self.bytes_per_s
        )
        max_size = sizes["S"] if self.causal and letters == ("T",) else math.inf
        return crossover if crossover <= max_size else math.inf

    @property
    def products(self) -> tuple[rules.MatrixProduct, ...]:
        """The matrix products of the kernel, with their shapes."""
        return self.form.products(self.sizes)

    @property
    def padding_efficiency(self) -> float | None:
        """Useful FLOPs over those of shapes padded to the matrix unit; None without a sourced side or without products."""
        if self.matrix_unit is None or not self.products:
            return None
        return rules.padding_efficiency(self.products, self.matrix_unit)

    @property
    def padded_bounds(self) -> rules.TimeBounds | None:
        """`bounds` with the FLOPs of the padded shapes."""
        efficiency = self.padding_efficiency
        if efficiency is None:
            return None
        *transfers_s, compute_s = (stage.seconds for stage in self.staging.stages)
        return rules.time_bounds(*transfers_s, compute_s / efficiency)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelComparison:
    """Rooflines of kernels on one chip, side by side. `origin` is where operands lie, `links` are the chip's in bytes/s.

    >>> import shardwise as sw
    >>> comparison = sw.roofline("matmul", "h100", size_texts=["B=1,D=8192,F=8192"], compared_kernels=["dot N=16Mi"])
    >>> [roofline.bound for roofline in comparison.rooflines]
    ['memory', 'memory']
    """

    rooflines: tuple[KernelRoofline, ...]
    chip: Chip
    origin: Origin
    links: Mapping[str, float]

    @property
    def bandwidths(self) -> dict[str, float]:
        """Bytes/s of everything beside memory that has a source: on-chip memory, the host, links to other chips."""
        return link_bandwidths(self.chip, self.links)


def kernel_roofline(
    chip: Chip, kernel: str, sizes: Mapping[str, float], dtype: str = "bf16", weights: str | None = None, *,
    origin: Origin = "hbm", causal: bool = False, fused: bool = True,
) -> KernelRoofline:  # fmt: skip
    """Return the roofline of a kernel by name, at the chip's dense peak and bandwidths as the vendor states them.

    `weights` is the format of the second operand of a product if it differs; `causal` and not `fused` are for attention. Raises
    `InputError` for an unknown kernel, letter, format or origin, and for an option that the kernel does not have;
    `MissingValueError` for a rate without a source."""
    form = get_kernel_form(kernel)
    roofline = KernelRoofline(
        form=form, arguments=dict(sizes), dtype=dtype, weights=weights or dtype, causal=causal, fused=fused,
        flops_per_s=_peak(chip, dtype, weights), transfers=transfer_rates(chip, origin), matrix_unit=chip.matrix_unit,
    )  # fmt: skip
    _check(roofline, weights)
    return roofline


def _peak(chip: Chip, dtype: str, weights: str | None) -> float:
    for name in (dtype, weights or dtype):
        bytes_per_element(name)
    return chip.peak(dtype)


def _check(roofline: KernelRoofline, weights: str | None) -> None:
    """Raise for options that the kernel does not have."""
    form, sizes = roofline.form, roofline.sizes
    problems = []
    if weights and not form.weights:
        problems.append(f"weights: {form.name} has none; a format of weights is for matmul, bmm and moe")
    if (roofline.causal or not roofline.fused) and not form.attention:
        problems.append(f"{form.name} is not attention: causal and unfused are for the kernel attention")
    if roofline.causal and form.attention and sizes["T"] > sizes["S"]:
        problems.append(
            f"SIZES: found T={sizes['T']:g} queries for S={sizes['S']:g} keys; causal attention has at most S of them"
        )
    if problems:
        raise InputError(*problems)
