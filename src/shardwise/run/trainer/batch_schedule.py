"""The global batch of a run by step: at first, later, and when the run goes on. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardwise.batch_size import BatchRamp, parse_batch_schedule
from shardwise.batch_size.batch_schedule import BATCH_RAMP_KEY, NoiseScaleBatches, PhasedBatches, ramp_from_phases
from shardwise.layout import Layout
from shardwise.pipeline.registry import ALL_SCHEDULES, find_problems
from shardwise.run.recipe import TrainingRecipe
from shardwise.search import Plan
from shardwise.values import InputError

NEAREST_RANGE = 64  # micro-batches searched in both directions for a batch that the schedule runs


def complete_schedule(plan: Plan, recipe: TrainingRecipe) -> PhasedBatches | NoiseScaleBatches | None:
    """Return a recipe's batch schedule, with open values taken from the plan; None without a schedule. Raises
    `InputError`."""
    if recipe.batch_schedule is None:
        return None
    schedule = parse_batch_schedule(recipe.batch_schedule)
    if isinstance(schedule, NoiseScaleBatches) and not recipe.noise_scale_every:
        raise InputError(
            "--batch-schedule: batches by noise scale follow what is measured; --noise-scale-every N is required"
        )
    if isinstance(schedule, NoiseScaleBatches) and schedule.smallest is None:
        limit = schedule.largest or plan.job.global_batch_tokens
        schedule = replace(schedule, smallest=min(_min_measured_tokens(plan), limit))
    return schedule.resolve(plan.job.global_batch_tokens, quantum_tokens(plan))


def quantum_tokens(plan: Plan) -> int:
    """Return the tokens of the smallest batch that fills a micro-batch of every replica and that the pipeline schedule
    runs."""
    layout = plan.layout
    multiple = ALL_SCHEDULES[layout.schedule].micro_batch_multiple(layout.pp, layout.num_virtual_stages)
    return layout.num_replicas * layout.micro_batch_seqs * int(multiple) * plan.job.seq_len


def _min_measured_tokens(plan: Plan) -> int:
    """Return the tokens of the smallest such batch whose noise scale can be measured."""
    quantum = quantum_tokens(plan)
    return next(size for size in (quantum, 2 * quantum) if _has_parts(plan.layout, size // plan.job.seq_len))


def batch_ramp(plan: Plan, recipe: TrainingRecipe, previous: BatchRamp | None = None, step: int = 0) -> BatchRamp:
    """Return the batches of a run, which were those of `previous` up to `step`. A schedule by noise scale begins with
    its smallest batch."""
    schedule, seq_len = complete_schedule(plan, recipe), plan.job.seq_len
    match schedule:
        case None:
            return BatchRamp(recipe.batch_ramp or ((0, plan.job.num_seqs),))
        case PhasedBatches():
            return ramp_from_phases(schedule.phases, seq_len, previous, step)
        case NoiseScaleBatches():
            initial = ramp_from_phases([(0, schedule.smallest or 0)], seq_len)
            return previous.until(step) if previous is not None and step else initial


def require_batches(plan: Plan, recipe: TrainingRecipe) -> None:
    """Raise `InputError` if a global batch of a run is not whole sequences, or the pipeline schedule cannot run it."""
    schedule = complete_schedule(plan, recipe)
    if isinstance(schedule, NoiseScaleBatches):
        sizes: Iterable[int] = _possible_sizes(schedule)
        ramp_from_phases([(0, schedule.smallest or 0), (1, schedule.increment or 0)], plan.job.seq_len)
    else:
        sizes = (sequences * plan.job.seq_len for _, sequences in batch_ramp(plan, recipe).values)
    for tokens in sizes:
        _require_schedule(plan.layout, tokens, plan.job.seq_len)
        if recipe.noise_scale_every:
            _require_parts(plan.layout, tokens // plan.job.seq_len)


def _possible_sizes(schedule: NoiseScaleBatches) -> Iterator[int]:
    """Yield every batch that a schedule by noise scale may choose, in tokens."""
    smallest, largest, step = schedule.smallest or 0, schedule.largest or 0, schedule.increment or 1
    yield smallest
    yield from range(-(-smallest // step) * step, largest + 1, step)


def _require_schedule(layout: Layout, tokens: int, seq_len: int) -> None:
    size = layout.num_replicas * layout.micro_batch_seqs * seq_len
    num_micro_batches = -(-tokens // size)
    for problem in _schedule_problems(layout, num_micro_batches):
        near = [
            candidate
            for distance in range(1, NEAREST_RANGE)
            for candidate in (num_micro_batches - distance, num_micro_batches + distance)
            if candidate > 0
        ]
        nearest = sorted(
            candidate * size
            for candidate in [candidate for candidate in near if not _schedule_problems(layout, candidate)][:2]
        )
        hint = (
            f"the nearest are {' and '.join(f'{batch_tokens:,}' for batch_tokens in nearest)} tokens; "
            if nearest
            else ""
        )
        raise InputError(
            f"a batch of {tokens // seq_len} sequences ({tokens:,} tokens): {problem}; {hint}change --batch-schedule or "
            "recipe.batch_ramp, or plan another layout"
        )


def _require_parts(layout: Layout, num_seqs: int) -> None:
    """Raise `InputError` if the noise scale is to be measured and a global batch has only one part."""
    if not _has_parts(layout, num_seqs):
        raise InputError(
            f"--noise-scale-every: found a batch of {num_seqs} sequences in one part; two, a micro-batch or replica each, are "
            "required: plan with a smaller micro_batch_seqs, or a larger batch"
        )


def _has_parts(layout: Layout, num_seqs: int) -> bool:
    """Return whether a global batch has two parts, each a micro-batch of a replica; replicas that share experts count
    as one."""
    replicas_per_part = max(layout.ep * layout.expert_tp // layout.tp, 1)
    return num_seqs > replicas_per_part * layout.micro_batch_seqs


def _schedule_problems(layout: Layout, num_micro_batches: int) -> list[str]:
    return find_problems(layout.schedule, layout.pp, num_micro_batches, layout.num_virtual_stages)


def ramp_state(ramp: BatchRamp, step: int) -> dict[str, Any]:
    """Return what a checkpoint of `step` keeps: the batches until then, and the next one."""
    return {BATCH_RAMP_KEY: [list(value) for value in ramp.until(step).values]}


def resume_ramp(plan: Plan, recipe: TrainingRecipe, values: Mapping[str, Any], step: int) -> BatchRamp:
    """Return the batches of a run that goes on from a checkpoint of `step`: those it had, then those of its schedule."""
    if BATCH_RAMP_KEY in values:
        previous = BatchRamp(tuple((first, sequences) for first, sequences in values[BATCH_RAMP_KEY]))
    elif recipe.batch_schedule is not None:
        raise InputError(
            f"--batch-schedule: the checkpoint of step {step}, of an earlier version, does not have the batches before it; go on "
            "for a step without --batch-schedule first"
        )
    else:
        previous = batch_ramp(plan, recipe)
    return batch_ramp(plan, recipe, previous, step)
