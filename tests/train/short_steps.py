"""A training engine of one rank and its steps, for tests of casts: three micro-batches of two short sequences a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.world import World
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.training_engine import TrainingEngine
from shardwise.step.rank_program import RankProgram
from shardwise.values import IssuePolicy, get_precision

SEQS, POSITIONS, MICRO_BATCHES = 2, 16, 3


def build_engine(precision: str, policy: IssuePolicy, architecture: Architecture, **layout: Any) -> TrainingEngine:
    instance = RankProgram(
        architecture=architecture, layout=Layout(micro_batch_seqs=SEQS, **layout), precision=get_precision(precision),
        seq_len=POSITIONS, policy=policy,
    )  # fmt: skip
    engine = TrainingEngine(instance, TrainingRecipe(steps=4, learning_rate=3e-3), World(instance.mesh))
    engine.initialize(0)
    return engine


def micro_batches(seed: int = 0) -> Iterator[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(MICRO_BATCHES):
        ids = torch.randint(96, (SEQS, POSITIONS + 1), generator=generator)
        yield MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def run_step(engine: TrainingEngine, step: int = 0) -> float:
    return float(engine.step(micro_batches(step), MICRO_BATCHES * SEQS * POSITIONS, MICRO_BATCHES, step).loss)
