"""Fractions of the ideal that a chip and a software stack reach: the constants that measurements fit, with priors and bounds.

Eight constants belong to a chip and its network, five to a stack. Each has a physical meaning, bounds, a prior and the
prior's width (`CONSTANTS`). A `Calibration` has one value of each. The step time of a cluster with a calibration is a
prediction; without one it is a lower bound, at the rates of micro-benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from shardwise.hardware.network.pods import Pods
from shardwise.hardware.network.switches import Switched
from shardwise.hardware.network.topology import Topology
from shardwise.values import Value, raise_problems

Owner = Literal["chip", "stack"]
MODEL_KINDS = ("dense", "moe")  # kinds of model with a prediction interval each
LOWEST_CLOCK, HIGHEST_CLOCK = 0.1, 1.5  # over the usual clock: no chip that trains is outside


class CalibrationConstant(NamedTuple):
    """Calibration constant: its owner (chip or stack), its bounds, and its prior before anything is measured.

    It is fitted on an unbounded scale (`to_unbounded`): its logarithm if it is a size, its logit between the bounds if it is
    a fraction. `width` is the standard deviation of the prior on that scale.
    """

    owner: Owner
    low: float
    high: float
    prior: float
    width: float
    is_size: bool
    meaning: str

    def make_worse(self, name: str, value: float, scale: float) -> float:
        """Return the value made worse (`scale` below 1) within its bounds: rates decrease, all else increases."""
        worse = value * scale if name.endswith("_fraction") else value / scale
        return min(max(worse, self.low), self.high)

    def to_unbounded(self, value: float) -> float:
        """Return the point of a value on the unbounded scale."""
        if self.is_size:
            return math.log(value)
        fraction = (value - self.low) / (self.high - self.low)
        return math.log(fraction / (1.0 - fraction))

    def from_unbounded(self, point: Value) -> Value:
        """Return the value at a point (or an array of points) of the unbounded scale."""
        import numpy as np  # not at the top: `import shardwise` must not load NumPy

        if self.is_size:
            return np.clip(np.exp(point), self.low, self.high)
        return self.low + (self.high - self.low) / (1.0 + np.exp(-point))

    def derivative(self, point: float) -> float:
        """Return the derivative of the value with respect to the point on the unbounded scale."""
        value = float(self.from_unbounded(point))
        return value if self.is_size else (value - self.low) * (self.high - value) / (self.high - self.low)


# Priors. Products: large bf16 products in public GEMM tables sustain 0.70 to 0.83 of the peak on A100, H100, H200 and B200, and
# K / (K + k0) of that with k0 from 0 to 190. fp8: 0.71 to 0.76 of its peak (best shapes). Attention: FlashAttention-2
# reaches 0.35 of H100's peak, FlashAttention-3 up to 0.75. Memory: STREAM-like kernels reach 0.9, short ones less. Links:
# busbw of nccl-tests over the link rate. Stacks: the range of the published runs.
CONSTANTS: Mapping[str, CalibrationConstant] = {
    "matmul_fraction": CalibrationConstant(
        "chip", 0.3, 1.0, 0.75, 0.5, False, "sustained rate of long bf16 products over the peak"
    ),
    "fp8_matmul_fraction": CalibrationConstant(
        "chip", 0.2, 1.0, 0.68, 0.5, False, "the same of fp8 products, over the fp8 peak"
    ),
    "matmul_ramp": CalibrationConstant(
        "chip", 1.0, 2000.0, 190.0, 0.4, True, "k0: a product that sums over K takes (K + k0)/K of its time"
    ),
    "attention_fraction": CalibrationConstant(
        "chip", 0.1, 0.95, 0.5, 0.5, False, "rate of fused attention over the bf16 peak"
    ),
    "grouped_fraction": CalibrationConstant(
        "chip", 0.2, 1.0, 0.7, 0.6, False, "rate of grouped products over that of single ones"
    ),
    "memory_fraction": CalibrationConstant(
        "chip", 0.3, 1.0, 0.75, 0.4, False, "sustained memory bandwidth over the peak"
    ),
    "link_fraction": CalibrationConstant(
        "chip", 0.15, 1.0, 0.7, 0.5, False, "rate of collectives inside a node, or on a torus, over the links'"
    ),
    "network_fraction": CalibrationConstant(
        "chip", 0.15, 1.0, 0.75, 0.5, False, "rate of collectives between nodes, or pods, over the cards'"
    ),
    "elementwise": CalibrationConstant(
        "stack", 1.0, 12.0, 2.0, 0.4, True, "bytes that elementwise kernels move over those of fused ones"
    ),
    "exposed": CalibrationConstant(
        "stack", 0.0, 1.05, 0.4, 1.0, False, "exposed share of communication that no kernel waits for"
    ),
    "launch_s": CalibrationConstant(
        "stack", 2e-7, 1e-3, 12e-6, 0.7, True, "seconds between one kernel and the next"
    ),
    "routing_s": CalibrationConstant(
        "stack", 1e-4, 5e-2, 6e-3, 0.7, True, "seconds of the host for one pass of a layer with routed experts"
    ),
    "attention": CalibrationConstant(
        "stack", 0.2, 6.0, 1.0, 0.4, True, "time of its attention kernels over that of the chip's usual ones"
    ),
}  # fmt: skip

# All constants where nothing is lost: no measurement is faster, since rates end at what micro-benchmarks reached
# (`price.roofline.Rates`, `scale_rates`).
IDEAL_CONSTANTS: Mapping[str, float] = {
    name: constant.high if name.endswith("fraction") else constant.low for name, constant in CONSTANTS.items()
}

# Constants that benchmarks of the machine itself can fit (`bench machine`), and published runs cannot. Without `update` and
# `loss` these kernels are priced as other elementwise ones; on a CPU they differ, as these stream from memory or take
# exponentials, and others run in caches. Without `host_s` that of the stack counts (`Stack.host_s`); a CPU is its own host.
BENCH_ONLY_CONSTANTS: Mapping[str, CalibrationConstant] = {
    "update": CalibrationConstant(
        "stack", 0.1, 12.0, 2.0, 0.4, True, "bytes that the optimizer's kernels move over those of fused ones"
    ),
    "loss": CalibrationConstant(
        "stack", 0.1, 60.0, 2.0, 0.4, True, "bytes that the kernels over logits move over those of fused ones"
    ),
    "host_s": CalibrationConstant(
        "stack", 2e-7, 1e-3, 12e-6, 0.7, True, "seconds of the host to issue a kernel, for which shorter kernels wait"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The constants of a chip under a stack (`CONSTANTS`), facts about the stack, and the spread of what was predicted.

    `clock`: sustained clock over that of the chip that the constants were fitted on (a power limit lowers it).
    `fused_attention`: scores stay on the chip. `has_capacity`: experts take a fixed number of rows, so that the host does not
    wait for the router's counts. `is_measured`: fitted to micro-benchmarks of this very cluster, whose rates may exceed the best
    that others published; else they end there. `loss`: the leanest cross-entropy that the stack has, if known. `spread`: by
    kind of model ("dense", "moe") the ends of the 90% prediction interval, as factors on a predicted step time, and
    `spread_notes`, for kinds of which it is not the stack's own, why. `source` says what it was fitted to.
    """

    stack: str
    constants: Mapping[str, float]
    loss: str | None = None
    clock: float = 1.0
    fused_attention: bool = True
    has_capacity: bool = False
    is_measured: bool = False
    spread: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    spread_notes: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        raise_problems(list(self._problems()))

    def _problems(self) -> Iterator[str]:
        allowed = {**CONSTANTS, **BENCH_ONLY_CONSTANTS}
        if not CONSTANTS.keys() <= self.constants.keys() <= allowed.keys():
            yield (
                f"calibration: constants are {', '.join(self.constants)}; {', '.join(CONSTANTS)} are required, "
                f"and {', '.join(BENCH_ONLY_CONSTANTS)} may be there"
            )
        for name in self.constants.keys() & allowed.keys():
            value, constant = self.constants[name], allowed[name]
            if not constant.low <= value <= constant.high:
                yield (
                    f"calibration: {name} is {value:g}; {constant.meaning}, of {constant.low:g} to {constant.high:g}, "
                    "is required"
                )
        if not LOWEST_CLOCK <= self.clock <= HIGHEST_CLOCK:
            yield (
                f"calibration: clock is {self.clock:g}; a part of the usual clock, of {LOWEST_CLOCK:g} to "
                f"{HIGHEST_CLOCK:g}, is required"
            )
        for kind, (low, high) in self.spread.items():
            if kind not in MODEL_KINDS or not 0 < low <= 1 <= high:
                yield f"calibration: spread of {kind} is {low:g} to {high:g}; factors of dense or moe around 1 are required"

        for kind in self.spread_notes.keys() - set(MODEL_KINDS):
            yield f"calibration: spread_notes are of {kind}; notes of {' or '.join(MODEL_KINDS)} are required"

    def interval(self, step_s: float, *, moe: bool) -> tuple[float, float] | None:
        """Return the 90% prediction interval of a step time, in seconds, or None without a spread."""
        factors = self.spread.get(MODEL_KINDS[moe])
        return (step_s * factors[0], step_s * factors[1]) if factors else None

    def interval_note(self, *, moe: bool) -> str | None:
        """Return why the prediction interval for a kind of model is not the stack's own, or None if it is."""
        return self.spread_notes.get(MODEL_KINDS[moe])

    def __getitem__(self, name: str) -> float:
        """Return a constant by name."""
        return self.constants[name]


def unscale_rates(topology: Topology, link_fraction: float, network_fraction: float) -> Topology:
    """Return the network from which `scale_rates` made this one, with fractions of 1: the original fractions are not kept."""
    if isinstance(topology, Switched):
        return Switched(tiers=tuple(replace(tier, fraction=1.0) for tier in topology.tiers))
    return scale_rates(topology, 1.0 / link_fraction, 1.0 / network_fraction)


def scale_rates(topology: Topology, link_fraction: Value, network_fraction: Value) -> Topology:
    """Return the network at the rates that collectives sustain: the innermost tier or the torus, and everything beyond it."""
    if isinstance(topology, Switched):
        inner, *outer = topology.tiers
        tiers = (replace(inner, fraction=link_fraction), *(replace(tier, fraction=network_fraction) for tier in outer))
        return Switched(tiers=tiers)
    if isinstance(topology, Pods):
        torus = scale_rates(topology.torus, link_fraction, network_fraction)
        return replace(topology, torus=torus, bytes_per_s=topology.bytes_per_s * network_fraction)  # type: ignore[arg-type]
    return replace(topology, bytes_per_s=topology.bytes_per_s * link_fraction)
