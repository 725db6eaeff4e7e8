"""A pipeline's measured step beside the one that is played from its own passes, on two processes with a core each.

    python benchmarks/pipelines.py [--steps 5] [--micro-batches 8] [SCHEDULE ...]

Each schedule trains a model of even stages for some steps. Of each pass the seconds of its computation are taken, without what it
waits for from the other stage; by kind and stage their medians are the durations from which the same action list is played
(`pipeline.timeline`). The time from the first pass to the last is compared: the median of the steps over the played
makespan, so that
both come from one run. Prints also whether the passes ran in the list's order, and the bubble of either.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.pipeline.actions import BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, FULL_BACKWARD, Action
from shardwise.pipeline.registry import build_actions
from shardwise.pipeline.timeline import Durations, play_actions
from shardwise.present.rendering.plain_text import render_block
from shardwise.present.rendering.report import Table
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.spawn import run_in_processes
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import get_precision

MODEL = Architecture(
    name="even stages", num_layers=8, d_model=512, d_ff=1408, num_heads=8, num_kv_heads=8, head_dim=64, vocab_size=256
)
SEQ_LEN, STAGES, WARM_UP = 512, 2, 2
SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb_h1": 1}


class PipelineRequest(NamedTuple):
    """A schedule with v virtual stages of a rank."""

    schedule: str
    v: int
    num_micro_batches: int
    steps: int


class Timed(NamedTuple):
    """A pass on a rank: when its computation began and ended."""

    action: Action
    begin: float
    end: float


def run(rank: int, size: int, device: torch.device, request: PipelineRequest) -> Iterator[list[list[list[Timed]]]]:
    """The passes of each step, by rank."""
    torch.set_num_threads(1)
    layout = Layout(pp=STAGES, schedule=request.schedule, num_virtual_stages=request.v)
    instance = RankProgram(architecture=MODEL, layout=layout, precision=get_precision("fp32"), seq_len=SEQ_LEN)
    engine = TrainingEngine(instance, TrainingRecipe(steps=1), World(instance.mesh))
    engine.initialize(0)
    ids = torch.randint(MODEL.vocab_size, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    batches = [MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * request.num_micro_batches
    passes_by_step: list[list[Timed]] = []
    for _ in range(WARM_UP + request.steps):
        passes: list[Timed] = []
        engine.observer.pass_span = lambda action, passes=passes: timed(action, passes)  # type: ignore[misc]
        dist.barrier()
        engine.step(batches, request.num_micro_batches * SEQ_LEN, request.num_micro_batches, 0)
        passes_by_step.append(passes)
    ranks: list[Any] = [None] * size
    dist.all_gather_object(ranks, passes_by_step[WARM_UP:])
    yield [[ranks[rank][step] for rank in range(size)] for step in range(request.steps)]


@contextmanager
def timed(action: Action, passes: list[Timed]) -> Iterator[None]:
    """Note when a pass runs; the clock is that of the machine, the same for all of its processes."""
    begin = time.monotonic()
    yield
    passes.append(Timed(action, begin, time.monotonic()))


def durations(steps: list[list[list[Timed]]], num_stages: int) -> Durations:
    """Medians by kind and stage."""
    seconds: dict[tuple[str, int], list[float]] = {}
    for step in steps:
        for timed_pass in (timed_pass for rank in step for timed_pass in rank):
            seconds.setdefault((timed_pass.action.kind, timed_pass.action.stage), []).append(
                timed_pass.end - timed_pass.begin
            )
    of = {key: statistics.median(values) for key, values in seconds.items()}

    def kind(name: str) -> tuple[float, ...]:
        return tuple(of.get((name, stage), 0.0) for stage in range(num_stages))

    whole = kind(FULL_BACKWARD)
    return Durations(
        forward=kind(FORWARD),
        input=kind(BACKWARD_INPUT),
        weight=kind(BACKWARD_WEIGHT),
        backward=whole if any(whole) else None,
    )


def compare_row(request: PipelineRequest) -> tuple[str, ...]:
    """A row of the table."""
    (steps,) = run_in_processes(run, request, "cpu", STAGES, 1)
    actions = build_actions(request.schedule, STAGES, request.num_micro_batches, request.v)
    times = durations(steps, actions.num_stages)
    played = play_actions(actions, times)
    measured = statistics.median(
        max(rank[-1].end for rank in step) - min(rank[0].begin for rank in step) for step in steps
    )
    orders = [[action for slot in slots for action in slot] for slots in actions.order]
    in_order = all(
        [timed_pass.action for timed_pass in rank] == order
        for step in steps
        for rank, order in zip(step, orders, strict=True)
    )
    busy = (
        sum(timed_pass.end - timed_pass.begin for step in steps for rank in step for timed_pass in rank)
        / len(steps)
        / STAGES
    )
    return (
        request.schedule, str(request.num_micro_batches), f"{measured:.3f}", f"{played.makespan:.3f}",
        f"{measured / played.makespan:.3f}", f"{measured / busy - 1:.1%}", f"{played.bubble:.1%}", str(in_order).lower(),
    )  # fmt: skip


def main() -> None:
    """Print a row for each schedule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", help=f"of {', '.join(SCHEDULES)} (default: all)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()
    names = arguments.schedules or list(SCHEDULES)
    if unknown := set(names) - set(SCHEDULES):
        parser.error(f"unknown {', '.join(sorted(unknown))}; known are {', '.join(SCHEDULES)}")
    requests = [PipelineRequest(name, SCHEDULES[name], arguments.micro_batches, arguments.steps) for name in names]
    header = ("schedule", "micro-batches", "measured s", "played s", "ratio", "bubble", "played", "in order")
    print(render_block(Table(rows=(header, *map(compare_row, requests)), right=range(1, 7))))


if __name__ == "__main__":
    main()
