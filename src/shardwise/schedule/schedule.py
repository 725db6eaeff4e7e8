"""Schedules of pipelines: the order in which the stages take their micro-batches. One table.

Layouts, legality, costs, searches, explanations and help read it. A name that is not there is an error, never another schedule.
AFAB and 1F1B run whole backward passes, interleaved 1F1B those of several virtual stages. ZB-H1 and ZB-H2 split the
backward pass: the weights' gradients (W) wait, and fill what would be idle. DualPipe sends micro-batches from both ends, so
each device holds two stages, and runs a forward and a backward pass of different micro-batches together.

Sources: those of `closed_form`; Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2 and table 1; DeepSeek-AI 2024,
"DeepSeek-V3 Technical Report", table 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from shardwise.errors import chosen
from shardwise.schedule.closed_form import in_flight_1f1b, in_flight_afab, in_flight_interleaved
from shardwise.symbolic import Value, maximum, minimum, where


class Passes(NamedTuple):
    """Seconds of one micro-batch on one stage, with the traffic that shows.

    `backward_s` is the whole backward pass with what it recomputes, `weight_s` the part of it for the weights' gradients
    (0 where nobody asks for it), `overlapped_s` a forward and a backward pass that run together.
    """

    forward_s: Value
    backward_s: Value
    weight_s: Value = 0.0
    overlapped_s: Value = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """All that a schedule decides: p stages of v virtual ones, m micro-batches, a stage counted from 0; numbers or arrays.

    Legality: `goes_with(p, v)` says whether it runs on so many stages, `fewest(p, v)` is the least number of micro-batches with
    which its closed forms hold, and they come in a `multiple(p, v)`. `natural`: it is taken where none is named and it goes with
    the stages; `searched`: a search tries it besides, without being asked.

    Cost: `bubble_s(p, v, passes)` are seconds that a stage waits in a step, for the first and the last micro-batch and between,
    never less than nothing; `bubble` writes it for people. It assumes stages that take alike, and of ZB-H2 an optimizer step
    that does not wait for all stages (Qi et al., section 4). `num_overlapped(p, v, m)`: forward passes of a device that run
    together with a backward pass. `splits_backward`: the weights' gradients wait; `both_ends`: micro-batches come in from both
    ends.

    Memory: `in_flight(p, v, m, stage)` are the micro-batches of which a stage holds something, of which `num_waiting(p, v, m,
    stage)` may hold only what their weights' gradients are made of.

    `aliases` are other names for it, as papers and engines write them.
    """

    goes_with: Callable[[Value, Value], Value]
    bubble_s: Callable[[Value, Value, Passes], Value]
    bubble: str
    in_flight: Callable[[Value, Value, Value, Value], Value]
    num_waiting: Callable[[Value, Value, Value, Value], Value] = lambda p, v, m, stage: 0
    num_overlapped: Callable[[Value, Value, Value], Value] = lambda p, v, m: 0
    fewest: Callable[[Value, Value], Value] = lambda p, v: 1
    multiple: Callable[[Value, Value], Value] = lambda p, v: 1
    natural: bool = False
    searched: bool = False
    splits_backward: bool = False
    both_ends: bool = False
    aliases: tuple[str, ...] = ()


def _whole_passes_s(p: Value, v: Value, passes: Passes) -> Value:
    return (passes.forward_s + passes.backward_s) * ((p - 1) / v)


def _one_then_one(p: Value, v: Value, m: Value, stage: Value) -> Value:
    """1F1B, interleaved where there are virtual stages; 1 without a pipeline."""
    return where(v > 1, in_flight_interleaved(p, m, v, stage), in_flight_1f1b(p, m, stage))


def _alone(p: Value, v: Value) -> Value:
    return (p > 1) & (v == 1)


_1F1B = Schedule(goes_with=_alone, bubble_s=_whole_passes_s, bubble="(p - 1) · (F + B) / v", in_flight=_one_then_one)
SCHEDULES: dict[str, Schedule] = {
    "none": replace(_1F1B, goes_with=lambda p, v: p == 1, natural=True),
    "afab": replace(_1F1B, in_flight=lambda p, v, m, stage: in_flight_afab(m), aliases=("gpipe",)),
    "1f1b": replace(_1F1B, natural=True),
    "interleaved": replace(_1F1B, goes_with=lambda p, v: v > 1, multiple=lambda p, v: p, natural=True),
    # On stage i i micro-batches wait of p in flight, p M_B on the first and (p - i) M_B + i M_W in Qi et al.'s words, who call B
    # what is left of the backward pass without W.
    "zb_h1": Schedule(
        goes_with=_alone, bubble="(p - 1) · (F + B - 2W)",
        bubble_s=lambda p, v, t: (p - 1) * maximum(t.forward_s + t.backward_s - 2.0 * t.weight_s, 0.0),
        in_flight=lambda p, v, m, stage: minimum(m, p), num_waiting=lambda p, v, m, stage: minimum(m, stage),
        fewest=lambda p, v: p, splits_backward=True, aliases=("zb-h1", "zb1p"),
    ),
    # (2p - 2i - 1) M_B + 2i M_W
    "zb_h2": Schedule(
        goes_with=_alone, bubble="(p - 1) · (F + B - 3W)",
        bubble_s=lambda p, v, t: (p - 1) * maximum(t.forward_s + t.backward_s - 3.0 * t.weight_s, 0.0),
        in_flight=lambda p, v, m, stage: minimum(m, 2 * p - 1), num_waiting=lambda p, v, m, stage: minimum(m, 2 * stage),
        fewest=lambda p, v: 2 * p - 1, splits_backward=True, aliases=("zb-h2", "zb2p"),
    ),
    # Waiting on the devices i and p - 1 - i, and pairs on those in the middle, as counted in the published implementation's
    # order of passes, which requires 2p micro-batches. The middle waits for as long as the closed form says; devices at the ends
    # have fewer pairs and wait less.
    "dualpipe": Schedule(
        goes_with=_alone, bubble="(p/2 - 1) · (F&B + B - 3W)",
        bubble_s=lambda p, v, t: (p / 2.0 - 1.0) * maximum(t.overlapped_s + t.backward_s - 3.0 * t.weight_s, 0.0),
        in_flight=lambda p, v, m, stage: minimum(m, p + 1),
        num_waiting=lambda p, v, m, stage: minimum(stage, p - 1 - stage) + 1, num_overlapped=lambda p, v, m: m - p - 1,
        fewest=lambda p, v: 2 * p, multiple=lambda p, v: 2, splits_backward=True, both_ends=True,
    ),
}  # fmt: skip
NATURAL = "natural"  # in a search: for each row the natural one that goes with its stages


def schedule_of(name: str) -> Schedule:
    """A schedule by name; `NATURAL` is one too. Raises `InputError` that lists the names.

    >>> schedule_of("zb_h1").fewest(4, 1)
    4
    """
    return _natural() if name == NATURAL else chosen(SCHEDULES, name, "schedule")


def schedule_names() -> tuple[str, ...]:
    """All that a layout may name."""
    return tuple(SCHEDULES)


def pipeline_names() -> tuple[str, ...]:
    """Those of them that take a pipeline."""
    return tuple(name for name, schedule in SCHEDULES.items() if not schedule.goes_with(1, 1))


def searched_schedules() -> tuple[str, ...]:
    """What a search tries where nobody asks for a schedule."""
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


def _natural() -> Schedule:
    """What the natural schedules are together: each where it goes with the stages. None of them splits the backward pass."""
    every = [schedule for schedule in SCHEDULES.values() if schedule.natural]
    names = [one.name for one in fields(Schedule) if callable(getattr(every[0], one.name))]
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
