"""Files that verbs make of their results: pictures, texts and HTML reports, each under a flag of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from shardwise.present import charts
from shardwise.present.verb import Export
from shardwise.values import InputError
from shardwise.values.argument_parser import non_empty_text

DrawingOf = Callable[[Any], Any]  # result -> chart, or charts


def picture(flag: str, help_text: str, draw: DrawingOf) -> Export:
    """Return the export of a picture: `draw` returns a chart of the result, or several; the file's ending decides its form."""

    def write(result: Any, target: str) -> None:
        write_picture(flag, target, draw(result))

    return Export(flag=flag, help=help_text, parse=picture_name, write=write)


def text_file(flag: str, help_text: str, text_of: Callable[[Any], str], ending: str = "") -> Export:
    """Return the export of a text, such as a table as CSV or a trace as JSON, to a file whose name needs the `ending`, if any."""

    def write(result: Any, target: str) -> None:
        write_file(flag, target, text_of(result))

    parse = name_with_ending(ending) if ending else non_empty_text
    return Export(flag=flag, help=help_text, parse=parse, write=write)


def html_report(html_of: Callable[[Any], str]) -> Export:
    """Return `--report`: figures and tables as one HTML file that opens from a disk and requests nothing."""
    return text_file(
        "--report", "write figures and tables as an HTML file that opens without a server", html_of, ending=".html"
    )


def name_with_ending(ending: str) -> Callable[[str], str]:
    """Return a parser of file names that need an ending. It raises `ArgumentTypeError` for others."""

    def parse(text: str) -> str:
        if not text.strip().lower().endswith(ending):
            kind = "reports are HTML: write" if ending == ".html" else "write"
            raise argparse.ArgumentTypeError(f"found {text!r}; {kind} a name that ends in {ending}")
        return text

    return parse


def picture_name(text: str) -> str:
    """Return the name of a picture. Raises `ArgumentTypeError` for an ending that no picture has, or that needs matplotlib."""
    if ending_of(text) not in charts.ENDINGS:
        raise argparse.ArgumentTypeError(f"found {text!r}; a name that ends in {', '.join(charts.ENDINGS)} is required")
    if ending_of(text) != ".svg":
        try:
            charts.require_matplotlib(text)
        except InputError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return text


def picture_name_or_dash(text: str) -> str:
    """Return the name of a picture, or "-" for standard output."""
    return text if text == "-" else picture_name(text)


def ending_of(name: str) -> str:
    """Return what a file's name ends in, in small letters."""
    return PurePath(name.strip()).suffix.lower()


def write_picture(flag: str, target: str, content: Any) -> None:
    """Write a chart, or several one under the other, in the form of the file's ending.

    Raises `InputError` if the file cannot be written.
    """
    drawing = charts.draw_charts(content if isinstance(content, tuple) else (content,))
    try:
        Path(target).write_bytes(charts.encoded(drawing, ending_of(target)))
    except OSError as error:
        raise InputError(f"{flag}: cannot write {target}: {error.strerror}; choose a writable path") from None


def write_file(flag: str, target: str, text: str) -> None:
    """Write the text that a flag asks for. Raises `InputError` if the file cannot be written."""
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{flag}: cannot write {target}: {error.strerror}") from None
