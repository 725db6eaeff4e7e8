"""Measurements of a run besides its log, in measured.json: memory and collectives of an inspected step, and short timings
before and after the run, which show whether the machine changed.

The timings are no calibration: a product and a copy on each device at once, and an AllReduce over all, at some of a
plan's sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from shardwise.records import MeasuredMemory, RunFolder, RunInspection, StepInspection, StepRecord
from shardwise.records.step_inspection import ProcessMemory, inspection_payload
from shardwise.run.faults.agreement import RankGroup, all_gather_ints
from shardwise.run.faults.rank_status import wait_for_ranks
from shardwise.run.mixed_precision import training_dtypes
from shardwise.run.trainer.step_inspector import process_memory
from shardwise.search import Plan
from shardwise.values import BUCKET_BYTES, get_precision, pluralize, write_json_atomic


def describe_machine(device: torch.device) -> str:
    """Describe a device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {pluralize(torch.get_num_threads(), 'thread')}"


@dataclass
class MachineProbe:
    """Measurements of a run on all ranks. `probe` returns seconds of short work by name; it is run at creation and at
    the end."""

    world: RankGroup
    out: RunFolder
    probe: Callable[[], Mapping[str, float]]
    inspection: RunInspection = field(init=False)

    def __post_init__(self) -> None:
        device = self.world.device
        self.inspection = RunInspection(device=device.type, machine=describe_machine(device), before=self.probe())

    def begin(self) -> None:
        """Write the first measurements when a run starts or goes on."""
        self._keep(self.inspection)

    def step(self, record: StepRecord, inspection: StepInspection) -> None:
        """Add an inspected step, with the memory of the rank that held most."""
        process = process_memory(self.world.device)
        rows = all_gather_ints(self.world, _MemoryRow.numbers(inspection.memory, process), "memory of the watched step")
        memory_rows = [_MemoryRow(*numbers) for numbers in rows]
        rank = max(range(len(memory_rows)), key=lambda index: memory_rows[index].peak_bytes)
        memory, process = memory_rows[rank].memory(inspection.memory), memory_rows[rank].process(process)
        self._keep(
            replace(
                self.inspection, step=record.step, rank=rank, memory=memory, process=process,
                collectives=inspection.collectives,
            )
        )  # fmt: skip

    def end(self) -> None:
        """Add the timings after the run."""
        self._keep(replace(self.inspection, after=self.probe()))

    def _keep(self, inspection: RunInspection) -> None:
        self.inspection = inspection
        if self.world.rank == 0:
            write_json_atomic(self.out.measured, inspection_payload(inspection))


class _MemoryRow:
    """A rank's memory as a row of integers, which ranks can exchange."""

    def __init__(self, peak_bytes: int, *numbers: int) -> None:
        self.peak_bytes, self._numbers = peak_bytes, numbers

    @staticmethod
    def numbers(memory: MeasuredMemory, process: ProcessMemory) -> list[int]:
        peaks = [-1 if peak is None else peak for peak in process]
        return [memory.peak_bytes, *memory.at_peak.values(), *memory.largest.values(), memory.undeclared_bytes, *peaks]

    def memory(self, template: MeasuredMemory) -> MeasuredMemory:
        """Return the row's memory, with the terms of `template`, which are those of every rank."""
        count = len(template.at_peak)
        at_peak = dict(zip(template.at_peak, self._numbers[:count], strict=True))
        end = count + len(template.largest)
        largest = dict(zip(template.largest, self._numbers[count:end], strict=True))
        return MeasuredMemory(
            peak_bytes=self.peak_bytes, at_peak=at_peak, largest=largest, undeclared_bytes=self._numbers[end]
        )

    def process(self, template: ProcessMemory) -> ProcessMemory:
        peaks = self._numbers[-len(template) :]
        return ProcessMemory(peaks[0], *(None if peak < 0 else peak for peak in peaks[1:]))


MIN_SIZE, MAX_SIZE = 256, 4096  # rows and columns of the product: large enough to time, and quick
COPIED_BYTES = 2**26  # larger than the caches of a host
BUDGET_S, REPEATS, WARM_UPS = 0.5, 9, 2  # least seconds and repetitions of a piece of work, untimed runs before
SUMMED = 21  # AllReduces that are timed: equally many on every rank, or a rank would wait forever


def time_machine_probe(plan: Plan, world: RankGroup) -> dict[str, float]:
    """Return seconds of short work by name, each the median of its repetitions, on the slowest rank."""
    work_seconds = _measure_seconds(plan, world)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # leave no cached memory of the probe to the run
    ranks = all_gather_ints(
        world, [round(seconds * 1e9) for seconds in work_seconds.values()], "the times of the probe"
    )
    return {name: max(column) / 1e9 for name, column in zip(work_seconds, zip(*ranks, strict=True), strict=True)}


def _measure_seconds(plan: Plan, world: RankGroup) -> dict[str, float]:
    """Return this rank's seconds of each piece of work."""
    work_seconds = {name: _time_median(run, world.device) for name, run in _work(plan, world.device)}
    if world.size > 1:
        buffer = torch.zeros(int(BUCKET_BYTES) // 4, device=world.device)
        group = world.transport.world
        with wait_for_ranks("the AllReduces of the probe"):
            group.all_reduce(buffer).wait()  # align the ranks first
            work_seconds["collectives"] = _time_median(
                lambda: group.all_reduce(buffer).wait(), world.device, exactly=SUMMED
            )
    return work_seconds


def _work(plan: Plan, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a product [m, k] · [k, n] like a block's first projection, in the plan's dtype, and a copy."""
    dtype = training_dtypes(get_precision(plan.job.precision)).weights
    rows = plan.layout.micro_batch_seqs * plan.job.seq_len
    m, k, n = (min(max(size, MIN_SIZE), MAX_SIZE) for size in (rows, plan.model.d_model, plan.model.d_ff))
    left, right = torch.ones(m, k, device=device, dtype=dtype), torch.ones(k, n, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    yield "products", lambda: torch.mm(left, right, out=out)
    source = torch.zeros(COPIED_BYTES // 4, device=device)
    target = torch.zeros_like(source)
    yield "memory", lambda: target.copy_(source)


def _time_median(run: Callable[[], object], device: torch.device, *, exactly: int | None = None) -> float:
    for _ in range(WARM_UPS):
        _time_once(run, device)
    seconds: list[float] = []
    while len(seconds) < (exactly or REPEATS) or (exactly is None and sum(seconds) < BUDGET_S):
        seconds.append(_time_once(run, device))
    return median(seconds)


def _time_once(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
