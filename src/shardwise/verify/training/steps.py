"""The steps of a small run by the engine: what each gives, and the collectives of one more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.sharding.collective import Issued
from shardwise.train.capture import Capture
from shardwise.train.engine import Engine, MicroBatch, StepResult
from shardwise.train.parallel.flat import Interval
from shardwise.train.transport.rank_threads import run_rank_threads
from shardwise.train.world import World
from shardwise.verify.training.case import Case, Ids

Values = NDArray[np.float64]
Pieces = list[tuple[Interval, Tensor]]  # this rank's parts of all parameters, and their values
GRADIENTS, WEIGHTS = "gradient_shard", "state"  # a group's tensors


@dataclass(slots=True)
class RankSteps:
    """What one rank has: by step the loss, the norm of all gradients before they are clipped, and its pieces of each gradient;
    its pieces of the weights after the last step; the collectives of one step more, in order."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Pieces] = field(default_factory=list)
    weights: Pieces = field(default_factory=list)
    issued: list[Issued] = field(default_factory=list)


@dataclass(slots=True)
class Found:
    """By step the loss, the norm of all gradients before they are clipped, and each gradient, flat and whole; the weights after
    the last step. `issued` by rank: the collectives of one step more, in order."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Values]] = field(default_factory=list)
    weights: dict[str, Values] = field(default_factory=dict)
    issued: list[list[Issued]] = field(default_factory=list)


def run_case(case: Case) -> Found:
    """Run all steps, with the ranks of the case's layout as threads of this process.

    Raises the error of the first rank that fails, and `DeadlockError` where ranks wait for each other.
    """
    size = case.layout.num_devices
    ranks = run_rank_threads(_run_rank, size, case) if size > 1 else [_run_rank(case)]
    first = ranks[0]
    gradients = [_whole([rank.gradients[step] for rank in ranks]) for step in range(case.recipe.steps)]
    weights = _whole([rank.weights for rank in ranks])
    return Found(first.losses, first.norms, gradients, weights, [rank.issued for rank in ranks])


def _run_rank(case: Case) -> RankSteps:
    """All steps on this rank."""
    instance = case.instance
    engine = Engine(instance, case.recipe, World(instance.mesh))
    engine.initialise(case.recipe.seed)
    steps = RankSteps()
    engine.gradients_ended = lambda: steps.gradients.append(_pieces(engine, GRADIENTS))
    for step in range(case.recipe.steps):
        result = _step(engine, case, step)
        steps.losses.append(float(result.loss))
        steps.norms.append(float(result.norm))
    steps.weights = _pieces(engine, WEIGHTS)
    engine.gradients_ended = lambda: None
    with Capture(engine.world) as capture:
        _step(engine, case, case.recipe.steps)
    steps.issued = capture.sequence
    return steps


def _step(engine: Engine, case: Case, step: int) -> StepResult:
    replica = engine.world.position(engine.instance.batch_axes)
    own = engine.places_read(case.seq_len)
    batches = [micro_batch(*arrays).at(own) for arrays in case.micro_batches(step, replica)]
    return engine.step(batches, case.num_targets, case.num_micro_batches, step)


def micro_batch(ids: Ids, targets: Ids, documents: Ids | None) -> MicroBatch:
    """Arrays of a case as the engine takes them."""
    numbers = None if documents is None else torch.from_numpy(documents.copy())
    return MicroBatch(torch.from_numpy(ids.copy()), torch.from_numpy(targets.copy()), numbers)


def _pieces(engine: Engine, tensor: str) -> Pieces:
    """Return this rank's part of every parameter's gradient (`GRADIENTS`) or weight (`WEIGHTS`)."""
    return [
        (interval, getattr(group, tensor)[interval.start : interval.start + interval.size].clone())
        for group in engine.groups
        if group.group.trained or tensor == WEIGHTS
        for interval in group.intervals()
    ]


def _whole(ranks: Sequence[Pieces]) -> dict[str, Values]:
    """Return every parameter put together from the pieces of all ranks, flat, in float64; nan where no rank has it."""
    parameters: dict[str, Tensor] = {}
    for interval, values in (piece for pieces in ranks for piece in pieces):
        whole = parameters.setdefault(interval.name, torch.full(interval.whole, float("nan"), dtype=torch.float64))
        boxes = list(interval.boxes())
        for box, part in zip(boxes, torch.split(values, [box.volume for box in boxes]), strict=True):
            whole[box.slices] = part.view(box.lengths).to(torch.float64)
    return {name: whole.flatten().numpy() for name, whole in parameters.items()}
