"""Benchmarks of this machine as they are asked for: micro-benchmarks as lines of a file, or the machine as a cluster file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.measure.microbenchmarks.benchmark_layers import MACHINE_SIZES
from shardwise.measure.microbenchmarks.benchmark_lines import (
    BENCHMARK_KINDS,
    BenchmarkResult,
    append_line,
    list_benchmark_lines,
    read_measured_keys,
    remaining_lines,
)
from shardwise.measure.microbenchmarks.machine_benchmark import MachineResult, measure_machine, write_cluster_file
from shardwise.measure.microbenchmarks.timing import (
    DTYPES,
    Timing,
    describe_device,
    num_gpus,
    select_device,
    time_collectives,
    time_line,
)
from shardwise.values import (
    InputError,
    Progress,
    argument_label,
    describe_unknown,
    ignore_progress,
    parse_count,
    require_writable,
)

ALL = "all"
MAX_PROCESSES = 64
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkSettings:
    """Device ("auto", "cpu", "cuda"), number formats and number of processes of benchmarks, and the file to write.

    Left out: bf16 on GPUs and fp32 on a CPU; the number of GPUs, or 2 processes.
    """

    device: str = "auto"
    dtypes: Sequence[str] = ()
    processes: int | str | None = None
    out: PathLike | None = None


def run_benchmarks(kind: str, settings: BenchmarkSettings, progress: Progress = ignore_progress) -> BenchmarkResult:
    """Measure micro-benchmarks of a kind, or of all kinds, and add a line for each to the file as soon as it is measured.

    Lines that the file has of this machine already are not measured again. Raises `InputError` for wrong settings.
    """
    device = select_device(settings.device)
    out = None if settings.out is None else Path(settings.out)
    machine = describe_device(device)
    requested = list(_list_lines(kind, settings, device))
    pending = remaining_lines(requested, read_measured_keys(out, machine) if out else set())
    lines = []
    for number, (line, timing) in enumerate(_time_lines(pending, device), start=1):
        measured = {
            **line, "seconds": timing.seconds, "low": timing.low, "high": timing.high, "repeats": timing.repeats,
            "machine": machine,
        }  # fmt: skip
        lines.append(measured)
        if out:
            append_line(out, measured)
        progress("micro-benchmarks", number, len(pending))
    return BenchmarkResult(
        machine=machine, lines=tuple(lines), num_known=len(requested) - len(pending),
        out=None if settings.out is None else os.fspath(settings.out),
    )  # fmt: skip


def run_machine_benchmark(settings: BenchmarkSettings, progress: Progress = ignore_progress) -> MachineResult:
    """Measure the CPU or the GPUs of this machine with all processes at once, and write its cluster file.

    Raises `InputError` for wrong settings.
    """
    device = select_device(settings.device)
    if settings.dtypes:
        sizes = MACHINE_SIZES[device]
        raise InputError(
            f"bench: found {argument_label('dtypes')} {settings.dtypes[0]} for machine; it measures "
            f"{', '.join((sizes.dtype, *sizes.other_dtypes))}, and takes none"
        )
    processes = _parse_processes(settings, device)
    _require_processes(processes, device, minimum=1, subject="a machine")
    out = None if settings.out is None else os.fspath(settings.out)
    if out is not None:
        if not out.endswith(".toml"):
            label = argument_label("out")
            raise InputError(f"bench: found {label} {out}; a name that ends in .toml is required for a machine")
        require_writable(out)
    result = measure_machine(processes, device, progress=progress)
    if out is None:
        return result
    write_cluster_file(result, Path(out))
    return replace(result, out=out)


def _parse_processes(settings: BenchmarkSettings, device: str) -> int:
    if settings.processes is not None:
        return parse_count(settings.processes, label=argument_label("processes"))
    return num_gpus() if device == "cuda" else 2


def _require_processes(processes: int, device: str, *, minimum: int, subject: str) -> None:
    if not minimum <= processes <= (num_gpus() if device == "cuda" else MAX_PROCESSES):
        limit = f"the {num_gpus()} GPUs of this machine" if device == "cuda" else MAX_PROCESSES
        raise InputError(
            f"bench: found {argument_label('processes')} {processes}; {minimum} or more, at most {limit}, are required for "
            f"{subject}"
        )


def _list_lines(requested_kind: str, settings: BenchmarkSettings, device: str) -> Iterator[Mapping[str, Any]]:
    dtypes = tuple(settings.dtypes or (("bf16",) if device == "cuda" else ("fp32",)))
    unknown = [name for name in dtypes if name not in DTYPES]
    if unknown:
        raise InputError(f"bench: {argument_label('dtypes')}: {describe_unknown(unknown[0], DTYPES)}")
    processes = _parse_processes(settings, device)
    kinds = BENCHMARK_KINDS if requested_kind == ALL else (requested_kind,)
    if "collectives" in kinds:
        _require_processes(processes, device, minimum=2, subject="collectives")
    for kind in kinds:
        yield from list_benchmark_lines(kind, device, dtypes, processes)


def _time_lines(
    lines: Sequence[Mapping[str, Any]], device: str
) -> Iterator[tuple[Mapping[str, Any], Timing]]:  # fmt: skip
    """Yield each line with its timing; collectives in one start of their processes."""
    for line in lines:
        if line["bench"] != "collective":
            yield line, time_line(line, device)
    collectives = [line for line in lines if line["bench"] == "collective"]
    if collectives:
        yield from time_collectives(collectives, device, collectives[0]["devices"])
