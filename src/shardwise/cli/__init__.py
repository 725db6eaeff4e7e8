"""The command line: one file for each verb; a verb loads what it needs only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from shardwise.cli import (
    bench,
    calibrate,
    collective,
    estimate,
    explain,
    explore,
    export,
    figures,
    instructions,
    kv_cache,
    matmul,
    memory,
    mfu,
    plan,
    read,
    reconcile,
    rehearse,
    reshard,
    roofline,
    schedule,
    show,
    simulate,
    tokenize,
    train,
    validate,
    verify,
)
from shardwise.cli.plain import plain
from shardwise.cli.section import short_form
from shardwise.cli.terminal import ProgressLine, folded, terminal_width
from shardwise.cost.kept import derivations_kept
from shardwise.errors import STOPPED, ShardwiseError, told
from shardwise.output import complain, write
from shardwise.parser import Parser, asks_for_json

VERBS = (
    plan,
    estimate,
    explain,
    instructions,
    memory,
    kv_cache,
    roofline,
    matmul,
    reshard,
    collective,
    schedule,
    simulate,
    explore,
    export,
    read,
    mfu,
    show,
    figures,
    validate,
    bench,
    calibrate,
    tokenize,
    verify,
    rehearse,
    train,
    reconcile,
)

SHOW_THEMSELVES = ("train", "explore")  # verbs with lines of their own for what is being done
READER_LEFT = 0  # `| head` has all that it wanted


class _Version(argparse.Action):
    """Print the version, which takes longer to find than to parse a command line."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        from shardwise.version import __version__

        write(f"shardwise {__version__}\n", sys.stdout)
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = Parser(
        prog="shardwise",
        description="How to shard a large transformer for training, what it costs, and what bounds it.",
        epilog="With --json an error is JSON too. Exit codes: 0 fine, 1 the output cannot be written or a rehearsal is not "
        "as planned, 2 the input is wrong, 3 nothing fits or a limit is missed, 130 stopped by Ctrl-C.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.set_defaults(exit_code=0)  # of what is printed; a verb may set another
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.configure(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 fine, 1 the output cannot be written or a rehearsal is not as planned, 2 the input is wrong,
    3 nothing fits or a limit is missed, 130 stopped by Ctrl-C."""
    as_json = asks_for_json(sys.argv[1:] if argv is None else argv)
    try:
        arguments = build_parser().parse_args(argv)
        with derivations_kept() if argv is None else nullcontext():  # a process of its own, not a call in another's
            write(_answer(arguments) + "\n", sys.stdout)
    except ShardwiseError as error:
        said = told(error.problems, error.exit_code, as_json=as_json)
        complain((said if as_json else folded(said, terminal_width(sys.stderr))) + "\n")
        return error.exit_code
    except KeyboardInterrupt:
        complain((told(["stopped"], STOPPED, as_json=True) if as_json else "stopped") + "\n")
        return STOPPED
    except BrokenPipeError:
        return READER_LEFT
    code: int = arguments.exit_code
    return code


def _answer(arguments: argparse.Namespace) -> str:
    """What a verb prints: on a terminal in its width, but for what programs read."""
    with ProgressLine(arguments.verb, None if arguments.verb in SHOW_THEMSELVES else sys.stderr) as arguments.progress:
        found = arguments.run(arguments)
    for_programs = arguments.json or getattr(arguments, "emit", None)
    text = (
        found if isinstance(found, str) else plain(found if getattr(arguments, "verbose", True) else short_form(found))
    )
    return text if for_programs else folded(text, terminal_width())
