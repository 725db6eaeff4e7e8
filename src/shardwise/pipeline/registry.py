"""Schedules by name: the table of all of them, the natural one for a number of stages, and action lists by name.

`ALL_SCHEDULES` has every schedule, `SCHEDULES` those with closed forms, which layouts, legality, prices, searches,
explanations and help read. An unknown name is an error; no other schedule takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

from shardwise.pipeline import dualpipe, schedule_definition, zero_bubble, zero_bubble_search
from shardwise.pipeline.actions import ActionList
from shardwise.pipeline.schedule_definition import Schedule
from shardwise.pipeline.timeline import Durations, peak_in_flight
from shardwise.values import InputError, Value, describe_unknown, lookup, raise_problems, where

__all__ = [
    "ALL_SCHEDULES", "MAX_PASSES", "MEMORY_TOLERANCE", "NATURAL", "NO_OPTIONS", "SCHEDULES", "OrderOptions", "activation_share",
    "build_actions", "check_memory_limit", "default_searched_schedules", "find_problems", "get_schedule", "in_flight_split",
    "min_virtual_stages", "natural_schedule", "pipeline_schedule_names", "resolve_schedule_name", "schedule_names",
    "schedule_names_by_alias",
]  # fmt: skip


# In the order in which they are listed.
ALL_SCHEDULES: dict[str, Schedule] = {
    "none": schedule_definition.NO_PIPELINE,
    "afab": schedule_definition.GPIPE,
    "1f1b": schedule_definition.ONE_F_ONE_B,
    "interleaved": schedule_definition.INTERLEAVED,
    "zb_h1": zero_bubble.ZB_H1,
    "zb_h2": zero_bubble.ZB_H2,
    "dualpipe": dualpipe.DUALPIPE,
    "looped_bfs": schedule_definition.LOOPED_BFS,
    "naive": schedule_definition.NAIVE,
    "interleaved_breadth_first": schedule_definition.BREADTH_FIRST,
    "interleaved_zb": zero_bubble.INTERLEAVED_ZB,
    "zb_v": zero_bubble.ZB_V,
    "zb_auto": zero_bubble_search.ZB_AUTO,
    "dualpipe_v": dualpipe.DUALPIPE_V,
}
SCHEDULES: dict[str, Schedule] = {
    name: schedule for name, schedule in ALL_SCHEDULES.items() if schedule.has_closed_forms
}
NATURAL = "natural"  # in a search: for each row the natural one that goes with its stages


def get_schedule(name: str) -> Schedule:
    """Return a schedule with closed forms by name, or `NATURAL`. Raises `InputError` that lists the names.

    >>> get_schedule("zb_h1").min_micro_batches(4, 1)
    4
    """
    return _natural_schedule() if name == NATURAL else lookup(SCHEDULES, name, "schedule")


def resolve_schedule_name(text: str) -> str:
    """Return the name here of a schedule that has an action list, by that name or by one of papers and engines.

    Case, dashes and underscores do not count. Raises `InputError` that lists the names.

    >>> resolve_schedule_name("Interleaved1F1B"), resolve_schedule_name("GPipe"), resolve_schedule_name("ZB-H1")
    ('interleaved', 'afab', 'zb_h1')
    """
    names = {
        _normalize_name(alias): name for name, schedule in ALL_SCHEDULES.items() for alias in (name, *schedule.aliases)
    }
    if _normalize_name(text) not in names:
        raise InputError(f"schedule: {describe_unknown(text, ALL_SCHEDULES)}")
    return names[_normalize_name(text)]


def _normalize_name(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def schedule_names() -> tuple[str, ...]:
    """Return all names that a layout may have."""
    return tuple(SCHEDULES)


def pipeline_schedule_names() -> tuple[str, ...]:
    """Return the names of the schedules that take a pipeline."""
    return tuple(name for name, schedule in SCHEDULES.items() if not schedule.supports(1, 1))


def default_searched_schedules() -> tuple[str, ...]:
    """Return the schedules that a search tries by default."""
    return (NATURAL, *(name for name, schedule in SCHEDULES.items() if schedule.searched))


def natural_schedule(pp: int, num_virtual_stages: int) -> str:
    """Return the schedule that goes with the stages when none is named.

    >>> natural_schedule(1, 1), natural_schedule(4, 1), natural_schedule(4, 2)
    ('none', '1f1b', 'interleaved')
    """
    return next(
        name for name, schedule in SCHEDULES.items() if schedule.natural and schedule.supports(pp, num_virtual_stages)
    )


def schedule_names_by_alias() -> Mapping[str, str]:
    """Map every name and alias of the schedules that take a pipeline to the name here."""
    return {alias: name for name in pipeline_schedule_names() for alias in (name, *SCHEDULES[name].aliases)}


def in_flight_split(schedule: str, pp: Value, num_micro_batches: Value) -> Value:
    """Return the micro-batches of which any stage holds something: p in ZB-H1, 2p - 1 in ZB-H2, p + 1 in DualPipe.

    Later stages hold more of them for their weight gradients alone. Raises `InputError` for a schedule that does not
    split the backward pass, whose stages hold different numbers.
    """
    split = {name: candidate for name, candidate in SCHEDULES.items() if candidate.splits_backward}
    return lookup(split, schedule, "schedule").in_flight(pp, 1, num_micro_batches, 0)


@cache
def _natural_schedule() -> Schedule:
    """Return one schedule of all natural ones, each where it supports the stages. None of them splits the backward pass."""
    natural_schedules = [schedule for schedule in SCHEDULES.values() if schedule.natural]
    names = [field.name for field in fields(Schedule) if callable(getattr(natural_schedules[0], field.name))]
    names.remove("actions")
    return replace(
        natural_schedules[0],
        **{**{name: _select_by_stages(natural_schedules, name) for name in names}, "supports": lambda p, v: True},  # type: ignore[arg-type]
    )


def _select_by_stages(schedules: Sequence[Schedule], name: str) -> Callable[..., Value]:
    """Return a function that takes the value of the schedule which supports the stages, for numbers and arrays."""
    functions = [getattr(schedule, name) for schedule in schedules]

    def chosen_by_stages(p: Value, v: Value, *rest: Any) -> Value:
        selected = functions[-1](p, v, *rest)
        for schedule, function in zip(schedules[:-1], functions, strict=False):
            selected = where(schedule.supports(p, v), function(p, v, *rest), selected)
        return selected

    return functions[0] if len(set(functions)) == 1 else chosen_by_stages


MAX_PASSES = 300_000  # of a kind: a list of them takes 0.3 GB, and is played in 6 seconds
MEMORY_TOLERANCE = 1e-9  # of a memory limit, for what rounding leaves of p / p


class OrderOptions(NamedTuple):
    """Options of the order of actions, where a schedule leaves a choice.

    `memory_limit`: activations that a rank may hold, in units of what 1F1B's first stage does (1.0 is p micro-batches).
    `round_size`: micro-batches of a virtual stage in a row, for interleaved schedules.
    """

    memory_limit: float | None = None
    round_size: int | None = None


NO_OPTIONS = OrderOptions()


def build_actions(
    name: str, p: int, m: int, v: int | None = None, durations: Durations | None = None, options: OrderOptions = NO_OPTIONS
) -> ActionList:  # fmt: skip
    """Return the action list of a schedule, by any of its names, on p ranks with m micro-batches and v virtual stages each.

    v None: the fewest that the schedule supports. Raises `InputError` that says what the schedule requires.

    >>> [str(slot[0]) for slot in build_actions("gpipe", 2, 2).order[0]]
    ['0F0', '0F1', '0B0', '0B1']
    """
    name = resolve_schedule_name(name)
    v = min_virtual_stages(name, p) if v is None else v
    raise_problems(find_problems(name, p, m, v, options.round_size))
    rounds = {} if options.round_size is None else {"round_size": options.round_size}
    actions = ALL_SCHEDULES[name].actions(p, m, v, durations, options.memory_limit, **rounds)
    check_memory_limit(actions, options.memory_limit)
    return actions


def check_memory_limit(actions: ActionList, memory_limit: float | None) -> None:
    """Refuse a list in which a rank holds more than the limit. Raises `InputError`."""
    share = activation_share(actions)
    largest = max(share)
    if memory_limit is not None and largest > memory_limit * (1 + MEMORY_TOLERANCE):
        raise InputError(
            f"memory limit: rank {share.index(largest)} of {actions.name} holds {largest:.3g} times what 1F1B's first stage "
            f"does; the limit is {memory_limit:.3g}; zb_auto keeps to any limit from {1 / actions.num_ranks:.3g} on"
        )


def activation_share(actions: ActionList) -> list[float]:
    """Return the peak activations of each rank, in units of what 1F1B's first stage holds: p micro-batches."""
    return [peak.peak / actions.num_virtual_stages / actions.num_ranks for peak in peak_in_flight(actions)]


def min_virtual_stages(name: str, p: int) -> int:
    """Return the fewest virtual stages per rank, of 1 and 2, that a schedule supports; 1 if neither."""
    return next((v for v in (1, 2) if ALL_SCHEDULES[resolve_schedule_name(name)].supports(p, v)), 1)


def find_problems(name: str, p: int, m: int, v: int, round_size: int | None = None) -> list[str]:
    """Describe what is wrong with stages and micro-batches for a schedule; an empty list where it runs."""
    counts = {
        "stages": p, "micro-batches": m, "virtual stages": v, "round size": 1 if round_size is None else round_size,
    }  # fmt: skip
    problems = [f"{quantity}: found {n}; at least 1 is required" for quantity, n in counts.items() if n < 1]
    if problems:
        return problems
    if p * v * m > MAX_PASSES:
        return [
            f"stages: found {p * v:,} for {m:,} micro-batches; at most {MAX_PASSES:,} passes of each kind are listed"
        ]
    schedule = ALL_SCHEDULES[name]
    if round_size is not None and not schedule.takes_round_size:
        takers = ", ".join(taker for taker, candidate in ALL_SCHEDULES.items() if candidate.takes_round_size)
        return [
            f"round size: found {round_size} for {name}, which has no rounds; leave it out, or take one of {takers}"
        ]
    if not schedule.supports(p, v) or (schedule.bidirectional and p % 2):
        fitting = [str(n) for n in range(1, 5) if schedule.supports(p, n)]
        requirement = f"{' or '.join(fitting)} virtual stages on each" if fitting else "another number of stages"
        even = ", of an even number of stages," if schedule.bidirectional else ""
        return [
            f"stages: {name}{even} does not run on {p} stages with {v} virtual stages on each; {requirement} is required"
        ]
    fewest = schedule.min_micro_batches(p, v) if schedule.requires_min else 1
    multiple = schedule.micro_batch_multiple(p, v)
    if round_size is None and (m < fewest or m % multiple):
        in_multiples = f" in multiples of {multiple}" if multiple > 1 else ""
        return [
            f"micro-batches: found {m}; {name} requires at least {max(fewest, multiple)}{in_multiples} on {p} stages"
        ]
    return []
