"""A run that goes on with fewer processes than its plan has devices: with a plan that is searched for those that are left."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shardwise.cluster.resize import resized
from shardwise.errors import ShardwiseError
from shardwise.planning.plan import Plan
from shardwise.search.pins import narrowed
from shardwise.search.plan import plan as search_plan
from shardwise.train.launch import outcome_of
from shardwise.train.outcome import Outcome, RunEndedError
from shardwise.train.parent import RESTARTED
from shardwise.units import counted

VISIBLE = "CUDA_VISIBLE_DEVICES"


def planned_for(plan: Plan, num_devices: int) -> Plan:
    """The plan of the same model and job, searched for so many devices of the cluster: the global batch and its samples stay.

    A plan of so many devices already is given as it is. Raises `InputError` for a number of devices that the cluster cannot have,
    and `NothingFitsError` where the job does not fit on them.
    """
    if num_devices == plan.layout.num_devices:
        return plan
    reliability = plan.run.reliability if plan.run else None
    cluster = resized(plan.cluster, num_devices)
    return search_plan(plan.model, cluster, plan.job, choices=narrowed({}, {}, runnable=True), reliability=reliability)


def largest_plan(plan: Plan, num_devices: int) -> Plan:
    """The plan for the most devices, of at most so many, for which there is one.

    Raises what is wrong with `num_devices` where there is none for fewer either.
    """
    problems: list[ShardwiseError] = []
    for count in range(num_devices, 0, -1):
        try:
            return planned_for(plan, count)
        except ShardwiseError as error:
            problems.append(error)
    raise problems[0]


def launch_elastic(arguments: Sequence[str], plan: Plan, max_restarts: int) -> int:
    """Run the ranks of a plan on this machine as `launch` does, and again on the processes that are left where some were lost.

    Each time they go on from the newest whole checkpoint, with a plan for at most as many devices as processes are left. A GPU
    whose rank was lost is not used again. Raises as `launch` does for what is no loss of ranks, `RunEndedError` for one after
    `max_restarts`, and what is wrong with the number of devices that are left where no plan for them is legal and fits.
    """
    devices, more = list(range(plan.layout.num_devices)), dict[str, str]()
    for number in range(1, max_restarts + 2):
        outcome = outcome_of(arguments, len(devices), more)
        if not outcome.can_go_on:
            return outcome.code()
        reason = _reason(outcome)
        if number <= max_restarts:
            left = [device for rank, device in enumerate(devices) if rank not in outcome.lost]
            what = f"{reason}; {len(left)} of {counted(len(devices), 'rank')} can go on"
            print(f"restart {number} of at most {max_restarts}: {what}", file=sys.stderr, flush=True)
            devices = left[: largest_plan(plan, len(left)).layout.num_devices]
            more = {RESTARTED: reason, **_visible(devices)}
    raise RunEndedError(
        f"{reason}; recipe.max_restarts allows {counted(max_restarts, 'restart')}, and there were as many"
    )


def _reason(outcome: Outcome) -> str:
    """What the launcher would have reported."""
    try:
        outcome.code()
    except ShardwiseError as error:
        return "; ".join(error.problems)
    return ""


def _visible(devices: Sequence[int]) -> dict[str, str]:
    """The environment in which ranks see the GPUs of those that are left alone, of those that this process may use."""
    ids = os.environ.get(VISIBLE, ",".join(map(str, range(max(devices) + 1)))).split(",")
    return {VISIBLE: ",".join(ids[device] for device in devices if device < len(ids))}
