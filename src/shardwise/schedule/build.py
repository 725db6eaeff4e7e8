"""Action lists by the name of their schedule."""

from __future__ import annotations

from shardwise.errors import InputError, require
from shardwise.schedule.action import ActionList
from shardwise.schedule.durations import Durations
from shardwise.schedule.held import held_by_rank
from shardwise.schedule.schedule import ACTION_LISTS, schedule_name

MOST_PASSES = 1_000_000  # of a kind: a list of them takes a gigabyte
TOLERANCE = 1e-9  # of a memory limit, for what rounding leaves of p / p


def build(
    name: str, p: int, m: int, v: int | None = None, durations: Durations | None = None,
    memory_limit: float | None = None, *, round_size: int | None = None,
) -> ActionList:  # fmt: skip
    """The action list of a schedule, by any of its names, on p ranks with m micro-batches and v virtual stages on each rank.

    v is the fewest that the schedule goes with where it is None. `memory_limit`: activations that a rank may hold, in those that
    1F1B's first stage does (1.0 is p micro-batches). `round_size`: micro-batches of a virtual stage in a row, for interleaved
    schedules. Raises `InputError` that says what the schedule requires.

    >>> [str(slot[0]) for slot in build("gpipe", 2, 2).order[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    found = unlimited(name, p, m, v, durations, memory_limit, round_size=round_size)
    check_limit(found, memory_limit)
    return found


def check_limit(actions: ActionList, memory_limit: float | None) -> None:
    """Refuse a list of which a rank holds more than the limit. Raises `InputError`."""
    share = held_share(actions)
    most = max(share)
    if memory_limit is not None and most > memory_limit * (1 + TOLERANCE):
        raise InputError(
            f"memory limit: rank {share.index(most)} of {actions.name} holds {most:.3g} times what 1F1B's first stage does; "
            f"the limit is {memory_limit:.3g}; zb_auto keeps to any limit from {1 / actions.num_ranks:.3g} on"
        )


def unlimited(
    name: str, p: int, m: int, v: int | None = None, durations: Durations | None = None,
    memory_limit: float | None = None, *, round_size: int | None = None,
) -> ActionList:  # fmt: skip
    """The same, where only a schedule that plans with the memory limit keeps to it."""
    name = schedule_name(name)
    v = fewest_virtual_stages(name, p) if v is None else v
    require(problems(name, p, m, v, round_size))
    schedule = ACTION_LISTS[name]
    rounds = {} if round_size is None else {"round_size": round_size}
    return schedule.actions(p, m, v, durations, memory_limit, **rounds)


def held_share(actions: ActionList) -> list[float]:
    """The most that each rank holds, in what 1F1B's first stage does: p micro-batches."""
    return [held.peak / actions.num_virtual_stages / actions.num_ranks for held in held_by_rank(actions)]


def fewest_virtual_stages(name: str, p: int) -> int:
    """The fewest virtual stages of a rank with which a schedule goes; 1 where it goes with none of these."""
    return next((v for v in (1, 2) if ACTION_LISTS[schedule_name(name)].goes_with(p, v)), 1)


def problems(name: str, p: int, m: int, v: int, round_size: int | None = None) -> list[str]:
    """What is wrong with stages and micro-batches for a schedule, in words; nothing where it runs."""
    counts = {
        "stages": p,
        "micro-batches": m,
        "virtual stages": v,
        "round size": 1 if round_size is None else round_size,
    }
    found = [f"{what}: found {n}; at least 1 is required" for what, n in counts.items() if n < 1]
    if found:
        return found
    if p * v * m > MOST_PASSES:
        return [
            f"stages: found {p * v:,} for {m:,} micro-batches; at most {MOST_PASSES:,} passes of each kind are listed"
        ]
    schedule = ACTION_LISTS[name]
    if round_size is not None and not schedule.takes_round_size:
        takers = ", ".join(other for other, one in ACTION_LISTS.items() if one.takes_round_size)
        return [
            f"round size: found {round_size} for {name}, which has no rounds; leave it out, or take one of {takers}"
        ]
    if not schedule.goes_with(p, v) or (schedule.both_ends and p % 2):
        fitting = [str(n) for n in range(1, 5) if schedule.goes_with(p, n)]
        wants = f"{' or '.join(fitting)} virtual stages on each" if fitting else "another number of stages"
        even = ", of an even number of stages," if schedule.both_ends else ""
        return [f"stages: {name}{even} does not run on {p} stages with {v} virtual stages on each; {wants} is required"]
    fewest, multiple = (schedule.fewest(p, v) if schedule.needs_fewest else 1), schedule.multiple(p, v)
    if round_size is None and (m < fewest or m % multiple):
        of = f" in multiples of {multiple}" if multiple > 1 else ""
        return [f"micro-batches: found {m}; {name} requires at least {max(fewest, multiple)}{of} on {p} stages"]
    return []
