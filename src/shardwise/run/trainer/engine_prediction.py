"""A plan as the engine runs it: what it issues, and its memory. Needs no PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from shardwise.price import Pricing
from shardwise.run.recipe import TrainingRecipe
from shardwise.search import Plan
from shardwise.sharding import ROWS, IssuedCollective
from shardwise.step import RankProgram
from shardwise.values import IssuePolicy, get_precision
from shardwise.values.engine_policies import RouterStatistics

ROUTER_STATISTICS: Mapping[str, RouterStatistics] = {"auxiliary": "micro_batch", "bias": "step", "none": "never"}


def engine_instance(plan: Plan, recipe: TrainingRecipe) -> RankProgram:
    """Return a plan as a rank's program under a recipe."""
    return RankProgram(
        architecture=plan.model, layout=plan.layout, precision=get_precision(plan.job.precision),
        policy=issue_policy(recipe, routed=plan.model.num_experts > 0), seq_len=plan.job.seq_len,
        optimizer=plan.job.optimizer,
    )  # fmt: skip


def issue_policy(recipe: TrainingRecipe, *, routed: bool) -> IssuePolicy:
    """Return what the engine issues under a recipe; `routed`: the model has experts, whose load is measured."""
    return IssuePolicy(
        reduction=recipe.reduction, bucket_bytes=recipe.bucket_bytes,
        reduce_each_micro_batch=recipe.reduce_each_micro_batch,
        statistics=ROUTER_STATISTICS[recipe.balance] if routed else "never",
        noise_scale=recipe.noise_scale_every > 0, casts="in_producers", weight_casts="each_step",
    )  # fmt: skip


def engine_policy(plan: Plan, recipe: TrainingRecipe) -> IssuePolicy | None:
    """Return the engine's issue policy if its memory differs from the plan's stack: it casts activations in products alone, and
    keeps casts of weights. None for a precision recipe without narrow products."""
    if not get_precision(plan.job.precision).matmul:
        return None
    return issue_policy(recipe, routed=plan.model.num_experts > 0)


def engine_memory(plan: Plan, recipe: TrainingRecipe) -> Mapping[str, float]:
    """Return the bytes of the fullest device by memory term as the engine runs a plan."""
    policy = engine_policy(plan, recipe)
    if policy is None:
        return plan.estimate.memory
    pricing = Pricing(plan.problem, plan.layout, policy)
    return pricing.fullest_device(pricing.stages())[1]


def comparable_counts(
    planned: Counter[IssuedCollective], captured: Counter[IssuedCollective], *, even: bool = False
) -> tuple[Counter[IssuedCollective], Counter[IssuedCollective]]:
    """Return planned and captured collectives without what cannot be compared.

    What a collective carries is not seen in a capture. How many rows go to an expert is a router's decision, so
    collectives like those of rows have 0 bytes in both, unless shares are `even`.
    """
    uneven = (
        set()
        if even
        else {(collective.kind, collective.axes, collective.dtype) for collective in planned if collective.what == ROWS}
    )
    return _strip_payload(planned, uneven), _strip_payload(captured, uneven)


def _strip_payload(counts: Counter[IssuedCollective], uneven: Set[tuple[object, ...]]) -> Counter[IssuedCollective]:
    stripped: Counter[IssuedCollective] = Counter()
    for collective, count in counts.items():
        num_bytes = 0 if (collective.kind, collective.axes, collective.dtype) in uneven else collective.num_bytes
        stripped[collective._replace(what="", num_bytes=num_bytes)] += count
    return stripped
