"""Constants of a calibration from the seconds of operations, and the cluster that they make.

Each constant has operations of its own, which are repeated alone. Between the other kernels of a step a kernel finds its operands
in no cache, and takes longer: one factor on the time of all kernels, from whole steps in several layouts, says how much. What the
constants miss of these steps then is the uncertainty of a prediction.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardwise.hardware import (
    BENCH_ONLY_CONSTANTS,
    CONSTANTS,
    Calibration,
    Chip,
    Cluster,
    Switched,
    Tier,
    get_stack,
    published_calibration,
    with_calibration,
)
from shardwise.measure.microbenchmarks.benchmark_layers import (
    COLLECTIVES,
    MatmulShape,
    SampleLayer,
    SampleStep,
)
from shardwise.measure.microbenchmarks.machine_facts import MachineFacts
from shardwise.price import Problem
from shardwise.price.estimate import Estimate, estimate
from shardwise.price.roofline import TILE_ROWS
from shardwise.values import COMMUNICATION_TERMS

STACK = "shardwise"
Seconds = Mapping[str, float]  # of each operation, once, by "SAMPLE/OPERATION"
# Operations per layer, if more than one. Sums: of the residual stream forward (2) and of its gradients backward (2), and
# of the gradients of queries, keys and values (2), of gate and up (1).
OPERATION_COUNTS = {"norm forward": 2, "norm backward": 2, "sum": 7}
ELEMENTWISE = ("norm", "rotary of a query", "rotary of a key", "activation")
NARROWEST_INTERVAL = 0.1  # of a prediction: repeated operations on a quiet machine show too little
# Constants that say how fast kernels are: rates over those of the chip.
KERNEL_RATES = ("matmul_fraction", "fp8_matmul_fraction", "attention_fraction", "memory_fraction")
FEWEST_STEPS = 2
COMMUNICATION = (*COMMUNICATION_TERMS, "control")  # terms of a step that are no kernels
LEAST_FACTOR = 0.1  # of a step's kernels, where communication is predicted to take more than the whole step
NORMAL_90 = 1.645  # standard deviations that contain 90% of a normal distribution


def median_rounds(rounds: Sequence[Seconds]) -> dict[str, float]:
    """Return the median of each operation over the rounds."""
    return {name: statistics.median(round_seconds[name] for round_seconds in rounds) for name in rounds[0]}


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """Best rates of products by format, of a copy (read plus written) and of a collective's links, None with one process; and
    seconds between the starts of two kernels without work, on the device and on the host, which issues them."""

    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float | None
    kernel_gap_s: float
    host_issue_s: float


class StepFactors(NamedTuple):
    """How many times as long kernels, and their starts, take inside a step as when operations are repeated alone."""

    kernels: float
    starts: float


@dataclass(frozen=True)
class MachineFit:
    """Constants from the seconds of operations."""

    seconds: Seconds
    machine: MachineFacts

    @property
    def samples(self) -> tuple[SampleLayer, ...]:
        return self.machine.sizes.samples

    @property
    def tiny(self) -> SampleLayer:
        return self.machine.sizes.tiny

    def peak(self, dtype: str) -> float:
        """Return the nominal peak of a format: the catalogue's, or without one the best rate."""
        nominal = self.machine.nominal
        peaks = nominal.chip.peak_flops_per_s if nominal else {}
        return peaks.get(dtype) or self.best_rate(dtype)

    def best_rate(self, dtype: str) -> float:
        """Return the best rate of products of a format, in FLOP/s."""
        if dtype == self.machine.dtype:
            return max(product.flops / s for product, s in self.products())
        product = next(product for product in self.samples[0].products if product.name == "up forward")
        return product.flops / self.seconds[f"{dtype}/{product.name}"]

    def products(self) -> list[tuple[MatmulShape, float]]:
        return [
            (shape, self.seconds[f"{sample.name}/{shape.name}"]) for sample in self.samples for shape in sample.products
        ]

    @property
    def bytes_per_s(self) -> float:
        """Rate of a copy, read plus written."""
        return self.machine.sizes.copy_bytes / self.seconds["copy"]

    def fit_sustained_rate(self) -> tuple[float, float]:
        """Return the sustained share of the best rate, and k0: seconds are FLOPs / rate · (1 + k0 / summed)."""
        products = self.products()
        shares = np.array([product.flops / self.best_rate(self.machine.dtype) / s for product, s in products])
        design = np.stack([shares, shares / [product.summed for product, _ in products]], axis=1)
        inverse, ramp = np.linalg.lstsq(design, np.ones(len(products)), rcond=None)[0]
        return 1.0 / float(inverse), float(ramp / inverse)

    def attention(self) -> float:
        """Return the rate of attention, forward and backward, over the best rate of products."""
        shares = []
        for sample in self.samples:
            flops = sum(sample.attention_flops(phase) for phase in ("forward", "backward"))
            seconds = sum(self.seconds[f"{sample.name}/attention {phase}"] for phase in ("forward", "backward"))
            shares.append(flops / seconds / self.best_rate(self.machine.dtype))
        return _geometric_mean(shares)

    def elementwise(self) -> float:
        """Return the bytes that memory moves in the time of a layer's elementwise kernels, over those of fused kernels."""
        return _geometric_mean(
            self._elementwise_s(sample.name) * self.bytes_per_s / sample.elementwise_bytes() for sample in self.samples
        )

    def _elementwise_s(self, name: str) -> float:
        """Return the seconds of a layer's elementwise kernels, without their launches."""
        kernels = [f"{kernel} {phase}" for kernel in ELEMENTWISE for phase in ("forward", "backward")] + ["sum"]
        return sum(OPERATION_COUNTS.get(kernel, 1) * self._without_launch(name, kernel) for kernel in kernels)

    def _without_launch(self, sample: str, operation: str) -> float:
        seconds = self.seconds[f"{sample}/{operation}"]
        return max(seconds - self.seconds[f"{self.tiny.name}/{operation}"], 0.1 * seconds)

    def update(self) -> float:
        return _geometric_mean(
            self._without_launch(sample.name, "update") * self.bytes_per_s / sample.update_bytes()
            for sample in self.samples
        )

    def loss(self) -> float:
        """Return the same ratio for the kernels over logits, which are what the head takes beyond its products."""
        sample = next(sample for sample in self.samples if sample.has_loss)
        products_s = sum(
            self.seconds[f"{sample.name}/{shape.name}"] for shape in sample.products if shape.name.startswith("head")
        )
        loss_s = max(self.seconds[f"{sample.name}/loss"] - products_s, 0.0)
        return loss_s * self.bytes_per_s / sample.loss_bytes()

    def launch_s(self) -> float:
        """Return the seconds per kernel of a layer so small that it only launches them; on a GPU in its queue."""
        name = "launch/layer" if self.machine.is_gpu else f"{self.tiny.name}/layer"
        return self.seconds[name] / self.tiny.num_kernels()

    def host_s(self) -> float:
        """Return the seconds that the host of a GPU takes per kernel of that layer: the GPU waits for each."""
        return self.seconds[f"{self.tiny.name}/layer"] / self.tiny.num_kernels()

    def grouped_rate(self) -> float:
        """Return the rate of products with an expert's rows over that of a layer's."""
        rate, ramp = self.fit_sustained_rate()
        shares = []
        for sample in self.samples[:1]:
            expert = sample.expert
            ideal_s = expert.flops / (rate * self.best_rate(self.machine.dtype)) * (1 + ramp / expert.summed)
            shares.append(ideal_s * (1 + TILE_ROWS / 2 / expert.rows) / self.seconds[f"{sample.name}/{expert.name}"])
        return _geometric_mean(shares)

    def collectives(self) -> list[tuple[int, float, float]]:
        """Return for each collective its rounds of the ring, the bytes that pass a link in each, and its seconds."""
        n, collectives = self.machine.num_processes, []
        for kind in COLLECTIVES if n > 1 else ():
            for size in self.machine.sizes.collective_bytes:
                rounds = 2 if kind == "all_reduce" else 1
                collectives.append((rounds, (n - 1) / n * size, self.seconds[f"{kind}/{size}"]))
        return collectives

    def fit_link(self) -> tuple[float, float]:
        """Return the seconds of a hop and the bytes/s of a ring that fit all collectives."""
        collectives, n = self.collectives(), self.machine.num_processes
        if not collectives:
            return 0.0, self.bytes_per_s
        design = np.array([[rounds * (n - 1) / s, rounds * sent / s] for rounds, sent, s in collectives])
        hop, per_byte = np.linalg.lstsq(design, np.ones(len(collectives)), rcond=None)[0]
        best_rate = max(rounds * sent / s for rounds, sent, s in collectives)
        return max(float(hop), 0.0), 1.0 / float(per_byte) if per_byte > 0 else best_rate

    def best_link(self) -> float:
        """Return the best rate of a collective, in bytes/s of the ring, or that of `fit_link` if it is better."""
        return max([rounds * sent / s for rounds, sent, s in self.collectives()] + [self.fit_link()[1]])

    def exposed(self) -> float:
        """Return the share of an AllReduce by which concurrent products take longer."""
        if self.machine.num_processes == 1:
            return 1.0
        return self.seconds["beside/longer"] / self.seconds["beside/all_reduce"]

    def fp8_fraction(self) -> float:
        """Return the sustained share of the fp8 peak, from the one product that is timed and the ramp of the others."""
        _, ramp = self.fit_sustained_rate()
        summed = next(product.summed for product in self.samples[0].products if product.name == "up forward")
        return self.best_rate("fp8") * (1 + ramp / summed) / self.peak("fp8")

    def unmeasured(self) -> dict[str, str]:
        """Return why each constant that is not measured has the value that it has, by name."""
        network = {"network_fraction": "not measured: as link_fraction"}
        if not self.machine.is_gpu:
            return {"fp8_matmul_fraction": "not measured: as matmul_fraction", **network}
        published = "not measured: of published runs"
        unmeasured = {"routing_s": published, "network_fraction": published}
        if "fp8" not in self.machine.sizes.other_dtypes:
            unmeasured["fp8_matmul_fraction"] = published
        if self.machine.num_processes == 1:
            unmeasured |= dict.fromkeys(("link_fraction", "exposed"), published)
        return unmeasured

    def constants(self) -> dict[str, float]:
        """Return all constants inside a step, clipped to their bounds; on a GPU those of published runs where they are not
        measured."""
        constants = self.constants_alone()
        measured = constants.keys() - (self.unmeasured() if self.machine.is_gpu else {})
        constants |= {name: constants[name] / self.in_step for name in KERNEL_RATES if name in measured}
        return _clip({**constants, "launch_s": constants["launch_s"] * self.step_factors.starts})

    def constants_alone(self) -> dict[str, float]:
        """Return the constants of kernels that are repeated alone, clipped to their bounds."""
        rate, ramp = self.fit_sustained_rate()
        dtype, is_gpu = self.machine.dtype, self.machine.is_gpu
        share = self.best_rate(dtype) / self.peak(dtype)
        attention = self.attention() * share
        attention_fraction = max(attention, CONSTANTS["attention_fraction"].low)
        link = self.fit_link()[1] / self.nominal_link()
        constants = {
            "matmul_fraction": rate * share, "fp8_matmul_fraction": rate, "matmul_ramp": ramp,
            "attention_fraction": attention_fraction, "grouped_fraction": self.grouped_rate(),
            "memory_fraction": self.bytes_per_s / self.nominal_bytes_per_s(),
            "link_fraction": link, "network_fraction": link, "elementwise": self.elementwise(),
            "exposed": self.exposed(), "launch_s": self.launch_s(), "attention": attention_fraction / attention,
            "routing_s": 0.0,  # a CPU is its own host: what routing takes is in its kernels
            "update": self.update(), "loss": self.loss(),
        }  # fmt: skip
        if is_gpu:
            constants["host_s"] = self.host_s()
        if is_gpu and "fp8" in self.machine.sizes.other_dtypes:
            constants["fp8_matmul_fraction"] = self.fp8_fraction()
        if is_gpu:
            published = published_calibration(self._chip_name(), get_stack(STACK)).constants
            constants |= {name: published[name] for name in self.unmeasured()}
        return _clip(constants)

    @property
    def in_step(self) -> float:
        """How many times as long kernels take inside a step as when each is repeated alone."""
        return self.step_factors.kernels

    @cached_property
    def step_factors(self) -> StepFactors:
        """Factors from the whole steps: seconds without communication are kernels · its factor + starts · theirs.

        Steps of micro-batches with few rows tell both apart; without them both are one. Both are 1 where a single step was
        measured, which would leave nothing to judge predictions by.
        """
        if len(self.steps) < FEWEST_STEPS:
            return StepFactors(1.0, 1.0)
        parts = list(self._step_parts())
        factor = _geometric_mean(measured_s / (kernels_s + starts_s) for measured_s, kernels_s, starts_s in parts)
        if not self.machine.sizes.short_samples:
            return StepFactors(factor, factor)
        design = np.array(
            [[kernels_s / measured_s, starts_s / measured_s] for measured_s, kernels_s, starts_s in parts]
        )
        kernels, starts = np.linalg.lstsq(design, np.ones(len(parts)), rcond=None)[0]
        return (
            StepFactors(float(kernels), float(starts))
            if min(kernels, starts) >= LEAST_FACTOR
            else StepFactors(factor, factor)
        )

    def _step_parts(self) -> Iterator[tuple[float, float, float]]:
        """Yield for each step its measured seconds without communication, and those of kernels and of their starts that
        constants of repeated operations predict."""
        alone = self.constants_alone()
        without_starts = {**alone, "launch_s": CONSTANTS["launch_s"].low}
        share = 1.0 - without_starts["launch_s"] / alone["launch_s"]  # of the starts, which the difference has
        shorter = self._predict_steps(without_starts)
        for step, predicted in self._predict_steps(alone).items():
            predicted_s = sum(s for name, s in predicted.time.items() if name not in COMMUNICATION)
            starts_s = (predicted.step_time_s - shorter[step].step_time_s) / share if share > 0 else 0.0
            measured_s = self.seconds[step.name] - (predicted.step_time_s - predicted_s)
            yield max(measured_s, LEAST_FACTOR * predicted_s), predicted_s - starts_s, starts_s

    @property
    def steps(self) -> tuple[SampleStep, ...]:
        """The whole steps that were measured."""
        return self.machine.sizes.steps(self.machine.num_processes)

    def _predict_steps(self, constants: Mapping[str, float]) -> dict[SampleStep, Estimate]:
        cluster = with_calibration(self.cluster(), self._calibration(constants, (1.0, 1.0)))
        return {step: estimate(Problem(step.sample.model, cluster, step.job), step.layout) for step in self.steps}

    def _chip_name(self) -> str:
        """Return the chip's name in the catalogue, or "" for one that it lacks."""
        return self.machine.nominal.chip.catalog_name if self.machine.nominal else ""

    def nominal_link(self) -> float:
        """Return the nominal bytes/s of a link between processes: the catalogue's, or without one the best measured."""
        topology = self.machine.nominal.topology if self.machine.nominal else None
        return topology.tiers[0].bytes_per_s if isinstance(topology, Switched) else self.best_link()

    def nominal_bytes_per_s(self) -> float:
        """Return the nominal bandwidth of memory: the catalogue's, or without one the copy's."""
        return self.machine.nominal.chip.memory_bytes_per_s if self.machine.nominal else self.bytes_per_s

    def cluster(self) -> Cluster:
        """Return the machine at nominal rates: the catalogue's, or the best that was measured of each."""
        machine, source = self.machine, self.machine.source
        if machine.nominal:
            return replace(machine.nominal, name=machine.name)
        chip = Chip(
            name=machine.name, vendor=machine.vendor, memory_bytes=machine.memory_bytes, memory_bytes_per_s=self.bytes_per_s,
            peak_flops_per_s={dtype: self.best_rate(dtype) for dtype in (machine.dtype, *machine.sizes.other_dtypes)},
            sources=dict.fromkeys(("peak_flops_per_s", "memory_bytes", "memory_bytes_per_s"), source),
        )  # fmt: skip
        tier = Tier(
            name="processes", size=machine.num_processes, bytes_per_s=self.best_link(), fraction=1.0,
            hop_latency_s=self.fit_link()[0],
        )  # fmt: skip
        return Cluster(name=machine.name, chip=chip, topology=Switched(tiers=(tier,)))

    def measured_rates(self) -> MeasuredRates:
        """Return the best rates and the times of a kernel's start."""
        dtypes = (self.machine.dtype, *self.machine.sizes.other_dtypes)
        return MeasuredRates(
            flops_per_s={dtype: self.best_rate(dtype) for dtype in dtypes}, memory_bytes_per_s=self.bytes_per_s,
            link_bytes_per_s=self.best_link() if self.machine.num_processes > 1 else None,
            kernel_gap_s=self.seconds["launch/gap"], host_issue_s=self.seconds["launch/issue"],
        )  # fmt: skip

    def measured_over_predicted(self) -> dict[str, float]:
        """Return the measured seconds of each whole step over the predicted ones, by sample and layout."""
        predicted = self._predict_steps(self.constants())
        return {step.name: self.seconds[step.name] / of_step.step_time_s for step, of_step in predicted.items()}

    def calibration(self, spread: tuple[float, float]) -> Calibration:
        """Return the constants with factors on a prediction as its interval."""
        return self._calibration(self.constants(), spread)

    def _calibration(self, constants: Mapping[str, float], spread: tuple[float, float]) -> Calibration:
        published = published_calibration("", get_stack(STACK))
        moe_spread = published.spread["moe"]
        return Calibration(
            stack=STACK, constants=constants, source=self.machine.source, loss=published.loss, is_measured=True,
            spread={"dense": spread, "moe": (min(moe_spread[0], spread[0]), max(moe_spread[1], spread[1]))},
        )  # fmt: skip


def prediction_interval(
    rounds: Sequence[Seconds], samples: Iterable[SampleLayer], step_ratios: Iterable[float] = (), num_fitted: int = 1
) -> tuple[float, float]:
    """Return the 90% prediction interval as factors on a prediction, at least 10% wide.

    Two deviations, taken as independent: of repeated operations around their median, and of whole steps, measured over
    predicted (`step_ratios`), around 1, with the degrees of freedom that `MachineFit.step_factors` takes.
    """
    prefixes = [f"{sample.name}/" for sample in samples]
    totals = [sum(s for name, s in seconds.items() if name.startswith(tuple(prefixes))) for seconds in rounds]
    median_total = statistics.median(totals)
    logs, step_logs = [math.log(total / median_total) for total in totals], [math.log(ratio) for ratio in step_ratios]
    repeat_variance = sum(log**2 for log in logs) / max(len(logs) - 1, 1)
    width = NORMAL_90 * math.sqrt(
        repeat_variance + sum(log**2 for log in step_logs) / max(len(step_logs) - num_fitted, 1)
    )
    high = 1.0 + max(math.expm1(width), NARROWEST_INTERVAL)
    return 1.0 / high, high


def _clip(constants: Mapping[str, float]) -> dict[str, float]:
    """Return the constants within their bounds."""
    bounds = {**CONSTANTS, **BENCH_ONLY_CONSTANTS}
    return {name: min(max(value, bounds[name].low), bounds[name].high) for name, value in constants.items()}


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
