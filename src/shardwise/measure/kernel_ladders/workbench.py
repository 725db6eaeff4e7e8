"""The workbench of kernels: each rung's bytes and roofline on a chip, what its compiled kernels take, its time on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from shardwise.hardware import Chip, load_chip
from shardwise.measure.kernel_ladders.compile_ladders import compile_ladders
from shardwise.measure.kernel_ladders.ladder import Ladder, Rung
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

if TYPE_CHECKING:
    from shardwise.measure.microbenchmarks.device_timers import WorkTimer

PRODUCT_FORMAT = "bf16"  # of operands on a GPU, whose peak the roofline takes
COMPUTE_CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200
Device = Literal["auto", "none", "cuda"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RungResult(Payload):
    """A rung on a chip. `traffic_s`: what its kernels ask of memory over the chip's bandwidth, as if no cache answered.
    `roofline_s`: the larger of its FLOPs over the peak and of the bytes that each way of computing its result moves over the
    bandwidth. `sector_use`: the share of the bytes in the sectors of its loads that lanes asked for. `executed_flops`: what its
    lanes go through, masked off or not, where that is more than the ladder's.

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
    roofline_s: float
    sector_use: Annotated[float | None, OmitEmpty()] = None
    executed_flops: Annotated[float | None, OmitEmpty()] = None
    seconds: float | None = None
    low_s: float | None = None
    high_s: float | None = None
    relative_error: float | None = None
    compiled: Annotated[tuple[KernelResources, ...], OmitEmpty()] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderResult(Payload):
    """A ladder on a chip: `roofline_s` is the larger of FLOPs over the peak and of `least_bytes`, which each way of computing
    it moves, over the bandwidth; `bound` says which.

    `knee_rows`, where rungs compute more and more rows: the rows at which both are equal; `measured_knee_rows`: where the time
    of the fewest rows meets a line from zero to that of the most. `benchmark`: the line of `calibrate --bench` that the fastest
    rung measures.
    """

    name: str
    title: str
    sizes: str
    flops: float
    least_bytes: float
    roofline_s: float
    bound: Literal["compute", "memory"]
    rungs: tuple[RungResult, ...]
    knee_rows: Annotated[float | None, OmitEmpty()] = None
    measured_knee_rows: Annotated[float | None, OmitEmpty()] = None
    benchmark: Annotated[Mapping[str, Any] | None, OmitEmpty()] = None


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
        results.append(_time_on_gpu(result, ladder) if on_gpu else result)
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


def _time_on_gpu(result: LadderResult, ladder: Ladder) -> LadderResult:
    from shardwise.measure.microbenchmarks.device_timers import EventTimer  # PyTorch is optional for the closed forms

    return time_ladder(result, ladder, "cuda", EventTimer())


def place_on_chip(ladder: Ladder, chip: Chip) -> LadderResult:
    """Return a ladder with its times by a chip's peak and bandwidth."""
    peak, bytes_per_s = chip.peak(PRODUCT_FORMAT), chip.memory_bytes_per_s

    def bounds_s(flops: float, num_bytes: float) -> tuple[float, float]:
        return flops / peak if ladder.product_flops else 0.0, num_bytes / bytes_per_s

    def place(rung: Rung) -> RungResult:
        flops, least_bytes = ladder.work(rung)
        moved = rung.loaded_bytes + rung.stored_bytes
        return RungResult(
            name=rung.name, lesson=rung.lesson, num_launches=rung.num_launches, loaded_bytes=rung.loaded_bytes,
            stored_bytes=rung.stored_bytes, intensity=flops / moved, traffic_s=moved / bytes_per_s,
            roofline_s=max(bounds_s(flops, least_bytes)), sector_use=rung.sector_use, executed_flops=rung.executed_flops,
        )  # fmt: skip

    compute_s, memory_s = bounds_s(ladder.flops, ladder.least_bytes)
    return LadderResult(
        name=ladder.name, title=ladder.title, sizes=ladder.sizes, flops=ladder.flops, least_bytes=ladder.least_bytes,
        roofline_s=max(memory_s, compute_s), bound="compute" if compute_s > memory_s else "memory",
        rungs=tuple(map(place, ladder.rungs)), knee_rows=ladder.knee_rows(peak, bytes_per_s), benchmark=ladder.benchmark,
    )  # fmt: skip


def time_ladder(result: LadderResult, ladder: Ladder, device: str, timer: WorkTimer) -> LadderResult:
    """Return a ladder with the time and the error of each rung on a device."""
    from shardwise.measure.microbenchmarks.timing import time_cold_kernel  # as above

    operands = ladder.make_operands(device)
    expected = _tensors(ladder.reference(*operands))
    rungs = []
    for placed, rung in zip(result.rungs, ladder.rungs, strict=True):
        error = relative_error(_tensors(rung.run(*operands)), [tensor[: rung.num_rows] for tensor in expected])
        timing = time_cold_kernel(partial(rung.run, *operands), timer)
        rungs.append(
            replace(placed, seconds=timing.seconds, low_s=timing.low, high_s=timing.high, relative_error=error)
        )
    return replace(result, rungs=tuple(rungs), measured_knee_rows=_measured_knee(ladder, rungs))


def _measured_knee(ladder: Ladder, rungs: Sequence[RungResult]) -> float | None:
    """Return the rows at which the time of the fewest rows meets a line from zero to that of the most."""
    fewest_s, most_s = rungs[0].seconds, rungs[-1].seconds
    if ladder.row_cost is None or fewest_s is None or most_s is None:
        return None
    return ladder.row_cost.num_rows * fewest_s / most_s


def _tensors(results: Any) -> tuple[Any, ...]:
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def relative_error(computed: Sequence[Any], expected: Sequence[Any]) -> float:
    """Return the largest relative error in the norm over some results."""
    return max(
        float((ours.double() - reference).norm() / reference.norm())
        for ours, reference in zip(computed, expected, strict=True)
    )
