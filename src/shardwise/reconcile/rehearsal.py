"""A plan against the rehearsal of one of its ranks (`train.rehearse`): the list of collectives, and memory by term."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from typing_extensions import TypedDict

from shardwise.cost.memory_terms import MEMORY
from shardwise.cost.pricing import Pricing
from shardwise.layout.legality import degrees_of, num_micro_batches
from shardwise.layout.payload import LayoutPayload
from shardwise.measurement.inspection import Measured, Rehearsed
from shardwise.model.payload import ModelPayload, model_payload
from shardwise.planning.payload import layout_of_plan
from shardwise.planning.plan import Plan
from shardwise.reconcile.collectives import Collectives, collectives
from shardwise.reconcile.compare import cast_remarks
from shardwise.reconcile.memory import PASSING, MemoryTerm, StepMemory, step_memory
from shardwise.reconcile.payload import CollectivesPayload, collectives_payload
from shardwise.schema import Fields
from shardwise.train.issued import own_policy
from shardwise.train.recipe import Recipe

SCHEMA = "shardwise.rehearse/2"


class GroupPayload(TypedDict):
    """The ranks that a rank has collectives with over some axes."""

    axes: list[str]
    ranks: list[int]


class Judged(TypedDict):
    """Whether a term is judged, and whether it is as close to the plan as is asked."""

    is_judged: bool
    holds: bool | None


class RankMemory(TypedDict):
    """Bytes by term, planned and executed, and each term with its verdict."""

    planned: dict[str, float | None]
    executed: dict[str, float]
    terms: list[Annotated[dict[str, Any], Fields(MemoryTerm, Judged)]]


class RehearsePayload(TypedDict):
    """One rank of a plan's world, run without the others."""

    schema: Literal["shardwise.rehearse/2"]
    model: ModelPayload
    cluster: str
    layout: LayoutPayload
    ranks: int
    rank: int
    coordinate: dict[str, int]
    groups: list[GroupPayload]
    num_micro_batches: int
    seconds: float
    collectives_equal: bool
    collectives: CollectivesPayload
    memory: RankMemory
    remarks: list[str]
    ok: bool


CLOSE = 0.03  # of a term, and of the peak: nothing of a machine is in what tensors hold
LITTLE = 0.01  # of the peak: what is gathered of it at one moment and not at another as full


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What was planned and executed for one of so many `ranks`; `planned_micro_batches` are those of the plan's step. `remarks`
    say what the numbers must be read with."""

    ranks: int
    seen: Rehearsed
    planned_micro_batches: int
    memory: StepMemory
    collectives: Collectives
    remarks: tuple[str, ...] = ()

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
        return tuple(one for one in self.terms if is_judged(one, self.memory.total) and not one.holds(CLOSE))


def is_judged(term: MemoryTerm, peak: MemoryTerm) -> bool:
    """Whether a term is judged by itself. Logits and workspace are judged within the peak only: where two moments are nearly as
    full, the plan may have taken the one and the rank the other. So is what is gathered, where the plan has little at its peak:
    under ZeRO-1 the part of the head's gradients that is this rank's."""
    if term.name == PASSING:
        return (term.predicted or 0.0) > LITTLE * (peak.predicted or 0.0)
    return term.name == "peak" or term.largest is not None


def rehearsal(plan: Plan, recipe: Recipe, seen: Rehearsed) -> Rehearsal:
    """Hold a rank's step against the plan."""
    layout, pp_rank = plan.layout, seen.coordinate.get("pp", 0)
    pricing = Pricing(plan.model, plan.cluster, plan.job, layout, own_policy(plan, recipe))
    planned = MEMORY.values(pricing.memories(pricing.stages())[pp_rank])
    num_seqs = seen.num_micro_batches * layout.num_replicas * layout.micro_batch_seqs
    measured = Measured(device="meta", machine="", before={}, rank=seen.rank, memory=seen.inspection.memory)
    return Rehearsal(
        ranks=layout.num_devices, seen=seen, memory=step_memory(planned, measured),
        planned_micro_batches=int(num_micro_batches(plan.job, degrees_of(layout))), remarks=tuple(cast_remarks(plan, recipe)),
        collectives=collectives(
            plan, recipe.of_step(0), num_seqs * plan.job.seq_len, seen.inspection.collectives, even=True, pp_rank=pp_rank
        ),
    )  # fmt: skip


def rehearsal_payload(plan: Plan, found: Rehearsal) -> dict[str, Any]:
    """The versioned payload that `--json` prints."""
    seen = found.seen
    return {
        "schema": SCHEMA, "model": model_payload(plan.model), "cluster": plan.cluster.name, "layout": layout_of_plan(plan),
        "ranks": found.ranks, "rank": seen.rank, "coordinate": dict(seen.coordinate),
        "groups": [{"axes": list(axes), "ranks": list(ranks)} for axes, ranks in seen.groups.items()],
        "num_micro_batches": seen.num_micro_batches, "seconds": seen.seconds,
        "collectives_equal": found.collectives.equal, "collectives": collectives_payload(found.collectives),
        "memory": {
            "planned": {one.name: one.predicted for one in found.terms},
            "executed": {one.name: one.judged for one in found.terms},
            "terms": [
                {**asdict(one), "is_judged": is_judged(one, found.memory.total), "holds": one.holds(CLOSE)}
                for one in found.terms
            ],
        },
        "remarks": list(found.remarks), "ok": found.ok,
    }  # fmt: skip
