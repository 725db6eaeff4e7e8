"""Program that XLA makes of a sharded product: its collectives, bytes and FLOPs, to compare with the derived ones.

The product is compiled, not run, in a process of its own (the number of host devices is fixed when jax starts). The
shardings of operands and result are given; the compiler decides the rest. Only that process imports jax.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from shardwise.derive import ShardedExpression
from shardwise.sharding import Axes, CollectiveKind, Mesh
from shardwise.sharding.notation import einsum_equation
from shardwise.values import InputError, bytes_per_element, lookup, raise_problems
from shardwise.verify import xla_worker
from shardwise.verify.hlo_graph import Groups
from shardwise.verify.hlo_program import HloProgram

Backend = Literal["cpu", "gpu", "tpu"]

LARGEST_CPU_MESH = 2048  # beyond it the CPU backend takes the devices for those of another process
_WHEELS = {
    "cpu": {},
    "gpu": {"jax_plugins.xla_cuda12": "jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 (with --no-deps)"},
    "tpu": {"libtpu": "libtpu==0.0.42.*"},
}
# Only the width of an element matters to what is compared, and bytes are counted in the format that was asked for.
_STAND_INS = {
    "fp64": "float32", "fp32": "float32", "tf32": "float32", "int32": "int32", "bf16": "bfloat16", "fp16": "float16",
    "fp8": "bfloat16", "int8": "int8", "fp4": "bfloat16", "int4": "int8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class XlaCollective:
    """One collective that the compiler chose; `axes` is none when its groups are no set of whole mesh axes."""

    op: CollectiveKind
    axes: Axes | None
    bytes: float

    def __str__(self) -> str:
        return f"{self.op}_{{{','.join(self.axes) if self.axes is not None else '?'}}} {self.bytes:g} B"


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaReport:
    """The compiler's choice for one product. `bytes_per_device` is what a device receives, in the operands' number format."""

    backend: str
    version: str
    collectives: tuple[XlaCollective, ...]
    bytes_per_device: float
    flops_per_device: float
    multiplications_per_device: float


def compile_product(product: ShardedExpression, *, backend: Backend = "cpu", timeout_s: float = 120) -> XlaReport:
    """Compile one product. Raises `InputError` if jax or a compiler is missing, or if XLA has no such product."""
    return compile_products([product], backend=backend, timeout_s=timeout_s)[0]


def compile_products(
    cases: Sequence[ShardedExpression], *, backend: Backend = "cpu", timeout_s: float = 600
) -> list[XlaReport]:
    """Compile many products in one process, whose start takes longer than most compilations."""
    raise_problems(missing_packages(backend))
    raise_problems([problem for product in cases for problem in _violations(product, backend)])
    answer = _compile([_request(product) for product in cases], backend, timeout_s)
    version = answer["version"]
    return [read_report(product, text, backend, version) for product, text in zip(cases, answer["hlo"], strict=True)]


def missing_packages(backend: Backend) -> list[str]:
    """Return a problem for each package that `backend` lacks. Raises `InputError` for an unknown backend."""
    if find_spec("jax") is None:
        return ['xla: jax is not installed; pip install "shardwise[jax]"']
    return [
        f"xla: the ahead-of-time compiler for {backend} is not installed; pip install {wheel}"
        for module, wheel in lookup(_WHEELS, backend, "xla: backend").items()
        if not _is_installed(module)
    ]


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def read_report(product: ShardedExpression, hlo: str, backend: str, version: str) -> XlaReport:
    """Return the report of a compiled module's text."""
    program = HloProgram(hlo)
    width = bytes_per_element(product.dtype)
    collectives = tuple(
        XlaCollective(
            c.kind,
            group_axes(c.groups, product.mesh, pairs=c.kind is CollectiveKind.PERMUTE),
            c.received_elements * width,
        )
        for c in program.collectives()
    )
    return XlaReport(
        backend=backend, version=version, collectives=collectives, flops_per_device=program.flops(),
        bytes_per_device=math.fsum(c.bytes for c in collectives), multiplications_per_device=program.multiplications(),
    )  # fmt: skip


def group_axes(groups: Groups, mesh: Mesh, *, pairs: bool = False) -> Axes | None:
    """Return the mesh axes along which the devices of a group differ; None unless every group spans whole axes. For the
    pairs of a permute: all axes along which any source differs from its target."""
    coordinates = list(mesh.coordinates())
    axes = tuple(
        axis for axis in mesh.names if any(len({coordinates[device][axis] for device in group}) > 1 for group in groups)
    )
    if pairs:
        return axes
    return axes if all(len(set(group)) == mesh.size(axes) for group in groups) else None


def _violations(product: ShardedExpression, backend: Backend) -> list[str]:
    partial = [
        f"xla: {name}{spec} is a partial sum; XLA takes whole operands, so leave {{U_...}} out"
        for name, spec in zip(product.names, product.operands, strict=True)
        if spec.partial
    ]
    devices = product.mesh.num_devices
    if backend == "cpu" and devices > LARGEST_CPU_MESH:
        return [*partial, f"xla: the mesh has {devices} devices; the CPU backend takes at most {LARGEST_CPU_MESH}"]
    if backend == "tpu" and devices not in xla_worker.TPU_SHAPES:
        allowed = ", ".join(map(str, xla_worker.TPU_SHAPES))
        return [*partial, f"xla: the mesh has {devices} devices; for tpu it must be one of {allowed}"]
    return partial


# The process that compiles


def _request(product: ShardedExpression) -> dict[str, Any]:
    return {
        "product": einsum_equation(product.expression),
        "dtype": _STAND_INS[product.dtype],
        "mesh": product.mesh.axes,
        "shapes": [[product.sizes[dim] for dim in spec.dims] for spec in product.operands],
        "operands": [spec.axes for spec in product.operands],
        "result": product.goal.axes if product.goal is not None else None,
    }


def _compile(requests: Sequence[Mapping[str, Any]], backend: Backend, timeout_s: float) -> dict[str, Any]:
    devices = max((math.prod(size for _, size in request["mesh"]) for request in requests), default=1)
    environment = {**os.environ, **_environment(backend, devices)}
    source = str(Path(__file__).parents[2])  # the folder that holds the package, so that the child finds the same one
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", xla_worker.__name__]
    text = json.dumps({"backend": backend, "requests": requests})
    try:
        process = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"xla: {len(requests)} products were not compiled within {timeout_s:g} s; give more time"
        raise InputError(problem) from None
    if process.returncode:
        last_line = process.stderr.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        raise InputError(f"xla: the {backend} compiler failed: {last_line[0]}")
    answer: dict[str, Any] = json.loads(process.stdout)
    return answer


def _environment(backend: Backend, devices: int) -> dict[str, str]:
    common = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    if backend == "cpu":
        return common | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if backend == "gpu":
        return common | {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"}
    return common | {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8", "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    }  # fmt: skip
