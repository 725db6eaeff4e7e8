"""Parts that reports of several views have: panels, quiet lines, and terms with their colours and numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardwise.present.charts.chart import BarPart, LegendEntry
from shardwise.present.rendering.page_report import PageBlock, PageCell, PageSection, Paragraph, TermList
from shardwise.present.rendering.payload_text import FORMATS, format_share
from shardwise.present.rendering.report import Number

PLOT_HEIGHT = 228.0  # pixels
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


def term_legend(labels: Mapping[str, str]) -> Sequence[LegendEntry]:
    """Return the colours of terms with labels."""
    return [LegendEntry(label=label, colour=f"term:{term}") for term, label in labels.items()]


def term_bar(values: Mapping[str, float], unit: str, tree: str = "") -> tuple[BarPart, ...]:
    """Return the terms that are there as parts of a bar; `tree` explains them."""
    return tuple(
        BarPart(
            name=term, value=value, colour=f"term:{term}", hover=f"{term_words(term)}, {FORMATS[unit](value)}",
            path=tree and f"{tree}.{term}",
        )
        for term, value in values.items() if value > 0
    )  # fmt: skip


def term_list(values: Mapping[str, float], terms: Iterable[str], unit: str, tree: str = "") -> TermList:
    """Return terms with their colour, value and share; `tree` explains them."""
    total, form = sum(values.values()), FORMATS[unit]
    numbers = {term: Number(form(values[term]), values[term], path=tree and f"{tree}.{term}") for term in terms}
    return TermList([(term, term_words(term), numbers[term], format_share(values[term] / total)) for term in numbers])
