"""Measure this machine in training a small model, and write the cluster file that the measurements give.

Every operation runs in all processes at once, in rounds, since processes share the cores' clock, their caches and the memory.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from typing_extensions import TypedDict

from shardwise.hardware.calibration_constants import BENCH_ONLY_CONSTANTS, CONSTANTS, Calibration
from shardwise.hardware.chips import Chip
from shardwise.hardware.cluster import Cluster
from shardwise.hardware.cluster_files import format_cluster_toml
from shardwise.hardware.network.switches import Switched
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
    make_copy,
    product_operations,
    sample_operations,
    step_operation,
)
from shardwise.measure.microbenchmarks.machine_fit import MachineFacts, MachineFit, median_rounds, prediction_interval
from shardwise.measure.microbenchmarks.timing import describe_device
from shardwise.run.machine_resources import device_bytes, keep_host_memory
from shardwise.run.spawn import run_in_processes
from shardwise.values.errors import InputError
from shardwise.values.progress import Progress, ignore_progress

ROUNDS = 5  # after one that is not counted
PAIRS = 5  # of products alone and beside a collective, in each round

Round = Mapping[str, float]  # seconds of each operation, once, by "SAMPLE/OPERATION"


class SampleSet(NamedTuple):
    """What is measured: samples in the format that the constants are of, and formats of which only the best rate is wanted."""

    samples: tuple[SampleLayer, ...]
    others: tuple[str, ...]
    tiny: SampleLayer = TINY


def time_rounds(asked: SampleSet, num_processes: int, progress: Progress = ignore_progress) -> list[Round]:
    """The seconds of all operations in each round, the mean of the processes. Raises `InputError` when a process fails."""
    rounds: list[Round] = []
    progress("starting the processes")
    for one in run_in_processes(_time_rounds_on_rank, asked, "cpu", num_processes, ROUNDS):
        rounds.append(one)
        progress("rounds", len(rounds), ROUNDS)
    return rounds


def _time_rounds_on_rank(rank: int, size: int, place: torch.device, asked: SampleSet) -> Iterator[Round]:
    keep_host_memory()  # as a run does
    torch.manual_seed(rank)
    wanted = dict(_all_operations(asked, size, place))
    for number in range(1 + ROUNDS):
        found = {name: _seconds(one) for name, one in wanted.items()}
        if size > 1:
            found |= _time_overlap(wanted, place)
        if number:
            yield _mean_of_processes(found, size, place)


def _all_operations(asked: SampleSet, size: int, place: torch.device) -> Iterator[tuple[str, TimedOperation]]:
    for sample in (*asked.samples, asked.tiny):
        for name, one in sample_operations(sample, place):
            yield f"{sample.name}/{name}", one
    for sample in asked.samples:
        yield f"{sample.name}/step", step_operation(sample, size, place)
    yield "tiny/layer", TimedOperation(layer_operation(asked.tiny, place).run, 1)
    yield "copy", TimedOperation(make_copy(place, COPY_BYTES), 1)
    for dtype in asked.others:
        for name, one in product_operations(asked.samples[0].with_dtype(dtype), place):
            if name == "up forward":
                yield f"{dtype}/{name}", one
    for kind in COLLECTIVES if size > 1 else ():
        for num_bytes in COLLECTIVE_BYTES:
            yield f"{kind}/{num_bytes}", TimedOperation(_collective(kind, num_bytes, size, place), 1)


def _collective(kind: str, num_bytes: int, size: int, place: torch.device) -> Callable[[], object]:
    count = max(num_bytes // 4 // size, 1) * size
    whole, part = torch.ones(count, device=place), torch.ones(count // size, device=place)
    made: Mapping[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole.fill_(1.0)),
        "all_gather": lambda: dist.all_gather_single(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole),
    }
    return made[kind]


def _time_overlap(wanted: Mapping[str, TimedOperation], place: torch.device) -> dict[str, float]:
    """An AllReduce alone, products alone that take longer, and by how much they take longer with the AllReduce beside them.

    That is a small difference of two long times, so each pair is taken at once, several times, and the middle one counts.
    """
    values = torch.zeros(OVERLAPPED_BYTES // 4, device=place)
    product = next(one for name, one in wanted.items() if name.endswith("up forward"))
    alone = statistics.median(_seconds(TimedOperation(lambda: dist.all_reduce(values), 1)) for _ in range(PAIRS))
    times = max(1, round(2 * alone / max(_seconds(product) * product.times, 1e-6)))

    def products() -> None:
        for _ in range(times):
            product.run()

    def both() -> None:
        work = dist.all_reduce(values, async_op=True)
        products()
        work.wait()

    pairs = [(_seconds(TimedOperation(products, 1)), _seconds(TimedOperation(both, 1))) for _ in range(PAIRS)]
    longer = statistics.median(together - apart for apart, together in pairs)
    return {"beside/all_reduce": alone, "beside/longer": longer}


def _seconds(one: TimedOperation) -> float:
    """Seconds of an operation, once, where all processes begin together."""
    dist.barrier()
    started = time.perf_counter()
    one.run()
    return (time.perf_counter() - started) / one.times


def _mean_of_processes(found: Mapping[str, float], size: int, place: torch.device) -> Round:
    total = torch.tensor(list(found.values()), dtype=torch.float64, device=place)
    dist.all_reduce(total)
    return dict(zip(found, (total / size).tolist(), strict=True))


SCHEMA = "shardwise.bench-machine/1"
# Formats that are measured: that of the constants, and others of which the best rate is known.
DTYPES = ("fp32", "bf16")


class MachinePayload(TypedDict):
    """This machine as a cluster: its chip and links at nominal rates, what is reached of them, and whole steps as a check."""

    schema: Literal["shardwise.bench-machine/1"]
    machine: str
    chip: Chip
    topology: Switched
    calibration: Calibration
    measured_over_predicted: dict[str, float]


class MachineResult(NamedTuple):
    """The machine at nominal rates, and what it reaches of them."""

    cluster: Cluster
    calibration: Calibration
    measured_over_predicted: Mapping[str, float]  # of whole steps, measured seconds over those that the constants give

    def payload(self) -> dict[str, Any]:
        """The chip, its links and the constants as JSON has them."""
        return {
            "schema": SCHEMA, "machine": self.cluster.name,
            "chip": asdict(self.cluster.chip), "topology": asdict(self.cluster.topology),
            "calibration": asdict(self.calibration), "measured_over_predicted": dict(self.measured_over_predicted),
        }  # fmt: skip

    def toml(self) -> str:
        meanings = {name: one.meaning for name, one in {**CONSTANTS, **BENCH_ONLY_CONSTANTS}.items()}
        meanings["network_fraction"] = "not measured: as link_fraction"
        meanings["fp8_matmul_fraction"] = "not measured: as matmul_fraction"
        return format_cluster_toml(self.cluster, self.calibration, meanings)


def measure_machine(
    num_processes: int, samples: tuple[SampleLayer, ...] = SAMPLES, progress: Progress = ignore_progress
) -> MachineResult:
    """Measure the CPU of this machine in so many processes. Raises `InputError` when one fails."""
    dtype, *others = DTYPES
    sized = tuple(sample.with_dtype(dtype) for sample in samples)
    rounds = time_rounds(SampleSet(sized, tuple(others), TINY.with_dtype(dtype)), num_processes, progress)
    known = MachineFacts(
        name=f"{platform.node() or 'this machine'}:{num_processes}", num_processes=num_processes, dtype=dtype,
        others=tuple(others), memory_bytes=device_bytes("cpu", num_processes),
        source=f"measured on this machine by shardwise bench machine, {num_processes} processes at once: "
        f"{describe_device('cpu')}, {platform.machine()}",
    )  # fmt: skip
    fit = MachineFit(median_rounds(rounds), sized, TINY.with_dtype(dtype), known)
    misses = fit.measured_over_predicted()
    return MachineResult(fit.cluster(), fit.calibration(prediction_interval(rounds, sized, misses.values())), misses)


def write_cluster_file(found: MachineResult, out: Path) -> None:
    """Write the cluster file. Raises `InputError` where that cannot be."""
    try:
        out.write_text(found.toml(), encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"bench: cannot write {out}: {error.strerror}; a path in a writable directory is required"
        ) from None
