"""Resources of a compiled kernel, as a value. No Triton here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResources:
    """Resources of one block of threads of a compiled kernel; `spilled_bytes` of each thread are in local memory. `loads`: the
    instructions of its PTX that read global memory, such as `ld.global.v4.b32`, `cp.async` or `cp.async.bulk.tensor` (TMA)."""

    kernel: str
    compute_capability: int
    num_warps: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    loads: tuple[str, ...] = ()
