"""`schedule`: the order in which a pipeline's stages take their micro-batches, checked, played and drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardwise import pipeline, present
from shardwise.present import charts
from shardwise.present.exports import picture, text_file
from shardwise.present.verb import Argument, Mode, verb
from shardwise.values import InputError, argument_label, describe_unknown, parse_at_least, parse_count, read_text

if TYPE_CHECKING:
    from shardwise.pipeline import PassTimes, ScheduleComparison, Timeline

COMPARE = "compare"
TIME_KEYS = ("f", "b", "w", "p2p", "fb")
SINGLE_SCHEDULE_FLAGS = ("draw", "trace", "csv", "round_size")  # that `compare` refuses

Stages = Annotated[
    int | str | None,
    Argument(
        flag="--stages", group="pipeline", metavar="N", help="ranks of the pipeline; a .csv file has its own"
    ),
]  # fmt: skip
MicroBatches = Annotated[
    int | str | Sequence[int] | None,
    Argument(
        flag="--micro-batches", group="pipeline", metavar="N[,N...]",
        help="micro-batches of a step; compare takes several",
    ),
]  # fmt: skip
VirtualStages = Annotated[
    int | str | None,
    Argument(
        flag="--virtual-stages", group="pipeline", metavar="N",
        help="virtual stages of each rank (default: the fewest that the schedule takes)",
    ),
]  # fmt: skip
Times = Annotated[
    "str | PassTimes | None",
    Argument(
        flag="--times", group="pipeline", metavar="K=S[,...]",
        help="seconds of a rank's part of the model: f forward, b backward for activations, w for weights (b + w is the whole "
        "backward pass; b without w is the whole one, halved where it is split), fb a forward and a backward pass together, "
        "p2p a message (default: f=1,b=1,w=1)",
    ),
]  # fmt: skip
MemoryLimit = Annotated[
    float | str | None,
    Argument(
        flag="--memory-limit", group="pipeline", metavar="X",
        help="activations that a rank may hold, in those of 1F1B's first stage (1.0: as many micro-batches as stages); "
        "zb_auto plans with it, others are refused above it",
    ),
]  # fmt: skip


def schedules(
    stages: Stages = None, micro_batches: MicroBatches = None, virtual_stages: VirtualStages = None, times: Times = None,
    memory_limit: MemoryLimit = None,
) -> ScheduleComparison:  # fmt: skip
    """Return all schedules that run on so many stages within the memory limit, for each number of micro-batches.

    Arguments are those of `schedule`; `micro_batches` may be several. Raises `InputError` if no schedule runs.

    >>> import shardwise as sw
    >>> {row.schedule: row.bubble for row in sw.schedules(4, 8).rows}["1f1b"]
    0.375
    """
    num_stages, numbers = _parse_sizes(stages, micro_batches)
    return pipeline.compare_all_schedules(
        num_stages, numbers, _parse_optional_count("virtual_stages", virtual_stages), parse_times(times),
        _parse_limit(memory_limit),
    )  # fmt: skip


def _refuse_single_schedule_flags(arguments: Mapping[str, Any]) -> None:
    flags = [f"--{name.replace('_', '-')}" for name in SINGLE_SCHEDULE_FLAGS if name in arguments]
    if flags:
        raise InputError(f"{', '.join(flags)}: of one schedule, and compare has them all; name one, such as 1f1b")


def _timeline_chart(timeline: Timeline) -> charts.Chart:
    return charts.timeline_chart(timeline)


def _trace_text(timeline: Timeline) -> str:
    return present.schedule_trace_text(timeline) + "\n"


@verb(
    description="""The order in which the stages of a pipeline run the passes of micro-batches: F forward, B the whole backward
pass, I and W its parts for activations and for weights. Played with times for each pass: the bubble (idle over ideal time),
what each rank holds, the messages between ranks. NAME is a schedule, a .csv file in PyTorch's format (a row for each rank,
cells such as 0F3), or `compare` for all of them.""",
    examples=(
        "shardwise schedule 1f1b --stages 4 --micro-batches 8 --draw 1f1b.svg --csv mine.csv",
        "shardwise schedule mine.csv --times f=1,b=2",
        "shardwise schedule interleaved --stages 4 --micro-batches 16 --virtual-stages 2 --round-size 8",
        "shardwise schedule zb_auto --stages 4 --micro-batches 8 --times f=1,b=1,w=1,p2p=0.1 --memory-limit 1.0 --trace out.json",
        "shardwise schedule compare --stages 4 --micro-batches 8,16",
    ),
    exports=(
        picture("--draw", "draw the timeline and what ranks hold", _timeline_chart),
        text_file("--trace", "write a trace for Chrome and Perfetto (JSON)", _trace_text),
        text_file(
            "--csv", "write the list in the CSV format of PyTorch's pipelining",
            lambda timeline: pipeline.to_csv(timeline.actions),
        ),
    ),
    modes=(
        Mode(
            function=schedules, applies=lambda arguments: arguments["name"] == COMPARE,
            check=_refuse_single_schedule_flags,
        ),
    ),
    group_order=("pipeline", "output"),
)  # fmt: skip
def schedule(
    name: Annotated[
        str,
        Argument(
            group="pipeline", metavar="NAME", help="a schedule, such as 1f1b or zb_v; a .csv file; or compare"
        ),
    ],
    stages: Stages = None,
    micro_batches: MicroBatches = None,
    virtual_stages: VirtualStages = None,
    round_size: Annotated[
        int | str | None,
        Argument(
            flag="--round-size", group="pipeline", metavar="N",
            help="micro-batches of a virtual stage in a row, for interleaved schedules: as many as stages is depth-first (the "
            "default), all of them breadth-first",
        ),
    ] = None,
    times: Times = None,
    memory_limit: MemoryLimit = None,
) -> Timeline:  # fmt: skip
    """Return a pipeline schedule, played: start and end of each pass, the bubble, what each rank holds.

    `name` is a schedule or a .csv file in PyTorch's format, which has its own sizes. `times` are the seconds of a rank's part of
    the model ("f=1,b=1,w=1,p2p=0.1"), by default 1 of each pass. `memory_limit`: activations that a rank may hold, in those of
    1F1B's first stage. Raises `InputError` for an unknown schedule, and for sizes or a list that it cannot run.

    >>> import shardwise as sw
    >>> timeline = sw.schedule("1f1b", stages=4, micro_batches=8)
    >>> timeline.bubble, timeline.peak_activations
    (0.375, (4.0, 3.0, 2.0, 1.0))
    """
    if name.casefold().endswith(".csv"):
        sizes = {
            "stages": stages, "micro_batches": micro_batches, "virtual_stages": virtual_stages, "round_size": round_size,
        }  # fmt: skip
        timeline = _play_file(name, sizes, parse_times(times), _parse_limit(memory_limit))
    else:
        num_stages, (num_micro_batches, *more_numbers) = _parse_sizes(stages, micro_batches)
        if more_numbers:
            raise InputError(
                f"{argument_label('micro_batches')}: found {micro_batches!r}; one number, or `schedule compare`, is required"
            )
        timeline = pipeline.play_schedule(
            name, num_stages, num_micro_batches, _parse_optional_count("virtual_stages", virtual_stages), parse_times(times),
            pipeline.OrderOptions(_parse_limit(memory_limit), _parse_optional_count("round_size", round_size)),
        )  # fmt: skip
    return replace(timeline, has_default_times=times is None)


MAX_ACTION_LIST_BYTES = 20_000_000  # PyTorch's lists of the largest pipelines have less


def _play_file(name: str, sizes: Mapping[str, Any], times: PassTimes, memory_limit: float | None) -> Timeline:
    surplus = [argument_label(size) for size, value in sizes.items() if value is not None]
    if surplus:
        raise InputError(f"{', '.join(surplus)}: {name} has its own; leave them out")
    text = read_text(name, max_bytes=MAX_ACTION_LIST_BYTES)
    actions = pipeline.from_csv(text, Path(name).stem)
    pipeline.check_memory_limit(actions, memory_limit)
    durations = pipeline.Durations.even(actions.num_stages, actions.num_virtual_stages, times)
    return pipeline.play_actions(actions, durations)


def _parse_sizes(stages: int | str | None, micro_batches: int | str | Sequence[int] | None) -> tuple[int, list[int]]:
    """Return the number of stages and the numbers of micro-batches."""
    labels = {argument_label("stages"): stages, argument_label("micro_batches"): micro_batches}
    missing = [label for label, value in labels.items() if value is None]
    if stages is None or micro_batches is None:
        raise InputError(
            f"{' and '.join(missing)}: missing; a number is required, such as --stages 4 --micro-batches 8"
        )
    parts: Sequence[int | str] = (
        micro_batches.split(",")
        if isinstance(micro_batches, str)
        else [micro_batches]
        if isinstance(micro_batches, int)
        else micro_batches
    )
    numbers = [parse_count(part, label=argument_label("micro_batches")) for part in parts]
    return parse_count(stages, label=argument_label("stages")), numbers


def _parse_optional_count(parameter: str, value: int | str | None) -> int | None:
    return None if value is None else parse_count(value, label=argument_label(parameter))


def _parse_limit(value: float | str | None) -> float | None:
    return None if value is None else parse_at_least(value, label=argument_label("memory_limit"), minimum=0.0)


def parse_times(times: str | PassTimes | None) -> PassTimes:
    """Parse the seconds of passes. Raises `InputError`.

    >>> parse_times("f=1,b=2,p2p=0.1")
    PassTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, overlapped_s=None, message_s=0.1)
    """
    if isinstance(times, pipeline.PassTimes):
        return times
    label = argument_label("times")
    seconds: dict[str, float] = {}
    for part in times.split(",") if times else ():
        key, equals, value = part.strip().partition("=")
        if key not in TIME_KEYS or not equals:
            raise InputError(
                f"{label}: {describe_unknown(part.strip() if not equals else key, TIME_KEYS)}, such as f=1,b=1,w=1"
            )
        if key in seconds:
            raise InputError(f"{label}: found {key} more than once; each of them once is required")
        seconds[key] = parse_at_least(value, label=f"{label} {key}", minimum=0.0)
    halves = 2.0 if "b" in seconds and "w" not in seconds else 1.0
    backward_s = seconds.get("b", 1.0) / halves
    return pipeline.PassTimes(
        forward_s=seconds.get("f", 1.0), input_s=backward_s,
        weight_s=seconds.get("w", backward_s if halves > 1 else 1.0),
        overlapped_s=seconds.get("fb"), message_s=seconds.get("p2p", 0.0),
    )  # fmt: skip
