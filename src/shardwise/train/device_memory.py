"""The memory that a device really has, and what of it was used."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")  # Linux, control groups v2: "max" or bytes
GIB = 2**30
RSS_UNIT = 1024  # Linux, getrusage(2): ru_maxrss is in kilobytes


def host_bytes() -> int:
    """Bytes of memory of this host, or of the container that this process is in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdecimal() else whole


def device_bytes(device: str, processes_on_host: int) -> int:
    """Bytes of memory of a device: of a GPU its own, of a CPU the host's over the processes that share it."""
    if device == "cpu":
        return host_bytes() // processes_on_host
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def used(device: str) -> dict[str, float]:
    """The peak of a device's memory, by torchtitan's names; of a CPU the largest resident set of the process so far, by ours."""
    if device == "cpu":
        return {"memory/max_rss(GiB)": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT / GIB}
    import torch

    stats, whole = torch.cuda.memory_stats(device), torch.cuda.get_device_properties(device).total_memory
    torch.cuda.reset_peak_memory_stats(device)
    found: dict[str, float] = {}
    for name in ("active", "reserved"):
        peak = stats.get(f"{name}_bytes.all.peak", 0)
        found |= {f"memory/max_{name}(GiB)": peak / GIB, f"memory/max_{name}(%)": 100.0 * peak / whole}
    return found | {f"memory/{name}": stats.get(name, 0) for name in ("num_alloc_retries", "num_ooms")}
