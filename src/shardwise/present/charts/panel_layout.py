"""Panels in pixels: the size of the plot, its rows, and the room that texts around it take."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.present.charts.chart import Cells, Curve, Panel, RuleLine, Span, Spans, StackedBars
from shardwise.present.charts.drawing import ROW, SIZE, SMALL, text_width, wrapped

LINE, SMALL_LINE = 18.0, 15.0  # height of a line of text over a bar, and of small text in or under a cell
LEAST_PLOT, NARROWEST = 120.0, 240.0  # of a plot, and before the legend beside it moves under it
INSET, RING = 2.0, 2.5  # of a piece in its cell; of a new one inside of its edge


class PanelLayout:
    """Layout of a panel in pixels: the plot, `width` by `height` at (x0, y0), and the room for the texts around it."""

    def __init__(self, panel: Panel, stretch: float, *, is_x_labelled: bool) -> None:
        self.panel, self.x_axis, self.y_axis, self.is_x_labelled = panel, panel.x, panel.y, is_x_labelled
        self.has_spans = any(isinstance(mark, Spans) for mark in panel.marks)
        self.cells = [cell for mark in panel.marks if isinstance(mark, Cells) for cell in mark.cells]
        self.is_inset = any(isinstance(mark, Cells) and mark.inset for mark in panel.marks)
        self.cell_size = SMALL if self.is_inset else SIZE
        self.x0 = self.y0 = 0.0
        count = len(self.x_axis.categories)
        column = max(self._column_width(), panel.size[0] + stretch / max(1, count))
        self.width = count * column if count else max(LEAST_PLOT, panel.size[0] + stretch)
        self.rows = list(self._rows())
        trailing = panel.gap if self.y_axis.side == "over" else 0.0
        self.height = self.rows[-1][0] + self.rows[-1][1] + trailing if self.rows else panel.size[1]
        self.rules = [mark for mark in panel.marks if isinstance(mark, RuleLine)]
        self.rule_rows = self._rule_rows()
        self.left = self._left()
        self.above, self.below = self._above(), self._below()
        self.right = max(0.0, *self._right_edges()) if self.panel.marks else 0.0

    @property
    def outer_width(self) -> float:
        """Width in pixels, with the texts around the plot."""
        return self.left + self.width + self.right

    def spans(self) -> list[Span]:
        """Return the spans of all rows."""
        return [span for mark in self.panel.marks if isinstance(mark, Spans) for span in mark.spans]

    def _column_width(self) -> float:
        """Return the pixels of a column: room for its texts, and for those in its cells."""
        bold, size, pad = (
            not self.x_axis.small,
            SMALL if self.x_axis.small else SIZE,
            4.0 if self.x_axis.small else 10.0,
        )
        needs = [0.0]
        for category in self.x_axis.categories:
            needs.append(text_width(category.label, size, bold=bold) + pad)
            needs += [text_width(line, SMALL) + 10.0 for line in category.lines]
        for cell in self.cells:
            needs += [
                text_width(line, SMALL if number else self.cell_size) + (4 * INSET if self.is_inset else 20.0)
                for number, line in enumerate(cell.lines)
            ]
        return max(needs)

    def _rows(self) -> Iterator[tuple[float, float]]:
        """Yield the top and height of each row, from the plot's upper edge."""
        top, (_, size) = 0.0, self.panel.size
        more = SMALL_LINE * max((len(cell.lines) - 1 for cell in self.cells), default=0)
        for number, category in enumerate(self.y_axis.categories):
            is_over = self.y_axis.side == "over"
            gap = self.panel.gap * (1 / 3 if category.thin else 1.0) if number else 0.0
            top += gap + (LINE * len(wrapped(category.label, self.width)) if is_over else 0.0)
            height = size * (0.4 if category.thin else 1.0) + max(0.0, more)
            yield top, height
            top += height

    def _rule_rows(self) -> dict[int, int]:
        """Return the rows of labels over the plot, by number of the line: above every line that they would cross."""
        labelled = [n for n, rule in enumerate(self.rules) if rule.axis == "x" and rule.label]
        rows: dict[int, int] = {}
        for n in sorted(labelled, key=lambda n: self.rules[n].at, reverse=True):
            end = self.x(self.rules[n].at) + text_width(self.rules[n].label) + 12.0
            rows[n] = 1 + max((row for number, row in rows.items() if self.x(self.rules[number].at) <= end), default=-1)
        return rows

    def _rule_label_left(self, number: int) -> float:
        """Return the left edge of a rule's label: right of the line, or left of it if it stands alone with more room there."""
        x, width = self.x(self.rules[number].at), text_width(self.rules[number].label)
        is_left = len(self.rule_rows) == 1 and x + 6.0 + width > self.x0 + self.width and x - 6.0 - width >= self.x0
        return x - 6.0 - width if is_left else x + 6.0

    def _left(self) -> float:
        axis = self.y_axis
        if axis.side == "over":
            return 0.0
        texts = (
            [axis.title, *(c.label for c in axis.categories)]
            if axis.categories
            else [text for _, text in axis.ticks or ()]
        )
        size = SMALL if axis.small and not axis.categories else SIZE
        widest = max((text_width(text, size) for text in texts), default=0.0)
        return widest + (10.0 if widest else 0.0) + (26.0 if axis.title and not axis.categories else 0.0)

    def _above(self) -> float:
        top_labels = ROW * (1 + bool(self.x_axis.title)) if self.x_axis.side == "top" else 0.0
        rules = ROW * (1 + max(self.rule_rows.values(), default=-1))
        titles = ROW * (bool(self.panel.title) + bool(self.panel.caption))
        self.over = top_labels + rules
        return 8.0 + self.over + titles

    def _below(self) -> float:
        axis = self.x_axis
        if not self.is_x_labelled or axis.side == "top":
            return 0.0
        if axis.categories:
            lines = max((len(category.lines) for category in axis.categories), default=0)
            labels = 22.0 + SMALL_LINE * lines if any(category.label for category in axis.categories) else 0.0
        else:
            labels = 24.0 if axis.ticks else 0.0
        return labels + (24.0 if axis.title else 0.0)

    def _right_edges(self) -> Iterator[float]:
        """Yield the pixels by which texts reach beyond the plot's right edge."""
        for n in self.rule_rows:
            yield self._rule_label_left(n) + text_width(self.rules[n].label) - self.width
        yield text_width(self.panel.title, bold=True) - self.width
        yield text_width(self.panel.caption) - self.width
        yield (text_width(self.x_axis.title) - self.left - self.width) if self.is_x_labelled else 0.0
        if self.x_axis.ticks and self.is_x_labelled:
            place, text = self.x_axis.ticks[-1]
            yield self.x(place) + text_width(text) / 2 - self.width
        yield from (8.0 + text_width(line) for category in self.y_axis.categories for line in category.lines)
        for mark in self.panel.marks:
            if isinstance(mark, Curve) and mark.row is not None:
                yield 8.0 + text_width(mark.label)
            if isinstance(mark, StackedBars) and self.y_axis.categories:
                yield from (
                    self.x(s) + 6.0 + text_width(self.x_axis.format(s), bold=True) - self.width for s in mark.sums
                )

    def x(self, value: float) -> float:
        """Return the pixels from the page's left edge."""
        return self.x0 + self.width * self.x_axis.position(value)

    def y(self, value: float) -> float:
        """Return the pixels from the page's upper edge; rows go down, numbers up."""
        if not self.rows:
            return self.y0 + self.height * (1.0 - self.y_axis.position(value))
        top, height = self.rows[min(int(value), len(self.rows) - 1)]
        return self.y0 + top + height * (value - min(int(value), len(self.rows) - 1))
