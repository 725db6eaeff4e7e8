"""Comparison of schedules, and the JSON payloads of `shardwise schedule`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from shardwise.pipeline.messages import count_messages
from shardwise.pipeline.registry import (
    ALL_SCHEDULES,
    MEMORY_TOLERANCE,
    NO_OPTIONS,
    OrderOptions,
    activation_share,
    build_actions,
    find_problems,
    min_virtual_stages,
    resolve_schedule_name,
)
from shardwise.pipeline.timeline import Durations, PassTimes, Timeline, play_actions
from shardwise.values import Flat, InputError, MergedFields, Payload, raise_problems


class ScheduleFigures(NamedTuple):
    """Figures of a schedule: `peak_activations` of the fullest rank in micro-batches of a stage, `messages` of a step."""

    schedule: str
    stages: int
    micro_batches: int
    virtual_stages: float
    bubble: float
    peak_activations: float
    messages: int


def play_schedule(
    schedule: str, stages: int, micro_batches: int, virtual_stages: int | None = None, times: PassTimes | None = None,
    options: OrderOptions = NO_OPTIONS,
) -> Timeline:  # fmt: skip
    """Play a schedule, by any of its names, with even stages. Raises `InputError`; see `build_actions`.

    >>> play_schedule("1f1b", 4, 8).bubble
    0.375
    """
    v = min_virtual_stages(schedule, stages) if virtual_stages is None else virtual_stages
    raise_problems(find_problems(resolve_schedule_name(schedule), stages, micro_batches, v, options.round_size))
    durations = Durations.even(max(stages * v, 1), max(v, 1), times)
    return play_actions(build_actions(schedule, stages, micro_batches, v, durations, options), durations)


def summarize_timeline(timeline: Timeline) -> ScheduleFigures:
    """Return the figures of a played schedule: a row of a comparison."""
    actions = timeline.actions
    v = actions.num_virtual_stages
    return ScheduleFigures(
        schedule=actions.name, stages=actions.num_ranks, micro_batches=actions.num_micro_batches,
        virtual_stages=int(v) if v == int(v) else v, bubble=timeline.bubble, peak_activations=max(timeline.peak_activations),
        messages=sum(count_messages(actions).values()),
    )  # fmt: skip


def compare_schedules(
    stages: int, micro_batches: Sequence[int], virtual_stages: int | None = None, times: PassTimes | None = None,
    memory_limit: float | None = None,
) -> Iterator[ScheduleFigures]:  # fmt: skip
    """Yield the figures of every schedule that runs on so many stages within the memory limit, for each number of
    micro-batches.

    Schedules with several virtual stages have two of them unless another number is given. Raises `InputError` where
    none runs.
    """
    rows = 0
    for number in micro_batches:
        for name in ALL_SCHEDULES:
            v = min_virtual_stages(name, stages)
            v = virtual_stages if v > 1 and virtual_stages is not None else v
            if find_problems(name, stages, number, v):
                continue
            durations = Durations.even(stages * v, v, times)
            actions = ALL_SCHEDULES[name].actions(stages, number, v, durations, memory_limit)
            if memory_limit is None or max(activation_share(actions)) <= memory_limit * (1 + MEMORY_TOLERANCE):
                rows += 1
                yield summarize_timeline(play_actions(actions, durations))
    if not rows:
        raise InputError(
            f"stages: found {stages} with {', '.join(map(str, micro_batches))} micro-batches; no schedule runs on them "
            "within the limit; more stages or micro-batches are required"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleComparison:
    """Figures of every schedule that runs on some stages, for each number of micro-batches.

    >>> import shardwise as sw
    >>> [row.schedule for row in sw.schedules(4, 8, memory_limit=1.0).rows][:2]
    ['1f1b', 'zb_h1']
    """

    rows: tuple[ScheduleFigures, ...]


def compare_all_schedules(
    stages: int, micro_batches: Sequence[int], virtual_stages: int | None = None, times: PassTimes | None = None,
    memory_limit: float | None = None,
) -> ScheduleComparison:  # fmt: skip
    """Return the rows of `compare_schedules` as one value. Raises `InputError` where no schedule runs."""
    return ScheduleComparison(rows=tuple(compare_schedules(stages, micro_batches, virtual_stages, times, memory_limit)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleComparisonRecord(Payload):
    """Comparison of the schedules that run on some stages, for each number of micro-batches."""

    SCHEMA = "shardwise.schedule-comparison/1"
    schedules: Sequence[Annotated[dict[str, Any], MergedFields(ScheduleFigures)]]

    @classmethod
    def of(cls, comparison: ScheduleComparison) -> ScheduleComparisonRecord:
        """Return the record of compared schedules."""
        return cls(schedules=[row._asdict() for row in comparison.rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord(Payload):
    """Actions that a rank runs together, with their start and end."""

    actions: Sequence[str]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRankRecord(Payload):
    """Rank of a timeline: its waiting time, its peak in micro-batches, that for weight gradients alone, and its slots."""

    rank: int
    idle_s: float
    wait_s: float
    peak_activations: float
    peak_waiting: float
    slots: Sequence[SlotRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRecord(Payload):
    """Number of messages from one rank to another."""

    source: int
    target: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassDurationsRecord(Payload):
    """Seconds of the passes of each virtual stage, and of a message."""

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    backward: Sequence[float]
    together: Sequence[float] | None
    message: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineRecord(Payload):
    """Timeline of a schedule: its figures, its ranks, and the times of every slot."""

    SCHEMA = "shardwise.schedule/1"
    figures: Annotated[ScheduleFigures, Flat]
    placement: str
    durations_s: PassDurationsRecord
    makespan_s: float
    local_bubble: float
    idle_fraction: float
    ranks: Sequence[ScheduleRankRecord]
    messages_between: Sequence[MessagesRecord]

    @classmethod
    def of(cls, timeline: Timeline) -> TimelineRecord:
        """Return the record of a played schedule."""
        durations, idle, waits, actions = timeline.durations, timeline.idle(), timeline.waits(), timeline.actions
        return cls.from_attributes(
            timeline, figures=summarize_timeline(timeline), placement=actions.placement.name, makespan_s=timeline.makespan,
            durations_s=PassDurationsRecord.from_attributes(
                durations, backward=durations.full_backward, together=durations.overlapped
            ),
            ranks=[
                ScheduleRankRecord(
                    rank=rank, idle_s=idle[rank], wait_s=waits[rank], peak_activations=timeline.peak_activations[rank],
                    peak_waiting=timeline.peak_waiting[rank],
                    slots=[
                        SlotRecord(actions=list(map(str, slot)), start_s=start, end_s=end)
                        for slot, start, end in zip(actions.order[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
                    ],
                )
                for rank in range(actions.num_ranks)
            ],
            messages_between=[
                MessagesRecord(source=source, target=target, messages=count)
                for (source, target), count in sorted(count_messages(actions).items())
            ],
        )  # fmt: skip
