"""Measure this machine by training a small model, and write the resulting cluster file.

Every operation runs in all processes at once, in rounds, because processes share the cores' clock, caches and memory.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.hardware import BENCH_ONLY_CONSTANTS, CONSTANTS, Calibration, Chip, Cluster, Switched
from shardwise.hardware.cluster_files import format_cluster_toml
from shardwise.measure.microbenchmarks.benchmark_layers import (
    COLLECTIVE_BYTES,
    COLLECTIVES,
    COPY_BYTES,
    OVERLAPPED_BYTES,
    SAMPLES,
    TINY,
    SampleLayer,
)
from shardwise.measure.microbenchmarks.engine_operations import (
    TimedOperation,
    layer_operation,
    product_operations,
    sample_operations,
    step_operation,
)
from shardwise.measure.microbenchmarks.machine_fit import MachineFacts, MachineFit, median_rounds, prediction_interval
from shardwise.measure.microbenchmarks.timing import describe_device, make_collective, make_copy
from shardwise.run.machine_resources import device_bytes, keep_host_memory
from shardwise.run.spawn import run_in_processes
from shardwise.values import InputError, Payload, Progress, ignore_progress

ROUNDS = 5  # after one round of warm-up
PAIRS = 5  # measurements per round of products alone and during a collective

Round = Mapping[str, float]  # seconds of each operation, once, by "SAMPLE/OPERATION"


class SampleSet(NamedTuple):
    """Samples in the format of the constants, and other formats of which only the best rate is measured."""

    samples: tuple[SampleLayer, ...]
    other_dtypes: tuple[str, ...]
    tiny: SampleLayer = TINY


def time_rounds(samples: SampleSet, num_processes: int, progress: Progress = ignore_progress) -> list[Round]:
    """Return the seconds of all operations in each round, the mean over processes. Raises `InputError` if one fails."""
    rounds: list[Round] = []
    progress("starting the processes")
    for round_seconds in run_in_processes(_time_rounds_on_rank, samples, "cpu", num_processes, ROUNDS):
        rounds.append(round_seconds)
        progress("rounds", len(rounds), ROUNDS)
    return rounds


def _time_rounds_on_rank(rank: int, size: int, device: torch.device, samples: SampleSet) -> Iterator[Round]:
    keep_host_memory()  # as a run does
    torch.manual_seed(rank)
    operations = dict(_all_operations(samples, size, device))
    for number in range(1 + ROUNDS):
        seconds = {name: _seconds(operation) for name, operation in operations.items()}
        if size > 1:
            seconds |= _time_overlap(operations, device)
        if number:
            yield _mean_of_processes(seconds, size, device)


def _all_operations(samples: SampleSet, size: int, device: torch.device) -> Iterator[tuple[str, TimedOperation]]:
    for sample in (*samples.samples, samples.tiny):
        for name, operation in sample_operations(sample, device):
            yield f"{sample.name}/{name}", operation
    for sample in samples.samples:
        yield f"{sample.name}/step", step_operation(sample, size, device)
    yield "tiny/layer", TimedOperation(layer_operation(samples.tiny, device).run, 1)
    yield "copy", TimedOperation(make_copy(COPY_BYTES, device), 1)
    for dtype in samples.other_dtypes:
        for name, operation in product_operations(samples.samples[0].with_dtype(dtype), device):
            if name == "up forward":
                yield f"{dtype}/{name}", operation
    for kind in COLLECTIVES if size > 1 else ():
        for num_bytes in COLLECTIVE_BYTES:
            collective = make_collective(kind, num_bytes, device, torch.float32, refill=True)
            yield f"{kind}/{num_bytes}", TimedOperation(collective, 1)


def _time_overlap(operations: Mapping[str, TimedOperation], device: torch.device) -> dict[str, float]:
    """Time an AllReduce alone, and how much longer products take while it runs. The latter is a small difference of two
    long times, so each pair is measured back to back, and the median counts."""
    message = torch.zeros(OVERLAPPED_BYTES // 4, device=device)
    product = next(operation for name, operation in operations.items() if name.endswith("up forward"))
    all_reduce_s = statistics.median(
        _seconds(TimedOperation(lambda: dist.all_reduce(message), 1)) for _ in range(PAIRS)
    )
    num_products = max(1, round(2 * all_reduce_s / max(_seconds(product) * product.times, 1e-6)))

    def products() -> None:
        for _ in range(num_products):
            product.run()

    def run_products_beside_traffic() -> None:
        work = dist.all_reduce(message, async_op=True)
        products()
        work.wait()

    pairs = [
        (_seconds(TimedOperation(products, 1)), _seconds(TimedOperation(run_products_beside_traffic, 1)))
        for _ in range(PAIRS)
    ]
    excess_s = statistics.median(overlapped_s - alone_s for alone_s, overlapped_s in pairs)
    return {"beside/all_reduce": all_reduce_s, "beside/longer": excess_s}


def _seconds(operation: TimedOperation) -> float:
    """Return the seconds of one repetition of an operation that all processes start together."""
    dist.barrier()
    started = time.perf_counter()
    operation.run()
    return (time.perf_counter() - started) / operation.times


def _mean_of_processes(seconds: Mapping[str, float], size: int, device: torch.device) -> Round:
    total = torch.tensor(list(seconds.values()), dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return dict(zip(seconds, (total / size).tolist(), strict=True))


SCHEMA = "shardwise.bench-machine/1"
# The format of the constants, and those of which only the best rate is measured.
DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, slots=True)
class MachineResult:
    """The machine at nominal rates, and the calibration of what it reaches; `out` is the file that was written, if any.

    `measured_over_predicted` are measured seconds of whole steps over those that the constants give.
    """

    cluster: Cluster
    calibration: Calibration
    measured_over_predicted: Mapping[str, float]
    out: str | None = None

    def toml(self) -> str:
        meanings = {name: constant.meaning for name, constant in {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.items()}
        meanings["network_fraction"] = "not measured: as link_fraction"
        meanings["fp8_matmul_fraction"] = "not measured: as matmul_fraction"
        return format_cluster_toml(self.cluster, self.calibration, meanings)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRecord(Payload):
    """This machine as a cluster: its chip and links at nominal rates, what is reached of them, and whole steps as a check."""

    SCHEMA = "shardwise.bench-machine/1"
    machine: str
    chip: Chip
    topology: Switched
    calibration: Calibration
    measured_over_predicted: Mapping[str, float]

    @classmethod
    def of(cls, result: MachineResult) -> MachineRecord:
        """Return the record of a machine."""
        return cls.from_attributes(result, result.cluster, machine=result.cluster.name)


def measure_machine(
    num_processes: int, samples: tuple[SampleLayer, ...] = SAMPLES, progress: Progress = ignore_progress
) -> MachineResult:
    """Measure the CPU of this machine with `num_processes` processes. Raises `InputError` if one fails."""
    dtype, *other_dtypes = DTYPES
    typed_samples = tuple(sample.with_dtype(dtype) for sample in samples)
    rounds = time_rounds(SampleSet(typed_samples, tuple(other_dtypes), TINY.with_dtype(dtype)), num_processes, progress)
    facts = MachineFacts(
        name=f"{platform.node() or 'this machine'}:{num_processes}", num_processes=num_processes, dtype=dtype,
        other_dtypes=tuple(other_dtypes), memory_bytes=device_bytes("cpu", num_processes),
        source=f"measured on this machine by shardwise bench machine, {num_processes} processes at once: "
        f"{describe_device('cpu')}, {platform.machine()}",
    )  # fmt: skip
    fit = MachineFit(median_rounds(rounds), typed_samples, TINY.with_dtype(dtype), facts)
    step_ratios = fit.measured_over_predicted()
    return MachineResult(
        fit.cluster(), fit.calibration(prediction_interval(rounds, typed_samples, step_ratios.values())), step_ratios
    )


def write_cluster_file(result: MachineResult, out: Path) -> None:
    """Write the cluster file. Raises `InputError` if it cannot be written."""
    try:
        out.write_text(result.toml(), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"bench: cannot write {out}: {error.strerror}; a path in a writable directory is required"
        ) from None
