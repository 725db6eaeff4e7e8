"""One kernel on one chip: FLOPs, bytes, what binds, from which size on compute does, what padding wastes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.books.roofline.chip import Origin, transfers
from shardwise.books.roofline.forms import Form, kernel_form
from shardwise.books.rules import (
    Bounds,
    KernelCost,
    MatrixProduct,
    Stage,
    Staging,
    attainable_flops_per_s,
    critical_intensity,
    critical_size,
    padding_efficiency,
    time_bounds,
)
from shardwise.cluster.chip import Chip
from shardwise.dtypes import bytes_per_element
from shardwise.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRoofline:
    """The roofline of one kernel on one chip: activations and arithmetic in one format, weights possibly in another.

    `transfers` are the bandwidths (bytes/s) of the links between its operands and the matrix unit; `bytes_per_s` is the slowest.
    Source: "How to Scale Your Model", All About Rooflines.

    >>> import shardwise as sw
    >>> found = sw.roofline("matmul", "tpu-v5e", B=512, D=8192, F=28672)
    >>> found.cost.flops == 2 * 512 * 8192 * 28672, found.bound, round(found.critical_intensity)
    (True, 'compute', 243)
    """

    form: Form
    given: Mapping[str, float]
    dtype: str
    weights: str
    causal: bool
    fused: bool
    flops_per_s: float
    transfers: Mapping[str, float]
    matrix_unit: int | None

    @property
    def sizes(self) -> dict[str, float]:
        """All sizes by letter, with those left out filled in."""
        return self.form.filled(self.given)

    @property
    def cost(self) -> KernelCost:
        """FLOPs; the bytes of activations and of weights, each in its own format."""
        return self._cost(self.sizes)

    def _cost(self, sizes: Mapping[str, float]) -> KernelCost:
        widths = bytes_per_element(self.dtype), bytes_per_element(self.weights)
        return self.form.cost(sizes, *widths, self.causal, self.fused)

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the slowest transfer, in bytes/s."""
        return min(self.transfers.values())

    @property
    def critical_intensity(self) -> float:
        """Peak over bandwidth: the FLOPs per byte from which the kernel is bound by compute."""
        return critical_intensity(self.flops_per_s, self.bytes_per_s)

    @property
    def staging(self) -> Staging:
        """The transfers in order, then compute, each with its amount and rate."""
        moved = (Stage(name=name, amount=self.cost.moved_bytes, rate=rate) for name, rate in self.transfers.items())
        return Staging(stages=(*moved, Stage(name="compute", amount=self.cost.flops, rate=self.flops_per_s)))

    @property
    def bounds(self) -> Bounds:
        """Seconds with compute and all transfers overlapped, and one after the other."""
        return time_bounds(*(stage.seconds for stage in self.staging.stages))

    @property
    def bound(self) -> str:
        """The stage that takes the longest; "compute" in a tie."""
        slowest = min(self.transfers, key=lambda name: self.transfers[name])
        return "compute" if self.cost.intensity >= self.critical_intensity else slowest

    @property
    def attainable_flops_per_s(self) -> float:
        """The roofline at the kernel's intensity: the smaller of the peak and intensity times bandwidth, in FLOP/s."""
        return attainable_flops_per_s(self.cost.intensity, self.flops_per_s, self.bytes_per_s)

    @property
    def critical_letters(self) -> tuple[str, ...]:
        """The letter that `critical_size` is about, and those tied to it; none where no size raises the intensity."""
        return self.form.tied(self.given)

    @property
    def critical_size(self) -> float:
        """Size of the critical letter from which the kernel is bound by compute; infinite where no size is enough.

        Source: the book, "All About Rooflines" (batch 240 on v5e, half of it with int8 weights); "Transformers", question 4.
        """
        letters, sizes = self.critical_letters, self.sizes
        if not letters:
            return math.inf
        found = critical_size(
            lambda size: self._cost(sizes | dict.fromkeys(letters, size)), self.flops_per_s, self.bytes_per_s
        )
        most = sizes["S"] if self.causal and letters == ("T",) else math.inf
        return found if found <= most else math.inf

    @property
    def products(self) -> tuple[MatrixProduct, ...]:
        """The matrix products of the kernel, with their shapes."""
        return self.form.products(self.sizes)

    @property
    def padding_efficiency(self) -> float | None:
        """Useful FLOPs over those of shapes padded to the matrix unit; None without a sourced side or without products."""
        if self.matrix_unit is None or not self.products:
            return None
        return padding_efficiency(self.products, self.matrix_unit)

    @property
    def padded_bounds(self) -> Bounds | None:
        """`bounds` with the FLOPs of the padded shapes."""
        efficiency = self.padding_efficiency
        if efficiency is None:
            return None
        *moves, compute = (stage.seconds for stage in self.staging.stages)
        return time_bounds(*moves, compute / efficiency)


def kernel_roofline(
    chip: Chip, kernel: str, sizes: Mapping[str, float], dtype: str = "bf16", weights: str | None = None, *,
    origin: Origin = "hbm", causal: bool = False, fused: bool = True,
) -> KernelRoofline:  # fmt: skip
    """A kernel by name at the chip's dense peak and bandwidths as the vendor states them, as the books do.

    `weights` is the format of the second operand of a product where it is another one; `causal` and not `fused` are for
    attention. Raises `InputError` for an unknown kernel, letter, format or origin, and for an option that the kernel does
    not have; `MissingValueError` for a rate without a source.
    """
    form = kernel_form(kernel)
    found = KernelRoofline(
        form=form, given=dict(sizes), dtype=dtype, weights=weights or dtype, causal=causal, fused=fused,
        flops_per_s=_peak(chip, dtype, weights), transfers=transfers(chip, origin), matrix_unit=chip.matrix_unit,
    )  # fmt: skip
    _check(found, weights)
    return found


def _peak(chip: Chip, dtype: str, weights: str | None) -> float:
    for name in (dtype, weights or dtype):
        bytes_per_element(name)
    return chip.peak(dtype)


def _check(found: KernelRoofline, weights: str | None) -> None:
    """Options that fit the kernel."""
    form, sizes = found.form, found.sizes
    problems = []
    if weights and not form.weights:
        problems.append(f"weights: {form.name} has none; a format of weights is for matmul, bmm and moe")
    if (found.causal or not found.fused) and not form.attention:
        problems.append(f"{form.name} is not attention: causal and unfused are for the kernel attention")
    if found.causal and form.attention and sizes["T"] > sizes["S"]:
        problems.append(
            f"SIZES: found T={sizes['T']:g} queries for S={sizes['S']:g} keys; causal attention has at most S of them"
        )
    if problems:
        raise InputError(*problems)
