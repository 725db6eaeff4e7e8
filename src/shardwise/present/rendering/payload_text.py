"""Texts whose numbers are read from a payload by their paths: what `--json` prints and what a reader sees cannot differ.

A template is a format string. A field is a path with a unit, such as "{estimate.step_time_s:s} of {devices:n} devices"; behind an
"@" stands the name of the explanation where it is not the path. A field without a unit is a text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from string import Formatter
from typing import Any

from shardwise.present.rendering.page_report import DataTable, PageAction, PageCell, Paragraph
from shardwise.present.rendering.report import Line, Number, Status
from shardwise.values import (
    format_bytes,
    format_count,
    format_days,
    format_energy,
    format_quantity,
    format_seconds,
    format_usd,
)

Payload = Mapping[str, Any]
Format = Callable[[float], str]


def format_share(value: float, digits: int = 1) -> str:
    """Format a share of a whole, rounding sums alike in whatever order they were added.

    >>> format_share(0.1875), format_share(0.18749999999999994)
    ('18.8%', '18.8%')
    """
    return f"{float(f'{100 * value:.12g}'):.{digits}f}%"


FORMATS: Mapping[str, Format] = {
    "s": format_seconds, "B": format_bytes, "%": format_share, "$": format_usd, "days": format_days, "MWh": format_energy,
    "n": "{:,.0f}".format, "g": "{:.3g}".format, "x": "{:.3g}×".format, "k": format_quantity, "count": format_count,
}  # fmt: skip


class PayloadText:
    """Texts of a payload; paths are below `prefix`, which ends in a dot.

    >>> PayloadText({"step": {"time_s": 0.5}}).cells("a step of {step.time_s:s}")[1].text
    '500 ms'
    """

    def __init__(self, payload: Payload, prefix: str = "") -> None:
        self.payload, self.prefix = payload, prefix

    def value(self, path: str) -> Any:
        """Return what is at a path. Raises `LookupError` if there is nothing."""
        keys = (self.prefix + path).split(".")
        return reduce(
            lambda part, key: part[int(key)] if isinstance(part, list | tuple) else part[key], keys, self.payload
        )

    def cells(self, template: str) -> list[PageCell]:
        """Return the texts and numbers of a template; an unknown number has no text."""
        cells: list[PageCell] = []
        for text, path, spec, _ in Formatter().parse(template):
            cells += [text] if text else []
            if path is not None:
                unit, _, name = (spec or "").partition("@")
                value = self.value(path)
                text = "" if value is None else FORMATS[unit](value) if unit else str(value)
                cells.append(Number(text, value, unit, name or self.prefix + path) if unit and text else text)
        return cells

    def __call__(self, template: str, style: str = "") -> Paragraph:
        return Paragraph(self.cells(template), style)

    def interval(self, path: str, unit: str) -> list[PageCell]:
        """Return "low to high" of an interval; empty where there is none."""
        return self.cells(f"{{{path}.0:{unit}}} to {{{path}.1:{unit}}}") if self.value(path) else []

    def join(self, template: str, path: str) -> list[PageCell]:
        """Return the template of each key of a mapping ("*" stands for it), with commas between them."""
        return self.cells(", ".join(template.replace("*", key) for key in self.value(path)))

    def table(
        self, caption: str, head: str, path: str, template: str | Callable[[Payload], str], *, folded: bool = False
    ) -> DataTable:
        """Return a row for each element of a list: heads and the columns of the row's template stand between " | ".

        Fields are below the element. A column "[text]" is a button that takes the element's layout, "*text" stands out.
        """
        rows: list[list[PageCell]] = [list(head.split(" | "))]
        for index, element in enumerate(self.value(path)):
            row = PayloadText(self.payload, f"{self.prefix}{path}.{index}.")
            columns = template if isinstance(template, str) else template(element)
            rows.append([row.cell(column, element) for column in columns.split(" | ")])
        return DataTable(caption, rows, folded)

    def cell(self, template: str, element: Payload) -> PageCell:
        """Return a cell of a table's row."""
        if template.startswith("["):
            return PageAction(template[1:-1], {"layout": element["layout"]})
        if template.startswith("*"):
            return Status(
                "".join(cell if isinstance(cell, str) else cell.text for cell in self.cells(template[1:])), "note"
            )
        cells = self.cells(template)
        return cells[0] if len(cells) == 1 else Line(tuple(cell for cell in cells if not isinstance(cell, PageAction)))
