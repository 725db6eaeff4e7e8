"""Schedules of pipelines: the order in which the stages take their micro-batches. One table.

Each is a file of this room: its action list and, where there are some, its closed forms. `ACTION_LISTS` has all of them,
`SCHEDULES` those with closed forms, which layouts, legality, costs, searches, explanations and help read. A name that is
not there is an error, never another schedule. AFAB and 1F1B run whole backward passes, interleaved 1F1B those of several
virtual stages. ZB-H1 and ZB-H2 split the backward pass: the weights' gradients (W) wait, and fill what would be idle.
DualPipe sends micro-batches from both ends, so each device holds two stages, and runs a forward and a backward pass of
different micro-batches together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from shardwise.errors import InputError, chosen
from shardwise.names import unknown
from shardwise.schedule import (
    afab,
    dualpipe,
    dualpipe_v,
    interleaved,
    interleaved_breadth_first,
    interleaved_zb,
    looped_bfs,
    naive,
    none,
    one_f_one_b,
    zb_auto,
    zb_h1,
    zb_h2,
    zb_v,
)
from shardwise.schedule.form import Passes, Schedule
from shardwise.symbolic import Value, where

__all__ = [
    "ACTION_LISTS", "NATURAL", "SCHEDULES", "Passes", "Schedule", "in_flight_split", "natural_schedule", "pipeline_names",
    "pipelines_by_any_name", "schedule_name", "schedule_names", "schedule_of", "searched_schedules",
]  # fmt: skip

# In the order in which they are listed.
ACTION_LISTS: dict[str, Schedule] = {
    "none": none.SCHEDULE,
    "afab": afab.SCHEDULE,
    "1f1b": one_f_one_b.SCHEDULE,
    "interleaved": interleaved.SCHEDULE,
    "zb_h1": zb_h1.SCHEDULE,
    "zb_h2": zb_h2.SCHEDULE,
    "dualpipe": dualpipe.SCHEDULE,
    "looped_bfs": looped_bfs.SCHEDULE,
    "naive": naive.SCHEDULE,
    "interleaved_breadth_first": interleaved_breadth_first.SCHEDULE,
    "interleaved_zb": interleaved_zb.SCHEDULE,
    "zb_v": zb_v.SCHEDULE,
    "zb_auto": zb_auto.SCHEDULE,
    "dualpipe_v": dualpipe_v.SCHEDULE,
}
SCHEDULES: dict[str, Schedule] = {name: schedule for name, schedule in ACTION_LISTS.items() if schedule.priced}
NATURAL = "natural"  # in a search: for each row the natural one that goes with its stages


def schedule_of(name: str) -> Schedule:
    """A schedule by name; `NATURAL` is one too. Raises `InputError` that lists the names.

    >>> schedule_of("zb_h1").fewest(4, 1)
    4
    """
    return _natural() if name == NATURAL else chosen(SCHEDULES, name, "schedule")


def schedule_name(text: str) -> str:
    """The name here of a schedule that has an action list, by that name or by one that papers and engines have for it.

    Case, dashes and underscores do not count. Raises `InputError` that lists the names.

    >>> schedule_name("Interleaved1F1B"), schedule_name("GPipe"), schedule_name("ZB-H1")
    ('interleaved', 'afab', 'zb_h1')
    """
    names = {_plain(alias): name for name, one in ACTION_LISTS.items() for alias in (name, *one.aliases)}
    if _plain(text) not in names:
        raise InputError(f"schedule: {unknown(text, ACTION_LISTS)}")
    return names[_plain(text)]


def _plain(text: str) -> str:
    return "".join(character for character in text.casefold() if character.isalnum())


def schedule_names() -> tuple[str, ...]:
    """All that a layout may name."""
    return tuple(SCHEDULES)


def pipeline_names() -> tuple[str, ...]:
    """Those of them that take a pipeline."""
    return tuple(name for name, schedule in SCHEDULES.items() if not schedule.goes_with(1, 1))


def searched_schedules() -> tuple[str, ...]:
    """The schedules that a search tries by default."""
    return (NATURAL, *(name for name, schedule in SCHEDULES.items() if schedule.searched))


def natural_schedule(pp: int, num_virtual_stages: int) -> str:
    """The schedule that goes with the stages when none is named.

    >>> natural_schedule(1, 1), natural_schedule(4, 1), natural_schedule(4, 2)
    ('none', '1f1b', 'interleaved')
    """
    return next(name for name, one in SCHEDULES.items() if one.natural and one.goes_with(pp, num_virtual_stages))


def pipelines_by_any_name() -> Mapping[str, str]:
    """The name here of every schedule that takes a pipeline, by that name and by those that others have for it."""
    return {alias: name for name in pipeline_names() for alias in (name, *SCHEDULES[name].aliases)}


def in_flight_split(schedule: str, pp: Value, num_micro_batches: Value) -> Value:
    """Micro-batches of which any stage holds something: p in ZB-H1, 2p - 1 in ZB-H2, p + 1 in DualPipe.

    The later the stage, the more of them only wait for their weights' gradients. Raises `InputError` for a schedule that does not
    split the backward pass, whose stages hold different numbers.
    """
    split = {name: one for name, one in SCHEDULES.items() if one.splits_backward}
    return chosen(split, schedule, "schedule").in_flight(pp, 1, num_micro_batches, 0)


@cache
def _natural() -> Schedule:
    """What the natural schedules are together: each where it goes with the stages. None of them splits the backward pass."""
    every = [schedule for schedule in SCHEDULES.values() if schedule.natural]
    names = [one.name for one in fields(Schedule) if callable(getattr(every[0], one.name)) and one.name != "actions"]
    return replace(
        every[0],
        **{**{name: _of_each(every, name) for name in names}, "goes_with": lambda p, v: True},  # type: ignore[arg-type]
    )


def _of_each(schedules: Sequence[Schedule], name: str) -> Callable[..., Value]:
    """A function of schedules, each for the stages that its own goes with."""
    functions = [getattr(schedule, name) for schedule in schedules]

    def chosen_by_stages(p: Value, v: Value, *rest: Any) -> Value:
        found = functions[-1](p, v, *rest)
        for schedule, function in zip(schedules[:-1], functions, strict=False):
            found = where(schedule.goes_with(p, v), function(p, v, *rest), found)
        return found

    return functions[0] if len(set(functions)) == 1 else chosen_by_stages
