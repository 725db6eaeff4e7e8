"""Seconds of a kernel on a chip, from its FLOPs, its bytes and a calibration. The constants may be numbers, or arrays
of them.

Without a calibration: products and attention run at the chip's best measured matmul rate, all else at its memory's.
With one: a product that sums over K takes (K + k0)/K of its time at the sustained rate (each of its tiles starts and
ends once), and longer where an extent does not fill whole memory transactions; the rows of an expert fill whole tiles;
attention has a rate of its own, or writes its scores; elementwise kernels move what a stack does not fuse several
times, and those of the optimizer and of the loss as often as was measured, if it was; and the host launches every
kernel, which leaves a gap after each, and takes longer than the device where kernels are short.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.hardware import Calibration, Chip, Cluster, RoutedLayers, Stack, get_stack
from shardwise.hardware.stacks import RoutedGraphs
from shardwise.model import Job
from shardwise.values import InputError, IssuePolicy, Value, maximum, where

# Rows of an output tile. Source: NVIDIA, Matrix Multiplication Background User's Guide (tiles of 256 x 128 and 128 x 128);
# the side of a TPU's matrix unit (S0, section 2). The last tile of an expert's rows is half full on average.
TILE_ROWS = 128
# Products run best where every extent fills 128 bytes. Source: the same guide, table 1 (64 elements of 16 bits on A100 and
# later). The loss: published runs of one model on 384 A100 whose widths differ, 12%.
ALIGNED_ELEMENTS, MISALIGNED_FACTOR = 64, 1.12
# Bytes moved for a score where attention writes them: forward, two products write and read them (4), softmax reads and writes
# (4), dropout too, and writes a mask (5); backward the same kernels, and two products more that read (4).
SCORE_BYTES = {False: 13.0, True: 17.0}
# Tensor cores take heads whose width is a multiple of 8; other units reach a quarter of the rate. Source: NVIDIA A100
# whitepaper: 312 TFLOP/s in fp16 on tensor cores, 78 without them.
TENSOR_CORE_WIDTH, NO_TENSOR_CORE_FACTOR = 8, 4.0
# Share of `routing_s` by what is replayed as CUDA graphs (`RoutedLayers.graphs`), and where the host knows the rows of every
# expert (fixed capacity), so that it does not wait for the router's counts.
# Source: published runs of one model and machine with and without (Qwen3 30B and 235B, NeMo 25.09, 25.11 and 26.02).
ROUTED_HOST_SHARE: Mapping[RoutedGraphs, float] = {"none": 1.0, "router": 0.4, "step": 0.1}
CAPACITY_SHARE = 0.5
# Of the smooth minimum of a rate and its ceiling: a share that equals its ceiling is 5.6% below it, one at half of it 0.002%.
CEILING_SHARPNESS = 12.0


class Formula(NamedTuple):
    """Formulas of `Rates` as text: for the kernels of a unit, for the update; and the source."""

    kernels: str
    update: str
    source: str


_ROOFLINE = "Williams, Waterman and Patterson 2009, Roofline, CACM 52(4)"
_BOUND = Formula("Σ max(FLOPs / matmul rate, bytes / memory rate)", "bytes of state / memory rate", _ROOFLINE)
_PREDICTION = Formula(
    "(device + kernels · launch_s), or kernels · host_s where that is longer: device = Σ max(FLOPs / rate · shape, bytes / "
    "memory rate), elementwise bytes several times; with experts √(device² + routing_s²)",
    "elementwise · bytes of state / memory rate",
    f"{_ROOFLINE}; NVIDIA, Matrix Multiplication Background User's Guide (shape); constants of the calibration, docs/accuracy.md",
)


class KernelWork(NamedTuple):
    """Work of one kernel: FLOPs, bytes, and what its rate depends on (`step.instructions.KernelShape`)."""

    flops: Value
    num_bytes: Value
    contraction: Value
    extents: tuple[Value, ...]
    group_rows: Value
    scores: Value
    width: Value
    is_backward: bool
    is_update: bool = False
    is_loss: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Constants of a calibration (`hardware.calibration_constants.CONSTANTS`); without one, `is_bound`, the chip's ceilings."""

    chip: Chip
    matmul_fraction: Value
    fp8_matmul_fraction: Value
    attention_fraction: Value
    memory_fraction: Value
    matmul_ramp: Value = 0.0
    grouped_fraction: Value = 1.0
    elementwise: Value = 1.0
    update: Value | None = None  # None: as other elementwise kernels
    loss: Value | None = None
    exposed: Value | None = None
    launch_s: Value = 0.0
    routing_s: Value = 0.0
    host_s: Value = 0.0
    overlaps_gradients: bool = False
    updates_on_host: bool = False
    attention: Value = 1.0
    clock: Value = 1.0
    fused_attention: bool = True
    routed: RoutedLayers = field(default_factory=RoutedLayers)
    has_capacity: bool = False
    is_bound: bool = False
    is_limited: bool = True
    policy: IssuePolicy = field(default_factory=IssuePolicy)

    @property
    def formula(self) -> Formula:
        """Formula of a kernel's time at these rates."""
        return _BOUND if self.is_bound else _PREDICTION

    @property
    def bytes_per_s(self) -> Value:
        return self.chip.memory_bytes_per_s * self._limited(self.memory_fraction, self.chip.memory_fraction)

    def flops_per_s(self, dtype: str) -> Value:
        """Return the sustained rate of products of a format."""
        fraction = self.fp8_matmul_fraction if dtype == "fp8" else self.matmul_fraction
        return self.chip.peak(dtype) * self._limited(fraction * self.clock, _ceiling(self.chip, dtype))

    def _limited(self, fraction: Value, ceiling: float) -> Value:
        """Return a share of a peak, below what the best micro-benchmark reached where the constants are limited to that.

        A smooth minimum of both: a fit has a slope at the ceiling too.
        """
        if self.is_bound or not self.is_limited:
            return fraction
        return fraction / (1.0 + (fraction / ceiling) ** CEILING_SHARPNESS) ** (1.0 / CEILING_SHARPNESS)

    def kernel_s(self, kind: str, dtype: str, work: KernelWork) -> Value:
        """Return the seconds of a kernel; for products and attention the longer of compute and memory time."""
        streaming = work.num_bytes / self.bytes_per_s
        match kind:
            case "contract" | "of_matrix":
                return maximum(work.flops / self.flops_per_s(dtype) * self._shape_factor(work), streaming)
            case "recurrence" | "select":
                return self._fused_s(dtype, work)
            case "scan":
                return self._fused_s(dtype, work) if self.fused_attention else self._unfused_s(dtype, work)
            case "map" | "lookup" | "scatter" | "route" | "carry":
                return streaming * self._elementwise_factor(work)
            case _:
                raise InputError(f"kernel: found {kind!r}; a kind of operation is required")

    def _elementwise_factor(self, work: KernelWork) -> Value:
        """Return the bytes that elementwise kernels move, over those of fused kernels."""
        measured = self.update if work.is_update else self.loss if work.is_loss else None
        return self.elementwise if measured is None else measured

    def _fused_s(self, dtype: str, work: KernelWork) -> Value:
        fraction = self.attention_fraction * self.clock / self.attention
        rate = self.chip.peak(dtype) * self._limited(fraction, _attention_ceiling(self.chip))
        return maximum(work.flops / rate, work.num_bytes / self.bytes_per_s)

    def _unfused_s(self, dtype: str, work: KernelWork) -> Value:
        """Return the seconds of unfused attention: products over all scores, masked ones too, and kernels over every score.

        Forward there are two products, backward four.
        """
        flops = work.scores * work.width * (8.0 if work.is_backward else 4.0)
        slower = where(work.width % TENSOR_CORE_WIDTH == 0, 1.0, NO_TENSOR_CORE_FACTOR)
        slower = slower * (1.0 + self.matmul_ramp / work.width)
        moved = work.scores * SCORE_BYTES[work.is_backward] + work.num_bytes
        return (flops / self.flops_per_s(dtype) * slower + moved / self.bytes_per_s) * self.attention

    def _shape_factor(self, work: KernelWork) -> Value:
        """Return the factor by which a product takes longer for its shape."""
        if self.is_bound or _is_zero(work.contraction):
            return 1.0
        aligned: Value = True
        for extent in work.extents:
            aligned = aligned & (extent % ALIGNED_ELEMENTS == 0)
        shape = (1.0 + self.matmul_ramp / work.contraction) * where(aligned, 1.0, MISALIGNED_FACTOR)
        if _is_zero(work.group_rows):
            return shape
        return shape / self.grouped_fraction * (1.0 + TILE_ROWS / 2 / work.group_rows)

    def with_launches_s(self, device_s: Value, num_kernels: int, *, routed: bool) -> Value:
        """Return the seconds of kernels as a host launches them: with a gap after each, without the time that the device
        waits for a host that is behind (`host_behind_s`).

        `routed`: a router and its experts are among them; then it is the slower of device and host, and more where both
        are as slow.
        """
        if self.is_bound:
            return device_s
        gaps_s = num_kernels * self.launch_s
        if not routed or not num_kernels:
            return device_s + gaps_s
        host_s = self.routing_s * ROUTED_HOST_SHARE[self.routed.graphs] * (CAPACITY_SHARE if self.has_capacity else 1.0)
        return ((device_s + gaps_s) ** 2 + host_s**2) ** 0.5

    def host_behind_s(self, device_s: Value, num_kernels: int, *, routed: bool) -> Value:
        """Return the seconds by which the host's queue of launches is longer than the device's queue of kernels; negative where
        the host gets ahead of the device. 0 with a router, which both wait for, and where the host launches no kernel."""
        if self.is_bound or routed or _is_zero(self.host_s):
            return 0.0
        return num_kernels * self.host_s - device_s - num_kernels * self.launch_s


def _ceiling(chip: Chip, dtype: str) -> float:
    """Return the largest share of a peak that a micro-benchmark of products reached on a chip."""
    measured = chip.fp8_matmul_fraction if dtype == "fp8" else None
    return chip.matmul_fraction if measured is None else measured


def _attention_ceiling(chip: Chip) -> float:
    """Return the largest share of the peak that fused attention reached on a chip; that of products where it is not known."""
    return chip.matmul_fraction if chip.attention_fraction is None else chip.attention_fraction


def _is_zero(number: Value) -> bool:
    return isinstance(number, float) and number == 0.0


def chip_rates(chip: Chip, calibration: Calibration | None, model: str = "") -> Rates:
    """Return the rates of a chip: its calibration's, or the best that micro-benchmarks reach."""
    if calibration is None:
        fp8 = chip.matmul_fraction if chip.fp8_matmul_fraction is None else chip.fp8_matmul_fraction
        return Rates(
            chip=chip, matmul_fraction=chip.matmul_fraction, fp8_matmul_fraction=fp8,
            attention_fraction=chip.matmul_fraction, memory_fraction=chip.memory_fraction, is_bound=True,
            routed=RoutedLayers(dispatch="per_group"),
        )  # fmt: skip
    return rates_from_constants(
        chip, calibration.constants, clock=calibration.clock, fused_attention=calibration.fused_attention,
        has_capacity=calibration.has_capacity, stack=get_stack(calibration.stack), model=model,
        is_limited=not calibration.is_measured,
    )  # fmt: skip


def updates_on_host(cluster: Cluster) -> bool:
    """Return True if a cluster's stack updates an offloaded optimizer's state on the host."""
    return cluster.calibration is not None and get_stack(cluster.calibration.stack).updates_on_host


def runs_short_micro_batches(cluster: Cluster) -> bool:
    """Return True if a cluster's stack runs a last micro-batch that is not full in the time of its sequences."""
    return cluster.calibration is not None and get_stack(cluster.calibration.stack).short_micro_batches


def issue_policy(cluster: Cluster) -> IssuePolicy:
    """Return the issue policy of a cluster's stack; the defaults without a calibration."""
    return get_stack(cluster.calibration.stack).policy if cluster.calibration else IssuePolicy()


def exposed_share(cluster: Cluster) -> float | None:
    """Return the measured share of communication that is exposed; None where a convention decides (`price.overlap`)."""
    return None if cluster.calibration is None else cluster.calibration["exposed"]


def loss_kind(cluster: Cluster, job: Job) -> str:
    """Return the kind of cross-entropy: the job's, else the one of the stack with the least memory, else PyTorch's own."""
    stack_loss = cluster.calibration.loss if cluster.calibration else None
    return job.loss or stack_loss or "unfused"


def rates_from_constants(
    chip: Chip,
    constants: Mapping[str, Value],
    *,
    clock: float,
    fused_attention: bool,
    has_capacity: bool,
    stack: Stack,
    model: str = "",
    is_limited: bool = True,
) -> Rates:
    """Return the rates at given constants by name, numbers or arrays; constants of links are the network's and dropped.

    The host's seconds for a kernel are the stack's where they were not measured.
    """
    of_links = ("link_fraction", "network_fraction")
    chip_constants = {"host_s": stack.host_s} | {
        name: value for name, value in constants.items() if name not in of_links
    }
    return Rates(
        chip=chip, clock=clock, fused_attention=fused_attention, has_capacity=has_capacity, policy=stack.policy,
        is_limited=is_limited,
        routed=stack.routed_layers(chip.catalog_name, model),
        overlaps_gradients=stack.overlaps_gradients,
        updates_on_host=stack.updates_on_host, **chip_constants,
    )  # fmt: skip
