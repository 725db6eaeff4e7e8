"""A short look at the machine, before and after a run: did it change meanwhile?

It is no calibration: a product and a copy on each device at once, and a sum over all of them, some of a plan's sizes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from shardwise.issuing import BUCKET_BYTES
from shardwise.planning.plan import Plan
from shardwise.precision import precision_named
from shardwise.train.formats import formats_of
from shardwise.train.parts import World
from shardwise.train.together import everyones
from shardwise.train.waits import waits_for

LEAST, MOST = 256, 4096  # rows and columns of the product: long enough to time, and short
COPIED_BYTES = 2**26  # larger than the caches of a host
BUDGET_S, REPEATS, WARM_UPS = 0.5, 9, 2  # seconds of a piece of work, and how often it runs at least
SUMMED = 21  # how often the sum runs: as often on every rank


def probe(plan: Plan, world: World) -> dict[str, float]:
    """Seconds of short work by name, each the median of its repetitions, on the slowest rank."""
    found = _seconds(plan, world)
    if world.device.type == "cuda":
        torch.cuda.empty_cache()  # what the allocator keeps is to be the run's
    ranks = everyones(world, [round(seconds * 1e9) for seconds in found.values()], "the times of the probe")
    return {name: max(column) / 1e9 for name, column in zip(found, zip(*ranks, strict=True), strict=True)}


def _seconds(plan: Plan, world: World) -> dict[str, float]:
    """This rank's."""
    found = {name: _timed(run, world.device) for name, run in _work(plan, world.device)}
    if world.size > 1:
        summed = torch.zeros(int(BUCKET_BYTES) // 4, device=world.device)
        group = world.transport.world
        with waits_for("the AllReduces of the probe"):
            group.all_reduce(summed).wait()  # so that they begin together
            found["collectives"] = _timed(lambda: group.all_reduce(summed).wait(), world.device, exactly=SUMMED)
    return found


def _work(plan: Plan, device: torch.device) -> Iterator[tuple[str, Callable[[], object]]]:
    """A product [m, k] · [k, n] as of a block's first projection, in the plan's format, and a copy."""
    dtype = formats_of(precision_named(plan.job.precision)).weights
    rows = plan.layout.micro_batch_seqs * plan.job.seq_len
    m, k, n = (min(max(size, LEAST), MOST) for size in (rows, plan.model.d_model, plan.model.d_ff))
    left, right = torch.ones(m, k, device=device, dtype=dtype), torch.ones(k, n, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    yield "products", lambda: torch.mm(left, right, out=out)
    source = torch.zeros(COPIED_BYTES // 4, device=device)
    target = torch.zeros_like(source)
    yield "memory", lambda: target.copy_(source)


def _timed(run: Callable[[], object], device: torch.device, *, exactly: int | None = None) -> float:
    for _ in range(WARM_UPS):
        _once(run, device)
    found: list[float] = []
    while len(found) < (exactly or REPEATS) or (exactly is None and sum(found) < BUDGET_S):
        found.append(_once(run, device))
    return median(found)


def _once(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
