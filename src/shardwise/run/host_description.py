"""Description of this machine: processor, memory, free disk, and the GPUs and communication backends that PyTorch has here."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from shardwise.run.machine_resources import host_bytes, num_usable_cores

CPU_INFO = Path("/proc/cpuinfo")  # Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as PyTorch names it."""

    name: str
    memory_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSupport:
    """PyTorch on this machine: its build, devices and communication backends.

    `platform` is what it is built for: "CUDA 12.8", "ROCm 6.4", or "CPU". `backends` are those of `torch.distributed`. `problem`
    says why PyTorch is installed but cannot be loaded; then the rest is unknown.
    """

    platform: str = ""
    gpus: tuple[Gpu, ...] = ()
    backends: tuple[str, ...] = ()
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine: `num_cores` and `memory_bytes` are those that this process may use. `torch` is None without PyTorch."""

    system: str
    cpu: str
    num_cores: int
    memory_bytes: float
    folder: str
    free_disk_bytes: float
    torch: TorchSupport | None


def describe_host(folder: str = ".") -> Host:
    """Return what this machine is; the free disk is that of a folder. PyTorch is loaded if it is installed."""
    return Host(
        system=f"{platform.system()} {platform.machine()}", cpu=_cpu_name(), num_cores=num_usable_cores(),
        memory_bytes=host_bytes(), folder=os.path.abspath(folder), free_disk_bytes=shutil.disk_usage(folder).free,
        torch=_torch_support() if importlib.util.find_spec("torch") else None,
    )  # fmt: skip


def _cpu_name() -> str:
    """Return the model of the processor; `platform.processor` has none on Linux."""
    try:
        lines = CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _torch_support() -> TorchSupport:
    try:
        import torch  # late: this module is for machines without it, too
        import torch.distributed as dist
    except Exception as error:  # a damaged installation: a library that is missing or of another version
        return TorchSupport(problem=f"{type(error).__name__}: {error}")
    version = torch.version
    built_for = f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "CPU"
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    available = {
        "gloo": dist.is_available() and dist.is_gloo_available(),
        "nccl": dist.is_available() and dist.is_nccl_available(),
    }
    return TorchSupport(
        platform=built_for, gpus=tuple(Gpu(name=gpu.name, memory_bytes=gpu.total_memory) for gpu in properties),
        backends=tuple(name for name, is_there in available.items() if is_there),
    )  # fmt: skip
