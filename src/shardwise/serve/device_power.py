"""Power of a device that serves: an idle share of its rated power, and what its memory and its products draw while they are used.

    watts = rated * min(idle_share + memory_share * use of bandwidth + compute_share * use of the peak, 1)

A use is a share of time: the seconds that a device's memory takes for what a second's passes move at its full bandwidth, and
those that products take at their formats' peaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.hardware.chips import Chip
from shardwise.serve.kernel_seconds import ACTIVATION_BYTES, STATE_BYTES, ServingRates
from shardwise.serve.pass_work import Column, PassWork
from shardwise.serve.serving_estimate import Prediction
from shardwise.serve.steady_state import INTERVAL_DEVIATIONS, PassPricer


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerConstants:
    """Shares of a chip's rated power: `idle` of a device that is on duty, and what the full use of its memory (`memory`) and of
    its peak (`compute`) adds. `spread`: deviation of the logarithm of what was measured over a prediction."""

    idle: float
    memory: float
    compute: float
    spread: float
    source: str


# `measure.serving.power_fit` makes these again.
POWER: Mapping[str, PowerConstants] = {
    "a100-80gb": PowerConstants(
        idle=0.295, memory=0.704, compute=1.12, spread=0.06,
        source="fitted to 36 batches of Splitwise (Patel et al. 2024, data/perf_model.csv); the spread is that of batches whose "
        "model and degree are left out, 0.055",
    )
}  # fmt: skip
# Of other chips no reading is among the rows (H100's are zeros, which are none): shares are A100's, and the spread is assumed.
UNMEASURED_SPREAD = 0.2
UNMEASURED = PowerConstants(
    idle=POWER["a100-80gb"].idle, memory=POWER["a100-80gb"].memory, compute=POWER["a100-80gb"].compute,
    spread=UNMEASURED_SPREAD, source="those of A100; the spread is assumed",
)  # fmt: skip


def power_constants(chip: Chip) -> PowerConstants:
    """Return the constants of a chip: its own where it was measured, else those of A100 with a wide spread.

    >>> from shardwise.hardware.chips import load_chip
    >>> power_constants(load_chip("h100")).idle == power_constants(load_chip("a100-80gb")).idle
    True
    """
    return POWER.get(chip.catalog_name, UNMEASURED)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """Seconds that a device's memory takes at its full bandwidth, and its products at their peaks; of each second: its use."""

    memory: Column
    compute: Column

    @classmethod
    def of(cls, work: PassWork, rates: ServingRates) -> DeviceUse:
        """Return the seconds of a pass's work."""
        moved_bytes: Column = work.cache_elements * rates.cache_bytes + work.state_elements * STATE_BYTES
        moved_bytes = moved_bytes + work.activation_elements * ACTIVATION_BYTES
        compute_s: Column = (work.decode_flops + work.prompt_flops) / rates.half_peak
        for group, products in work.products.items():
            moved_bytes = moved_bytes + products.elements * rates.groups[group].element_bytes
            compute_s = compute_s + products.flops / rates.groups[group].peak
        return cls(memory=moved_bytes / rates.memory_bytes_per_s, compute=compute_s)

    def __add__(self, use: DeviceUse) -> DeviceUse:
        return DeviceUse(memory=self.memory + use.memory, compute=self.compute + use.compute)

    def scaled(self, factor: Column) -> DeviceUse:
        """Return a multiple of the use."""
        return DeviceUse(memory=self.memory * factor, compute=self.compute * factor)

    def power_share(self, constants: PowerConstants) -> Column:
        """Return the share of the rated power, at most 1: a chip lowers its clocks beyond."""
        share: Column = np.minimum(
            constants.idle + constants.memory * self.memory + constants.compute * self.compute, 1.0
        )
        return share


def decode_use(pricer: PassPricer, running: Column) -> DeviceUse:
    """Return the use of a decode pass of `running` sequences in each copy of attention."""
    return DeviceUse.of(pricer.decode_work(running), pricer.rates).scaled(pricer.draft_share)


def input_use(pricer: PassPricer, running: Column) -> DeviceUse:
    """Return what one request's chunks add to a device's use, beside `running` sequences where they share passes."""
    decoding = running * pricer.fuses_chunks / pricer.work.pp
    mixed = DeviceUse.of(pricer.work.work(decoding, pricer.rates.routing, prompts=1.0), pricer.rates)
    alone = DeviceUse.of(pricer.work.work(decoding, pricer.rates.routing), pricer.rates)
    added = mixed + alone.scaled(np.where(decoding > 0.0, -1.0, 0.0))
    return added.scaled(pricer.work.num_chunks / pricer.work.pp)


def serving_use(pricer: PassPricer, running: Column, rate_per_s: Column, osl: Column) -> DeviceUse:
    """Return the use of a device whose copy of attention serves `rate_per_s` requests, of which `running` decode together."""
    passes_per_s = rate_per_s * osl / (pricer.tokens_per_pass * running)
    return decode_use(pricer, running).scaled(passes_per_s) + input_use(pricer, running).scaled(rate_per_s)


def predict_power(chip: Chip, use: DeviceUse, time_spread: float) -> Prediction | None:
    """Return the mean watts of a device with their 90% interval, None where the chip's rated power is not known.

    `time_spread` is the deviation of the logarithm of the time in which the work is done: a faster pass draws more.
    """
    if chip.power_w is None:
        return None
    constants = power_constants(chip)
    share = float(np.ravel(use.power_share(constants))[0])
    busy = 1.0 - constants.idle / share  # share of the power that follows the work of a second
    factor = np.exp(INTERVAL_DEVIATIONS * np.hypot(constants.spread, busy * time_spread))
    return Prediction(
        value=chip.power_w * share,
        low=chip.power_w * float(share / factor),
        high=chip.power_w * min(float(share * factor), 1.0),
    )


def sum_energy(parts: Sequence[tuple[Prediction | None, int]], tokens_per_s: float) -> Prediction | None:
    """Return the joules for each output token of pools, each as the watts of a device and the number of its devices; the ends of
    the interval are where all are at theirs."""
    pools = [(watts, num_devices) for watts, num_devices in parts if watts is not None]
    if len(pools) < len(parts):
        return None

    def total(end: str) -> float:
        return sum(float(getattr(watts, end)) * num_devices for watts, num_devices in pools) / tokens_per_s

    return Prediction(value=total("value"), low=total("low"), high=total("high"))


def predict_energy(chip: Chip, watts: Prediction | None, tokens_per_s: float, time_spread: float) -> Prediction | None:
    """Return the joules of a device for each output token with their 90% interval: a faster pass saves the idle share alone."""
    if watts is None or chip.power_w is None:
        return None
    constants, value = power_constants(chip), watts.value / tokens_per_s
    idle = min(constants.idle * chip.power_w / watts.value, 1.0)
    factor = float(np.exp(INTERVAL_DEVIATIONS * np.hypot(constants.spread, idle * time_spread)))
    ceiling = chip.power_w / watts.value * float(np.exp(INTERVAL_DEVIATIONS * time_spread))
    return Prediction(value=value, low=value / factor, high=value * min(factor, ceiling))
