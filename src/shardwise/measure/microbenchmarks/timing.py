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

from shardwise.run.spawn import run_in_processes
from shardwise.values import InputError, describe_unknown, lookup

WARM_UPS = 2
REPEATS = 9  # at least; more as long as there is time
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
    time_once = _time_on_gpu if device == "cuda" else _time_on_host
    num_runs = max(1, min(MOST_RUNS, int(SHORTEST_REPETITION_S / max(time_once(run, 1), 1e-7))))
    times_s: list[float] = []
    started = time.perf_counter()
    while len(times_s) < REPEATS or time.perf_counter() - started < budget_s:
        times_s.append(time_once(run, num_runs))
    return summarise_times(times_s)


def summarise_times(times_s: list[float]) -> Timing:
    """Return the median of some seconds, and their 10th and 90th percentiles."""
    ordered = sorted(times_s)
    return Timing(
        statistics.median(ordered), ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10], len(ordered)
    )


def _time_on_host(run: Callable[[], object], num_runs: int) -> float:
    started = time.perf_counter()
    for _ in range(num_runs):
        run()
    return (time.perf_counter() - started) / num_runs


def _time_on_gpu(run: Callable[[], object], num_runs: int) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    for _ in range(num_runs):
        run()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / num_runs


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


def time_line(line: Mapping[str, Any], device: str) -> Timing:
    """Time what a line describes. Raises `InputError` for a format that this verb cannot run."""
    dtype = line.get("dtype", "bf16")
    if dtype not in DTYPES:
        raise InputError(f"bench: --dtype: {describe_unknown(dtype, DTYPES)}")
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    run = KERNELS[line["bench"]](line, device, DTYPES[dtype])
    return time_kernel(run, device)


def _matmul(line: Mapping[str, Any], device: str, dtype: torch.dtype) -> Callable[[], object]:
    """Return a product of [m, k] and [k, n] into an allocated array."""
    left = torch.randn(line["m"], line["k"], device=device).to(dtype)
    right = torch.randn(line["k"], line["n"], device=device).to(dtype)
    out = torch.empty(line["m"], line["n"], device=device, dtype=dtype)
    return lambda: torch.mm(left, right, out=out)


def _memory(line: Mapping[str, Any], device: str, dtype: torch.dtype) -> Callable[[], object]:
    return make_copy(line["bytes"], device)


def make_copy(num_bytes: int, device: str | torch.device) -> Callable[[], object]:
    """Return a copy between arrays of fp32; half of the bytes are read, half are written."""
    source = torch.zeros(num_bytes // 8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _attention(line: Mapping[str, Any], device: str, dtype: torch.dtype) -> Callable[[], object]:
    shape = (line["batch"], line["heads"], line["seq_len"], line["head_dim"])
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_(line["backward"]) for _ in range(3))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=line["causal"])

    if not line["backward"]:
        return forward
    out = forward()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


KERNELS: Mapping[str, Callable[[Mapping[str, Any], str, torch.dtype], Callable[[], object]]] = {
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
