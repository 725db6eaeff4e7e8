"""Reports as one HTML file without a script: pictures inside it, and sections as tables and paragraphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from shardwise.present import charts
from shardwise.present.charts.chart import Chart
from shardwise.present.rendering.report import Block, Cell, Preformatted, Report, Status, Table, cell_text

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; } svg { background: #fff; }
table { border-collapse: collapse; } th, td { padding: .2rem .8rem .2rem 0; text-align: left; white-space: nowrap; }
th { border-bottom: 1px solid #8888; } td.right, th.right { text-align: right; font-variant-numeric: tabular-nums; }
.good { color: #1a7f37; } .bad { color: #c9510c; } p { margin: .3rem 0; }
"""


def static_page(title: str, pictures: Sequence[Chart], report: Report) -> str:
    """Return an HTML page of charts and a report, which requests nothing and runs no script."""
    drawings = "\n".join(f'<div class="wide">{_picture(chart)}</div>' for chart in pictures)
    sections = "\n".join(_section(section.title, section.blocks) for section in report)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n{drawings}\n{sections}\n</body>\n</html>\n"
    )


def _picture(chart: Chart) -> str:
    text = charts.encoded(charts.draw_charts((chart,)), ".svg").decode("utf-8")
    return text[text.index("<svg") :]  # without the declaration of a file of its own


def _section(title: str, blocks: Sequence[Block]) -> str:
    head = f"<h2>{escape(title)}</h2>\n" if title else ""
    return head + "\n".join(map(_block, blocks))


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return f'<div class="wide"><table>\n{"".join(_rows(block))}</table></div>'
    if isinstance(block, Preformatted):
        return f"<pre>{escape(chr(10).join(block.lines(None)))}</pre>"
    return f"<p>{_cell(block)}</p>"


def _rows(table: Table) -> Iterator[str]:
    for number, row in enumerate(table.rows):
        tag = "th" if table.head and number == 0 else "td"
        cells = (
            f"<{tag}{' class=right' if column in table.right else ''}>{_cell(cell)}</{tag}>"
            for column, cell in enumerate(row)
        )
        yield f"<tr>{''.join(cells)}</tr>\n"


def _cell(cell: Cell) -> str:
    text = escape(cell_text(cell))
    return f'<span class="{cell.tone}">{text}</span>' if isinstance(cell, Status) else text
