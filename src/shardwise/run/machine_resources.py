"""This machine: processor, memory, free disk, GPUs and communication backends; threads and memory of a process.

Nothing here loads PyTorch at import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # Linux, control groups v2: "max" or bytes
GIB = 2**30
# glibc, malloc.h: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX of mallopt(3).
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
NEVER, AHEAD_BYTES = -1, 2**26
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage(2): ru_maxrss is in kilobytes, on macOS in bytes


def num_usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_bytes() -> int:
    """Return the bytes of memory of this host, or of the container in which this process runs."""
    physical_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return physical_bytes
    return min(physical_bytes, int(limit)) if limit.isdecimal() else physical_bytes


def device_bytes(device: str, processes_on_host: int) -> int:
    """Return the bytes of memory of a device: a GPU's own, or the share of one process of the host's."""
    if device == "cpu":
        return host_bytes() // processes_on_host
    import torch  # late: this module sets threads before PyTorch loads

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def keep_host_memory() -> bool:
    """Keep memory that a step frees for the next step, as PyTorch does on a GPU; return whether the C library (glibc)
    can.

    Otherwise glibc returns large arrays to the system, which hands out zeroed pages one by one when the next step
    touches them: on a virtual machine with two cores 0.4 ms for each MB, 40% of a small model's step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return all(
        mallopt(name, setting) == 1
        for name, setting in ((MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER), (TOP_PAD, AHEAD_BYTES))
    )


def memory_used(device: str) -> dict[str, float]:
    """Return the peak memory use of a device as metrics of the log. A GPU's have torchtitan's names and are of this
    step; a CPU's is the largest resident set of the process so far."""
    if device == "cpu":
        return {"memory/max_rss(GiB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / GIB}
    import torch  # late: this module sets threads before PyTorch loads

    stats, total_bytes = torch.cuda.memory_stats(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats(device)
    usage: dict[str, float] = {}
    for name in ("active", "reserved"):
        peak = stats.get(f"{name}_bytes.all.peak", 0)
        usage |= {f"memory/max_{name}(GiB)": peak / GIB, f"memory/max_{name}(%)": 100.0 * peak / total_bytes}
    return usage | {f"memory/{name}": stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}


def set_threads(num_processes: int) -> None:
    """Give each process of this host its share of the cores, unless OMP_NUM_THREADS is set. Call it before PyTorch is
    loaded."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(num_usable_cores() // num_processes, 1)))


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
