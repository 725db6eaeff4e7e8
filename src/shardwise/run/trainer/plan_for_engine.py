"""What the engine issues for a plan, and whether it did. Nothing here needs PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from shardwise.price.layout_pricer import Pricing
from shardwise.run.recipe import Recipe
from shardwise.search.plan import Plan
from shardwise.sharding.collectives import ROWS, Issued
from shardwise.step.rank_program import Instance
from shardwise.values.issue_policy import IssuePolicy, Statistics
from shardwise.values.precision import precision_named

STATISTICS: Mapping[str, Statistics] = {"auxiliary": "micro_batch", "bias": "step", "none": "never"}


def instance_of(plan: Plan, recipe: Recipe) -> Instance:
    """A plan as the engine runs it under a recipe."""
    return Instance(
        architecture=plan.model, layout=plan.layout, precision=precision_named(plan.job.precision),
        policy=policy_of(recipe, routed=plan.model.num_experts > 0), seq_len=plan.job.seq_len,
        optimizer=plan.job.optimizer,
    )  # fmt: skip


def policy_of(recipe: Recipe, *, routed: bool) -> IssuePolicy:
    """What the engine issues under a recipe; `routed`: the model has experts, whose load is watched."""
    return IssuePolicy(
        reduction=recipe.reduction, bucket_bytes=recipe.bucket_bytes,
        reduce_each_micro_batch=recipe.reduce_each_micro_batch,
        statistics=STATISTICS[recipe.balance] if routed else "never",
        noise_scale=recipe.noise_scale_every > 0, casts="in_products",
    )  # fmt: skip


def own_policy(plan: Plan, recipe: Recipe) -> IssuePolicy | None:
    """What the engine issues, where its memory is not what the plan's stack would have: its casts are in products alone. None
    where a precision recipe keeps no casts."""
    own = precision_named(plan.job.precision)
    return policy_of(recipe, routed=plan.model.num_experts > 0) if own.matmul and own.saves_casts else None


def own_memory(plan: Plan, recipe: Recipe) -> Mapping[str, float]:
    """The bytes of the fullest device by term as the engine runs a plan."""
    policy = own_policy(plan, recipe)
    if policy is None:
        return plan.estimate.memory
    pricing = Pricing(plan.model, plan.cluster, plan.job, plan.layout, policy)
    return pricing.fullest(pricing.stages())[1]


def comparable(
    planned: Counter[Issued], seen: Counter[Issued], *, even: bool = False
) -> tuple[Counter[Issued], Counter[Issued]]:
    """A planned list and one that was captured, each without what cannot be compared: what a collective carries is not seen from
    below, and how many rows go to an expert a router decides, so that collectives like those of rows have 0 bytes in both; but
    where shares are `even`."""
    uneven = set() if even else {(one.kind, one.axes, one.dtype) for one in planned if one.what == ROWS}
    return _counted(planned, uneven), _counted(seen, uneven)


def _counted(counts: Counter[Issued], uneven: Set[tuple[object, ...]]) -> Counter[Issued]:
    found: Counter[Issued] = Counter()
    for one, count in counts.items():
        num_bytes = 0 if (one.kind, one.axes, one.dtype) in uneven else one.num_bytes
        found[one._replace(what="", num_bytes=num_bytes)] += count
    return found
