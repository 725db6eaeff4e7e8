"""The workbench of kernels: each rung's bytes and roofline on a chip, what its compiled kernels take, its time on a GPU."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from shardwise.hardware import Chip, load_chip
from shardwise.measure.kernel_ladders.compile_ladders import compile_ladders
from shardwise.measure.kernel_ladders.ladder import Ladder
from shardwise.measure.kernel_ladders.ladders import LADDERS
from shardwise.run.triton_kernels.kernel_resources import KernelResources
from shardwise.values import (
    InputError,
    OmitEmpty,
    Payload,
    Progress,
    describe_unknown,
    ignore_progress,
    printed,
    raise_problems,
)

PRODUCT_FORMAT = "bf16"  # of operands on a GPU, whose peak the roofline takes
COMPUTE_CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
# Larger than any L2 cache (H100 and H200: 50 MB, B200: 126 MB): written before each run, so that operands come from memory.
FLUSH_BYTES = 2**28
WARM_UPS, REPEATS = 3, 20
Device = Literal["auto", "none", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult(Payload):
    """A rung on a chip. `traffic_s`: what its kernels ask of memory over the chip's bandwidth, as if no cache answered.

    Where it ran: `seconds`, the median of repetitions with the L2 cache emptied before each, their 10th and 90th percentiles,
    and the relative error of its result.
    """

    name: str
    lesson: str
    num_launches: int
    loaded_bytes: float
    stored_bytes: float
    intensity: float
    traffic_s: float
    seconds: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    relative_error: float | None = None
    compiled: Annotated[tuple[KernelResources, ...], OmitEmpty()] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderResult(Payload):
    """A ladder on a chip: `roofline_s` is the larger of FLOPs over the peak and of `least_bytes`, which each way of computing
    it moves, over the bandwidth; `bound` says which."""

    name: str
    title: str
    sizes: str
    flops: float
    least_bytes: float
    roofline_s: float
    bound: Literal["compute", "memory"]
    rungs: tuple[RungResult, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLadders(Payload):
    """Ladders of kernels on a chip; `machine` is where they ran, if they did."""

    SCHEMA: ClassVar[str] = "shardwise.kernels/1"
    chip: str
    ladders: tuple[LadderResult, ...]
    machine: str | None = None

    @property
    @printed
    def num_measured(self) -> int:
        """Rungs that ran."""
        return sum(rung.seconds is not None for ladder in self.ladders for rung in ladder.rungs)


def run_workbench(
    names: Sequence[str],
    chip: str | Chip,
    *,
    device: Device = "auto",
    compile_for: Sequence[int] = (),
    progress: Progress = ignore_progress,
) -> KernelLadders:
    """Return the ladders of these names, or all of them, on a chip; with their times on a GPU, and what compiled kernels take.

    Raises `InputError` for an unknown ladder, device or compute capability, and where a GPU or Triton is asked for and missing.

    >>> from shardwise.measure.kernel_ladders.workbench import run_workbench
    >>> (ladder,) = run_workbench(["softmax"], "h100", device="none").ladders
    >>> ladder.bound, [round(rung.traffic_s / ladder.roofline_s, 1) for rung in ladder.rungs]
    ('memory', [4.0, 2.0, 1.5, 1.0])
    """
    raise_problems([f"kernels: {describe_unknown(name, LADDERS)}" for name in names if name not in LADDERS])
    hardware = load_chip(chip) if isinstance(chip, str) else chip
    _require_libraries(device, compile_for)
    ladders = [LADDERS[name]() for name in names or LADDERS]
    on_gpu = device != "none" and _has_gpu()
    compiled = compile_ladders([ladder.name for ladder in ladders], compile_for) if compile_for else {}
    results = []
    for number, ladder in enumerate(ladders, start=1):
        result = place_on_chip(ladder, hardware)
        if compiled:
            pairs = zip(result.rungs, compiled[ladder.name], strict=True)
            result = replace(result, rungs=tuple(replace(rung, compiled=kernels) for rung, kernels in pairs))
        results.append(_with_times(result, ladder) if on_gpu else result)
        progress("kernels", number, len(ladders))
    return KernelLadders(chip=hardware.name, ladders=tuple(results), machine=_describe_gpu() if on_gpu else None)


def _require_libraries(device: Device, compile_for: Sequence[int]) -> None:
    """Raise `InputError` for what is asked for and cannot be had."""
    unknown = [capability for capability in compile_for if capability not in COMPUTE_CAPABILITIES]
    if unknown:
        raise InputError(
            f"kernels: compute capability: {describe_unknown(unknown[0], COMPUTE_CAPABILITIES)} (A100, H100 and H200, B200)"
        )
    missing = [package for package in ("torch", "triton") if importlib.util.find_spec(package) is None]
    if compile_for and missing:
        raise InputError(
            f"kernels: compiling needs {' and '.join(missing)}, found neither here; pip install 'shardwise[train,kernels]'"
            if len(missing) > 1
            else f"kernels: compiling needs {missing[0]}, which is not installed; pip install 'shardwise[train,kernels]'"
        )
    if device == "cuda" and not _has_gpu():
        raise InputError(
            "kernels: --device cuda, but PyTorch finds no GPU; --device none says what is known without one"
        )


def _has_gpu() -> bool:
    """Return whether kernels can run: PyTorch finds a GPU, and Triton is installed."""
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _describe_gpu() -> str:
    import torch
    import triton

    return f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {triton.__version__}"


def place_on_chip(ladder: Ladder, chip: Chip) -> LadderResult:
    """Return a ladder with its times by a chip's peak and bandwidth."""
    memory_s = ladder.least_bytes / chip.memory_bytes_per_s
    compute_s = ladder.flops / chip.peak(PRODUCT_FORMAT) if ladder.product_flops else 0.0
    rungs = tuple(
        RungResult(
            name=rung.name, lesson=rung.lesson, num_launches=rung.num_launches, loaded_bytes=rung.loaded_bytes,
            stored_bytes=rung.stored_bytes, intensity=ladder.flops / (rung.loaded_bytes + rung.stored_bytes),
            traffic_s=(rung.loaded_bytes + rung.stored_bytes) / chip.memory_bytes_per_s,
        )
        for rung in ladder.rungs
    )  # fmt: skip
    return LadderResult(
        name=ladder.name, title=ladder.title, sizes=ladder.sizes, flops=ladder.flops, least_bytes=ladder.least_bytes,
        roofline_s=max(memory_s, compute_s), bound="compute" if compute_s > memory_s else "memory", rungs=rungs,
    )  # fmt: skip


def _with_times(result: LadderResult, ladder: Ladder) -> LadderResult:
    """Return a ladder with the time and the error of each rung on the GPU."""
    operands = ladder.make_operands("cuda")
    expected = _tensors(ladder.reference(*operands))
    rungs = []
    for placed, rung in zip(result.rungs, ladder.rungs, strict=True):
        error = relative_error(_tensors(rung.run(*operands)), expected)
        times_s = sorted(_time_cold(partial(rung.run, *operands)))
        low, high = times_s[len(times_s) // 10], times_s[-1 - len(times_s) // 10]
        seconds = statistics.median(times_s)
        rungs.append(replace(placed, seconds=seconds, low_s=low, high_s=high, relative_error=error))
    return replace(result, rungs=tuple(rungs))


def _tensors(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def relative_error(computed: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative error in the norm over some results."""
    return max(
        float((ours.double() - reference).norm() / reference.norm())
        for ours, reference in zip(computed, expected, strict=True)
    )


def _time_cold(run: Callable[[], object]) -> list[float]:
    """Return the seconds of repetitions on the GPU's clock, the L2 cache emptied before each."""
    import torch

    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times_s = []
    for repetition in range(WARM_UPS + REPEATS):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        first.record()
        run()
        last.record()
        last.synchronize()
        if repetition >= WARM_UPS:
            times_s.append(float(first.elapsed_time(last)) / 1e3)
    return times_s
