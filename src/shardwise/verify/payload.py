"""A product that was run or compiled, as plain data: the keys that these add to what `shardwise matmul --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from shardwise.verify.run import RunResult
from shardwise.verify.xla import XlaReport


def run_payload(result: RunResult) -> dict[str, Any]:
    """The error of a run, and the devices that it ran on."""
    return {"max_relative_error": result.max_relative_error, "num_devices": result.num_devices}


def verify_payload(report: XlaReport) -> dict[str, Any]:
    """What XLA's partitioner made of the product, under `verify`."""
    return {"verify": asdict(report)}
