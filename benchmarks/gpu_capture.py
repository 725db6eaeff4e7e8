"""What the engine runs against what was planned: kernels by name, collectives by kind and bytes, and replays of a CUDA graph.

Used by `gpu_check.py`, part `captured`. Ranks are the machine's GPUs, or two processes of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from shardwise.hardware import load_cluster
from shardwise.layout import Layout
from shardwise.measure.reconcile.aligned_traces import align_clocks
from shardwise.measure.reconcile.step_differences import COPIES_AROUND_COLLECTIVES, match_operations
from shardwise.model import Architecture, Job
from shardwise.price import Pricing, Problem
from shardwise.price.simulation.simulated_step import simulate_step
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.spawn import run_in_processes
from shardwise.run.trainer.engine_prediction import comparable_counts, issue_policy
from shardwise.run.trainer.profiler import profiled_step
from shardwise.run.trainer.step_graph import GraphedPasses
from shardwise.run.trainer.step_inspector import CollectiveCapture
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.issued_collectives import count_collectives
from shardwise.step.rank_program import RankProgram
from shardwise.values import get_precision

MICRO_BATCHES, GRAPH_STEPS = 2, 6
RECIPE = TrainingRecipe(steps=10**6, schedule="constant", learning_rate=1e-4)


@dataclass(frozen=True, slots=True)
class CapturedCase:
    """A small model, its layout over the ranks, and the sizes of its micro-batches."""

    architecture: Architecture
    layout: Layout
    num_ranks: int
    seq_len: int
    precision: str = "bf16"

    @property
    def num_targets(self) -> int:
        return MICRO_BATCHES * self.layout.micro_batch_seqs * self.seq_len * self.layout.num_replicas

    def program(self) -> RankProgram:
        return RankProgram(
            architecture=self.architecture, layout=self.layout, precision=get_precision(self.precision), seq_len=self.seq_len,
            policy=issue_policy(RECIPE, routed=self.architecture.num_experts > 0),
        )  # fmt: skip

    def engine(self, device: torch.device) -> TrainingEngine:
        program = self.program()
        engine = TrainingEngine(program, RECIPE, World(program.mesh, device))
        engine.initialize(0)
        return engine

    def batches(self, rank: int, device: torch.device) -> list[MicroBatch]:
        generator = torch.Generator().manual_seed(rank)
        shape = (MICRO_BATCHES, self.layout.micro_batch_seqs, self.seq_len + 1)
        ids = torch.randint(self.architecture.vocab_size, shape, generator=generator).to(device)
        return [MicroBatch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in ids]


def capture(case: CapturedCase, device: str) -> dict[str, Any]:
    """Run some steps on all ranks and return the differences of the first one's lists; `equal` says that there are none."""
    (result,) = run_in_processes(_capture_on_rank, case, device, case.num_ranks, 1, "captured")
    differences: dict[str, Any] = result
    return differences


def _capture_on_rank(rank: int, size: int, device: torch.device, case: CapturedCase) -> Iterator[dict[str, Any]]:
    engine, batches = case.engine(device), case.batches(rank, device)

    def step(number: int) -> Any:
        return engine.step(batches, case.num_targets, MICRO_BATCHES, number)

    step(0)  # chooses kernels, and compiles them
    with CollectiveCapture(engine.world) as captured:
        step(1)
    planned = count_collectives(case.program(), MICRO_BATCHES)
    expected, issued = comparable_counts(planned, captured.counts)
    kernels = compare_kernels(engine, case, step)
    collectives = {
        "issued": sum(issued.values()), "missing": [str(collective) for collective in expected - issued],
        "unexpected": [str(collective) for collective in issued - expected],
    }  # fmt: skip
    graph = compare_graph(case, rank, device) if device.type == "cuda" and size == 1 else None
    lists_equal = not any(part[side] for part in (kernels, collectives) for side in ("missing", "unexpected"))
    yield {
        "ranks": size, "layout": str(case.layout), "kernels": kernels, "collectives": collectives, "graph": graph,
        "equal": lists_equal and (graph is None or graph["equal"]),
    }  # fmt: skip


def compare_kernels(engine: TrainingEngine, case: CapturedCase, step: Any) -> dict[str, Any]:
    """Record a step, and match its kernels with those of the planned one by the tensors that they make."""
    _, trace = profiled_step(engine, lambda: step(2) and SimpleNamespace(step=3))  # type: ignore[arg-type, return-value]
    job = Job(global_batch_tokens=case.num_targets, seq_len=case.seq_len, precision=case.precision)
    problem = Problem(case.architecture, load_cluster(f"h100:{case.num_ranks}", stack="shardwise"), job)
    planned = simulate_step(Pricing(problem, case.layout))
    (rank,) = align_clocks([trace]).ranks
    operations = match_operations(rank, planned)
    names = {key: " ".join(filter(None, key)) for key in operations if key.name != COPIES_AROUND_COLLECTIVES}
    return {
        "issued": sum(len(operations[key].spans) for key in names),
        "operations": len(names),
        "missing": [name for key, name in names.items() if not operations[key].spans],
        "unexpected": [name for key, name in names.items() if not operations[key].expected_s],
    }


def compare_graph(case: CapturedCase, rank: int, device: torch.device) -> dict[str, Any]:
    """Train some steps with a captured graph and without; return the losses' largest difference."""
    losses = {}
    for graphed in (None, GraphedPasses()):
        engine, batches = case.engine(device), case.batches(rank, device)
        engine.graphed = graphed
        losses[graphed is not None] = [
            float(engine.step(batches, case.num_targets, MICRO_BATCHES, number).loss) for number in range(GRAPH_STEPS)
        ]
    assert graphed is not None
    difference = max(abs(replayed - issued) for replayed, issued in zip(losses[True], losses[False], strict=True))
    return {
        "captures": graphed.num_captures, "replays": graphed.num_replays, "obstacle": graphed.obstacle,
        "largest_difference": difference, "equal": graphed.obstacle is None and difference <= 1e-6,
    }  # fmt: skip
