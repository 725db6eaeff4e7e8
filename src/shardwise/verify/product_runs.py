"""Run a sharded product and compare it with the unsharded one: on virtual devices in NumPy, or by running its emitted source.

What runs on JAX and PyTorch is the emitted file itself, in processes of their own; neither is imported here. The payloads are
the keys that a run and a compilation add to what `shardwise matmul --json` prints.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from shardwise.derive.expression import ShardedExpression
from shardwise.derive.sharded_program import ComputeStep, ShardedProgram
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.values.errors import InputError, ShardwiseError
from shardwise.verify.product_listing import build_listing
from shardwise.verify.xla_compile import XlaReport

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
    """The largest difference of any device's shard from the unsharded product, over the product's largest magnitude."""

    max_relative_error: float
    num_devices: int
    framework: str


def run_product(
    made: ShardedExpression, program: ShardedProgram, framework: Framework, *, seed: int = 0, timeout_s: float = 120
) -> RunResult:
    """Run `program` on random inputs: float64 on NumPy's virtual devices, fp32 on JAX (host devices) and PyTorch (gloo).

    Raises `InputError` when the framework is not installed, and `ShardwiseError` when the run fails or takes too long.
    """
    if framework == "numpy":
        error = _run_numpy(made, program, seed)
    elif framework == "jax":
        (error,) = _run_jax([(made, program)], seed, timeout_s)
    elif framework == "torch":
        error = _run_torch(made, program, seed, timeout_s)
    else:
        raise InputError(f"run: found framework {framework!r}; one of numpy, jax, torch is required")
    return RunResult(max_relative_error=error, num_devices=made.mesh.num_devices, framework=framework)


def run_products(
    cases: Sequence[ProductProgram], framework: Framework = "jax", *, seed: int = 0, timeout_s: float = 120
) -> list[float]:
    """The errors of many programs, in order; JAX starts once, with as many host devices as the largest mesh has.

    `timeout_s` is for all of them together on JAX, for each of them on PyTorch.
    """
    if framework == "jax":
        return _run_jax(cases, seed, timeout_s) if cases else []
    return [
        run_product(made, program, framework, seed=seed, timeout_s=timeout_s).max_relative_error
        for made, program in cases
    ]


def _run_numpy(made: ShardedExpression, program: ShardedProgram, seed: int) -> float:
    """On virtual devices, against the einsum of the text. An operand that is a partial sum has summands of its own on every
    device of its axes."""
    known = build_listing(made, program)
    _require_few_elements(made, program)
    rng = np.random.default_rng(seed)
    devices = VirtualDevices(made.mesh, made.sizes)
    wholes = []
    for name, operand in zip(made.names, known.operands, strict=True):
        spec = operand.spec
        drawn = rng.standard_normal(operand.shape)
        summands = drawn if spec.partial else drawn[None]
        devices.held[name, spec] = [
            devices.local_part(summands[made.mesh.position(place, spec.partial)], spec, place)
            for place in devices.coordinates
        ]
        wholes.append(summands.sum(axis=0))
    devices.run(program.program, program.steps)
    expected = np.asarray(np.einsum(known.equation, *wholes, optimize=True))
    shards = zip(devices.coordinates, devices.held[made.result_name, known.spec], strict=True)
    error = max(np.abs(shard - devices.local_part(expected, known.spec, place)).max() for place, shard in shards)
    return float(error / np.abs(expected).max())


def _require_few_elements(made: ShardedExpression, program: ShardedProgram) -> None:
    """Refuse arrays that would not fit in the memory of a host: shards on all devices, those of products on the way too,
    and the whole arrays."""
    products = [step.placed.outputs[0] for step in program.steps if isinstance(step, ComputeStep)]
    wholes = sum(
        math.prod(made.sizes[dim] for dim in spec.dims) for spec in (*made.operands, program.specs[made.result_name])
    )
    held = made.mesh.num_devices * sum(
        math.prod(made.sizes[dim] // made.mesh.size(axes) for dim, axes in zip(spec.dims, spec.axes, strict=True))
        for spec in (*made.operands, *products)
    )
    if wholes + held > MOST_ELEMENTS:
        raise InputError(
            f"--run numpy: found {wholes + held:.3g} elements in the arrays and on all {made.mesh.num_devices:,} devices; at "
            f"most {MOST_ELEMENTS:.3g} are required: take smaller sizes, which a program's correctness does not depend on"
        )


def _run_jax(cases: Sequence[ProductProgram], seed: int, timeout_s: float) -> list[float]:
    num_devices = max(made.mesh.num_devices for made, _ in cases)
    _require_framework("jax", num_devices)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={num_devices}"
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"product_{index}.py" for index in range(len(cases))]
        for path, (made, program) in zip(paths, cases, strict=True):
            path.write_text(emit(made, program, "jax"), encoding="utf-8")
        command = [sys.executable, "-c", _RUN_ALL, str(seed), *map(str, paths)]
        processes = _Processes("jax", Path(folder))
        processes.run(command, [{"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}], timeout_s)
        return processes.errors()


def _run_torch(made: ShardedExpression, program: ShardedProgram, seed: int, timeout_s: float) -> float:
    num_devices = made.mesh.num_devices
    _require_framework("torch", num_devices)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "product.py"
        path.write_text(emit(made, program, "torch"), encoding="utf-8")
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
    """What `torchrun` would put into the environment of each process, for gloo on this host alone."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "WORLD_SIZE": str(num_devices), "LOCAL_WORLD_SIZE": str(num_devices), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    }  # fmt: skip
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_devices)]


def _require_framework(framework: str, num_devices: int) -> None:
    if importlib.util.find_spec(framework) is None:
        raise InputError(f"{framework} is not installed; {_INSTALL[framework]}")
    most = _MOST_DEVICES[framework]
    if num_devices > most:
        raise InputError(
            f"mesh: found {num_devices} devices; {framework} runs on one host with at most {most}; shrink the mesh, "
            f"or emit the source and start it on more hosts"
        )


class _Processes:
    """Processes of one run, their output in files of a folder; when one fails the others are ended."""

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
        """The end of what the first process to fail wrote."""
        text = (self.folder / f"{failed[0]}.err").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-12:])

    def errors(self) -> list[float]:
        """The errors that the first process printed."""
        lines = (self.folder / "0.out").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["max_relative_error"] for line in lines if line.startswith("{")]


def run_payload(result: RunResult) -> dict[str, Any]:
    """The error of a run, and the devices that it ran on."""
    return {"max_relative_error": result.max_relative_error, "num_devices": result.num_devices}


def compile_payload(report: XlaReport) -> dict[str, Any]:
    """What XLA's partitioner made of the product, under `verify`."""
    return {"verify": asdict(report)}


def emit(made: ShardedExpression, program: ShardedProgram, framework: Literal["jax", "torch"]) -> str:
    """Source text that computes `made` by the steps of `program`, and checks itself when it is run.

    Raises `InputError` for another framework, and for steps that are not collectives and products.
    """
    from shardwise.verify import jax_source, torch_source

    backends = {"jax": jax_source.write_jax_source, "torch": torch_source.write_torch_source}
    if framework not in backends:
        raise InputError(f"emit: found framework {framework!r}; one of {', '.join(backends)} is required")
    return backends[framework](build_listing(made, program))
