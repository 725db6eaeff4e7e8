"""Whether a plan fits in the memory that a device really has, and the smallest change of it that does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from shardwise.cost.estimate import Estimate, estimate
from shardwise.errors import NothingFitsError
from shardwise.issuing import IssuePolicy
from shardwise.layout.layout import Layout
from shardwise.layout.legality import violations
from shardwise.model.recompute import POLICIES
from shardwise.planning.plan import Plan
from shardwise.planning.runnable import pins_text
from shardwise.train.issued import own_memory, own_policy
from shardwise.train.recipe import Recipe
from shardwise.units import format_bytes

Change = Mapping[str, Any]  # fields of a layout, with their new values


def require_memory(plan: Plan, recipe: Recipe, available: int, device: str) -> None:
    """Raise `NothingFitsError` where the predicted peak is above the bytes that are there, with the smallest change that fits."""
    policy = own_policy(plan, recipe)
    needed = sum(own_memory(plan, recipe).values())
    if needed <= available:
        return
    found = smallest_change(plan, available, policy)
    if found is None:
        help_text = "no change of recomputation, micro-batch or ZeRO stage fits: use more devices, or a smaller model or sequence"
    else:
        change, priced = found
        before = plan.estimate if policy is None else estimate(plan.model, plan.cluster, plan.job, plan.layout, policy)
        slower = priced.step_time_s / before.step_time_s - 1
        help_text = (
            f"the smallest change that fits takes {format_bytes(priced.memory_bytes)} and is {slower:+.1%} in time: plan again "
            f"with {pins_text(change)}"
        )
    raise NothingFitsError(
        f"the plan takes {format_bytes(needed)} on each device, by its estimate, and {device} has {format_bytes(available)}: "
        f"{help_text}"
    )


def smallest_change(plan: Plan, available: int, policy: IssuePolicy | None = None) -> tuple[Change, Estimate] | None:
    """The fastest change of one choice (recomputation, micro-batch, ZeRO stage) that fits; else of two; None where none does."""
    choices = [list(changes(plan.layout)) for changes in (_recompute, _micro_batch, _zero_stage)]
    for number in (1, 2):
        fitting = []
        for some in combinations(choices, number):
            for changes in product(*some):
                merged = {name: value for change in changes for name, value in change.items()}
                priced = _priced(plan, replace(plan.layout, **merged), policy)
                fitting += [(merged, priced)] if priced and priced.memory_bytes <= available else []
        if fitting:
            return min(fitting, key=lambda pair: pair[1].step_time_s)
    return None


def _priced(plan: Plan, layout: Layout, policy: IssuePolicy | None) -> Estimate | None:
    if violations(plan.model, plan.job, plan.cluster.num_devices, layout):
        return None
    return estimate(plan.model, plan.cluster, plan.job, layout, policy)


def _recompute(layout: Layout) -> Iterator[Change]:
    """Policies that keep less; of one that a part of the layers has, all of them."""
    leaner = tuple(POLICIES)[1:] if layout.recompute == "none" else ("full",)
    part: Change = {} if layout.recompute_layers is None else {"recompute_layers": None}
    for policy in dict.fromkeys((layout.recompute, *leaner)):
        if part or policy != layout.recompute:
            yield {"recompute": policy, **part}


def _micro_batch(layout: Layout) -> Iterator[Change]:
    size = layout.micro_batch_seqs
    while size > 1:
        size //= 2
        yield {"micro_batch_seqs": size}


def _zero_stage(layout: Layout) -> Iterator[Change]:
    """Higher stages; replicas become shards where there are none yet."""
    sharded: Change = {"dp": 1, "fsdp": layout.dp} if layout.fsdp == 1 and layout.dp > 1 else {}
    for stage in range(layout.zero_stage + 1, 4):
        yield {**sharded, "zero_stage": stage}
