"""How fast the axes run beside what they replace, in turn in the same processes.

    python benchmarks/axes.py [--pairs 9] [--steps 2]

`tp 2`: tensor parallelism on two processes against the decoder with autograd (`tests/plain`) whose blocks are a rank's own half,
with Megatron's f and g placed by hand (an AllReduce forward behind each row-cut product, and backward in front of each column-cut
one). `ring` and `all-gather`: context parallelism on two and four processes against one process on the same tokens. `experts`: a
step of eight experts, two for each token, against a dense step of the same active FLOPs, in one process. A figure is the median
over pairs of the other's time over ours, and the 80% range of the pairs: above 1 ours is faster. `predicted`: the same ratio by
the planner, for this machine as `bench machine` measures it before (a step by hand is a step of the same plan).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from train import MODEL, RECIPE, Step, loop_step, paired, report

from shardwise.hardware.published_constants import with_calibration
from shardwise.layout.layout import Layout
from shardwise.measure.microbenchmarks.machine_benchmark import measure_machine
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.spawn import run_in_processes
from shardwise.run.trainer.engine_prediction import issue_policy
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.search.plan import plan_layout
from shardwise.sharding.spec import Mesh
from shardwise.step.rank_program import RankProgram
from shardwise.values.precision import get_precision

sys.path.append(str(__import__("pathlib").Path(__file__).parents[1] / "tests"))
from plain import build, initialise
from plain.block import Block

DENSE = replace(MODEL, num_kv_heads=2, num_layers=4, vocab_size=256)  # a small head: by hand it is whole on each rank
EXPERTS = replace(DENSE, name="experts", d_ff=512, num_experts=8, experts_per_token=2)
AS_ACTIVE = replace(DENSE, d_ff=EXPERTS.d_ff * EXPERTS.experts_per_token)
SEQ_LEN, SEQS = 1024, 1
TENSOR_BY_HAND = "tp {}, f and g by hand"
RING_GATHERED = "cp {} zigzag ring, gathered keys and values"
RING_ALONE = "cp {} zigzag ring, one process"
EXPERTS_DENSE = "experts, a dense block of the same active FLOPs"


class Planned(NamedTuple):
    """A step that the planner can price."""

    model: Architecture
    layout: Layout


class MeasurementRequest(NamedTuple):
    """What one world measures."""

    kind: str
    pairs: int
    steps: int


class SingleRankWorld(World):
    """A process of several as a world of its own."""

    def __init__(self) -> None:
        self.mesh, self.device, self.meeting = Mesh(()), torch.device("cpu"), None
        self.rank, self.size, self.coordinate, self._groups = 0, 1, {}, {}


def batch() -> MicroBatch:
    ids = torch.randint(DENSE.vocab_size, (SEQS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    return MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def engine_step(architecture: Architecture, layout: Layout, world: World | None = None) -> Step:
    """The engine under a layout; every rank has the same sequences."""
    instance = RankProgram(
        architecture=architecture, layout=layout, precision=get_precision("fp32"),
        policy=issue_policy(RECIPE, routed=architecture.num_experts > 0), seq_len=SEQ_LEN,
    )  # fmt: skip
    if world is not None:
        world.mesh, world.coordinate = instance.mesh, dict.fromkeys(instance.mesh.names, 0)
    engine = TrainingEngine(instance, RECIPE, world or World(instance.mesh))
    engine.initialize(0)
    batches = [batch()]
    return lambda: float(engine.step(batches, SEQS * SEQ_LEN, 1, 0).loss)


class Column(torch.autograd.Function):
    """f: nothing forward, an AllReduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        dist.all_reduce(dy)
        return dy


class Row(torch.autograd.Function):
    """g: an AllReduce forward, nothing backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy


def by_hand(ranks: int) -> Step:
    """A rank's half of the heads and of the hidden columns, with f and g around them."""
    local = replace(
        DENSE, num_heads=DENSE.num_heads // ranks, num_kv_heads=DENSE.num_kv_heads // ranks, d_ff=DENSE.d_ff // ranks
    )
    model = build(local, dtype=torch.float32)
    initialise(model, 0)
    for layer in model.layers.values():
        before, after = layer.before, layer.after
        layer.before = lambda x, name, before=before: Column.apply(before(x, name))
        layer.after = lambda x, name, after=after: after(Row.apply(x.clone()), name)
    assert all(isinstance(layer, Block) for layer in model.layers.values())
    batches = [batch()]
    return loop_step(
        model,
        lambda micro_batch, number: model(micro_batch.ids_BT, micro_batch.targets_BT, SEQS * SEQ_LEN).loss,
        batches=batches,
    )


def tensor_parallel(request: MeasurementRequest, size: int) -> Iterator[tuple[str, list[float]]]:
    ours = engine_step(DENSE, Layout(tp=size, micro_batch_seqs=SEQS))
    yield TENSOR_BY_HAND.format(size), paired(ours, by_hand(size), request.pairs, request.steps)


def context_parallel(request: MeasurementRequest, size: int) -> Iterator[tuple[str, list[float]]]:
    # the others wait meanwhile, at the next barrier
    single_rank: Step = (
        engine_step(DENSE, Layout(micro_batch_seqs=SEQS), SingleRankWorld()) if dist.get_rank() == 0 else lambda: 0.0
    )
    gathered, ring = (engine_step(DENSE, _cut(size, variant)) for variant in ("all_gather", "zigzag"))
    yield RING_GATHERED.format(size), paired(ring, gathered, request.pairs, request.steps)
    yield RING_ALONE.format(size), paired(ring, single_rank, request.pairs, request.steps)


def experts(request: MeasurementRequest, size: int) -> Iterator[tuple[str, list[float]]]:
    ours, dense = (
        engine_step(model, Layout(micro_batch_seqs=SEQS), SingleRankWorld()) for model in (EXPERTS, AS_ACTIVE)
    )
    yield EXPERTS_DENSE, paired(ours, dense, request.pairs, request.steps)


def _cut(size: int, variant: str) -> Layout:
    return Layout(cp=size, cp_variant=variant, micro_batch_seqs=SEQS)


def predicted(kind: str, size: int) -> dict[str, float]:
    """Ratios by the planner, of the other's step over ours."""
    single_rank = Layout(micro_batch_seqs=SEQS)
    if kind == "tp":
        return {TENSOR_BY_HAND.format(size): 1.0}
    if kind == "experts":
        return {EXPERTS_DENSE: _seconds(Planned(AS_ACTIVE, single_rank)) / _seconds(Planned(EXPERTS, single_rank))}
    ring = _seconds(Planned(DENSE, _cut(size, "zigzag")))
    gathered = _seconds(Planned(DENSE, _cut(size, "all_gather")))
    return {
        RING_GATHERED.format(size): gathered / ring,
        RING_ALONE.format(size): _seconds(Planned(DENSE, single_rank)) / ring,
    }


def _seconds(step: Planned) -> float:
    machine = measured_machine(step.layout.num_devices)
    job = Job(global_batch_tokens=SEQS * SEQ_LEN, seq_len=SEQ_LEN, precision="fp32", loss="in_place")
    plan = plan_layout(step.model, with_calibration(machine.cluster, machine.calibration), job, step.layout)
    return plan.estimate.step_time_s


measured_machine = cache(measure_machine)
KINDS = {"tp": tensor_parallel, "cp": context_parallel, "experts": experts}
WORLDS = (("tp", 2), ("cp", 2), ("cp", 4), ("experts", 1))


def work(rank: int, size: int, device: torch.device, request: MeasurementRequest) -> Iterator[tuple[str, list[float]]]:
    torch.set_num_threads(1)
    yield from KINDS[request.kind](request, size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for kind, size in WORLDS:
        figures = 2 if kind == "cp" else 1
        request, expected = MeasurementRequest(kind, arguments.pairs, arguments.steps), predicted(kind, size)
        for name, ratios in run_in_processes(work, request, "cpu", size, figures, "axes"):
            report(f"{name} (predicted {expected[name]:.3f})", ratios, None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
