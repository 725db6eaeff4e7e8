"""`shardwise schedule`: the order in which a pipeline's stages take their micro-batches, checked, played and drawn."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments, at_least, write_file
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.present.rendering.report import Report
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.pipeline import PassTimes, Timeline

COMPARE = "compare"
TIMES = ("f", "b", "w", "p2p", "fb")
DESCRIPTION = """The order in which the stages of a pipeline run the passes of micro-batches: F forward, B the whole backward
pass, I and W its parts for activations and for weights. Played with times for each pass: the bubble (idle over ideal time),
what each rank holds, the messages between ranks. NAME is a schedule, a .csv file in PyTorch's format (a row for each rank,
cells such as 0F3), or `compare` for all of them."""
EXAMPLES = (
    "shardwise schedule 1f1b --stages 4 --micro-batches 8 --draw 1f1b.svg --csv mine.csv",
    "shardwise schedule mine.csv --times f=1,b=2",
    "shardwise schedule interleaved --stages 4 --micro-batches 16 --virtual-stages 2 --round-size 8",
    "shardwise schedule zb_auto --stages 4 --micro-batches 8 --times f=1,b=1,w=1,p2p=0.1 --memory-limit 1.0 --trace out.json",
    "shardwise schedule compare --stages 4 --micro-batches 8,16",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    pipeline, output = parser.groups("pipeline", "output")
    pipeline.add_argument("name", metavar="NAME", help="a schedule, such as 1f1b or zb_v; a .csv file; or compare")
    pipeline.add_argument("--stages", metavar="N", help="ranks of the pipeline; a .csv file has its own")
    pipeline.add_argument("--micro-batches", metavar="N[,N...]", help="micro-batches of a step; compare takes several")
    pipeline.add_argument(
        "--virtual-stages", metavar="N",
        help="virtual stages of each rank (default: the fewest that the schedule takes)",
    )  # fmt: skip
    pipeline.add_argument(
        "--round-size", metavar="N",
        help="micro-batches of a virtual stage in a row, for interleaved schedules: as many as stages is depth-first (the "
        "default), all of them breadth-first",
    )  # fmt: skip
    pipeline.add_argument(
        "--times", metavar="K=S[,...]",
        help="seconds of a rank's part of the model: f forward, b backward for activations, w for weights (b + w is the whole "
        "backward pass; b without w is the whole one, halved where it is split), fb a forward and a backward pass together, "
        "p2p a message (default: f=1,b=1,w=1)",
    )  # fmt: skip
    pipeline.add_argument(
        "--memory-limit", metavar="X",
        help="activations that a rank may hold, in those of 1F1B's first stage (1.0: as many micro-batches as stages); "
        "zb_auto plans with it, others are refused above it",
    )  # fmt: skip
    output.add_argument("--draw", type=picture_name, metavar="FILE", help="draw the timeline and what ranks hold")
    output.add_argument("--trace", metavar="FILE", help="write a trace for Chrome and Perfetto (JSON)")
    output.add_argument("--csv", metavar="FILE", help="write the list in the CSV format of PyTorch's pipelining")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    if arguments.name == COMPARE:
        return _compare(arguments)
    from shardwise.pipeline.compare_schedules import timeline_payload
    from shardwise.present.reports.pipeline_schedule import timeline_report

    line = _timeline(arguments)
    _write_files(arguments, line)
    return (
        json.dumps(timeline_payload(line))
        if arguments.json
        else timeline_report(line, defaults=arguments.times is None)
    )


def _compare(arguments: argparse.Namespace) -> str | Report:
    from shardwise.pipeline.compare_schedules import compare_schedules, comparison_payload
    from shardwise.present.reports.pipeline_schedule import comparison_report
    from shardwise.values import InputError

    given = [flag for flag in ("draw", "trace", "csv", "round_size") if getattr(arguments, flag)]
    if given:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in given)
        raise InputError(f"{flags}: of one schedule, and compare has them all; name one, such as 1f1b")
    stages, micro_batches = _sizes(arguments)
    rows = list(
        compare_schedules(stages, micro_batches, _count(arguments, "virtual_stages"), parse_times(arguments.times),
        _limit(arguments))
    )  # fmt: skip
    return json.dumps(comparison_payload(rows), indent=2) if arguments.json else comparison_report(rows)


def _timeline(arguments: argparse.Namespace) -> Timeline:
    """What is asked for, played. Raises `InputError`."""
    from shardwise.pipeline.compare_schedules import play_schedule
    from shardwise.pipeline.registry import OrderOptions
    from shardwise.values import InputError

    if arguments.name.casefold().endswith(".csv"):
        return _from_file(arguments)
    stages, (micro_batches, *others) = _sizes(arguments)
    if others:
        raise InputError(
            f"--micro-batches: found {arguments.micro_batches!r}; one number, or `schedule compare`, is required"
        )
    return play_schedule(
        arguments.name, stages, micro_batches, _count(arguments, "virtual_stages"), parse_times(arguments.times),
        OrderOptions(_limit(arguments), _count(arguments, "round_size")),
    )  # fmt: skip


def _from_file(arguments: argparse.Namespace) -> Timeline:
    from pathlib import Path

    from shardwise.pipeline.registry import check_memory_limit
    from shardwise.pipeline.timeline import Durations, play_actions
    from shardwise.pipeline.torch_csv import from_csv
    from shardwise.values import InputError

    own = [flag for flag in ("stages", "micro_batches", "virtual_stages", "round_size") if getattr(arguments, flag)]
    if own:
        flags = ", ".join(f"--{flag.replace('_', '-')}" for flag in own)
        raise InputError(f"{flags}: {arguments.name} has its own; leave them out")
    try:
        text = Path(arguments.name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{arguments.name}: cannot read it: {getattr(error, 'strerror', None) or error}") from None
    actions = from_csv(text, Path(arguments.name).stem)
    check_memory_limit(actions, _limit(arguments))
    durations = Durations.even(actions.num_stages, actions.num_virtual_stages, parse_times(arguments.times))
    return play_actions(actions, durations)


def _sizes(arguments: argparse.Namespace) -> tuple[int, list[int]]:
    from shardwise.values import InputError, parse_count

    missing = [flag for flag in ("stages", "micro_batches") if not getattr(arguments, flag)]
    if missing:
        flags = " and ".join(f"--{flag.replace('_', '-')}" for flag in missing)
        raise InputError(f"{flags}: missing; a number is required, such as --stages 4 --micro-batches 8")
    numbers = [parse_count(part, label="--micro-batches") for part in arguments.micro_batches.split(",")]
    return parse_count(arguments.stages, label="--stages"), numbers


def _count(arguments: argparse.Namespace, name: str) -> int | None:
    from shardwise.values import parse_count

    text = getattr(arguments, name)
    return None if text is None else parse_count(text, label=f"--{name.replace('_', '-')}")


def _limit(arguments: argparse.Namespace) -> float | None:
    return None if arguments.memory_limit is None else at_least(0.0, arguments.memory_limit, "--memory-limit")


def parse_times(text: str | None) -> PassTimes:
    """The seconds of `--times`. Raises `InputError`.

    >>> parse_times("f=1,b=2,p2p=0.1")
    PassTimes(forward_s=1.0, input_s=1.0, weight_s=1.0, overlapped_s=None, message_s=0.1)
    """
    from shardwise.pipeline import PassTimes
    from shardwise.values import InputError, describe_unknown

    given: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        key, equals, value = part.strip().partition("=")
        if key not in TIMES or not equals:
            raise InputError(
                f"--times: {describe_unknown(part.strip() if not equals else key, TIMES)}, such as f=1,b=1,w=1"
            )
        if key in given:
            raise InputError(f"--times: found {key} more than once; each of them once is required")
        given[key] = at_least(0.0, value, f"--times {key}")
    halves = 2.0 if "b" in given and "w" not in given else 1.0
    backward = given.get("b", 1.0) / halves
    return PassTimes(
        forward_s=given.get("f", 1.0), input_s=backward, weight_s=given.get("w", backward if halves > 1 else 1.0),
        overlapped_s=given.get("fb"), message_s=given.get("p2p", 0.0),
    )  # fmt: skip


def _write_files(arguments: argparse.Namespace, line: Timeline) -> None:
    from shardwise.pipeline.torch_csv import to_csv
    from shardwise.present.charts.step_charts import schedule_trace_text, timeline_chart
    from shardwise.present.charts.timeline import draw_timeline

    if arguments.draw:
        write_picture("--draw", arguments.draw, draw_timeline(timeline_chart(line)))
    if arguments.trace:
        write_file("--trace", arguments.trace, schedule_trace_text(line) + "\n")
    if arguments.csv:
        write_file("--csv", arguments.csv, to_csv(line.actions))
