"""What a verb answers to a call, as text; its errors are raised."""

from __future__ import annotations

from shardwise.present.command_line import build_parser
from shardwise.present.rendering.plain_text import render_text
from shardwise.values.progress import ignore_progress


def answer(*words: str) -> str:
    """The text for programs, or the whole report as a pipe gets it."""
    arguments = build_parser().parse_args(words)
    arguments.progress = ignore_progress
    report = arguments.run(arguments)
    return report if isinstance(report, str) else render_text(report)
