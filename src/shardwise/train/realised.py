"""How the engine realises a plan. Nothing here needs PyTorch."""

from __future__ import annotations

from shardwise.lowering.realisation import Realisation, Statistics
from shardwise.planning.plan import Plan
from shardwise.precision import precision_named
from shardwise.train.recipe import Recipe

STATISTICS: dict[str, Statistics] = {"auxiliary": "micro_batch", "bias": "step", "none": "never"}


def realisation_of(plan: Plan, recipe: Recipe) -> Realisation:
    """How the engine realises a plan under a recipe."""
    has_experts = plan.model.num_experts > 0
    return Realisation(
        architecture=plan.model, layout=plan.layout, precision=precision_named(plan.job.precision),
        reduction=recipe.reduction, bucket_bytes=recipe.bucket_bytes,
        reduce_each_micro_batch=recipe.reduce_each_micro_batch,
        statistics=STATISTICS[recipe.balance] if has_experts else "never",
    )  # fmt: skip
