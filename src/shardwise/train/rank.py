"""One rank of a run: `python -m shardwise.train.rank`, in the environment of torchrun."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardwise.errors import ShardwiseError
from shardwise.parser import Parser
from shardwise.train.flags import DESCRIPTION, add_train_arguments, settings_of
from shardwise.train.launch import set_threads
from shardwise.train.speak import first_of_host_speaks
from shardwise.train.stop import INTERRUPTED

if TYPE_CHECKING:
    from shardwise.train.parts import Parts


def build_parser() -> Parser:
    """The parser of a rank: that of `shardwise train`."""
    parser = Parser(prog="python -m shardwise.train", description=DESCRIPTION)
    add_train_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None, parts: Parts | None = None) -> int:
    """Run a rank, of the engine's own parts unless others are given. Exit codes as of `shardwise`, and 128 and the signal."""
    arguments = build_parser().parse_args(argv)
    try:
        set_threads(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        from shardwise.train.parts import own_parts
        from shardwise.train.run import run

        with first_of_host_speaks():
            settings = settings_of(arguments)
        return run(settings, parts or own_parts()).code
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
