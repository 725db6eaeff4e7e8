"""Rooflines: compute against memory, for a matrix product."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.cost.rules.bounds import critical_intensity


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Seconds of work that overlaps fully, and of work done one after the other."""

    lower_s: float
    upper_s: float


def time_bounds(*seconds: float) -> Bounds:
    """The longest part, with perfect overlap, and the sum of the parts, with none: at most a factor of their number."""
    return Bounds(lower_s=max(seconds), upper_s=sum(seconds))


def attainable_flops_per_s(intensity: float, flops_per_s: float, bytes_per_s: float) -> float:
    """The roofline, min(C, W·intensity), in FLOP/s. Source: the book, "All About Rooflines"."""
    return min(flops_per_s, bytes_per_s * intensity)


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCost:
    """FLOPs of one product, and bytes that it reads and writes."""

    flops: float
    read_bytes: float
    written_bytes: float

    @property
    def intensity(self) -> float:
        return self.flops / (self.read_bytes + self.written_bytes)

    def math_s(self, flops_per_s: float) -> float:
        return self.flops / flops_per_s

    def bounds(self, flops_per_s: float, bytes_per_s: float) -> Bounds:
        """The product's time with its traffic to memory, overlapped or not."""
        return time_bounds(self.flops / flops_per_s, (self.read_bytes + self.written_bytes) / bytes_per_s)


def matmul_cost(batch: float, d_in: float, d_out: float, bytes_per_element: float = 2.0) -> MatmulCost:
    """[B, D] · [D, F]: 2BDF FLOPs; (BD + DF) elements read and BF written. Source: the book, "All About Rooflines"."""
    return MatmulCost(
        flops=2.0 * batch * d_in * d_out,
        read_bytes=(batch * d_in + d_in * d_out) * bytes_per_element,
        written_bytes=batch * d_out * bytes_per_element,
    )


def matmul_critical_batch(
    flops_per_s: float,
    bytes_per_s: float,
    d_in: float = math.inf,
    d_out: float = math.inf,
    bytes_per_element: float = 2.0,
) -> float:
    """Batch from which [B, D] · [D, F] is bound by compute rather than by memory; C / W in bf16 for wide matrices.

    Formula: B = I / (1 - I (1/D + 1/F)) with I of `critical_intensity`; infinite where the matrices are too narrow.
    Source: the book, "All About Rooflines", which leaves the second factor out.
    """
    intensity = critical_intensity(flops_per_s, bytes_per_s, bytes_per_element)
    room = 1.0 - intensity * (1.0 / d_in + 1.0 / d_out)
    return intensity / room if room > 0 else math.inf
