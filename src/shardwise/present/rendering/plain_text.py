"""A report as plain text, with every line whole: what files and pipes get."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.present.rendering.report import Block, Preformatted, Report, Section, Table, cell_text

GAP = "  "


def render_text(report: Report) -> str:
    """The report as text: sections with an empty line between them."""
    return "\n\n".join("\n".join(_lines(section)) for section in report if section.title or section.blocks)


def _lines(section: Section) -> Iterator[str]:
    if section.title:
        yield section.title
    for block in section.blocks:
        yield render_block(block)


def render_block(block: Block) -> str:
    """A line, or the lines of a table: in its own format, or in columns as wide as their widest cell.

    >>> print(render_block(Table(rows=(("chip", "memory", "source"), ("h100", "80 GB", "datasheet, page 3")), right=(1,))))
    chip  memory  source
    h100   80 GB  datasheet, page 3
    """
    if isinstance(block, Preformatted):
        return "\n".join(block.lines(None))
    if not isinstance(block, Table):
        return cell_text(block)
    rows = [[cell_text(cell) for cell in row] for row in block.rows]
    if block.line:
        return "\n".join(block.line.format(*row).rstrip() for row in rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        (" " * block.indent + GAP.join(
            cell.rjust(width) if number in block.right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )).rstrip() for row in rows
    )  # fmt: skip
