"""Measure this machine by training a small model, and write the resulting cluster file.

Every operation runs in all processes at once, in rounds, because processes share the cores' clock, caches and memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.hardware import BENCH_ONLY_CONSTANTS, CONSTANTS, Calibration, Chip, Cluster, Switched
from shardwise.hardware.cluster_files import format_cluster_toml
from shardwise.measure.microbenchmarks.benchmark_layers import (
    COLLECTIVES,
    MACHINE_SIZES,
    MachineSizes,
)
from shardwise.measure.microbenchmarks.device_timers import WorkTimer, device_timer
from shardwise.measure.microbenchmarks.engine_operations import (
    LAUNCHES,
    TimedOperation,
    best_rate_operation,
    launch_work,
    layer_operation,
    sample_operations,
    step_operation,
)
from shardwise.measure.microbenchmarks.machine_facts import MachineFacts, cpu_facts, gpu_facts
from shardwise.measure.microbenchmarks.machine_fit import MachineFit, MeasuredRates, median_rounds, prediction_interval
from shardwise.measure.microbenchmarks.timing import make_collective, make_copy, supported_dtypes
from shardwise.run.machine_resources import keep_host_memory
from shardwise.run.spawn import run_in_processes
from shardwise.values import InputError, Payload, Progress, ignore_progress

ROUNDS = 5  # after one round of warm-up
PAIRS = 5  # measurements per round of products alone and during a collective
TINY_LAYERS = 10  # in a row: the first few are issued while a GPU's cache is emptied

Round = Mapping[str, float]  # seconds of each operation, once, by "SAMPLE/OPERATION"


def time_rounds(
    sizes: MachineSizes, device: str, num_processes: int, progress: Progress = ignore_progress
) -> list[Round]:
    """Return the seconds of all operations in each round, the mean over processes. Raises `InputError` if one fails."""
    rounds: list[Round] = []
    progress("starting the processes")
    for round_seconds in run_in_processes(_time_rounds_on_rank, sizes, device, num_processes, ROUNDS):
        rounds.append(round_seconds)
        progress("rounds", len(rounds), ROUNDS)
    return rounds


def _time_rounds_on_rank(rank: int, size: int, device: torch.device, sizes: MachineSizes) -> Iterator[Round]:
    keep_host_memory()  # as a run does
    torch.manual_seed(rank)
    yield from measure_rounds(size, device, sizes, device_timer(device.type))


def measure_rounds(size: int, device: torch.device, sizes: MachineSizes, timer: WorkTimer) -> Iterator[Round]:
    """Yield the seconds of all operations in each round on this process, after one of warm-up."""
    operations = dict(_all_operations(sizes, size, device))
    layer = layer_operation(sizes.tiny, device, 1)
    processes = ProcessClock(size, device, timer)
    for number in range(1 + ROUNDS):
        seconds = {name: processes.seconds(operation) for name, operation in operations.items()}
        seconds |= _time_launches(layer, device, timer)
        if size > 1:
            seconds |= _time_overlap(operations, sizes.overlapped_bytes, processes)
        if number:
            yield processes.mean(seconds)


def _all_operations(sizes: MachineSizes, size: int, device: torch.device) -> Iterator[tuple[str, TimedOperation]]:
    for sample in (*sizes.samples, sizes.tiny):
        for name, operation in sample_operations(sample, device):
            yield f"{sample.name}/{name}", operation
    for step in sizes.steps(size):
        yield step.name, step_operation(step, device)
    yield "tiny/layer", layer_operation(sizes.tiny, device, TINY_LAYERS)
    yield "copy", TimedOperation(make_copy(sizes.copy_bytes, device), 1)
    (product,) = (product for product in sizes.samples[0].products if product.name == "up forward")
    for dtype in sizes.other_dtypes:
        yield f"{dtype}/{product.name}", best_rate_operation(product, device, dtype)
    for kind in COLLECTIVES if size > 1 else ():
        for num_bytes in sizes.collective_bytes:
            collective = make_collective(kind, num_bytes, device, torch.float32, refill=True)
            yield f"{kind}/{num_bytes}", TimedOperation(collective, 1)


def _time_launches(layer: TimedOperation, device: torch.device, timer: WorkTimer) -> dict[str, float]:
    """Return the seconds between the starts of kernels without work, on a device that does not wait for the host, and on the host
    that issues them; and those of a layer without work on such a device."""
    work = launch_work(device)
    return {
        "launch/gap": timer.time_queued(work, LAUNCHES), "launch/issue": timer.time_issue(work, LAUNCHES),
        "launch/layer": timer.time_queued(layer.run),
    }  # fmt: skip


def _time_overlap(
    operations: Mapping[str, TimedOperation], num_bytes: int, processes: ProcessClock
) -> dict[str, float]:
    """Time an AllReduce alone, and how much longer products take while it runs. The latter is a small difference of two
    long times, so each pair is measured back to back, and the median counts."""
    message = torch.zeros(num_bytes // 4, device=processes.device)
    product = next(operation for name, operation in operations.items() if name.endswith("up forward"))
    all_reduce_s = statistics.median(
        processes.seconds(TimedOperation(lambda: dist.all_reduce(message), 1)) for _ in range(PAIRS)
    )
    num_products = max(1, round(2 * all_reduce_s / max(processes.seconds(product) * product.times, 1e-6)))

    def products() -> None:
        for _ in range(num_products):
            product.run()

    def run_products_beside_traffic() -> None:
        work = dist.all_reduce(message, async_op=True)
        products()
        work.wait()

    pairs = [
        (
            processes.seconds(TimedOperation(products, 1)),
            processes.seconds(TimedOperation(run_products_beside_traffic, 1)),
        )
        for _ in range(PAIRS)
    ]
    excess_s = statistics.median(overlapped_s - alone_s for alone_s, overlapped_s in pairs)
    return {"beside/all_reduce": all_reduce_s, "beside/longer": excess_s}


@dataclass(frozen=True)
class ProcessClock:
    """Clock of operations that all processes start together, each on its device."""

    num_processes: int
    device: torch.device
    timer: WorkTimer

    def seconds(self, operation: TimedOperation) -> float:
        """Return the seconds of one repetition of an operation."""
        if self.num_processes > 1:
            dist.barrier()
        return self.timer.time_cold_run(operation.run) / operation.times

    def mean(self, seconds: Mapping[str, float]) -> Round:
        """Return the mean over the processes."""
        total = torch.tensor(list(seconds.values()), dtype=torch.float64, device=self.device)
        if self.num_processes > 1:
            dist.all_reduce(total)
        return dict(zip(seconds, (total / self.num_processes).tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class MachineResult:
    """The machine at nominal rates, and the calibration of what it reaches; `out` is the file that was written, if any.

    `in_step` and `starts_in_step` are how much longer kernels and their starts take inside a step than when operations are
    repeated alone, which the constants contain;
    `measured_over_predicted` are measured seconds of whole steps over those that the constants give. `unmeasured`: where the
    values of constants that were not measured come from, by name.
    """

    cluster: Cluster
    calibration: Calibration
    in_step: float
    starts_in_step: float
    measured_over_predicted: Mapping[str, float]
    rates: MeasuredRates
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    out: str | None = None

    def toml(self) -> str:
        meanings = {name: constant.meaning for name, constant in {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.items()}
        meanings |= self.unmeasured
        return format_cluster_toml(self.cluster, self.calibration, meanings)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord(Payload):
    """This machine as a cluster: its chip and links at nominal rates, what is reached of them, and whole steps as a check."""

    SCHEMA = "shardwise.bench-machine/1"
    machine: str
    chip: Chip
    topology: Switched
    calibration: Calibration
    in_step: float
    starts_in_step: float
    measured_over_predicted: Mapping[str, float]
    rates: MeasuredRates
    unmeasured: Mapping[str, str]

    @classmethod
    def of(cls, result: MachineResult) -> MachineRecord:
        """Return the record of a machine."""
        return cls.from_attributes(result, result.cluster, machine=result.cluster.name)


def measure_machine(
    num_processes: int, device: str = "cpu", sizes: MachineSizes | None = None, progress: Progress = ignore_progress
) -> MachineResult:
    """Measure the CPU, or the GPUs, of this machine with `num_processes` processes. Raises `InputError` if one fails."""
    sizes = MACHINE_SIZES[device] if sizes is None else sizes
    sizes = replace(sizes, other_dtypes=supported_dtypes(sizes.other_dtypes, device))
    facts = gpu_facts(num_processes, sizes) if device == "cuda" else cpu_facts(num_processes, sizes)
    return fit_machine(time_rounds(facts.sizes, device, num_processes, progress), facts)


def fit_machine(rounds: Sequence[Round], facts: MachineFacts) -> MachineResult:
    """Return the machine from the rounds of its operations."""
    fit = MachineFit(median_rounds(rounds), facts)
    step_ratios = fit.measured_over_predicted()
    num_fitted = 2 if facts.sizes.short_samples else 1
    spread = prediction_interval(rounds, fit.samples, step_ratios.values(), num_fitted)
    return MachineResult(
        cluster=fit.cluster(), calibration=fit.calibration(spread), in_step=fit.in_step, starts_in_step=fit.step_factors.starts,
        measured_over_predicted=step_ratios,
        rates=fit.measured_rates(), unmeasured=fit.unmeasured(),
    )  # fmt: skip


def write_cluster_file(result: MachineResult, out: Path) -> None:
    """Write the cluster file. Raises `InputError` if it cannot be written."""
    try:
        out.write_text(result.toml(), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"bench: cannot write {out}: {error.strerror}; a path in a writable directory is required"
        ) from None
