"""The constants of a calibration from the seconds of operations, and the cluster that they make. Nothing here imports torch.

Each constant has operations of its own. Whole steps are measured too, and none is fitted: what the constants miss of them is how
far a prediction is trusted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.hardware.calibration_constants import BENCH_ONLY_CONSTANTS, CONSTANTS, Calibration
from shardwise.hardware.chips import Chip
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.network.switches import Switched, Tier
from shardwise.hardware.published_constants import published_calibration, with_calibration
from shardwise.hardware.stacks import get_stack
from shardwise.measure.microbenchmarks.benchmark_layers import (
    COLLECTIVE_BYTES,
    COLLECTIVES,
    COPY_BYTES,
    MatmulShape,
    SampleLayer,
)
from shardwise.price.estimate import estimate
from shardwise.price.roofline import TILE_ROWS

STACK = "shardwise"
Seconds = Mapping[str, float]  # of each operation, once, by "SAMPLE/OPERATION"
# How many of an operation a layer has, where it is more than one: norms and sums of the residual stream forward; backward also
# the sums of gradients of queries, keys and values (2), of gate and up (1), and of the residual stream (2).
OPERATION_COUNTS = {"norm forward": 2, "norm backward": 2, "sum": 7}
ELEMENTWISE = ("norm", "rotary of a query", "rotary of a key", "activation")
NARROWEST_INTERVAL = 0.1  # of a prediction: what repeats of operations on a quiet machine do not show
NORMAL_90 = 1.645  # 90% lie within so many standard deviations


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """What is known of a machine before anything is timed."""

    name: str
    source: str
    num_processes: int
    memory_bytes: float
    dtype: str
    others: tuple[str, ...]


def median_rounds(rounds: Sequence[Seconds]) -> dict[str, float]:
    """The median of each operation's rounds."""
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


@dataclass(frozen=True)
class MachineFit:
    """The constants that some seconds give."""

    seconds: Seconds
    samples: tuple[SampleLayer, ...]
    tiny: SampleLayer
    machine: MachineFacts

    def best_rate(self, dtype: str) -> float:
        """The best rate of products of a format, in FLOP/s."""
        if dtype == self.machine.dtype:
            return max(one.flops / s for one, s in self.products())
        one = next(one for one in self.samples[0].products if one.name == "up forward")
        return one.flops / self.seconds[f"{dtype}/{one.name}"]

    def products(self) -> list[tuple[MatmulShape, float]]:
        return [(one, self.seconds[f"{sample.name}/{one.name}"]) for sample in self.samples for one in sample.products]

    @property
    def bytes_per_s(self) -> float:
        """Of a copy, read and written."""
        return COPY_BYTES / self.seconds["copy"]

    def fit_sustained_rate(self) -> tuple[float, float]:
        """The sustained share of the best rate, and k0: seconds are FLOPs over the rate, times 1 + k0 / summed."""
        found = self.products()
        share = np.array([one.flops / self.best_rate(self.machine.dtype) / s for one, s in found])
        design = np.stack([share, share / [one.summed for one, _ in found]], axis=1)
        inverse, ramp = np.linalg.lstsq(design, np.ones(len(found)), rcond=None)[0]
        return 1.0 / float(inverse), float(ramp / inverse)

    def attention(self) -> float:
        """The rate of attention, forward and backward, over the best one of products."""
        shares = []
        for sample in self.samples:
            flops = sum(sample.attention_flops(phase) for phase in ("forward", "backward"))
            took = sum(self.seconds[f"{sample.name}/attention {phase}"] for phase in ("forward", "backward"))
            shares.append(flops / took / self.best_rate(self.machine.dtype))
        return _geometric_mean(shares)

    def elementwise(self) -> float:
        """Bytes that the memory would move in the seconds of a layer's elementwise kernels, over those that fused ones move."""
        return _geometric_mean(
            self._elementwise_s(sample.name) * self.bytes_per_s / sample.elementwise_bytes() for sample in self.samples
        )

    def _elementwise_s(self, name: str) -> float:
        """Seconds of a layer's, but for starting them."""
        every = [f"{one} {phase}" for one in ELEMENTWISE for phase in ("forward", "backward")] + ["sum"]
        return sum(OPERATION_COUNTS.get(one, 1) * self._without_launch(name, one) for one in every)

    def _without_launch(self, sample: str, operation: str) -> float:
        whole = self.seconds[f"{sample}/{operation}"]
        return max(whole - self.seconds[f"{self.tiny.name}/{operation}"], 0.1 * whole)

    def update(self) -> float:
        return _geometric_mean(
            self._without_launch(sample.name, "update") * self.bytes_per_s / sample.update_bytes()
            for sample in self.samples
        )

    def loss(self) -> float:
        """The same of the kernels over logits: what the head takes beyond its products."""
        sample = next(one for one in self.samples if one.has_loss)
        products = sum(
            self.seconds[f"{sample.name}/{one.name}"] for one in sample.products if one.name.startswith("head")
        )
        rest = max(self.seconds[f"{sample.name}/loss"] - products, 0.0)
        return rest * self.bytes_per_s / sample.loss_bytes()

    def launch_s(self) -> float:
        """Seconds of a layer in which there is nothing to do, for each of its kernels."""
        return self.seconds[f"{self.tiny.name}/layer"] / self.tiny.num_kernels()

    def grouped_rate(self) -> float:
        """The rate of products of an expert's rows over that of a layer's."""
        rate, ramp = self.fit_sustained_rate()
        shares = []
        for sample in self.samples[:1]:
            one = sample.expert
            alone = one.flops / (rate * self.best_rate(self.machine.dtype)) * (1 + ramp / one.summed)
            shares.append(alone * (1 + TILE_ROWS / 2 / one.rows) / self.seconds[f"{sample.name}/{one.name}"])
        return _geometric_mean(shares)

    def collectives(self) -> list[tuple[int, float, float]]:
        """How often each goes around the ring, the bytes that pass a link each time, and its seconds."""
        n, found = self.machine.num_processes, []
        for kind in COLLECTIVES if n > 1 else ():
            for size in COLLECTIVE_BYTES:
                times = 2 if kind == "all_reduce" else 1
                found.append((times, (n - 1) / n * size, self.seconds[f"{kind}/{size}"]))
        return found

    def fit_link(self) -> tuple[float, float]:
        """Seconds of a hop and bytes/s of the ring that collectives are as fast as, all kinds together."""
        found, n = self.collectives(), self.machine.num_processes
        if not found:
            return 0.0, self.bytes_per_s
        design = np.array([[times * (n - 1) / s, times * passed / s] for times, passed, s in found])
        hop, per_byte = np.linalg.lstsq(design, np.ones(len(found)), rcond=None)[0]
        most = max(times * passed / s for times, passed, s in found)
        return max(float(hop), 0.0), 1.0 / float(per_byte) if per_byte > 0 else most

    def best_link(self) -> float:
        """The best rate of a collective, in bytes/s of the ring; that without the hops where it is better."""
        return max([times * passed / s for times, passed, s in self.collectives()] + [self.fit_link()[1]])

    def exposed(self) -> float:
        """The share of an AllReduce by which products beside it take longer."""
        if self.machine.num_processes == 1:
            return 1.0
        return self.seconds["beside/longer"] / self.seconds["beside/all_reduce"]

    def constants(self) -> dict[str, float]:
        """All of them, within their bounds."""
        rate, ramp = self.fit_sustained_rate()
        attention = self.attention()
        usual = max(attention, CONSTANTS["attention_fraction"].low)
        link = self.fit_link()[1] / self.best_link()
        found = {
            "matmul_fraction": rate, "fp8_matmul_fraction": rate, "matmul_ramp": ramp, "attention_fraction": usual,
            "grouped_fraction": self.grouped_rate(), "memory_fraction": 1.0, "link_fraction": link, "network_fraction": link,
            "elementwise": self.elementwise(), "exposed": self.exposed(), "launch_s": self.launch_s(),
            "attention": usual / attention, "update": self.update(), "loss": self.loss(),
        }  # fmt: skip
        known = {**CONSTANTS, **BENCH_ONLY_CONSTANTS}
        return {name: min(max(value, known[name].low), known[name].high) for name, value in found.items()}

    def cluster(self) -> Cluster:
        """The machine at nominal rates: the best that was seen of each."""
        own, source = self.machine, self.machine.source
        chip = Chip(
            name=own.name, vendor="", memory_bytes=own.memory_bytes, memory_bytes_per_s=self.bytes_per_s,
            peak_flops_per_s={dtype: self.best_rate(dtype) for dtype in (own.dtype, *own.others)},
            sources=dict.fromkeys(("peak_flops_per_s", "memory_bytes", "memory_bytes_per_s"), source),
        )  # fmt: skip
        tier = Tier(
            name="processes",
            size=own.num_processes,
            bytes_per_s=self.best_link(),
            fraction=1.0,
            hop_latency_s=self.fit_link()[0],
        )
        return Cluster(name=own.name, chip=chip, topology=Switched(tiers=(tier,)))

    def measured_over_predicted(self) -> dict[str, float]:
        """Of each sample's whole step the measured seconds over those that the constants give."""
        cluster, num = with_calibration(self.cluster(), self.calibration((1.0, 1.0))), self.machine.num_processes
        predicted = {
            sample.name: estimate(sample.model, cluster, sample.job_for(num), sample.sharded_layout(num)).step_time_s
            for sample in self.samples
        }
        return {name: self.seconds[f"{name}/step"] / step_s for name, step_s in predicted.items()}

    def calibration(self, spread: tuple[float, float]) -> Calibration:
        usual = published_calibration("", get_stack(STACK))
        moe = usual.spread["moe"]
        return Calibration(
            stack=STACK, constants=self.constants(), source=self.machine.source, synchronises=True, loss=usual.loss,
            spread={"dense": spread, "moe": (min(moe[0], spread[0]), max(moe[1], spread[1]))},
        )  # fmt: skip


def prediction_interval(
    rounds: Sequence[Seconds], samples: Iterable[SampleLayer], misses: Iterable[float] = ()
) -> tuple[float, float]:
    """The 90% prediction interval as factors on a prediction; 10% wide at least.

    Two deviations that are taken to be independent: that of repeats of a layer's operations around their median, and that of
    whole steps, measured over predicted, around 1.
    """
    names = [f"{sample.name}/" for sample in samples]
    totals = [sum(s for name, s in one.items() if name.startswith(tuple(names))) for one in rounds]
    middle = statistics.median(totals)
    logs, missed = [math.log(total / middle) for total in totals], [math.log(miss) for miss in misses]
    repeats = sum(one**2 for one in logs) / max(len(logs) - 1, 1)
    width = NORMAL_90 * math.sqrt(repeats + sum(one**2 for one in missed) / max(len(missed), 1))
    high = 1.0 + max(math.expm1(width), NARROWEST_INTERVAL)
    return 1.0 / high, high


def _geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))
