"""`shardwise plan`: the fastest layout that fits, and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import add_job_arguments, convert, policies, resolve
from shardwise.errors import InputError

if TYPE_CHECKING:
    from shardwise.search.space import Choices


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "plan", help="search all layouts and choose the fastest that fits",
        description="Search all layouts of a training job on a cluster and choose the fastest that fits.",
    )  # fmt: skip
    add_job_arguments(parser)
    parser.add_argument(
        "--pin", action="append", default=[], metavar="KEY=VALUE",
        help="search only layouts with this, such as tp=8, sequence_parallel=true or recompute="
        f"{'|'.join(policies())}; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--max", action="append", default=[], metavar="KEY=VALUE",
        help="search only layouts with at most this, such as pp=4; may be repeated",
    )  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write the plan to a file")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The plan, as a report or as JSON."""
    from shardwise.cli.report import plan_report
    from shardwise.planning.codec import dump_plan, plan_payload
    from shardwise.search.plan import plan

    choices = narrowed_choices(arguments.pin, arguments.max)
    found = plan(*resolve(arguments), choices=choices)
    if arguments.out:
        dump_plan(found, arguments.out)
    return json.dumps(plan_payload(found), indent=2) if arguments.json else plan_report(found)


def narrowed_choices(pins: Iterable[str], maxima: Iterable[str]) -> Choices | None:
    """The choices that --pin and --max leave, None where there are none of these. Raises `InputError`."""
    from shardwise.search.space import Choices

    wanted, most = _settings("--pin", pins), _settings("--max", maxima)
    return Choices().narrowed(wanted, most) if wanted or most else None


def _settings(flag: str, texts: Iterable[str]) -> dict[str, Any]:
    """What each text asks for; a key that is not known keeps its text, and `Choices.narrowed` names the keys there are."""
    from shardwise.search.space import FLAGS, NUMERIC

    like: dict[str, Any] = dict.fromkeys(NUMERIC, 1) | dict.fromkeys(FLAGS, True)
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        if not (key and equals and value):
            raise InputError(f"{flag}: found {text!r}; KEY=VALUE is required, such as {flag} pp=4")
        if key in found:
            raise InputError(f"{flag}: {key} is given twice")
        found[key] = convert(value, like.get(key, ""), f"{flag} {key}")
    return found
