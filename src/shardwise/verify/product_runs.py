"""Run a sharded product and compare it with the unsharded one: on virtual devices in NumPy, or as emitted source.

What runs on JAX and PyTorch is the emitted file itself, in processes of its own; neither is imported here.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from shardwise.derive import ComputeStep, ShardedExpression, ShardedProgram
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.values import InputError, ShardwiseError
from shardwise.verify.jax_source import write_jax_source
from shardwise.verify.product_listing import build_listing
from shardwise.verify.torch_source import write_torch_source

Framework = Literal["numpy", "jax", "torch"]
ProductProgram = tuple[ShardedExpression, ShardedProgram]

_INSTALL = {"jax": 'pip install "shardwise[jax]"', "torch": 'pip install "shardwise[train]"'}
# XLA takes host devices beyond this for another process's; a process a device is more than a host should start.
_MOST_DEVICES = {"jax": 2048, "torch": 64}
# Elements of all devices' shards of operands and result together, in float64 on NumPy: 1 GB, and a few times that on the way.
MOST_ELEMENTS = 2**27
_TRIES = 3  # a port that was free may be taken by the time that it is opened
_RUN_ALL = """
import runpy, sys
for path in sys.argv[2:]:
    runpy.run_path(path, run_name="emitted")["main"](int(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Largest difference of any device's shard from the unsharded product, over that product's largest magnitude."""

    max_relative_error: float
    num_devices: int
    framework: str


def run_product(
    product: ShardedExpression, program: ShardedProgram, framework: Framework, *, seed: int = 0, timeout_s: float = 120
) -> RunResult:
    """Run `program` on random inputs: float64 on NumPy's virtual devices, fp32 on JAX's host devices and on gloo.
    Raises `InputError` if the framework is not installed, and `ShardwiseError` if the run fails or takes too long."""
    if framework == "numpy":
        error = _run_numpy(product, program, seed)
    elif framework == "jax":
        (error,) = _run_jax([(product, program)], seed, timeout_s)
    elif framework == "torch":
        error = _run_torch(product, program, seed, timeout_s)
    else:
        raise InputError(f"run: found framework {framework!r}; one of numpy, jax, torch is required")
    return RunResult(max_relative_error=error, num_devices=product.mesh.num_devices, framework=framework)


def run_products(
    cases: Sequence[ProductProgram], framework: Framework = "jax", *, seed: int = 0, timeout_s: float = 120
) -> list[float]:
    """Return the errors of many programs, in order; JAX starts once, with the host devices of the largest mesh.
    `timeout_s` is for all of them together on JAX, for each of them on PyTorch."""
    if framework == "jax":
        return _run_jax(cases, seed, timeout_s) if cases else []
    return [
        run_product(product, program, framework, seed=seed, timeout_s=timeout_s).max_relative_error
        for product, program in cases
    ]


def _run_numpy(product: ShardedExpression, program: ShardedProgram, seed: int) -> float:
    """Return the error on virtual devices against the einsum; operands that are partial sums have a summand on each."""
    listing = build_listing(product, program)
    _require_few_elements(product, program)
    rng = np.random.default_rng(seed)
    devices = VirtualDevices(product.mesh, product.sizes)
    unsharded = []
    for name, operand in zip(product.names, listing.operands, strict=True):
        spec = operand.spec
        samples = rng.standard_normal(operand.shape)
        summands = samples if spec.partial else samples[None]
        devices.live_shards[name, spec] = [
            devices.local_part(summands[product.mesh.position(place, spec.partial)], spec, place)
            for place in devices.coordinates
        ]
        unsharded.append(summands.sum(axis=0))
    devices.run(program.program, program.steps)
    expected = np.asarray(np.einsum(listing.equation, *unsharded, optimize=True))
    shards = zip(devices.coordinates, devices.live_shards[product.result_name, listing.spec], strict=True)
    error = max(np.abs(shard - devices.local_part(expected, listing.spec, place)).max() for place, shard in shards)
    return float(error / np.abs(expected).max())


def _require_few_elements(product: ShardedExpression, program: ShardedProgram) -> None:
    """Refuse arrays beyond a host's memory: unsharded ones, and all devices' shards, also of intermediate products."""
    products = [step.placed.outputs[0] for step in program.steps if isinstance(step, ComputeStep)]
    unsharded_elements = sum(
        math.prod(product.sizes[dim] for dim in spec.dims)
        for spec in (*product.operands, program.specs[product.result_name])
    )
    shard_elements = product.mesh.num_devices * sum(
        math.prod(product.sizes[dim] // product.mesh.size(axes) for dim, axes in zip(spec.dims, spec.axes, strict=True))
        for spec in (*product.operands, *products)
    )
    num_elements = unsharded_elements + shard_elements
    if num_elements > MOST_ELEMENTS:
        raise InputError(
            f"--run numpy: found {num_elements:.3g} elements in the arrays and on all {product.mesh.num_devices:,} devices; at "
            f"most {MOST_ELEMENTS:.3g} are required: take smaller sizes, which a program's correctness does not depend on"
        )


def _run_jax(cases: Sequence[ProductProgram], seed: int, timeout_s: float) -> list[float]:
    num_devices = max(product.mesh.num_devices for product, _ in cases)
    _require_framework("jax", num_devices)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"product_{index}.py" for index in range(len(cases))]
        for path, (product, program) in zip(paths, cases, strict=True):
            path.write_text(emit(product, program, "jax"), encoding="utf-8")
        command = [sys.executable, "-c", _RUN_ALL, str(seed), *map(str, paths)]
        processes = _Processes("jax", Path(folder))
        processes.run(command, [{"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}], timeout_s)
        return processes.errors()


def _run_torch(product: ShardedExpression, program: ShardedProgram, seed: int, timeout_s: float) -> float:
    num_devices = product.mesh.num_devices
    _require_framework("torch", num_devices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.py"
        path.write_text(emit(product, program, "torch"), encoding="utf-8")
        for attempt in range(1, _TRIES + 1):
            processes = _Processes("torch", Path(folder))
            try:
                processes.run([sys.executable, str(path), str(seed)], _rank_environments(num_devices), timeout_s)
                break
            except ShardwiseError as error:
                if attempt == _TRIES or "EADDRINUSE" not in str(error):
                    raise
        return processes.errors()[0]


def _rank_environments(num_devices: int) -> list[dict[str, str]]:
    """Return the environment variables of each process, as `torchrun` sets them, for gloo on this host."""
    with socket.socket() as free_socket:
        free_socket.bind(("127.0.0.1", 0))
        port = free_socket.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_devices), "LOCAL_WORLD_SIZE": str(num_devices), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_devices)]


def _require_framework(framework: str, num_devices: int) -> None:
    if importlib.util.find_spec(framework) is None:
        raise InputError(f"{framework} is not installed; {_INSTALL[framework]}")
    max_devices = _MOST_DEVICES[framework]
    if num_devices > max_devices:
        raise InputError(
            f"mesh: found {num_devices} devices; {framework} runs on one host with at most {max_devices}; shrink the mesh, "
            f"or emit the source and start it on more hosts"
        )


class _Processes:
    """Processes of one run, with their output in files of a folder; if one fails the others are killed."""

    def __init__(self, framework: str, folder: Path) -> None:
        self.framework, self.folder = framework, folder
        self.started: list[subprocess.Popen[bytes]] = []

    def run(self, command: Sequence[str], environments: Sequence[Mapping[str, str]], timeout_s: float) -> None:
        try:
            for index, environment in enumerate(environments):
                paths = (self.folder / f"{index}.{stream}" for stream in ("out", "err"))
                with next(paths).open("wb") as out, next(paths).open("wb") as err:
                    process = subprocess.Popen(command, stdout=out, stderr=err, env={**os.environ, **environment})
                self.started.append(process)
            self.wait(time.monotonic() + timeout_s, timeout_s)
        finally:
            for process in self.started:
                process.kill()
                process.wait()

    def wait(self, deadline: float, timeout_s: float) -> None:
        while (codes := [process.poll() for process in self.started]) != [0] * len(self.started):
            if failed := [index for index, code in enumerate(codes) if code]:
                raise ShardwiseError(f"{self.framework}: the emitted program failed\n{self.error_tail(failed)}")
            if time.monotonic() > deadline:
                raise ShardwiseError(f"{self.framework}: the emitted program did not finish in {timeout_s:g} s")
            time.sleep(0.02)

    def error_tail(self, failed: Sequence[int]) -> str:
        """Return the last lines of standard error of the first process that failed."""
        text = (self.folder / f"{failed[0]}.err").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-12:])

    def errors(self) -> list[float]:
        """Return the errors that the first process printed."""
        lines = (self.folder / "0.out").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["max_relative_error"] for line in lines if line.startswith("{")]


def emit(product: ShardedExpression, program: ShardedProgram, framework: Literal["jax", "torch"]) -> str:
    """Return source text that computes `product` by the steps of `program`, and checks itself when it is run. Raises
    `InputError` for another framework, and for steps other than collectives and products."""
    backends = {"jax": write_jax_source, "torch": write_torch_source}
    if framework not in backends:
        raise InputError(f"emit: found framework {framework!r}; one of {', '.join(backends)} is required")
    return backends[framework](build_listing(product, program))
