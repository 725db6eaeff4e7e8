"""A plan compared with the rehearsal of one of its ranks (`run.trainer.rehearsal`): collectives, and memory by term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise import run
from shardwise.layout import layout_degrees, num_micro_batches, require_runnable
from shardwise.measure.reconcile.reconciliation import cast_remarks
from shardwise.measure.reconcile.step_terms import (
    GATHERED,
    CollectiveComparison,
    MemoryTerm,
    StepMemory,
    compare_collectives,
    compare_memory,
)
from shardwise.price import MEMORY, Pricing
from shardwise.records import RunInspection
from shardwise.records.step_memory_and_collectives import RehearsedRank
from shardwise.run import TrainingRecipe
from shardwise.run.trainer.engine_prediction import engine_policy
from shardwise.run.trainer.flags import apply_changes
from shardwise.search import Plan
from shardwise.values import get_precision, parse_overrides

REHEARSAL_TOLERANCE = 0.03  # of a term, and of the peak: bytes of tensors do not depend on the machine
SMALL_SHARE = 0.01  # of the peak: fewer gathered bytes may be there at one moment and not at another that is as full


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Rehearsal of one of the plan's `ranks` ranks: what was planned and executed.

    `planned_micro_batches` are those of the plan's step; `remarks` say how to read the numbers."""

    plan: Plan
    ranks: int
    rehearsed: RehearsedRank
    planned_micro_batches: int
    memory: StepMemory
    collectives: CollectiveComparison
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if collectives are as planned, and memory is as close as `REHEARSAL_TOLERANCE`."""
        return self.collectives.equal and not self.failed_terms

    @property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """Terms of memory, and the peak."""
        return (*self.memory.terms, self.memory.total)

    @property
    def failed_terms(self) -> tuple[MemoryTerm, ...]:
        """Judged terms that are not as planned."""
        judged = (term for term in self.terms if is_judged(term, self.memory.total))
        return tuple(term for term in judged if not term.is_within(REHEARSAL_TOLERANCE))


def is_judged(term: MemoryTerm, peak: MemoryTerm) -> bool:
    """Return True if a term is judged by itself.

    Logits and workspace are judged only within the peak: if two moments are nearly as full, the plan may have its peak
    at one and the rank at the other. The same holds for gathered weights if the plan has few at its peak: under ZeRO-1
    the rank's part of the head's gradients.
    """
    if term.name == GATHERED:
        return (term.predicted or 0.0) > SMALL_SHARE * (peak.predicted or 0.0)
    return term.name == "peak" or term.largest is not None


def rehearse_plan(plan: Plan, rank: int = 0, changes: Sequence[str] = ()) -> Rehearsal:
    """Run a step of one rank of a plan alone, and compare it with the plan; `changes` are texts "recipe.NAME=VALUE".

    Raises `InputError` for a plan that the engine does not run.
    """
    recipe = apply_changes(TrainingRecipe(steps=1), parse_overrides(changes, rooms=("recipe",))["recipe"])
    require_runnable(plan.model, plan.layout, get_precision(plan.job.precision), plan.job.optimizer)
    return compare_rehearsal(plan, recipe, run.rehearse_rank(plan, recipe, rank))


def compare_rehearsal(plan: Plan, recipe: TrainingRecipe, rehearsed: RehearsedRank) -> Rehearsal:
    """Compare the step of a rehearsed rank with the plan."""
    layout, pp_rank = plan.layout, rehearsed.coordinate.get("pp", 0)
    pricing = Pricing(plan.problem, layout, engine_policy(plan, recipe))
    planned = MEMORY.values(pricing.memories(pricing.stages())[pp_rank])
    num_seqs = rehearsed.num_micro_batches * layout.num_replicas * layout.micro_batch_seqs
    measured = RunInspection(
        device="meta", machine="", before={}, rank=rehearsed.rank, memory=rehearsed.inspection.memory
    )
    return Rehearsal(
        plan=plan, ranks=layout.num_devices, rehearsed=rehearsed, memory=compare_memory(planned, measured),
        planned_micro_batches=int(num_micro_batches(plan.job, layout_degrees(layout))),
        remarks=tuple(cast_remarks(plan, recipe)),
        collectives=compare_collectives(
            plan, recipe.for_step(0), num_seqs * plan.job.seq_len, rehearsed.inspection.collectives, even=True,
            pp_rank=pp_rank
        ),
    )  # fmt: skip
