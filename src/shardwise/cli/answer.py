"""What a verb answers: run with what says how far it is, and written as its reader wants it."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from shardwise.cli.plain import plain
from shardwise.cli.section import short_form
from shardwise.cli.terminal import ProgressLine, folded, terminal_width
from shardwise.cost.kept import derivations_kept
from shardwise.output import write

SHOW_THEMSELVES = ("train", "explore")  # verbs with lines of their own for what is being done


def answered(arguments: argparse.Namespace, *, keeps: bool) -> None:
    """Run a verb and write its answer; derivations are kept for the next process where this one is the verb's own."""
    with derivations_kept() if keeps else nullcontext():
        write(_answer(arguments) + "\n", sys.stdout)


def _answer(arguments: argparse.Namespace) -> str:
    """What a verb prints: on a terminal in its width, but for what programs read."""
    with ProgressLine(arguments.verb, None if arguments.verb in SHOW_THEMSELVES else sys.stderr) as arguments.progress:
        found = arguments.run(arguments)
    for_programs = arguments.json or getattr(arguments, "emit", None)
    shown = (
        found if isinstance(found, str) else plain(found if getattr(arguments, "verbose", True) else short_form(found))
    )
    return shown if for_programs else folded(shown, terminal_width())
