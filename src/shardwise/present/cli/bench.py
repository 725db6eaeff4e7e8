"""`shardwise bench`: what this machine reaches, as lines for `calibrate --bench`."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.rendering.report import Report
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.measure.microbenchmarks.timing import Timing

DESCRIPTION = """Measure products, memory, attention or collectives on this machine, on its GPUs or its CPU, and add a JSON line
for each to --out. Lines that the file has of this machine already are not measured again, so a run that was cut short goes on
where it stopped. `shardwise calibrate CLUSTER --bench FILE` fits a cluster's constants to the lines.

`bench machine` times the operations of small models on the CPU in all --processes at once, for 10 to 25 seconds, and writes a
cluster file: plans for it say what `train` takes on this machine."""
EXAMPLES = (
    "shardwise bench matmul --out machine.jsonl",
    "shardwise bench collectives --processes 8 --out machine.jsonl",
    "shardwise bench machine --processes 2 --out machine.toml",
)
MOST_PROCESSES = 64


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    measurement, output = parser.groups("measurement", "output")
    measurement.add_argument(
        "what", choices=("matmul", "memory", "attention", "collectives", "all", "machine"), metavar="WHAT",
        help="matmul, memory, attention, collectives or all of these; or machine",
    )  # fmt: skip
    output.add_argument(
        "--out",
        metavar="FILE",
        help="add the lines to this file, or write the machine to it; without it they are only printed",
    )
    measurement.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    measurement.add_argument(
        "--dtype",
        action="append",
        metavar="NAME",
        help="number format, such as bf16 or fp32; may be repeated (default: bf16 on a GPU, fp32 on a CPU)",
    )
    measurement.add_argument(
        "--processes", metavar="N", help="processes of a collective, or of a machine (default: its GPUs, or 2)"
    )
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """Measure, keep the lines, and say what came out."""
    from shardwise.values import InputError

    if importlib.util.find_spec("torch") is None:
        raise InputError("bench: PyTorch is not installed; pip install shardwise[train]")
    from shardwise.measure.microbenchmarks.benchmark_lines import (
        append_line,
        bench_payload,
        read_measured_keys,
        remaining_lines,
    )
    from shardwise.measure.microbenchmarks.timing import describe_device, select_device
    from shardwise.present.reports.calibration import bench_report

    device = select_device(arguments.device)
    if arguments.what == "machine":
        return _machine(arguments, device)
    machine, out = describe_device(device), Path(arguments.out) if arguments.out is not None else None
    wanted = list(_lines(arguments, device))
    todo = remaining_lines(wanted, read_measured_keys(out, machine) if out else set())
    lines = []
    for number, (line, found) in enumerate(_measured(todo, device), start=1):
        whole = {**line, "seconds": found.seconds, "low": found.low, "high": found.high, "repeats": found.repeats,
                 "machine": machine}  # fmt: skip
        lines.append(whole)
        if out:
            append_line(out, whole)
        arguments.progress("micro-benchmarks", number, len(todo))
    if arguments.json:
        return json.dumps(bench_payload(machine, lines), indent=2)
    return bench_report(lines, machine, len(wanted) - len(todo), arguments.out)


def _machine(arguments: argparse.Namespace, device: str) -> str | Report:
    """Measure the whole machine, write its cluster file, and say what came out."""
    from shardwise.measure.microbenchmarks.machine_benchmark import DTYPES, measure_machine, write_cluster_file
    from shardwise.present.reports.calibration import machine_report
    from shardwise.values import InputError, require_writable

    if arguments.dtype:
        raise InputError(
            f"bench: found --dtype {arguments.dtype[0]} for machine; it measures {' and '.join(DTYPES)}, and takes none"
        )
    if device != "cpu":
        raise InputError(
            "bench: machine measures a CPU at sizes at which a GPU has nothing to do; --device cpu is required, or for GPUs "
            "`bench all` and `calibrate --bench`"
        )
    processes = _processes(arguments, device)
    _require_processes(processes, device, least=1, what="a machine")
    if arguments.out is not None:
        if not arguments.out.endswith(".toml"):
            raise InputError(f"bench: found --out {arguments.out}; a name that ends in .toml is required for a machine")
        require_writable(arguments.out)
    found = measure_machine(processes, progress=arguments.progress)
    if arguments.out is not None:
        write_cluster_file(found, Path(arguments.out))
    if arguments.json:
        return json.dumps(found.payload(), indent=2)
    return machine_report(found, arguments.out)


def _processes(arguments: argparse.Namespace, device: str) -> int:
    from shardwise.measure.microbenchmarks.timing import num_gpus
    from shardwise.values import parse_count

    if arguments.processes is not None:
        return parse_count(arguments.processes, label="--processes")
    return num_gpus() if device == "cuda" else 2


def _require_processes(processes: int, device: str, *, least: int, what: str) -> None:
    from shardwise.measure.microbenchmarks.timing import num_gpus
    from shardwise.values import InputError

    if not least <= processes <= (num_gpus() if device == "cuda" else MOST_PROCESSES):
        most = f"the {num_gpus()} GPUs of this machine" if device == "cuda" else MOST_PROCESSES
        raise InputError(
            f"bench: found --processes {processes}; {least} or more, at most {most}, are required for {what}"
        )


def _lines(arguments: argparse.Namespace, device: str) -> Iterator[Mapping[str, Any]]:
    from shardwise.measure.microbenchmarks.benchmark_lines import BENCHMARK_KINDS, list_benchmark_lines
    from shardwise.measure.microbenchmarks.timing import DTYPES
    from shardwise.values import InputError, describe_unknown

    dtypes = tuple(arguments.dtype or (("bf16",) if device == "cuda" else ("fp32",)))
    strange = [name for name in dtypes if name not in DTYPES]
    if strange:
        raise InputError(f"bench: --dtype: {describe_unknown(strange[0], DTYPES)}")
    processes = _processes(arguments, device)
    kinds = BENCHMARK_KINDS if arguments.what == "all" else (arguments.what,)
    if "collectives" in kinds:
        _require_processes(processes, device, least=2, what="collectives")
    for kind in kinds:
        yield from list_benchmark_lines(kind, device, dtypes, processes)


def _measured(lines: Sequence[Mapping[str, Any]], device: str) -> Iterator[tuple[Mapping[str, Any], Timing]]:
    """Each line with its timing; collectives in one start of their processes."""
    from shardwise.measure.microbenchmarks.timing import time_collectives, time_line

    for line in lines:
        if line["bench"] != "collective":
            yield line, time_line(line, device)
    together = [line for line in lines if line["bench"] == "collective"]
    if together:
        yield from time_collectives(together, device, together[0]["devices"])
