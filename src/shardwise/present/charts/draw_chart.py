"""Charts as drawings: the places of panels, axes, marks and legends in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from shardwise.present.charts.chart import (
    Axis,
    Band,
    BarPart,
    Cell,
    Cells,
    Chart,
    Curve,
    LegendEntry,
    Panel,
    Points,
    RuleLine,
    Span,
    Spans,
    StackedBars,
)
from shardwise.present.charts.drawing import (
    MARGIN,
    ROW,
    SAMPLE,
    SIZE,
    SMALL,
    Canvas,
    Drawing,
    below,
    flowed,
    heading_lines,
    text_width,
    wrapped,
)
from shardwise.present.charts.palette import EMPTY, FAINT, GRID, HUES, INK, PAPER, Colour, by_name, shade, text_on

LINE, SMALL_LINE = 18.0, 15.0  # height of a line of text over a bar, and of small text in or under a cell
PAGE_WIDTH, SPACE = 1100.0, 36.0  # where panels side by side wrap, and the space between them
LEAST_PLOT, NARROWEST = 120.0, 240.0  # of a plot, and before the legend beside it moves under it
DASHES = ((), (9, 4), (3, 4), (12, 3, 3, 3), (18, 6), (8, 3, 2, 3, 2, 3), (5, 2))
REFERENCE, RULE, EDGE = (6, 4), (2, 3), (1, 3)
LETTER, LEADER = 9.0, 30.0  # radius of a letter's circle, and how far above its point it stands
LARGEST, LEAST = 26.0, 4.0  # radius of a point whose share is 1, and of one without a share
STRIPE = 3.0
INSET, RING = 2.0, 2.5  # of a piece in its cell; of a new one inside of its edge
LABEL_HEIGHT = 13.0  # of the label over a piece of which a part is there
SCALE_WIDTH, SCALE_STEPS = 160.0, 16
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
    return page.drawn()


class _Page:
    """Panels at their places, and the legend."""

    def __init__(self, chart: Chart, width: float | None, stretch: float, *, is_legend_beside: bool = True) -> None:
        self.chart, self.page_width = chart, width
        following = [*chart.panels[1:], None]
        views = [
            _View(panel, stretch, is_x_labelled=not (after and after.x == panel.x and not (after.beside or chart.wrap)))
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
        self.beside = 38.0 if all(entry.sample == "box" for entry in entries) else SAMPLE + 24.0
        self.foot = list(flowed([entry.label for entry in entries], self.beside, self.right))
        self.notes = (
            wrapped(chart.note, width - 2 * MARGIN) if width and chart.note else [chart.note] * bool(chart.note)
        )
        beside = [entry for _, group in self.groups for entry in group]
        edges = [self.right, *(MARGIN + text_width(note) for note in self.notes)]
        edges += [self.right + MARGIN + self.sample + 10.0 + text_width(entry.label) for entry in beside]
        samples = (SCALE_WIDTH + 8.0 if entry.sample == "scale" else self.beside for entry in entries)
        edges += [x + sample + text_width(label) for sample, (label, x, _) in zip(samples, self.foot, strict=True)]
        self.width = max(edges) + MARGIN

    def entries(self) -> list[LegendEntry]:
        """The entries under the panels."""
        if self.is_legend_beside:
            return []
        entries = list(dict.fromkeys(entry for view in self.views for entry in view.panel.legend())) + list(
            self.chart.legend
        )
        spans = [span for view in self.views for span in view.spans()]
        entries += [IDLE] if spans or any(view.has_spans for view in self.views) else []
        return entries + ([STRIPED] if any(span.striped for span in spans) else [])

    def drawn(self) -> Drawing:
        legends = list(self.legend_places())
        bottom = max([self.bottom, *(y + ROW / 2 for _, y in legends)])
        foot = self.bottom + (12.0 + ROW * (1 + self.foot[-1][2]) if self.foot else 0.0)
        note_top = foot + ROW
        height = max(bottom, foot, note_top + LINE * (len(self.notes) - 1) if self.notes else 0.0) + MARGIN
        canvas = Canvas(self.width, height, self.chart.title, self.chart.subtitle, self.page_width)
        for view in self.views:
            view.draw(canvas)
        for entry, y in legends:
            _sample(canvas, entry, self.right + MARGIN, y, self.sample)
            canvas.text(self.right + MARGIN + self.sample + 10.0, y + 4.5, entry.label)
        for entry, (label, x, row) in zip(self.entries(), self.foot, strict=True):
            y = self.bottom + 18.0 + ROW * row
            end = _sample(canvas, entry, x, y, 14.0 if entry.sample == "box" else SAMPLE)
            canvas.text(end + 8.0, y + 4.5, label)
        for number, note in enumerate(self.notes):
            canvas.text(MARGIN, note_top + LINE * number, note)
        return canvas

    def legend_places(self) -> Iterator[tuple[LegendEntry, float]]:
        """Entries beside their panels, each group under the one before."""
        end, step = 0.0, ROW if len(self.views) == 1 else SIZE + 4.0
        for view, group in self.groups:
            start = max(end, view.y0 + ROW / 2)
            yield from ((entry, start + step * number) for number, entry in enumerate(group))
            end = start + step * len(group)


def _lines(views: Sequence[_View], *, wrap: bool, page_width: float) -> Iterator[list[_View]]:
    """Panels that stand side by side."""
    line: list[_View] = []
    for view in views:
        taken = sum(other.outer_width + SPACE for other in line)
        if line and not (view.panel.beside or (wrap and taken + view.outer_width <= page_width - 2 * MARGIN)):
            yield line
            line = []
        line.append(view)
    yield line


def _legend_groups(views: Sequence[_View]) -> Iterator[tuple[_View, list[LegendEntry]]]:
    """Entries beside the first of neighbouring panels that share any of them, limits last."""
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


class _View:
    """A panel in pixels: the plot of `width` by `height` at (x0, y0), and the room that texts around it take."""

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
        """Pixels with the texts around the plot."""
        return self.left + self.width + self.right

    def spans(self) -> list[Span]:
        """The spans of all rows."""
        return [span for mark in self.panel.marks if isinstance(mark, Spans) for span in mark.spans]

    def _column_width(self) -> float:
        """Pixels of a column: room for its texts, and for those in its cells."""
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
        """Top and height of each row, from the plot's upper edge."""
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
        """Rows of labels over the plot, by number of the line: above every line that they would cross."""
        labelled = [n for n, rule in enumerate(self.rules) if rule.axis == "x" and rule.label]
        rows: dict[int, int] = {}
        for n in sorted(labelled, key=lambda n: self.rules[n].at, reverse=True):
            end = self.x(self.rules[n].at) + text_width(self.rules[n].label) + 12.0
            rows[n] = 1 + max((row for other, row in rows.items() if self.x(self.rules[other].at) <= end), default=-1)
        return rows

    def _rule_label_left(self, number: int) -> float:
        """Where a rule's label begins: right of the line; left of it where it is alone and finds more room there."""
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
        """Pixels by which texts reach beyond the plot's right edge."""
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
        """Pixels from the page's left edge."""
        return self.x0 + self.width * self.x_axis.position(value)

    def y(self, value: float) -> float:
        """Pixels from the page's upper edge; rows go down, numbers up."""
        if not self.rows:
            return self.y0 + self.height * (1.0 - self.y_axis.position(value))
        top, height = self.rows[min(int(value), len(self.rows) - 1)]
        return self.y0 + top + height * (value - min(int(value), len(self.rows) - 1))

    def draw(self, canvas: Canvas) -> None:
        """Draw the panel: bands under the grid, the first curve over the others, texts over all."""
        self.canvas, self.late = canvas, list[partial[None]]()
        marks = self.panel.marks
        for mark in marks:
            if isinstance(mark, Band):
                self._band(mark)
        self._titles()
        self._ticks()
        for mark in marks:
            match mark:
                case StackedBars():
                    self._bars(mark)
                case Cells():
                    self._cells(mark)
                case Spans():
                    self._spans(mark)
        for number, rule in enumerate(self.rules):
            self._rule(number, rule)
        for mark in reversed(marks):
            if isinstance(mark, Curve):
                self._curve(mark)
        self._points([mark for mark in marks if isinstance(mark, Points)])
        for text in self.late:
            text()

    def _titles(self) -> None:
        base = self.y0 - 8.0 - self.over
        for text, bold in ((self.panel.title, True), (self.panel.caption, False)):
            if text:
                self.canvas.text(self.x0, base, text, bold=bold)
                base -= ROW

    def _ticks(self) -> None:
        canvas, left, right, top, bottom = self.canvas, self.x0, self.x0 + self.width, self.y0, self.y0 + self.height
        is_framed = not self.y_axis.categories
        for number, (value, text) in enumerate(self.x_axis.ticks or ()):
            x, is_grid = self.x(value), not self.has_spans
            canvas.line(
                x, top if is_grid else bottom, x, bottom + (0.0 if is_grid else 5.0), stroke=GRID if is_grid else FAINT
            )
            if self.is_x_labelled and number % self._every() == 0:
                canvas.text(x, bottom + 20.0, text, anchor="middle")
        for value, text in self.y_axis.ticks or ():
            canvas.line(left, self.y(value), right, self.y(value), stroke=GRID)
            canvas.text(left - 8.0, self.y(value) + 4.5, text, size=SMALL if self.y_axis.small else SIZE, anchor="end")
        if is_framed:
            canvas.rect(left, top, self.width, self.height, stroke=FAINT)
            if self.y_axis.title:
                canvas.text(
                    left - self.left + 12.0, (top + bottom) / 2, self.y_axis.title, anchor="middle", upward=True
                )
        self._columns()
        self._row_labels()

    def _every(self) -> int:
        """Every n-th tick of the x axis is written, so that none runs into the next."""
        ticks = self.x_axis.ticks or ()
        for every in range(1, len(ticks) + 1):
            shown = [(self.x(value), text_width(text)) for value, text in ticks[::every]]
            if all(b - a >= (u + v) / 2 + 4.0 for (a, u), (b, v) in pairwise(shown)):
                return every
        return 1

    def _columns(self) -> None:
        """Names of columns, and the title of the x axis."""
        axis, is_top = self.x_axis, self.x_axis.side == "top"
        if not self.is_x_labelled:
            return
        y = self.y0 - 8.0 if is_top else self.y0 + self.height + 18.0
        for number, category in enumerate(axis.categories):
            x = self.x(number + 0.5)
            if category.label:
                size = SMALL if axis.small else SIZE
                self.canvas.text(x, y, category.label, size=size, anchor="middle", bold=not axis.small)
            for line, text in enumerate(category.lines, 1):
                self.canvas.text(x, y + 3.0 + SMALL_LINE * line, text, size=SMALL, anchor="middle")
        if axis.title:
            height = y - ROW if is_top else self.y0 + self.height + self.below - 4.0
            middle = max(self.x0 + self.width / 2, self.x0 - self.left + text_width(axis.title) / 2)
            self.canvas.text(middle, height, axis.title, anchor="middle")

    def _row_labels(self) -> None:
        axis = self.y_axis
        if axis.categories and axis.title:
            self.canvas.text(self.x0 - 10.0, self.y0 - 8.0, axis.title, anchor="end")
        for (top, height), category in zip(self.rows, axis.categories, strict=True):
            if axis.side == "over":
                for number, line in enumerate(reversed(wrapped(category.label, self.width))):
                    place = self.x0, self.y0 + top - 5.0 - LINE * number
                    self.late.append(partial(self.canvas.text_on_paper, *place, line))
                continue
            size = SMALL if category.thin or axis.small else SIZE
            base = self.y0 + top + height / 2 + (4.0 if size == SMALL else 4.5)
            if category.label:
                self.canvas.text(self.x0 - 10.0, base, category.label, size=size, anchor="end")
            for line in category.lines:
                self.canvas.text(self.x0 + self.width + 8.0, base, line, size=size)

    def _band(self, band: Band) -> None:
        low = [(self.x(x), self.y(value)) for x, value, _ in band.edges]
        high = [(self.x(x), self.y(value)) for x, _, value in band.edges]
        with self.canvas.about(band.hover or band.label, band.path, band.query):
            self.canvas.area([*low, *reversed(high)], fill=by_name(band.colour))
        for edge in (low, high) if band.colour == "empty" else ():
            self.canvas.path(edge, stroke=FAINT, width=1.0, dash=EDGE)

    def _rule(self, number: int, rule: RuleLine) -> None:
        dash, width = (REFERENCE, 1.5) if rule.limit else (RULE, 1.0)
        with self.canvas.about(rule.hover, rule.path, rule.query):
            if rule.axis == "y":
                y = self.y(rule.at)
                self.canvas.path([(self.x0, y), (self.x0 + self.width, y)], stroke=INK, width=width, dash=dash)
                return
            x, head = self.x(rule.at), self.y0
            if number in self.rule_rows:
                head -= 8.0 + ROW * self.rule_rows[number]
                self.canvas.text(self._rule_label_left(number), head, rule.label)
                head -= 12.0
            self.canvas.path([(x, head), (x, self.y0 + self.height)], stroke=INK, width=width, dash=dash)

    def _curve(self, curve: Curve) -> None:
        colour, width, dash = style_of(curve)
        y = self.y
        if curve.row is not None:
            top, height = self.rows[curve.row]
            curves = (mark for mark in self.panel.marks if isinstance(mark, Curve) and mark.row is not None)
            most = max((value for other in curves for _, value in other.points), default=0.0) or 1.0
            base = self.y0 + top + height
            width, dash = 1.4, ()
            self.canvas.line(self.x0, base, self.x0 + self.width, base, stroke=FAINT)
            self.canvas.text(self.x0 + self.width + 8.0, base - height / 2 + 4.5, curve.label)

            def y(value: float) -> float:
                return base - height * value / most

        with self.canvas.about(curve.hover or curve.label, curve.path, curve.query):
            self.canvas.path([(self.x(a), y(b)) for a, b in curve.points], stroke=colour, width=width, dash=dash)

    def _points(self, marks: Sequence[Points]) -> None:
        """Larger points behind smaller ones; letters above them on leaders, clear of each other."""
        lettered = [mark for mark in marks if mark.letter]
        for mark in sorted(marks, key=lambda mark: -mark.share):
            texts = mark.texts or ("",) * len(mark.points)
            for (a, b), text in zip(mark.points, texts, strict=True):
                x, y = self.x(a), self.y(b)
                hover = mark.hover or f"{mark.label or self.panel.title}: {text or self.y_axis.format(b)}"
                with self.canvas.about(hover, mark.path, mark.query):
                    _point(self.canvas, x, y, mark)
                if text:
                    self.late.append(partial(self.canvas.text_on_paper, x, y - 8.0, text, size=SMALL, anchor="middle"))
        places = [(self.x(mark.points[0][0]), self.y(mark.points[0][1])) for mark in lettered]
        letters = letter_places(places, [_radius(mark) for mark in lettered])
        for start, end in zip(places, letters, strict=True):
            self.canvas.line(*start, *end)
        for mark, (x, y) in zip(lettered, letters, strict=True):
            _letter(self.canvas, x, y, mark.letter)

    def _bars(self, mark: StackedBars) -> None:
        is_lying = bool(self.y_axis.categories)
        value_axis, name_axis = (self.x_axis, self.y_axis) if is_lying else (self.y_axis, self.x_axis)
        breadth = self.width / max(1, len(name_axis.categories)) * 0.6
        several = len({part.name for bar in mark.bars for part in bar}) > 1
        for number, (bar, total) in enumerate(zip(mark.bars, mark.sums, strict=True)):
            end = 0.0
            for part in bar:
                start, end = end, end + part.value
                if part.value <= 0:
                    continue
                if is_lying:
                    top, height = self.y(number), self.rows[number][1]
                    box = self.x(start), top, self.x(end) - self.x(start), height
                else:
                    box = self.x(number + 0.5) - breadth / 2, self.y(end), breadth, self.y(start) - self.y(end)
                self._part(part, box, value_axis, is_written=is_lying and several)
            text = value_axis.format(total)
            if is_lying and mark.totals:
                place = self.x(total) + 6.0, self.y(number + 0.5) + 4.5
                self.late.append(partial(self.canvas.text_on_paper, *place, text, bold=True))
            elif mark.totals and bar:
                place = self.x(number + 0.5), self.y(total) - 5.0
                self.late.append(partial(self.canvas.text_on_paper, *place, text, size=SMALL, anchor="middle"))

    def _part(self, part: BarPart, box: tuple[float, float, float, float], axis: Axis, *, is_written: bool) -> None:
        """A part of a bar, with its value where there is room."""
        (x, y, width, height), text, fill = box, axis.format(part.value), by_name(part.colour)
        with self.canvas.about(part.hover or f"{part.name}: {text}", part.path, part.query):
            self.canvas.rect(x, y, width, height, fill=fill, stroke=PAPER, stroke_width=1.0 if is_written else 0.5)
            if is_written and text_width(text, SMALL) + 6.0 <= width:
                base = y + height / 2 + 4.0
                self.canvas.text(x + width / 2, base, text, size=SMALL, anchor="middle", fill=text_on(fill))

    def _cells(self, mark: Cells) -> None:
        for number in range(len(self.x_axis.categories)) if mark.inset else ():
            self.canvas.rect(self.x(number), self.y0, self.x(1) - self.x(0), self.height, stroke=FAINT)
        for cell in mark.cells:
            with self.canvas.about(cell.hover, cell.path, cell.query):
                self._piece(cell) if mark.inset else self._cell(cell)

    def _cell(self, cell: Cell) -> None:
        """A whole cell with its lines in the middle."""
        x, y, width, height = self.x(cell.column), self.y(cell.row), self.x(1) - self.x(0), self.rows[cell.row][1]
        fill, ink = by_name(cell.colour), text_on(by_name(cell.colour))
        is_pale = cell.colour == "empty" or cell.colour.startswith("shade:")
        self.canvas.rect(
            x, y, width, height, fill=fill, stroke=FAINT if is_pale else PAPER, stroke_width=0.75 if is_pale else 2
        )
        if cell.ringed:
            self.canvas.rect(x + 4, y + 4, width - 8, height - 8, stroke=ink, radius=3)
        base = y + (height - SMALL_LINE * (len(cell.lines) - 1)) / 2 + 4.5
        for number, line in enumerate(cell.lines):
            style = {"size": SMALL if number else SIZE, "bold": not number and len(cell.lines) > 1}
            self.canvas.text(x + width / 2, base + SMALL_LINE * number, line, anchor="middle", fill=ink, **style)  # type: ignore[arg-type]

    def _piece(self, cell: Cell) -> None:
        """A piece in its cell; the label of one of which a part is there stands over it, not half on it."""
        x, y = self.x(cell.column) + INSET, self.y(cell.row) + INSET
        width, height = self.x(1) - self.x(0) - 2 * INSET, self.rows[cell.row][1] - 2 * INSET
        fill, is_full, label = by_name(cell.colour), cell.share >= 1, "".join(cell.lines)
        over = LABEL_HEIGHT if label and not is_full else 0.0
        ring = RING if cell.new and is_full else 0.0  # the page's colour, between the edge and the piece
        self.canvas.rect(
            x + ring, y + over + ring, width * cell.share - 2 * ring, height - over - 2 * ring, fill=fill, radius=0 if over else 2
        )  # fmt: skip
        if cell.new or not is_full:
            edge, thick = (INK, 2.0) if cell.new else (FAINT, 1.0)
            self.canvas.rect(x, y, width, height, stroke=edge, stroke_width=thick, radius=2)
        if label:
            base = y + (over - 2.5 if over else height / 2 + 4.0)
            self.canvas.text(
                x + width / 2, base, label, size=SMALL, anchor="middle", fill=INK if over else text_on(fill)
            )

    def _spans(self, mark: Spans) -> None:
        """Spans over the colour of idle time, with a frame around each row."""
        for top, height in self.rows:
            self.canvas.rect(self.x0, self.y0 + top, self.width, height, fill=EMPTY)
        for span in mark.spans:
            with self.canvas.about(span.hover, span.path, span.query):
                self._span(span)
        for top, height in self.rows:
            self.canvas.rect(self.x0, self.y0 + top, self.width, height, stroke=FAINT, stroke_width=0.6)

    def _span(self, span: Span) -> None:
        (top, room), (lane, lanes), fill = self.rows[span.row], span.lane, by_name(span.colour)
        is_thin = self.y_axis.categories[span.row].thin
        x, y, height = self.x(span.start), self.y0 + top + room * lane / lanes, room / lanes
        width, ink = self.x(span.end) - x, text_on(fill)
        self.canvas.rect(x, y, width, height, fill=fill, stroke=None if is_thin else PAPER, stroke_width=0.6)
        if span.striped:
            _stripe(self.canvas, x, y + height, width, ink)
        if span.text and text_width(span.text, SMALL) <= width:
            base = y + height / 2 + (2.0 if span.striped else 4.0)
            self.canvas.text(x + width / 2, base, span.text, size=SMALL, anchor="middle", fill=ink)


def style_of(curve: Curve) -> tuple[Colour, float, Sequence[float]]:
    """Return colour, width and dashes of a curve; where colours repeat, dashes differ."""
    return _line_style(curve.colour, is_reference=curve.reference)


def _line_style(colour: str, *, is_reference: bool) -> tuple[Colour, float, Sequence[float]]:
    if is_reference:
        return by_name(colour), 2.0, REFERENCE
    number = int(colour.removeprefix("series:")) if colour.startswith("series:") else 0
    turn, place = divmod(number, len(HUES))
    return by_name(colour), 3.0, DASHES[(place + turn) % len(DASHES)]


def _radius(mark: Points) -> float:
    """Radius of a point whose area is its share."""
    return max(LEAST, LARGEST * math.sqrt(mark.share)) if mark.letter else LEAST if mark.texts else 3.5


def _point(canvas: Canvas, x: float, y: float, mark: Points) -> None:
    """A circle, or a square where the colours of series repeat."""
    radius, fill = _radius(mark), by_name(mark.colour)
    thick = 1.5 if mark.letter or mark.texts else 0.5
    if (
        mark.colour.startswith("series:")
        and int(mark.colour.removeprefix("series:")) // len(HUES) % 2
        and not mark.letter
    ):
        canvas.rect(x - 3.2, y - 3.2, 6.4, 6.4, fill=fill, stroke=PAPER, stroke_width=thick)
    else:
        canvas.circle(x, y, radius, fill=fill, stroke=PAPER, stroke_width=thick)


def _letter(canvas: Canvas, x: float, y: float, letter: str) -> None:
    canvas.circle(x, y, LETTER, fill=PAPER, stroke=INK)
    canvas.text(x, y + 4.2, letter, size=SMALL, anchor="middle", bold=True)


def _stripe(canvas: Canvas, left: float, bottom: float, width: float, ink: Colour) -> None:
    inset = min(2.0, width / 4)
    canvas.rect(left + inset, bottom - STRIPE - 1.0, width - 2 * inset, STRIPE, fill=ink)


def _sample(canvas: Canvas, entry: LegendEntry, x: float, y: float, width: float) -> float:
    """Draw a legend's sample around the height y; return where it ends."""
    match entry.sample:
        case "line" | "reference":
            colour, thick, dash = _line_style(entry.colour, is_reference=entry.sample == "reference")
            canvas.path([(x, y), (x + width, y)], stroke=colour, width=thick, dash=dash)
        case "limit":
            canvas.path([(x, y), (x + width, y)], stroke=INK, width=1.5, dash=REFERENCE)
        case "band" | "idle" | "stripe":
            canvas.rect(x, y - 7.0, width, 14.0, fill=by_name(entry.colour), stroke=FAINT)
            if entry.sample == "stripe":
                _stripe(canvas, x, y + 7.0, width, INK)
        case "point":
            _point(canvas, x + width / 2, y, Points(points=(), colour=entry.colour))
        case "letter":
            _letter(canvas, x + width / 2, y, entry.letter)
        case "scale":
            width = SCALE_WIDTH
            for step in range(SCALE_STEPS):
                part = width / SCALE_STEPS
                canvas.rect(x + part * step, y - 7.0, part, 14.0, fill=shade((step + 0.5) / SCALE_STEPS))
            canvas.rect(x, y - 7.0, width, 14.0, stroke=FAINT)
        case "box":
            width = min(width, 14.0)
            canvas.rect(x, y - 7.0, width, 14.0, fill=by_name(entry.colour), radius=2)
    return x + width


def letter_places(places: Sequence[tuple[float, float]], radii: Sequence[float]) -> list[tuple[float, float]]:
    """Return where letters stand: above their points, those of points at like heights side by side."""
    rows: dict[int, list[int]] = {}
    for i in sorted(range(len(places)), key=lambda i: (round(places[i][1] / LEADER), places[i][0])):
        rows.setdefault(round(places[i][1] / LEADER), []).append(i)
    letters: dict[int, tuple[float, float]] = {}
    for row in rows.values():
        height = min(places[i][1] - radii[i] for i in row) - LEADER + LETTER
        letters |= {
            i: (x, height) for i, x in zip(row, apart([places[i][0] for i in row], 2 * LETTER + 3), strict=True)
        }
    return [letters[i] for i in range(len(places))]


def apart(places: Sequence[float], distance: float) -> list[float]:
    """Return the nearest places to some in order that are no nearer to each other than a distance.

    >>> apart([0.0, 1.0, 50.0], 10.0)
    [-4.5, 5.5, 50.0]
    """
    runs: list[tuple[float, int]] = []  # sum of where runs would begin, and how many are in them
    for number, place in enumerate(places):
        total, count = place - number * distance, 1
        while runs and runs[-1][0] / runs[-1][1] > total / count:
            before, more = runs.pop()
            total, count = total + before, count + more
        runs.append((total, count))
    begins = [total / count for total, count in runs for _ in range(count)]
    return [begin + number * distance for number, begin in enumerate(begins)]
