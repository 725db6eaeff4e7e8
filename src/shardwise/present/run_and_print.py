"""Run a verb with a line of progress, and print its report or payload; print errors."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext

from shardwise.present.progress_line import ProgressLine
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.rendering.report import Report, Section, Status, short_form
from shardwise.present.rendering.terminal import open_console, render_terminal
from shardwise.price.derivation_cache import use_derivation_cache
from shardwise.values import write_error, write_text


def run_and_print(arguments: argparse.Namespace, *, keeps: bool) -> None:
    """Run a verb and write its answer; derivations are kept for the next process where this one is the verb's own.

    A text is for programs and written as it is; a report is for people: short unless all of it is asked for.
    """
    with use_derivation_cache() if keeps else nullcontext():
        with ProgressLine(arguments.verb, sys.stderr if arguments.shows_progress else None) as arguments.progress:
            answer: str | Report = arguments.run(arguments)
        if isinstance(answer, str):
            write_text(answer + "\n" if answer else "", sys.stdout)
        else:
            report = answer if getattr(arguments, "verbose", True) else short_form(answer)
            console = open_console(sys.stdout)
            write_text(render_terminal(report, console) if console else render_text(report) + "\n", sys.stdout)


def print_error(text: str) -> None:
    """Write what is wrong on the error stream, its first line in the colour of errors where there are colours."""
    console = open_console(sys.stderr)
    first_line, *other_lines = text.split("\n")
    section = Section([Status(first_line, "bad"), *other_lines])
    write_error(render_terminal([section], console) if console else text + "\n")
