"""JSON lines of micro-benchmarks, with what each measures as its keys, and the file that stores them.

The file is written line by line, so that an interrupted run keeps what it measured. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from shardwise.values import Hidden, InputError, Payload, parse_json_line, read_text

BENCHMARK_KINDS = ("matmul", "memory", "attention", "collectives")
# Sides of products and what they sum over: long sums for the sustained rate, short ones for the ramp. Of a CPU smaller ones, at
# which a core's rate is as steady (a product of side 1024 takes 20 ms at 100 GFLOP/s).
SIDES = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 1024)}
SUMMED_SIZES = {"cuda": (512, 1024, 4096, 8192, 16384), "cpu": (128, 256, 1024, 2048)}
# Bytes read and written: beyond any cache. Source: L2 of 50 MB on H100, last-level caches of up to 400 MB on server CPUs.
MEMORY_BYTES = {"cuda": (2**29, 2**31, 2**32), "cpu": (2**26, 2**28, 2**29)}
SEQ_LENS = {"cuda": (2048, 8192, 16384), "cpu": (256, 1024)}
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send_recv")
# Bytes of the whole array: small ones for the latency, large ones for the rate.
COLLECTIVE_BYTES = {"cuda": (2**20, 2**24, 2**28, 2**30), "cpu": (2**16, 2**20, 2**24, 2**26)}


def list_benchmark_lines(
    kind: str, device: str, dtypes: tuple[str, ...], num_devices: int
) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a kind without their seconds. Raises `InputError` for an unknown kind."""
    if kind == "matmul":
        for dtype, side, summed in product(dtypes, SIDES[device], SUMMED_SIZES[device]):
            yield {"bench": "matmul", "dtype": dtype, "m": side, "n": side, "k": summed}
    elif kind == "memory":
        yield from ({"bench": "memory", "bytes": size} for size in MEMORY_BYTES[device])
    elif kind == "attention":
        heads, head_dim = (16, 128) if device == "cuda" else (4, 64)
        wide_dtypes = [dtype for dtype in dtypes if dtype != "fp8"]  # fused attention runs in 16 and 32 bits
        for dtype, seq_len, backward in product(wide_dtypes, SEQ_LENS[device], (False, True)):
            yield {
                "bench": "attention", "dtype": dtype, "batch": 1, "heads": heads, "seq_len": seq_len,
                "head_dim": head_dim, "causal": True, "backward": backward,
            }  # fmt: skip
    elif kind == "collectives":
        for name, size in product(COLLECTIVES, COLLECTIVE_BYTES[device]):
            yield {"bench": "collective", "kind": name, "devices": num_devices, "bytes": size}
    else:
        raise InputError(f"bench: found {kind!r}; one of {', '.join(BENCHMARK_KINDS)} is required")


def describe_line(line: Mapping[str, Any]) -> str:
    """Return the text of what a line measures."""
    if line["bench"] == "matmul":
        return f"matmul {line['dtype']} {line['m']}x{line['n']}x{line['k']}"
    if line["bench"] == "memory":
        return f"copy of {line['bytes'] / 2e6:,.0f} MB"
    if line["bench"] == "attention":
        return f"attention {line['dtype']} {line['seq_len']} tokens{', backward' * line['backward']}"
    return f"{line['kind']} of {line['bytes'] / 1e6:,.3g} MB on {line['devices']}"


def format_rate(line: Mapping[str, Any]) -> str:
    """Return FLOP/s of a product or of causal attention (2 products forward, 5 backward), bytes/s of anything else."""
    if line["bench"] == "matmul":
        return f"{2e-12 * line['m'] * line['n'] * line['k'] / line['seconds']:.3g} TFLOP/s"
    if line["bench"] == "attention":
        products = 5 if line["backward"] else 2
        scores = line["batch"] * line["heads"] * line["seq_len"] ** 2 / 2
        return f"{2e-12 * products * scores * line['head_dim'] / line['seconds']:.3g} TFLOP/s"
    return f"{line['bytes'] / line['seconds'] / 1e9:.3g} GB/s"


SCHEMA = "shardwise.bench/1"
RESULT_KEYS = ("seconds", "low", "high", "repeats", "machine")


def line_key(line: Mapping[str, Any]) -> str:
    """Return the identity of a benchmark line: its keys without the results."""
    return json.dumps({name: value for name, value in line.items() if name not in RESULT_KEYS}, sort_keys=True)


def read_measured_keys(path: Path, machine: str) -> set[str]:
    """Return the keys of the lines that this machine has in the file. Raises `InputError` for another kind of file."""
    if not path.exists():
        return set()
    try:
        lines = [parse_json_line(line) for line in read_text(path).splitlines() if line.strip()]
    except (InputError, ValueError):
        raise InputError(
            f"bench: --out {path} is not a file of JSON lines; a new file, or one that this verb wrote, is required"
        ) from None
    if not all(isinstance(line, Mapping) and "bench" in line for line in lines):
        raise InputError(f'bench: --out {path} has lines without a "bench"; a file that this verb wrote is required')
    return {line_key(line) for line in lines if line.get("machine") == machine}


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line to the file. Raises `InputError` if it cannot be written."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise InputError(
            f"bench: cannot write {path}: {error.strerror}; a path in a writable directory is required"
        ) from None


def remaining_lines(lines: Iterable[Mapping[str, Any]], done: set[str]) -> list[Mapping[str, Any]]:
    """Return the lines that are not measured yet."""
    return [line for line in lines if line_key(line) not in done]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult(Payload):
    """Micro-benchmarks of a machine: a line for each, whose keys depend on what `bench` it is."""

    SCHEMA = "shardwise.bench/1"

    machine: str
    lines: tuple[Mapping[str, Any], ...]
    num_known: Annotated[int, Hidden] = 0  # lines that were in the file `out` already
    out: Annotated[str | None, Hidden] = None
