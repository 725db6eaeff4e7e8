"""A report as plain text, with every line whole: what files and pipes get."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.present.cli.section import Block, Fitted, Report, Section, Table, text_of

GAP = "  "


def plain(report: Report) -> str:
    """The report as text: sections with an empty line between them."""
    return "\n\n".join("\n".join(_lines(section)) for section in report if section.title or section.blocks)


def _lines(section: Section) -> Iterator[str]:
    if section.title:
        yield section.title
    for block in section.blocks:
        yield plain_block(block)


def plain_block(block: Block) -> str:
    """A line, or the lines of a table: in its own format, or in columns as wide as their widest cell.

    >>> print(plain_block(Table(rows=(("chip", "memory", "source"), ("h100", "80 GB", "datasheet, page 3")), right=(1,))))
    chip  memory  source
    h100   80 GB  datasheet, page 3
    """
    if isinstance(block, Fitted):
        return "\n".join(block.lines(None))
    if not isinstance(block, Table):
        return text_of(block)
    rows = [[text_of(cell) for cell in row] for row in block.rows]
    if block.line:
        return "\n".join(block.line.format(*row).rstrip() for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        (" " * block.indent + GAP.join(
            cell.rjust(width) if number in block.right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )).rstrip() for row in rows
    )  # fmt: skip
