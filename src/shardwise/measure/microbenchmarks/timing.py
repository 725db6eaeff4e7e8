"""Time what a benchmark line describes: a matrix product, a copy, attention on one device, or a collective.

A time is the median of repetitions, on the device's clock if it has one. Collectives run on NCCL on GPUs and on gloo on
a CPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor

from shardwise.measure.microbenchmarks.device_timers import WorkTimer, device_timer
from shardwise.run.spawn import run_in_processes
from shardwise.values import InputError, describe_unknown, lookup

WARM_UPS = 2
REPEATS = 9  # at least; more as long as there is time
COLD_REPEATS = 20
SHORTEST_REPETITION_S, MOST_RUNS = 0.05, 1000  # seconds of a repetition, for which a short kernel runs several times


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one run: the median of `repeats`, and the 10th and 90th percentiles."""

    seconds: float
    low: float
    high: float
    repeats: int


def time_kernel(run: Callable[[], object], device: str, budget_s: float = 1.0) -> Timing:
    """Time `run` for about `budget_s`, after warming up. Short kernels run several times in a row, so that each but the
    first is launched while the previous one runs."""
    for _ in range(WARM_UPS):
        run()
    timer = device_timer(device)
    num_runs = max(1, min(MOST_RUNS, int(SHORTEST_REPETITION_S / max(timer.time_run(run), 1e-7))))
    times_s: list[float] = []
    started = time.perf_counter()
    while len(times_s) < REPEATS or time.perf_counter() - started < budget_s:
        times_s.append(timer.time_run(run, num_runs))
    return summarise_times(times_s)


def time_cold_kernel(run: Callable[[], object], timer: WorkTimer) -> Timing:
    """Time `run` with the caches of the device emptied before each repetition."""
    for _ in range(WARM_UPS):
        run()
    return summarise_times([timer.time_cold_run(run) for _ in range(COLD_REPEATS)])


def summarise_times(times_s: list[float]) -> Timing:
    """Return the median of some seconds, and their 10th and 90th percentiles."""
    ordered = sorted(times_s)
    return Timing(
        statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10], len(ordered)
    )


# Formats of products. Those of fp8 take operands in E4M3 and write bf16; those of tf32 take fp32, rounded by the tensor cores.
DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
FP8_CAPABILITY = (8, 9)  # the first with products of E4M3 (CUDA C++ Programming Guide, Ada and Hopper)


def time_line(line: Mapping[str, Any], device: str) -> Timing:
    """Time what a line describes. Raises `InputError` for a format that this verb cannot run."""
    dtype = line.get("dtype", "bf16")
    if dtype not in DTYPES:
        raise InputError(f"bench: --dtype: {describe_unknown(dtype, DTYPES)}")
    return time_kernel(KERNELS[line["bench"]](line, device, dtype), device)


def _matmul(line: Mapping[str, Any], device: str, dtype: str) -> Callable[[], object]:
    """Return a product of [m, k] and [k, n] into an allocated array."""
    return make_product((line["m"], line["k"], line["n"]), device, dtype)


def make_product(shape: tuple[int, int, int], device: str | torch.device, dtype: str) -> Callable[[], object]:
    """Return a product of [M, K] and [K, N] in a format of `DTYPES` into an allocated array."""
    num_rows, depth, num_columns = shape
    left = torch.randn(num_rows, depth, device=device).to(DTYPES[dtype])
    right = torch.randn(num_columns, depth, device=device).to(DTYPES[dtype]).t()
    result_dtype = torch.bfloat16 if dtype == "fp8" else DTYPES[dtype]
    out = torch.empty(num_rows, num_columns, device=device, dtype=result_dtype)
    if dtype == "fp8":  # cuBLASLt takes the left operand by rows and the right one by columns
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right, scale_a=scale, scale_b=scale, out_dtype=result_dtype, out=out)
    if dtype == "tf32":
        return lambda: _multiply_in_tf32(left, right, out)
    return lambda: torch.mm(left, right, out=out)


def _multiply_in_tf32(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Multiply with the switch for TF32 on: it belongs to the process, and products of fp32 run with it off."""
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.mm(left, right, out=out)
    torch.backends.cuda.matmul.allow_tf32 = allowed


def _memory(line: Mapping[str, Any], device: str, dtype: str) -> Callable[[], object]:
    return make_copy(line["bytes"], device)


def make_copy(num_bytes: int, device: str | torch.device) -> Callable[[], object]:
    """Return a copy between arrays of fp32; half of the bytes are read, half are written."""
    source = torch.zeros(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _attention(line: Mapping[str, Any], device: str, dtype: str) -> Callable[[], object]:
    shape = (line["batch"], line["heads"], line["seq_len"], line["head_dim"])
    q, k, v = (torch.randn(shape, device=device).to(DTYPES[dtype]).requires_grad_(line["backward"]) for _ in range(3))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=line["causal"])

    if not line["backward"]:
        return forward
    out = forward()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


KERNELS: Mapping[str, Callable[[Mapping[str, Any], str, str], Callable[[], object]]] = {
    "matmul": _matmul,
    "memory": _memory,
    "attention": _attention,
}


def describe_device(device: str) -> str:
    """Return the name of the device and its software, which is stored with every line."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}"


def select_device(requested: str) -> str:
    """Return the requested device, or the best one for "auto". Raises `InputError` if there is none."""
    has_gpu = torch.cuda.is_available()
    if requested == "cuda" and not has_gpu:
        raise InputError("bench: --device cuda, but PyTorch finds no GPU; --device cpu measures this host")
    return requested if requested != "auto" else ("cuda" if has_gpu else "cpu")


def supported_dtypes(dtypes: Sequence[str], device: str, cuda: Any = torch.cuda) -> tuple[str, ...]:
    """Return the formats of products that a device has."""
    has_fp8 = device == "cuda" and cuda.get_device_capability() >= FP8_CAPABILITY
    return tuple(dtype for dtype in dtypes if dtype != "fp8" or has_fp8)


def num_gpus() -> int:
    return torch.cuda.device_count()


Lines = Sequence[Mapping[str, Any]]


def time_collectives(lines: Lines, device: str, num_processes: int) -> Iterator[tuple[Mapping[str, Any], Timing]]:
    """Time collectives in one start of the processes. Raises `InputError` if a process fails."""
    yield from zip(lines, run_in_processes(_time_on_rank, list(lines), device, num_processes, len(lines)), strict=True)


def _time_on_rank(rank: int, size: int, device: torch.device, lines: Lines) -> Iterator[Timing]:
    for line in lines:
        yield _time_together(make_collective(line["kind"], line["bytes"], device), device.type)


def _time_together(run: Callable[[], object], device: str) -> Timing:
    """Time repetitions that all processes start together; each is as long as it takes on the slowest."""
    times_s = []
    for repeat in range(WARM_UPS + REPEATS):
        dist.barrier()
        started = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = torch.tensor([time.perf_counter() - started], device="cuda" if device == "cuda" else "cpu")
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        if repeat >= WARM_UPS:
            times_s.append(float(seconds))
    return summarise_times(times_s)


def make_collective(
    kind: str, num_bytes: int, device: torch.device, dtype: torch.dtype = torch.bfloat16, *, refill: bool = False
) -> Callable[[], object]:
    """Return a collective over all processes; `num_bytes` is the whole array, in an AllToAll all shards together.
    `refill` writes the array before each AllReduce, so that repeated sums do not overflow."""
    rank, size = dist.get_rank(), dist.get_world_size()
    num_elements = max(num_bytes // dtype.itemsize // size, 1) * size
    full = torch.ones(num_elements, dtype=dtype, device=device)
    shard = torch.ones(num_elements // size, dtype=dtype, device=device)
    received = torch.empty_like(full)
    num_exchanged = max(len(shard) // size, 1) * size
    runs_by_kind: Mapping[str, Callable[[], object]] = {
        "all_gather": lambda: dist.all_gather_single(full, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_single(shard, full),
        "all_reduce": lambda: dist.all_reduce(full.fill_(1.0) if refill else full),
        "all_to_all": lambda: dist.all_to_all_single(received[:num_exchanged], full[:num_exchanged]),
        "send_recv": lambda: _send_around_ring(full, received, rank, size),
    }
    return lookup(runs_by_kind, kind, "collective")


def _send_around_ring(sent: torch.Tensor, received: torch.Tensor, rank: int, size: int) -> None:
    moves = [dist.P2POp(dist.isend, sent, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
