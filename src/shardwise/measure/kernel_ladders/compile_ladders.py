"""The ladders' Triton kernels compiled for GPUs that need not be there, in a process of their own.

This process may have loaded Triton with its interpreter, whose kernels cannot be compiled.

    python -m shardwise.measure.kernel_ladders.compile_ladders softmax,product 80,90     # JSON on standard output
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shardwise.measure.kernel_ladders.ladder import Ladder, Rung
from shardwise.measure.kernel_ladders.ladders import LADDERS
from shardwise.run.triton_kernels.kernel_resources import KernelResources
from shardwise.values import ShardwiseError

CompiledRungs = tuple[tuple[KernelResources, ...], ...]  # the kernels of each rung, none where Triton has no part in it


def compile_ladders(names: Sequence[str], compile_for: Sequence[int]) -> Mapping[str, CompiledRungs]:
    """Return, by ladder, what the kernels of each rung take once compiled for some compute capabilities.

    Raises `ShardwiseError` with the end of Triton's message where it fails.
    """
    command = [sys.executable, "-m", __spec__.name, ",".join(names), ",".join(map(str, compile_for))]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    finished = subprocess.run(command, capture_output=True, text=True, env=environment)
    if finished.returncode:
        raise ShardwiseError(f"kernels: Triton could not compile: {finished.stderr.strip()[-1000:]}")
    return {
        name: tuple(tuple(_read_resources(kernel) for kernel in rung) for rung in rungs)
        for name, rungs in json.loads(finished.stdout).items()
    }


def _read_resources(kernel: Mapping[str, Any]) -> KernelResources:
    return KernelResources(**{**kernel, "loads": tuple(kernel["loads"])})


def compile_rung(ladder: Ladder, rung: Rung, compile_for: Sequence[int]) -> list[KernelResources]:
    """Compile the kernels that a rung launches, on operands without data."""
    from shardwise.run.triton_kernels.ahead_of_time import compile_launch, recorded_launches

    with recorded_launches() as launches:
        operands = ladder.make_operands("meta")
        launches.clear()  # what made the operands
        rung.run(*operands)
    return [compile_launch(launch, capability) for capability in compile_for for launch in launches]


def main(names: str, capabilities: str) -> None:
    """Print the kernels of some ladders, by ladder and rung."""
    compile_for = [int(capability) for capability in capabilities.split(",")]
    ladders = [LADDERS[name]() for name in names.split(",")]
    compiled = {
        ladder.name: [
            [asdict(kernel) for kernel in compile_rung(ladder, rung, compile_for)] if rung.uses_triton else []
            for rung in ladder.rungs
        ]
        for ladder in ladders
    }
    json.dump(compiled, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
