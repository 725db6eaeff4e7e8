"""Charts as drawings: the places of panels, legends and notes on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwise.present.charts.chart import Chart, LegendEntry
from shardwise.present.charts.draw_marks import SCALE_WIDTH, draw_sample
from shardwise.present.charts.draw_panel import PanelDrawing
from shardwise.present.charts.drawing import (
    MARGIN,
    ROW,
    SAMPLE,
    SIZE,
    Canvas,
    Drawing,
    below,
    flowed,
    heading_lines,
    text_width,
    wrapped,
)
from shardwise.present.charts.panel_layout import LINE, NARROWEST

PAGE_WIDTH, SPACE = 1100.0, 36.0  # where panels side by side wrap, and the space between them
IDLE = LegendEntry(label="idle", colour="empty", sample="idle")
STRIPED = LegendEntry(label="a stripe: every other stage of a rank", colour="paper", sample="stripe")


def draw_charts(charts: Sequence[Chart], width: float | None = None) -> Drawing:
    """Return charts as one drawing, one under the other; `width` in pixels stretches or narrows plots as far as texts allow."""
    return below([draw(chart, width) for chart in charts])


def draw(chart: Chart, width: float | None = None) -> Drawing:
    """Return a chart as a drawing, as wide as its texts want or about `width` pixels."""
    page = _Page(chart, width, 0.0)
    if width is not None and not chart.wrap:
        if page.views[0].width + width - page.width < NARROWEST:
            page = _Page(chart, width, 0.0, is_legend_beside=False)
        stretch = (width - page.width) / len(page.lines[0])
        page = _Page(chart, width, stretch, is_legend_beside=page.is_legend_beside)
    return page.draw()


class _Page:
    """Panels at their places, and the legend."""

    def __init__(self, chart: Chart, width: float | None, stretch: float, *, is_legend_beside: bool = True) -> None:
        self.chart, self.page_width = chart, width
        following = [*chart.panels[1:], None]
        views = [
            PanelDrawing(
                panel, stretch, is_x_labelled=not (after and after.x == panel.x and not (after.beside or chart.wrap))
            )
            for panel, after in zip(chart.panels, following, strict=True)
        ]
        self.views, self.lines = views, list(_lines(views, wrap=chart.wrap, page_width=width or PAGE_WIDTH))
        self.is_legend_beside = (
            is_legend_beside and not chart.legend and not any(view.panel.y.categories for view in views)
        )
        self.groups = list(_legend_groups(views)) if self.is_legend_beside else []
        self.sample = SAMPLE if len(views) == 1 else 18.0
        self.top = MARGIN + 12.0 + ROW * sum(map(len, heading_lines(chart.title, chart.subtitle, width)))
        y = self.top
        left = max(line[0].left for line in self.lines)
        for line in self.lines:
            x, above = MARGIN + left - line[0].left, max(view.above for view in line)
            for view in line:
                view.x0, view.y0 = x + view.left, y + above
                x += view.left + view.width + view.right + SPACE
            y += above + max(view.height + view.below for view in line) + (SPACE if chart.wrap else 0.0)
        self.right = max(view.x0 + view.width + view.right for view in views)
        self.bottom = y - (SPACE if chart.wrap else 0.0)
        entries = self.entries()
        self.sample_width = 38.0 if all(entry.sample == "box" for entry in entries) else SAMPLE + 24.0
        self.foot = list(flowed([entry.label for entry in entries], self.sample_width, self.right))
        self.notes = (
            wrapped(chart.note, width - 2 * MARGIN) if width and chart.note else [chart.note] * bool(chart.note)
        )
        beside_entries = [entry for _, group in self.groups for entry in group]
        edges = [self.right, *(MARGIN + text_width(note) for note in self.notes)]
        edges += [self.right + MARGIN + self.sample + 10.0 + text_width(entry.label) for entry in beside_entries]
        samples = (SCALE_WIDTH + 8.0 if entry.sample == "scale" else self.sample_width for entry in entries)
        edges += [x + sample + text_width(label) for sample, (label, x, _) in zip(samples, self.foot, strict=True)]
        self.width = max(edges) + MARGIN

    def entries(self) -> list[LegendEntry]:
        """Return the entries of the legend under the panels."""
        if self.is_legend_beside:
            return []
        entries = list(dict.fromkeys(entry for view in self.views for entry in view.panel.legend())) + list(
            self.chart.legend
        )
        spans = [span for view in self.views for span in view.spans()]
        entries += [IDLE] if spans or any(view.has_spans for view in self.views) else []
        return entries + ([STRIPED] if any(span.striped for span in spans) else [])

    def draw(self) -> Drawing:
        legends = list(self.legend_places())
        bottom = max([self.bottom, *(y + ROW / 2 for _, y in legends)])
        foot = self.bottom + (12.0 + ROW * (1 + self.foot[-1][2]) if self.foot else 0.0)
        note_top = foot + ROW
        height = max(bottom, foot, note_top + LINE * (len(self.notes) - 1) if self.notes else 0.0) + MARGIN
        canvas = Canvas(self.width, height, self.chart.title, self.chart.subtitle, self.page_width)
        for view in self.views:
            view.draw(canvas)
        for entry, y in legends:
            draw_sample(canvas, entry, self.right + MARGIN, y, self.sample)
            canvas.text(self.right + MARGIN + self.sample + 10.0, y + 4.5, entry.label)
        for entry, (label, x, row) in zip(self.entries(), self.foot, strict=True):
            y = self.bottom + 18.0 + ROW * row
            end = draw_sample(canvas, entry, x, y, 14.0 if entry.sample == "box" else SAMPLE)
            canvas.text(end + 8.0, y + 4.5, label)
        for number, note in enumerate(self.notes):
            canvas.text(MARGIN, note_top + LINE * number, note)
        return canvas

    def legend_places(self) -> Iterator[tuple[LegendEntry, float]]:
        """Yield the legend entries beside their panels with their heights, each group under the one before."""
        end, step = 0.0, ROW if len(self.views) == 1 else SIZE + 4.0
        for view, group in self.groups:
            start = max(end, view.y0 + ROW / 2)
            yield from ((entry, start + step * number) for number, entry in enumerate(group))
            end = start + step * len(group)


def _lines(views: Sequence[PanelDrawing], *, wrap: bool, page_width: float) -> Iterator[list[PanelDrawing]]:
    """Yield the panels that stand side by side."""
    line: list[PanelDrawing] = []
    for view in views:
        line_width = sum(drawing.outer_width + SPACE for drawing in line)
        if line and not (view.panel.beside or (wrap and line_width + view.outer_width <= page_width - 2 * MARGIN)):
            yield line
            line = []
        line.append(view)
    yield line


def _legend_groups(views: Sequence[PanelDrawing]) -> Iterator[tuple[PanelDrawing, list[LegendEntry]]]:
    """Yield the legend entries beside the first of neighbouring panels that share any of them, limits last."""
    first, group = views[0], dict[LegendEntry, None]()
    for view in views:
        entries = list(view.panel.legend())
        if not group.keys() & set(entries):
            yield first, _limits_last(group)
            first, group = view, {}
        group.update(dict.fromkeys(entries))
    yield first, _limits_last(group)


def _limits_last(entries: dict[LegendEntry, None]) -> list[LegendEntry]:
    return sorted(entries, key=lambda entry: entry.sample == "limit")
