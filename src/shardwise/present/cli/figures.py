"""`shardwise figures`: the figures of the books, drawn from the product's own functions."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.cli.pictures import ending_of, write_picture
from shardwise.present.rendering.report import Report, Section
from shardwise.values import Parser

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwise.present.figures.figure import Figure
    from shardwise.values import Progress

DESCRIPTION = """Draw figures of "How to Scale Your Model" and of "The Ultra-Scale Playbook" from the functions
that plans are made with, beside what the originals show. Without --out they are listed."""
EXAMPLES = (
    "shardwise figures",
    "shardwise figures strategies-16x16x16 --out strategies.svg",
    "shardwise figures zero-stages tp-scaling --out folder/",
)
REMARK = "With --out figures/ and no name all are drawn, with a page, figures/index.html."
PAGE = "index.html"


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    figures, output = parser.groups("figures", "output")
    figures.add_argument("names", nargs="*", metavar="NAME", help="figures by name (default: all)")
    output.add_argument(
        "--out",
        metavar="PATH",
        help="a file for one figure, by its ending .svg, .png or .pdf; else a folder, for SVGs and a page",
    )
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The list of figures, or where they were drawn to."""
    from shardwise.present.figures.by_name import FIGURES, figure
    from shardwise.present.figures.figure import figure_payload, figures_payload
    from shardwise.values import run_all

    chosen = run_all(*((lambda name=name: figure(name)) for name in arguments.names)) or list(FIGURES.values())
    written = _write(chosen, arguments.out, arguments.progress) if arguments.out else []
    if arguments.json:
        return json.dumps(figure_payload(chosen[0]) if len(chosen) == 1 else figures_payload(chosen), indent=2)
    return [Section(written)] if written else _listed(chosen)


def _listed(figures: Sequence[Figure]) -> Report:
    """Names by book, with where the originals are and what they show."""
    books: dict[str, list[str]] = {}
    for one in figures:
        lines = books.setdefault(f"{one.book.title}  {one.book.url}", [])
        lines += [f"  {one.name}: {one.section}", f"    {one.original}", f"    here: {one.here}"]
    return [Section(lines, title=title) for title, lines in books.items()]


def _write(figures: Sequence[Figure], target: str, progress: Progress) -> list[str]:
    """Draw to one file, or to a folder with a page. Raises `InputError` where that cannot be written."""
    if ending_of(target) in (".svg", ".png", ".pdf"):
        return [_write_one(figures, target)]
    from pathlib import Path

    from shardwise.present.cli.arguments import write_file
    from shardwise.present.figures.figures_page import figures_page
    from shardwise.values import InputError

    folder = Path(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out: cannot write {target}: {error.strerror}; choose a writable path") from None
    for number, one in enumerate(figures, 1):
        progress(one.name, number, len(figures))
        write_picture("--out", str(folder / f"{one.name}.svg"), one.drawing())
    write_file("--out", str(folder / PAGE), figures_page(figures))
    return [*(str(folder / f"{one.name}.svg") for one in figures), str(folder / PAGE)]


def _write_one(figures: Sequence[Figure], target: str) -> str:
    from shardwise.values import InputError

    if len(figures) > 1:
        raise InputError(f"--out: found {target!r} for {len(figures)} figures; a folder, or one NAME, is required")
    write_picture("--out", target, figures[0].drawing())
    return target
