"""One rank of a run: `python -m shardwise.train.rank`, in the environment of torchrun."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from shardwise.errors import ShardwiseError, told
from shardwise.parser import Parser
from shardwise.train.flags import DESCRIPTION, EXAMPLES, add_train_arguments, settings_of
from shardwise.train.launch import set_threads
from shardwise.train.parent import end_with_parent
from shardwise.train.reporting import first_of_host_reports
from shardwise.train.stop import INTERRUPTED, StopRequest

if TYPE_CHECKING:
    from shardwise.train.parts import Parts


def build_parser() -> Parser:
    """The parser of a rank: that of `shardwise train`."""
    parser = Parser(prog="python -m shardwise.train")
    parser.describe(DESCRIPTION, EXAMPLES)
    add_train_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """Run a rank, of the engine's own parts unless others are given. Exit codes as of `shardwise`, and 128 and the signal."""
    arguments = build_parser().parse_args(argv)
    if "RANK" not in os.environ:
        return _run(arguments, parts, None)
    end_with_parent()
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # sockets whose other end has gone are no news: see c10/util/Logging.cpp
    with StopRequest(ends_process=True) as stop:
        return _run(arguments, parts, stop)


def _run(arguments: argparse.Namespace, parts: Parts | None, stop: StopRequest | None) -> int:
    try:
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        from shardwise.train.parts import own_parts
        from shardwise.train.run import run

        with first_of_host_reports(stop):
            settings = settings_of(arguments)
        return run(settings, parts or own_parts(), stop).code
    except ShardwiseError as error:
        print(told(error.problems, error.exit_code, as_json=arguments.json), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def leave(code: int) -> NoReturn:
    """End the process at once, whatever threads wait in libraries for ranks that are lost."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def ended(run: Callable[[], int]) -> NoReturn:
    """Run a rank, and end its process as it ends."""
    try:
        code = run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    leave(code)


if __name__ == "__main__":
    ended(main)
