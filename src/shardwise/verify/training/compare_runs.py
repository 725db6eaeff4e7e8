"""Run a small case by the engine, and compare a run on several devices with the same steps on one.

`run_case` gives the losses, norms, gradients and weights of all steps, and the collectives of one more; `relative_errors` has the
largest error of each kind, `collective_differences` what ranks issued otherwise than the instruction list has it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.derive.ring_attention_and_matmul import RING_AXES
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.flat_parameters import ParameterShard
from shardwise.run.parallel.world import World
from shardwise.run.trainer.plan_for_engine import comparable_counts
from shardwise.run.trainer.step_inspector import CollectiveCapture
from shardwise.run.trainer.training_engine import StepResult, TrainingEngine
from shardwise.run.transport.rank_threads import run_rank_threads
from shardwise.sharding.collectives import ROWS, CollectiveKind, IssuedCollective
from shardwise.sharding.spec import Axes
from shardwise.verify.training.small_case import Ids, TrainingCase

Values = NDArray[np.float64]
Pieces = list[tuple[ParameterShard, Tensor]]  # this rank's parts of all parameters, and their values
GRADIENTS, WEIGHTS = "gradient_shard", "state"  # a group's tensors


@dataclass(slots=True)
class RankResult:
    """What one rank has: by step the loss, the norm of all gradients before they are clipped, and its pieces of each gradient;
    its pieces of the weights after the last step; the collectives of one step more, in order."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Pieces] = field(default_factory=list)
    weights: Pieces = field(default_factory=list)
    issued: list[IssuedCollective] = field(default_factory=list)


@dataclass(slots=True)
class CaseResult:
    """By step the loss, the norm of all gradients before they are clipped, and each gradient, flat and whole; the weights after
    the last step. `issued` by rank: the collectives of one step more, in order."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Values]] = field(default_factory=list)
    weights: dict[str, Values] = field(default_factory=dict)
    issued: list[list[IssuedCollective]] = field(default_factory=list)


def run_case(case: TrainingCase) -> CaseResult:
    """Run all steps, with the ranks of the case's layout as threads of this process.

    Raises the error of the first rank that fails, and `DeadlockError` where ranks wait for each other.
    """
    size = case.layout.num_devices
    ranks = run_rank_threads(_run_rank, size, case) if size > 1 else [_run_rank(case)]
    first = ranks[0]
    gradients = [_assemble_parameters([rank.gradients[step] for rank in ranks]) for step in range(case.recipe.steps)]
    weights = _assemble_parameters([rank.weights for rank in ranks])
    return CaseResult(first.losses, first.norms, gradients, weights, [rank.issued for rank in ranks])


def _run_rank(case: TrainingCase) -> RankResult:
    """All steps on this rank."""
    instance = case.instance
    engine = TrainingEngine(instance, case.recipe, World(instance.mesh))
    engine.initialize(case.recipe.seed)
    steps = RankResult()
    engine.gradients_ended = lambda: steps.gradients.append(_pieces(engine, GRADIENTS))
    for step in range(case.recipe.steps):
        result = _run_step(engine, case, step)
        steps.losses.append(float(result.loss))
        steps.norms.append(float(result.norm))
    steps.weights = _pieces(engine, WEIGHTS)
    engine.gradients_ended = lambda: None
    with CollectiveCapture(engine.world) as capture:
        _run_step(engine, case, case.recipe.steps)
    steps.issued = capture.sequence
    return steps


def _run_step(engine: TrainingEngine, case: TrainingCase, step: int) -> StepResult:
    replica = engine.world.position(engine.instance.batch_axes)
    own = engine.places_read(case.seq_len)
    batches = [to_micro_batch(*arrays).restrict_to(own) for arrays in case.micro_batches(step, replica)]
    return engine.step(batches, case.num_targets, case.num_micro_batches, step)


def to_micro_batch(ids: Ids, targets: Ids, documents: Ids | None) -> MicroBatch:
    """Arrays of a case as the engine takes them."""
    numbers = None if documents is None else torch.from_numpy(documents.copy())
    return MicroBatch(torch.from_numpy(ids.copy()), torch.from_numpy(targets.copy()), numbers)


def _pieces(engine: TrainingEngine, tensor: str) -> Pieces:
    """Return this rank's part of every parameter's gradient (`GRADIENTS`) or weight (`WEIGHTS`)."""
    return [
        (interval, getattr(group, tensor)[interval.start : interval.start + interval.size].clone())
        for group in engine.groups
        if group.group.trained or tensor == WEIGHTS
        for interval in group.intervals()
    ]


def _assemble_parameters(ranks: Sequence[Pieces]) -> dict[str, Values]:
    """Return every parameter put together from the pieces of all ranks, flat, in float64; nan where no rank has it."""
    parameters: dict[str, Tensor] = {}
    for interval, values in (piece for pieces in ranks for piece in pieces):
        whole = parameters.setdefault(interval.name, torch.full(interval.whole, float("nan"), dtype=torch.float64))
        boxes = list(interval.boxes())
        for box, part in zip(boxes, torch.split(values, [box.volume for box in boxes]), strict=True):
            whole[box.slices] = part.view(box.lengths).to(torch.float64)
    return {name: whole.flatten().numpy() for name, whole in parameters.items()}


# The limits of docs/design.md for float64. Weights are held to that of gradients: an optimizer divides by their size.
ERROR_LIMITS: Mapping[str, float] = {"loss": 1e-12, "norm": 1e-12, "gradients": 1e-10, "weights": 1e-10}
SMALLEST_NUMBER = 1e-300  # so that what is 0 in both has no error
SMALLEST = 1e-6  # of the norm of all gradients: errors of smaller gradients are measured by it
ZERO = 1e-14  # of it: a gradient that is never more is zero but for rounding, whose signs an optimizer takes for steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeErrors:
    """Largest relative errors over all steps, by the names of `ERROR_LIMITS`; the gradient and the weight that are farthest off.

    `without_gradient` are weights without a gradient, whose updates are rounding and are not compared: a bias of keys that no
    rotation follows adds the same to all scores of a query.
    """

    largest: Mapping[str, float]
    gradient: str
    weight: str
    without_gradient: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(self.largest[name] <= limit for name, limit in ERROR_LIMITS.items())


def relative_errors(found: CaseResult, wanted: CaseResult) -> RelativeErrors:
    """Of each step's loss and norm, |found - wanted| / |wanted|; of each gradient and weight ‖found - wanted‖ over ‖wanted‖, or
    over `SMALLEST` of the norm of all gradients where that is more."""
    gradients = dict[str, float]()
    for own, others, norm in zip(found.gradients, wanted.gradients, wanted.norms, strict=True):
        for name, error in _errors_by_name(own, others, SMALLEST * norm):
            gradients[name] = max(gradients.get(name, 0.0), error)
    idle = _weights_without_gradient(wanted)
    compared = {name: values for name, values in wanted.weights.items() if name not in idle}
    weights = dict(_errors_by_name(found.weights, compared, 0.0))
    gradient, weight = (max(one, key=lambda name: one[name]) for one in (gradients, weights))
    largest = {
        "loss": _scalar_error(found.losses, wanted.losses), "norm": _scalar_error(found.norms, wanted.norms),
        "gradients": gradients[gradient], "weights": weights[weight],
    }  # fmt: skip
    return RelativeErrors(largest=largest, gradient=gradient, weight=weight, without_gradient=idle)


def _weights_without_gradient(wanted: CaseResult) -> tuple[str, ...]:
    steps = list(zip(wanted.gradients, wanted.norms, strict=True))
    return tuple(
        name
        for name in sorted(wanted.gradients[0])
        if all(np.linalg.norm(gradients[name]) <= ZERO * norm for gradients, norm in steps)
    )


def _scalar_error(found: Iterable[float], wanted: Iterable[float]) -> float:
    return max(
        _nan_to_infinity(abs(own - other) / max(abs(other), SMALLEST_NUMBER))
        for own, other in zip(found, wanted, strict=True)
    )


def _errors_by_name(
    found: Mapping[str, Values], wanted: Mapping[str, Values], least: float
) -> Iterable[tuple[str, float]]:
    for name, other in wanted.items():
        own = found.get(name)
        yield name, math.inf if own is None or own.shape != other.shape else _relative_error(own, other, least)


def _relative_error(found: Values, wanted: Values, least: float) -> float:
    return _nan_to_infinity(
        float(np.linalg.norm(found - wanted)) / max(float(np.linalg.norm(wanted)), least, SMALLEST_NUMBER)
    )


def _nan_to_infinity(error: float) -> float:
    """NaN is never agreement."""
    return math.inf if math.isnan(error) else error


def collective_differences(case: TrainingCase, issued: Sequence[Sequence[IssuedCollective]]) -> tuple[str, ...]:
    """What ranks issued otherwise than the instruction list has it, in words; rows to experts and back are counted over all."""
    found: list[str] = []
    instances = [case.instance.for_pp_rank(coordinate.get("pp", 0)) for coordinate in case.instance.mesh.coordinates()]
    lists = {one.pp_rank: one.issued(case.num_micro_batches) for one in instances}
    for rank, (instance, sequence) in enumerate(zip(instances, issued, strict=True)):
        wanted, counted = comparable_counts(lists[instance.pp_rank], Counter(sequence))
        found += [
            f"rank {rank}: {wanted[one]} {one.kind} over {', '.join(one.axes)} of {one.num_bytes} bytes in {one.dtype} planned, "
            f"{counted[one]} issued"
            for one in sorted({*wanted, *counted})
            if wanted[one] != counted[one]
        ]
        found += [
            f"rank {rank}: {text}"
            for text in _order_differences(instance.ordered_activation_collectives(case.num_micro_batches), sequence)
        ]
    if case.recipe.capacity_factor is not None:  # fewer rows than chosen experts
        return tuple(found)
    planned = sum((lists[one.pp_rank] for one in instances), Counter[IssuedCollective]())
    return (*found, *_row_differences(planned, [Counter(sequence) for sequence in issued]))


def _order_differences(listed: Iterable[IssuedCollective], sequence: Sequence[IssuedCollective]) -> Iterator[str]:
    """The first collective on activations that does not come where the list has it. Those of weights come between them, and those
    of a ring of attention, of two tensors at once, are counted only."""
    listed = [one for one in listed if one.kind is not CollectiveKind.PERMUTE or one.axes != RING_AXES]
    rows = {(one.kind, one.axes) for one in listed if one.what == ROWS}
    coming = iter(sequence)
    for one in listed:
        bare = one._replace(what="")
        uneven = (one.kind, one.axes) in rows
        if not any((seen[:3] == bare[:3]) if uneven else seen == bare for seen in coming):
            what = f"{one.kind} over {', '.join(one.axes)} of {one.num_bytes} bytes of {one.what}"
            yield f"{what} does not come in the list's order"
            return


def _row_differences(planned: Counter[IssuedCollective], issued: Sequence[Counter[IssuedCollective]]) -> Iterator[str]:
    """A router sends each token to as many experts as it chooses: all ranks together send as many bytes as planned."""
    kinds = {(one.kind, one.axes) for one in planned if one.what == ROWS and one.kind is CollectiveKind.ALL_TO_ALL}
    for kind, axes in sorted(kinds):
        wanted = _total_bytes(planned, kind, axes)
        sent = sum(_total_bytes(seen, kind, axes) for seen in issued)
        if sent != wanted:
            yield f"all ranks: {kind} over {', '.join(axes)} of {wanted} bytes planned, {sent} issued"


def _total_bytes(counts: Counter[IssuedCollective], kind: CollectiveKind, axes: Axes) -> int:
    return sum(one.num_bytes * count for one, count in counts.items() if (one.kind, one.axes) == (kind, axes))
