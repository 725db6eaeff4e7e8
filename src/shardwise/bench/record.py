"""The file of JSON lines that measurements are kept in: line by line, so that what was measured stays if it is cut short."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.errors import InputError

SCHEMA = "shardwise.bench/1"
RESULTS = ("seconds", "low", "high", "repeats", "machine")


def key_of(line: Mapping[str, Any]) -> str:
    """What a line measures, without what came out."""
    return json.dumps({name: value for name, value in line.items() if name not in RESULTS}, sort_keys=True)


def measured_before(path: Path, machine: str) -> set[str]:
    """What the file has of this machine already. Raises `InputError` for a file that is something else."""
    if not path.exists():
        return set()
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError):
        raise InputError(
            f"bench: --out {path} is not a file of JSON lines; a new file, or one that this verb wrote, is required"
        ) from None
    if not all(isinstance(line, Mapping) and "bench" in line for line in lines):
        raise InputError(f'bench: --out {path} has lines without a "bench"; a file that this verb wrote is required')
    return {key_of(line) for line in lines if line.get("machine") == machine}


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line at the end."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise InputError(
            f"bench: cannot write {path}: {error.strerror}; a path in a writable directory is required"
        ) from None


def left_over(lines: Iterable[Mapping[str, Any]], done: set[str]) -> list[Mapping[str, Any]]:
    """The lines that are not measured yet."""
    return [line for line in lines if key_of(line) not in done]


class BenchPayload(TypedDict):
    """Micro-benchmarks of a machine: a line for each, whose keys depend on what `bench` it is."""

    schema: Literal["shardwise.bench/1"]
    machine: str
    lines: list[dict[str, Any]]


def bench_payload(machine: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `shardwise bench --json` prints: the lines that were measured on a machine."""
    return {"schema": SCHEMA, "machine": machine, "lines": list(lines)}
