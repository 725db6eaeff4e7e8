"""A plan against the rehearsal of one of its ranks (`train.rehearse`): the list of collectives, and memory by term."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardwise.cost.memory_terms import MEMORY
from shardwise.cost.pricing import Pricing
from shardwise.layout.legality import degrees_of, num_micro_batches
from shardwise.measurement.inspection import Measured, Rehearsed
from shardwise.planning.plan import Plan
from shardwise.reconcile.collectives import Collectives, collectives
from shardwise.reconcile.memory import PASSING, MemoryTerm, StepMemory, step_memory
from shardwise.reconcile.payload import collectives_payload
from shardwise.train.recipe import Recipe

SCHEMA = "shardwise.rehearse/1"
CLOSE = 0.03  # of a term, and of the peak: nothing of a machine is in what tensors hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was planned and executed for one of so many `ranks`; `planned_micro_batches` are those of the plan's step."""

    ranks: int
    seen: Rehearsed
    planned_micro_batches: int
    memory: StepMemory
    collectives: Collectives

    @property
    def ok(self) -> bool:
        """Whether the list is the planned one, and memory as close as `CLOSE`."""
        return self.collectives.equal and not self.off

    @property
    def terms(self) -> tuple[MemoryTerm, ...]:
        """Those of memory, and the peak."""
        return (*self.memory.terms, self.memory.total)

    @property
    def off(self) -> tuple[MemoryTerm, ...]:
        """What is not as planned of those that are judged."""
        return tuple(one for one in self.terms if is_judged(one) and not one.holds(CLOSE))


def is_judged(term: MemoryTerm) -> bool:
    """Whether a term is judged by itself. Logits and workspace are judged within the peak only: where two moments are nearly as
    full, the plan may have taken the one and the rank the other. So is what is gathered, where the plan has none at its peak."""
    return term.name == "peak" or (term.largest is not None and (term.name != PASSING or bool(term.predicted)))


def rehearsal(plan: Plan, recipe: Recipe, seen: Rehearsed) -> Rehearsal:
    """Hold a rank's step against the plan."""
    layout, pp_rank = plan.layout, seen.coordinate.get("pp", 0)
    pricing = Pricing(plan.model, plan.cluster, plan.job, layout)
    planned = MEMORY.values(pricing.memories(pricing.stages())[pp_rank])
    num_seqs = seen.num_micro_batches * layout.num_replicas * layout.micro_batch_seqs
    measured = Measured(device="meta", machine="", before={}, rank=seen.rank, memory=seen.inspection.memory)
    return Rehearsal(
        ranks=layout.num_devices, seen=seen, memory=step_memory(planned, measured),
        planned_micro_batches=int(num_micro_batches(plan.job, degrees_of(layout))),
        collectives=collectives(
            plan, recipe, num_seqs * plan.job.seq_len, seen.inspection.collectives, even=True, pp_rank=pp_rank
        ),
    )  # fmt: skip


def rehearsal_payload(plan: Plan, found: Rehearsal) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    seen = found.seen
    return {
        "schema": SCHEMA, "model": plan.model.name, "cluster": plan.cluster.name, "layout": str(plan.layout),
        "ranks": found.ranks, "rank": seen.rank, "coordinate": dict(seen.coordinate),
        "groups": [{"axes": list(axes), "ranks": list(ranks)} for axes, ranks in seen.groups.items()],
        "num_micro_batches": seen.num_micro_batches, "seconds": seen.seconds,
        "collectives_equal": found.collectives.equal, "collectives": collectives_payload(found.collectives),
        "memory": {
            "planned": {one.name: one.predicted for one in found.terms},
            "executed": {one.name: one.judged for one in found.terms},
            "terms": [{**asdict(one), "is_judged": is_judged(one), "holds": one.holds(CLOSE)} for one in found.terms],
        },
        "ok": found.ok,
    }  # fmt: skip
