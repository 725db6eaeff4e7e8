"""The steps of a small run by the engine: what each gives, and the collectives of one more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from shardwise.sharding.collective import Issued
from shardwise.train.capture import Capture
from shardwise.train.engine import Engine, MicroBatch, StepResult
from shardwise.train.world import World
from shardwise.verify.training.case import Case, Ids

Values = NDArray[np.float64]
GRADIENTS, WEIGHTS = "gradient_shard", "state"  # a group's tensors


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
    """All steps, on this process and all others of the world together; each gives the same."""
    instance = case.instance
    engine = Engine(instance, case.recipe, World(instance.mesh))
    engine.initialise(case.recipe.seed)
    found = Found()
    engine.gradients_ended = lambda: found.gradients.append(gathered(engine, GRADIENTS))
    for step in range(case.recipe.steps):
        result = _step(engine, case, step)
        found.losses.append(float(result.loss))
        found.norms.append(float(result.norm))
    found.weights = gathered(engine, WEIGHTS)
    engine.gradients_ended = lambda: None
    with Capture(engine.world) as capture:
        _step(engine, case, case.recipe.steps)
    found.issued = _of_all_ranks(engine, capture.sequence)
    engine.world.close()
    return found


def _step(engine: Engine, case: Case, step: int) -> StepResult:
    replica = engine.world.position(engine.instance.batch_axes)
    own = engine.places_read(case.seq_len)
    batches = [micro_batch(*arrays).at(own) for arrays in case.micro_batches(step, replica)]
    return engine.step(batches, case.num_targets, case.num_micro_batches, step)


def micro_batch(ids: Ids, targets: Ids, documents: Ids | None) -> MicroBatch:
    """Arrays of a case as the engine takes them."""
    numbers = None if documents is None else torch.from_numpy(documents.copy())
    return MicroBatch(torch.from_numpy(ids.copy()), torch.from_numpy(targets.copy()), numbers)


def gathered(engine: Engine, tensor: str) -> dict[str, Values]:
    """Every parameter's gradient (`GRADIENTS`) or weight (`WEIGHTS`), put together from all processes, flat, in float64; nan
    where no process has it."""
    parts = [
        (one, getattr(group, tensor)[one.start : one.start + one.size].clone())
        for group in engine.groups
        if group.group.trained or tensor == WEIGHTS
        for one in group.intervals()
    ]
    found: dict[str, Tensor] = {}
    for one, values in (part for rank in _of_all_ranks(engine, parts) for part in rank):
        whole = found.setdefault(one.name, torch.full(one.whole, float("nan"), dtype=torch.float64))
        boxes = list(one.boxes())
        for box, piece in zip(boxes, values.split([box.volume for box in boxes]), strict=True):
            whole[box.slices] = piece.view(box.lengths).to(torch.float64)
    return {name: whole.flatten().numpy() for name, whole in found.items()}


def _of_all_ranks(engine: Engine, own: Any) -> list[Any]:
    everyone: list[Any] = [own]
    if engine.world.size > 1:
        everyone *= engine.world.size
        dist.all_gather_object(everyone, own)
    return everyone
