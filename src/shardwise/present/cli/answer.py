"""What a verb answers: run with what says how far it is, and written as its reader wants it."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from shardwise.present.cli.plain import plain
from shardwise.present.cli.section import Marked, Report, Section, short_form
from shardwise.present.cli.terminal import console_of, drawn
from shardwise.present.cli.working import Working
from shardwise.price.derivation_cache import use_derivation_cache
from shardwise.values import write_error, write_text

SHOW_THEMSELVES = ("train", "explore")  # verbs with lines of their own for what is being done


def answered(arguments: argparse.Namespace, *, keeps: bool) -> None:
    """Run a verb and write its answer; derivations are kept for the next process where this one is the verb's own.

    A text is for programs and written as it is; a report is for people: short unless all of it is asked for.
    """
    with use_derivation_cache() if keeps else nullcontext():
        with Working(arguments.verb, None if arguments.verb in SHOW_THEMSELVES else sys.stderr) as arguments.progress:
            found: str | Report = arguments.run(arguments)
        if isinstance(found, str):
            write_text(found + "\n", sys.stdout)
        else:
            report = found if getattr(arguments, "verbose", True) else short_form(found)
            console = console_of(sys.stdout)
            write_text(drawn(report, console) if console else plain(report) + "\n", sys.stdout)


def complained(said: str) -> None:
    """Write what is wrong on the error stream, its first line in the colour of errors where there are colours."""
    console = console_of(sys.stderr)
    first, *others = said.split("\n")
    write_error(drawn([Section([Marked(first, "bad"), *others])], console) if console else said + "\n")
