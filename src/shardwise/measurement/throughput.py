"""Rates of a step: tokens per second, and the share of the devices' peak that they are."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.measurement.record import StepRecord
from shardwise.units import format_quantity


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    """What turns a step into rates.

    `flops_per_token` are the model's, forward and backward, with causal attention counted once and no recomputation;
    `hardware_ratio` is what the devices run over that. `peak_flops_per_s` is one device's in `peak_format`; None where the chip
    has no sourced one, and then there is neither MFU nor HFU. Source of MFU: Chowdhery et al. 2022 (PaLM), appendix B.
    """

    num_devices: int
    chip: str
    flops_per_token: float
    hardware_ratio: float
    peak_format: str
    peak_flops_per_s: float | None

    def tokens_per_s(self, record: StepRecord) -> float:
        """Tokens of the global batch per second, of all devices."""
        return record.num_tokens / record.step_time_s

    def flops_per_s(self, record: StepRecord) -> float:
        """The model's FLOP/s on one device."""
        return self.flops_per_token * self.tokens_per_s(record) / self.num_devices

    def mfu(self, record: StepRecord) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None without a peak."""
        return None if self.peak_flops_per_s is None else self.flops_per_s(record) / self.peak_flops_per_s

    def hfu(self, record: StepRecord) -> float | None:
        """Hardware FLOPs utilisation: with what is recomputed; None without a peak."""
        mfu = self.mfu(record)
        return None if mfu is None else mfu * self.hardware_ratio

    def formula(self) -> str:
        """How MFU and HFU are made, with the numbers that go in."""
        if self.peak_flops_per_s is None:
            return f"MFU n/a: {self.chip} has no sourced {self.peak_format} peak"
        return (
            f"MFU = {format_quantity(self.flops_per_token, 'FLOP', digits=4)}/token x tokens/s / ({self.num_devices} x "
            f"{format_quantity(self.peak_flops_per_s, 'FLOP/s', digits=4)}), the dense {self.peak_format} peak of {self.chip}; "
            f"HFU = {self.hardware_ratio:.3f} x MFU"
        )
