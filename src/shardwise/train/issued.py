"""What the engine issues for a plan. Nothing here needs PyTorch."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.issuing import IssuePolicy, Statistics
from shardwise.lowering.instance import Instance
from shardwise.planning.plan import Plan
from shardwise.precision import precision_named
from shardwise.train.recipe import Recipe

STATISTICS: Mapping[str, Statistics] = {"auxiliary": "micro_batch", "bias": "step", "none": "never"}


def instance_of(plan: Plan, recipe: Recipe) -> Instance:
    """A plan as the engine runs it under a recipe."""
    return Instance(
        architecture=plan.model, layout=plan.layout, precision=precision_named(plan.job.precision),
        policy=policy_of(recipe, routed=plan.model.num_experts > 0), seq_len=plan.job.seq_len,
        optimizer=plan.job.optimizer,
    )  # fmt: skip


def policy_of(recipe: Recipe, *, routed: bool) -> IssuePolicy:
    """What a recipe says about collectives; `routed`: the model has experts, whose load is watched."""
    return IssuePolicy(
        reduction=recipe.reduction, bucket_bytes=recipe.bucket_bytes,
        reduce_each_micro_batch=recipe.reduce_each_micro_batch,
        statistics=STATISTICS[recipe.balance] if routed else "never",
    )  # fmt: skip
