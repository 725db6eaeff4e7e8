"""`--report`: what a verb prints, as one HTML file that opens from a disk and asks for nothing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.present.cli.arguments import write_file
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.present.explorer.html_report import Kind

FLAG = "--report"


def add_report_argument(parser: Parser) -> None:
    """`--report FILE`."""
    parser.group("output").add_argument(
        FLAG,
        type=_html_name,
        metavar="FILE",
        help="write figures and tables as an HTML file that opens without a server",
    )


def _html_name(text: str) -> str:
    if not text.strip().lower().endswith(".html"):
        raise argparse.ArgumentTypeError(f"found {text!r}; reports are HTML: write a name that ends in .html")
    return text


def write_report(target: str | None, kind: Kind, title: str, payload: Callable[[], Mapping[str, Any]]) -> None:
    """Write a report of a payload where one is asked for. Raises `InputError` where that cannot be."""
    if target:
        from shardwise.present.explorer.html_report import report

        write_file(FLAG, target, report(kind, title, payload()))
