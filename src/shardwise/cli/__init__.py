"""The command line: one file for each verb; a verb loads what it needs only when it runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

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
    reshard,
    roofline,
    show,
    tokenize,
    validate,
)
from shardwise.errors import ShardwiseError

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
)


class Parser(argparse.ArgumentParser):
    """A parser to which an empty text is no value: it is not taken for an argument that was left out."""

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        """As argparse has it; what takes a value takes one that is not empty, but for a layout: it has every default."""
        if settings.get("action", "store") in ("store", "append"):
            settings.setdefault("type", not_empty)
        return super().add_argument(*names, **settings)


def not_empty(text: str) -> str:
    """The text. Raises `ArgumentTypeError`, to which argparse adds the argument's name, for one of blanks alone."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"found {text!r}; a value is required")
    return text


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
    """Run one verb. Exit codes: 0 fine, 2 the input is wrong, 3 nothing fits or a limit is missed."""
    arguments = build_parser().parse_args(argv)
    try:
        print(arguments.run(arguments))
    except ShardwiseError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
    return 0
