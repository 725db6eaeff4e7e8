"""The command line: one file for each verb; a verb loads what it needs only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardwise.cli import (
    bench,
    calibrate,
    collective,
    estimate,
    explain,
    kv_cache,
    matmul,
    memory,
    plan,
    reconcile,
    reshard,
    roofline,
    show,
    tokenize,
    train,
    validate,
)
from shardwise.errors import ShardwiseError
from shardwise.parser import Parser

VERBS = (
    plan,
    estimate,
    explain,
    memory,
    kv_cache,
    roofline,
    matmul,
    reshard,
    collective,
    show,
    validate,
    bench,
    calibrate,
    tokenize,
    train,
    reconcile,
)

STOPPED = 130  # what a shell gives for a program that SIGINT (2) ended: 128 + 2


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = Parser(
        prog="shardwise",
        description="How to shard a large transformer for training, what it costs, and what bounds it.",
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.configure(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 fine, 2 the input is wrong, 3 nothing fits or a limit is missed, 130 stopped by Ctrl-C."""
    arguments = build_parser().parse_args(argv)
    try:
        print(arguments.run(arguments))
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:
        sys.stderr.close()
    return 0
