"""Report of a cheat sheet: a table for each topic."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.book_formulas import CheatSheet
from shardwise.book_formulas.cheat_sheet import SheetItem
from shardwise.present.rendering.report import Number, Report, Row, Section, Table


def cheat_sheet_report(sheet: CheatSheet) -> Report:
    """Report the numbers of a sheet by topic, each with its formula."""
    return [
        Section(
            [Table(rows=tuple(_rows(section.items, number)), right=(1,), head=False, indent=2)], title=section.title
        )
        for number, section in enumerate(sheet.sections)
    ]


def _rows(items: Sequence[SheetItem], section: int) -> list[Row]:
    return [
        (item.name, Number(item.text, item.value, item.unit, f"sections.{section}.items.{number}.value"), item.formula)
        for number, item in enumerate(items)
    ]
