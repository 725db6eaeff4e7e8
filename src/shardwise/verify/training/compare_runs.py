"""Run a small case by the engine, and compare a run on several devices with the same steps on one.

`run_case` returns losses, norms, gradients and weights of all steps, and the collectives of one more; `relative_errors`
has the largest error of each kind, `collective_differences` what ranks issued that differs from the instruction list.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shardwise.derive import RING_AXES
from shardwise.run import TrainingEngine
from shardwise.run.engine.micro_batch import MicroBatch
from shardwise.run.parallel.flat_parameters import FlatParameterGroup, ParameterShard
from shardwise.run.parallel.world import World
from shardwise.run.rank_threads import run_rank_threads
from shardwise.run.trainer.engine_prediction import comparable_counts
from shardwise.run.trainer.step_inspector import CollectiveCapture
from shardwise.run.trainer.training_engine import StepResult, are_finite
from shardwise.sharding import ROWS, Axes, CollectiveKind, IssuedCollective
from shardwise.step import count_collectives
from shardwise.step.issued_collectives import ordered_activation_collectives
from shardwise.verify.training.training_case import Ids, TrainingCase

Values = NDArray[np.float64]
Pieces = list[tuple[ParameterShard, Tensor]]  # this rank's parts of all parameters, and their values
GRADIENTS, WEIGHTS = "gradient_shard", "state"  # attributes of a parameter group


@dataclass(slots=True)
class RankResult:
    """Result of one rank: by step the loss, the norm of all gradients before clipping, and its pieces of each gradient;
    its pieces of the weights after the last step; the collectives of one more step, in order."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Pieces] = field(default_factory=list)
    weights: Pieces = field(default_factory=list)
    issued: list[IssuedCollective] = field(default_factory=list)


@dataclass(slots=True)
class CaseResult:
    """Result of all ranks: by step the loss, the norm of all gradients before clipping, and each whole gradient, flat;
    the weights after the last step. `issued` has by rank the collectives of one more step, in order."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Values]] = field(default_factory=list)
    weights: dict[str, Values] = field(default_factory=dict)
    issued: list[list[IssuedCollective]] = field(default_factory=list)


def run_case(case: TrainingCase, *, captures: bool = False) -> CaseResult:
    """Run all steps, with the ranks of the case's layout as threads of this process. With `captures` one more step follows,
    of which the collectives are returned.

    Raises the error of the first rank that fails, and `DeadlockError` if ranks wait for each other.
    """
    size = case.layout.num_devices
    ranks = run_rank_threads(_run_rank, size, case, captures) if size > 1 else [_run_rank(case, captures)]
    first = ranks[0]
    gradients = [_assemble_parameters([rank.gradients[step] for rank in ranks]) for step in range(case.recipe.steps)]
    weights = _assemble_parameters([rank.weights for rank in ranks])
    return CaseResult(first.losses, first.norms, gradients, weights, [rank.issued for rank in ranks])


def run_reference(case: TrainingCase) -> CaseResult:
    """Run all steps of a case on one device, with the same micro-batches, each of them alone: their gradients are added here,
    so that the engine's accumulation is compared too, and nothing is recomputed."""
    case = case.on_single_device()
    engine, steps = _build_engine(case), RankResult()
    sums: dict[FlatParameterGroup, Tensor] = {}
    engine.gradients_ended = lambda: _accumulate_outside(engine, sums)
    for step in range(case.recipe.steps):
        sums.clear()
        losses, norm = _run_separately(engine, case, step)
        steps.losses.append(math.fsum(losses))
        steps.norms.append(norm)
        steps.gradients.append(
            [(part, values[part.rows]) for group, values in sums.items() for part in group.intervals()]
        )
    weights = _assemble_parameters([_pieces(engine, WEIGHTS)])
    return CaseResult(
        steps.losses, steps.norms, [_assemble_parameters([pieces]) for pieces in steps.gradients], weights
    )


def _accumulate_outside(engine: TrainingEngine, sums: dict[FlatParameterGroup, Tensor]) -> None:
    """Add the gradients of earlier micro-batches, by group, to the engine's."""
    for buffer in engine.reducer.groups:
        group = buffer.flat
        if group in sums:
            group.gradient_shard.add_(sums[group])
        sums[group] = group.gradient_shard.clone()  # the optimizer clips in place


def _run_separately(engine: TrainingEngine, case: TrainingCase, step: int) -> tuple[list[float], float]:
    """Run the micro-batches of a step, each as a step of its own of which only the last one updates the weights; return their
    losses, and the norm at the last."""
    batches = [to_micro_batch(*arrays) for arrays in case.micro_batches(step, 0)]
    # Experts are balanced over all micro-batches: each adds its part of the auxiliary loss, and biases move once.
    engine.balancer.recipe = replace(
        case.recipe, balance_coefficient=case.recipe.balance_coefficient / len(batches),
        balance="none" if case.recipe.balance == "bias" else case.recipe.balance,
    )  # fmt: skip
    rows: dict[int, Tensor] = {}
    losses = []
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        engine.update_check = are_finite if is_last else lambda loss, norm: torch.zeros_like(norm, dtype=torch.bool)
        result = engine.step([batch], case.num_targets, 1, step)
        losses.append(float(result.loss))
        for router, counts in engine.balancer.counts.items():
            rows[router] = rows[router] + counts if router in rows else counts
    if case.recipe.balance == "bias":
        engine.balancer.recipe, engine.balancer.counts = case.recipe, rows
        engine.balancer.end_step(result.loss)
    return losses, float(result.norm)


def _build_engine(case: TrainingCase) -> TrainingEngine:
    program = case.instance
    engine = TrainingEngine(program, case.recipe, World(program.mesh))
    engine.initialize(case.recipe.seed)
    return engine


def _run_rank(case: TrainingCase, captures: bool) -> RankResult:
    engine = _build_engine(case)
    steps = RankResult()
    engine.gradients_ended = lambda: steps.gradients.append(_pieces(engine, GRADIENTS))
    for step in range(case.recipe.steps):
        result = _run_step(engine, case, step)
        steps.losses.append(float(result.loss))
        steps.norms.append(float(result.norm))
    steps.weights = _pieces(engine, WEIGHTS)
    if not captures:
        return steps
    engine.gradients_ended = lambda: None
    with CollectiveCapture(engine.world) as capture:
        _run_step(engine, case, case.recipe.steps)
    steps.issued = capture.sequence
    return steps


def _run_step(engine: TrainingEngine, case: TrainingCase, step: int) -> StepResult:
    replica = engine.world.position(engine.instance.batch_axes)
    positions = engine.places_read(case.seq_len)
    batches = [to_micro_batch(*arrays).restrict_to(positions) for arrays in case.micro_batches(step, replica)]
    return engine.step(batches, case.num_targets, case.num_micro_batches, step)


def to_micro_batch(ids: Ids, targets: Ids, documents: Ids | None) -> MicroBatch:
    """Return arrays of a case as the engine takes them."""
    numbers = None if documents is None else torch.from_numpy(documents.copy())
    return MicroBatch(torch.from_numpy(ids.copy()), torch.from_numpy(targets.copy()), numbers)


def _pieces(engine: TrainingEngine, tensor: str) -> Pieces:
    """Return this rank's part of every parameter's gradient (`GRADIENTS`), of a loss without a scale, or weight (`WEIGHTS`), in
    float64."""
    scale = engine.scaler.scale if engine.scaler and tensor == GRADIENTS else 1.0
    return [
        (interval, getattr(group, tensor)[interval.rows].to(torch.float64, copy=True) / scale)
        for group in engine.groups
        if group.group.trained or tensor == WEIGHTS
        for interval in group.intervals()
    ]


def _assemble_parameters(ranks: Sequence[Pieces]) -> dict[str, Values]:
    """Return every parameter put together from the pieces of all ranks, flat, in float64; nan where no rank has it."""
    parameters: dict[str, Tensor] = {}
    for interval, values in (piece for pieces in ranks for piece in pieces):
        parameter = parameters.setdefault(
            interval.name, torch.full(interval.global_shape, float("nan"), dtype=torch.float64)
        )
        boxes = list(interval.boxes())
        for box, part in zip(boxes, torch.split(values, [box.volume for box in boxes]), strict=True):
            parameter[box.slices] = part.view(box.lengths).to(torch.float64)
    return {name: parameter.flatten().numpy() for name, parameter in parameters.items()}


# The limits of docs/design.md for float64. Weights have that of gradients: an optimizer divides by their size.
ERROR_LIMITS: Mapping[str, float] = {"loss": 1e-12, "norm": 1e-12, "gradients": 1e-10, "weights": 1e-10}
SMALLEST_NUMBER = 1e-300  # divisor for a tensor of zeros
SMALLEST = 1e-6  # of the norm of all gradients: errors of smaller gradients are relative to it
# Of the norm of all gradients: a gradient that never exceeds it is zero but for rounding, which an adaptive optimizer turns
# into full steps.
ZERO = 1e-14


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeErrors:
    """Largest relative errors over all steps, by the names of `ERROR_LIMITS`, and the tensors with the largest ones.

    `without_gradient` are weights without a gradient, whose updates are rounding and are not compared: a bias of keys
    that no rotation follows adds the same to all scores of a query.
    """

    largest: Mapping[str, float]
    gradient: str
    weight: str
    without_gradient: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(self.largest[name] <= limit for name, limit in ERROR_LIMITS.items())


def relative_errors(sharded: CaseResult, reference: CaseResult) -> RelativeErrors:
    """Return the largest relative errors against the one-process run.

    |sharded - reference| / |reference| for each step's loss and norm; for each gradient and weight ‖sharded -
    reference‖ over ‖reference‖, or over `SMALLEST` of the norm of all gradients if that is more.
    """
    gradients = dict[str, float]()
    for step_gradients, reference_gradients, norm in zip(
        sharded.gradients, reference.gradients, reference.norms, strict=True
    ):
        for name, error in _errors_by_name(step_gradients, reference_gradients, SMALLEST * norm):
            gradients[name] = max(gradients.get(name, 0.0), error)
    idle = _weights_without_gradient(reference)
    compared = {name: values for name, values in reference.weights.items() if name not in idle}
    weights = dict(_errors_by_name(sharded.weights, compared, 0.0))
    gradient, weight = (
        max(errors_by_name, key=lambda name: errors_by_name[name]) for errors_by_name in (gradients, weights)
    )
    largest = {
        "loss": _scalar_error(sharded.losses, reference.losses), "norm": _scalar_error(sharded.norms, reference.norms),
        "gradients": gradients[gradient], "weights": weights[weight],
    }  # fmt: skip
    return RelativeErrors(largest=largest, gradient=gradient, weight=weight, without_gradient=idle)


def _weights_without_gradient(reference: CaseResult) -> tuple[str, ...]:
    steps = list(zip(reference.gradients, reference.norms, strict=True))
    return tuple(
        name
        for name in sorted(reference.gradients[0])
        if all(np.linalg.norm(gradients[name]) <= ZERO * norm for gradients, norm in steps)
    )


def _scalar_error(sharded: Iterable[float], reference: Iterable[float]) -> float:
    return max(
        _nan_to_infinity(abs(measured - expected) / max(abs(expected), SMALLEST_NUMBER))
        for measured, expected in zip(sharded, reference, strict=True)
    )


def _errors_by_name(
    sharded: Mapping[str, Values], reference: Mapping[str, Values], min_norm: float
) -> Iterable[tuple[str, float]]:
    for name, expected in reference.items():
        tensor = sharded.get(name)
        yield (
            name,
            math.inf
            if tensor is None or tensor.shape != expected.shape
            else _relative_error(tensor, expected, min_norm),
        )


def _relative_error(tensor: Values, reference: Values, min_norm: float) -> float:
    return _nan_to_infinity(
        float(np.linalg.norm(tensor - reference)) / max(float(np.linalg.norm(reference)), min_norm, SMALLEST_NUMBER)
    )


def _nan_to_infinity(error: float) -> float:
    """Return infinity for NaN, which never counts as agreement."""
    return math.inf if math.isnan(error) else error


def collective_differences(case: TrainingCase, issued: Sequence[Sequence[IssuedCollective]]) -> tuple[str, ...]:
    """Return texts of what ranks issued unlike the instruction list; experts' rows are counted over all ranks."""
    problems: list[str] = []
    programs = [case.instance.for_pp_rank(coordinate.get("pp", 0)) for coordinate in case.instance.mesh.coordinates()]
    planned_by_stage = {program.pp_rank: count_collectives(program, case.num_micro_batches) for program in programs}
    for rank, (program, sequence) in enumerate(zip(programs, issued, strict=True)):
        planned_counts, issued_counts = comparable_counts(planned_by_stage[program.pp_rank], Counter(sequence))
        problems += [
            f"rank {rank}: {planned_counts[collective]} {collective.kind} over {', '.join(collective.axes)} of "
            f"{collective.num_bytes} bytes in {collective.dtype} planned, {issued_counts[collective]} issued"
            for collective in sorted({*planned_counts, *issued_counts})
            if planned_counts[collective] != issued_counts[collective]
        ]
        problems += [
            f"rank {rank}: {text}"
            for text in _order_differences(ordered_activation_collectives(program, case.num_micro_batches), sequence)
        ]
    if case.recipe.capacity_factor is not None:  # fewer rows than chosen experts
        return tuple(problems)
    planned = sum((planned_by_stage[program.pp_rank] for program in programs), Counter[IssuedCollective]())
    return (*problems, *_row_differences(planned, [Counter(sequence) for sequence in issued]))


def _order_differences(listed: Iterable[IssuedCollective], sequence: Sequence[IssuedCollective]) -> Iterator[str]:
    """Yield the first collective on activations that is out of the list's order. Collectives of weights may come
    between them; those of ring attention, of two tensors at once, are only counted."""
    listed = [
        collective
        for collective in listed
        if collective.kind is not CollectiveKind.PERMUTE or collective.axes != RING_AXES
    ]
    rows = {(collective.kind, collective.axes) for collective in listed if collective.what == ROWS}
    issued = iter(sequence)
    for collective in listed:
        expected = collective._replace(what="")
        uneven = (collective.kind, collective.axes) in rows
        if not any((candidate[:3] == expected[:3]) if uneven else candidate == expected for candidate in issued):
            text = f"{collective.kind} over {', '.join(collective.axes)} of {collective.num_bytes} bytes of {collective.what}"
            yield f"{text} does not come in the list's order"
            return


def _row_differences(planned: Counter[IssuedCollective], issued: Sequence[Counter[IssuedCollective]]) -> Iterator[str]:
    """Yield differences of bytes to experts over all ranks: a router sends each token to a fixed number of them."""
    kinds = {
        (collective.kind, collective.axes)
        for collective in planned
        if collective.what == ROWS and collective.kind is CollectiveKind.ALL_TO_ALL
    }
    for kind, axes in sorted(kinds):
        planned_bytes = _total_bytes(planned, kind, axes)
        sent_bytes = sum(_total_bytes(counts, kind, axes) for counts in issued)
        if sent_bytes != planned_bytes:
            yield f"all ranks: {kind} over {', '.join(axes)} of {planned_bytes} bytes planned, {sent_bytes} issued"


def _total_bytes(counts: Counter[IssuedCollective], kind: CollectiveKind, axes: Axes) -> int:
    matching = {issued: count for issued, count in counts.items() if (issued.kind, issued.axes) == (kind, axes)}
    return sum(issued.num_bytes * count for issued, count in matching.items())
