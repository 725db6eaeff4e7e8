"""One accelerator: what it computes, remembers and moves, each value with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwise.errors import MissingValueError


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """Dense peaks, memory and their sustained fractions.

    `matmul_fraction` and `memory_fraction` are what micro-benchmarks reach of the peaks; 1.0 where the catalogue has no
    measurement, and then the estimate is a bound. `runtime_bytes` is memory that no tensor of ours can have.
    `sources` says for each value where it comes from.
    """

    name: str
    vendor: str
    peak_flops_per_s: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    runtime_bytes: float = 0.0
    matmul_fraction: float = 1.0
    memory_fraction: float = 1.0
    sources: Mapping[str, str] = field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """Dense peak in FLOP/s. Raises `MissingValueError` when the catalogue has none for the format."""
        try:
            return self.peak_flops_per_s[dtype]
        except KeyError:
            known = ", ".join(self.peak_flops_per_s)
            raise MissingValueError(f"chip {self.name}: no sourced {dtype} peak; it has {known}") from None

    def matmul_flops_per_s(self, dtype: str) -> float:
        """Rate that matrix products sustain, in FLOP/s."""
        return self.peak(dtype) * self.matmul_fraction

    def sustained_bytes_per_s(self) -> float:
        """Rate at which memory streams, in bytes/s."""
        return self.memory_bytes_per_s * self.memory_fraction
