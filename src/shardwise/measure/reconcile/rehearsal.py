"""A plan against the rehearsal of one of its ranks (`run.trainer.rehearsal`): the list of collectives, and memory by term."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.layout.degrees import layout_degrees, num_micro_batches
from shardwise.measure.reconcile.reconciliation import cast_remarks
from shardwise.measure.reconcile.step_terms import (
    GATHERED,
    CollectiveComparison,
    MemoryTerm,
    StepMemory,
    compare_collectives,
    compare_memory,
)
from shardwise.price.estimate_terms import MEMORY
from shardwise.price.layout_pricer import Pricing
from shardwise.records.step_memory_and_collectives import RehearsedRank, RunInspection
from shardwise.run.recipe import TrainingRecipe
from shardwise.run.trainer.plan_for_engine import engine_policy
from shardwise.search.plan import Plan

REHEARSAL_TOLERANCE = 0.03  # of a term, and of the peak: nothing of a machine is in what tensors hold
SMALL_SHARE = 0.01  # of the peak: what is gathered of it at one moment and not at another as full


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was planned and executed for one of so many `ranks`; `planned_micro_batches` are those of the plan's step. `remarks`
    say what the numbers must be read with."""

    ranks: int
    rehearsed: RehearsedRank
    planned_micro_batches: int
    memory: StepMemory
    collectives: CollectiveComparison
    remarks: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the list is the planned one, and memory as close as `REHEARSAL_TOLERANCE`."""
        return self.collectives.equal and not self.failed_terms

    @property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """Those of memory, and the peak."""
        return (*self.memory.terms, self.memory.total)

    @property
    def failed_terms(self) -> tuple[MemoryTerm, ...]:
        """What is not as planned of those that are judged."""
        return tuple(
            one for one in self.terms if is_judged(one, self.memory.total) and not one.is_within(REHEARSAL_TOLERANCE)
        )


def is_judged(term: MemoryTerm, peak: MemoryTerm) -> bool:
    """Whether a term is judged by itself. Logits and workspace are judged within the peak only: where two moments are nearly as
    full, the plan may have taken the one and the rank the other. So is what is gathered, where the plan has little at its peak:
    under ZeRO-1 the part of the head's gradients that is this rank's."""
    if term.name == GATHERED:
        return (term.predicted or 0.0) > SMALL_SHARE * (peak.predicted or 0.0)
    return term.name == "peak" or term.largest is not None


def compare_rehearsal(plan: Plan, recipe: TrainingRecipe, seen: RehearsedRank) -> Rehearsal:
    """Hold a rank's step against the plan."""
    layout, pp_rank = plan.layout, seen.coordinate.get("pp", 0)
    pricing = Pricing(plan.model, plan.cluster, plan.job, layout, engine_policy(plan, recipe))
    planned = MEMORY.values(pricing.memories(pricing.stages())[pp_rank])
    num_seqs = seen.num_micro_batches * layout.num_replicas * layout.micro_batch_seqs
    measured = RunInspection(device="meta", machine="", before={}, rank=seen.rank, memory=seen.inspection.memory)
    return Rehearsal(
        ranks=layout.num_devices, rehearsed=seen, memory=compare_memory(planned, measured),
        planned_micro_batches=int(num_micro_batches(plan.job, layout_degrees(layout))), remarks=tuple(cast_remarks(plan, recipe)),
        collectives=compare_collectives(
            plan, recipe.for_step(0), num_seqs * plan.job.seq_len, seen.inspection.collectives, even=True, pp_rank=pp_rank
        ),
    )  # fmt: skip
