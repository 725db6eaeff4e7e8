"""Parts that reports of several views have: panels, quiet lines, and terms with their colours and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwise.present.charts.page_charts import RowSpan
from shardwise.present.rendering.page_report import PageBlock, PageCell, PageSection, Paragraph, TermList
from shardwise.present.rendering.payload_text import FORMATS, format_share
from shardwise.present.rendering.report import Number

FIGURE_TITLES = {"timeline": "Simulated step", "roofline": "Roofline of a block", "pareto": "Pareto front"}
# Terms whose names say too little.
TERM_WORDS = {
    "tp": "tp: tensor parallel", "cp": "cp: context parallel", "ep": "ep: expert parallel", "pp": "pp: pipeline",
    "fsdp": "fsdp: sharded data parallel", "dp": "dp: data parallel", "control": "control: loss, norm, router sums",
    "master": "master weights", "gathered": "gathered weights", "host": "host transfers",
}  # fmt: skip


def panel(title: str, *blocks: PageBlock, half: bool = False) -> PageSection:
    return PageSection(title=title, blocks=blocks, half=half)


def quiet(*parts: PageCell) -> Paragraph:
    return Paragraph(parts, "quiet")


def term_words(term: str) -> str:
    """Return a term as the page writes it."""
    return TERM_WORDS.get(term, term)


def term_spans(values: Mapping[str, float], unit: str, tree: str = "") -> list[RowSpan]:
    """Return the terms that are there as spans from zero on; `tree` explains them."""
    spans, start = [], 0.0
    for term, value in values.items():
        if value > 0:
            title, path = f"{term_words(term)}, {FORMATS[unit](value)}", tree and f"{tree}.{term}"
            spans.append(RowSpan(start, start + value, term, title, term, path))
            start += value
    return spans


def term_list(values: Mapping[str, float], terms: Iterable[str], unit: str, tree: str = "") -> TermList:
    """Return terms with their colour, value and share; `tree` explains them."""
    total, form = sum(values.values()), FORMATS[unit]
    numbers = {term: Number(form(values[term]), values[term], path=tree and f"{tree}.{term}") for term in terms}
    return TermList([(term, term_words(term), numbers[term], format_share(values[term] / total)) for term in numbers])
