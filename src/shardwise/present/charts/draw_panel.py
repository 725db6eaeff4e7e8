"""Panels as shapes: grids, texts and marks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from shardwise.present.charts.chart import (
    Axis,
    Band,
    BarPart,
    Cell,
    Cells,
    Curve,
    Points,
    RuleLine,
    Span,
    SpanEdges,
    Spans,
    StackedBars,
)
from shardwise.present.charts.draw_marks import (
    EDGE,
    REFERENCE,
    RULE,
    draw_letter,
    draw_point,
    draw_stripe,
    letter_places,
    point_radius,
    style_of,
)
from shardwise.present.charts.drawing import ROW, SIZE, SMALL, Canvas, text_width, wrapped
from shardwise.present.charts.palette import EMPTY, FAINT, GRID, INK, PAPER, by_name, text_on
from shardwise.present.charts.panel_layout import INSET, LINE, RING, SMALL_LINE, PanelLayout

LABEL_HEIGHT = 13.0  # of the label over a piece of which a part is there


class PanelDrawing(PanelLayout):
    """A panel that draws itself: ticks and titles, then marks."""

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
                case SpanEdges():
                    self._span_edges(mark)
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
        """Return n where every n-th tick of the x axis is written, so that none runs into the next."""
        ticks = self.x_axis.ticks or ()
        for every in range(1, len(ticks) + 1):
            labels = [(self.x(value), text_width(text)) for value, text in ticks[::every]]
            if all(b - a >= (u + v) / 2 + 4.0 for (a, u), (b, v) in pairwise(labels)):
                return every
        return 1

    def _columns(self) -> None:
        """Draw the names of columns, and the title of the x axis."""
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
                if self.rows:
                    return  # a level of curves in rows
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
            highest = max((value for row_curve in curves for _, value in row_curve.points), default=0.0) or 1.0
            base = self.y0 + top + height
            width, dash = 1.4, ()
            self.canvas.line(self.x0, base, self.x0 + self.width, base, stroke=FAINT)
            self.canvas.text(self.x0 + self.width + 8.0, base - height / 2 + 4.5, curve.label)

            def y(value: float) -> float:
                return base - height * value / highest

        with self.canvas.about(curve.hover or curve.label, curve.path, curve.query):
            self.canvas.path([(self.x(a), y(b)) for a, b in curve.points], stroke=colour, width=width, dash=dash)

    def _points(self, marks: Sequence[Points]) -> None:
        """Draw larger points behind smaller ones; letters above them on leaders, clear of each other."""
        lettered = [mark for mark in marks if mark.letter]
        for mark in sorted(marks, key=lambda mark: -mark.share):
            texts = mark.texts or ("",) * len(mark.points)
            for (a, b), text in zip(mark.points, texts, strict=True):
                x, y = self.x(a), self.y(b)
                hover = mark.hover or f"{mark.label or self.panel.title}: {text or self.y_axis.format(b)}"
                with self.canvas.about(hover, mark.path, mark.query):
                    draw_point(self.canvas, x, y, mark)
                if text:
                    self.late.append(partial(self.canvas.text_on_paper, x, y - 8.0, text, size=SMALL, anchor="middle"))
        places = [(self.x(mark.points[0][0]), self.y(mark.points[0][1])) for mark in lettered]
        letters = letter_places(places, [point_radius(mark) for mark in lettered])
        for start, end in zip(places, letters, strict=True):
            self.canvas.line(*start, *end)
        for mark, (x, y) in zip(lettered, letters, strict=True):
            draw_letter(self.canvas, x, y, mark.letter)

    def _bars(self, mark: StackedBars) -> None:
        is_lying = bool(self.y_axis.categories)
        value_axis, name_axis = (self.x_axis, self.y_axis) if is_lying else (self.y_axis, self.x_axis)
        breadth = self.width / max(1, len(name_axis.categories)) * 0.6
        has_several = len({part.name for bar in mark.bars for part in bar}) > 1
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
                self._part(part, box, value_axis, is_written=is_lying and has_several)
            text = value_axis.format(total)
            if is_lying and mark.totals:
                place = self.x(total) + 6.0, self.y(number + 0.5) + 4.5
                self.late.append(partial(self.canvas.text_on_paper, *place, text, bold=True))
            elif mark.totals and bar:
                place = self.x(number + 0.5), self.y(total) - 5.0
                self.late.append(partial(self.canvas.text_on_paper, *place, text, size=SMALL, anchor="middle"))

    def _part(self, part: BarPart, box: tuple[float, float, float, float], axis: Axis, *, is_written: bool) -> None:
        """Draw a part of a bar, with its value where there is room."""
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
        """Draw a whole cell with its lines in the middle."""
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
        """Draw a piece in its cell; the label of a partial piece stands over it."""
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
        """Draw spans over the colour of idle time, with a frame around each row."""
        for top, height in self.rows:
            self.canvas.rect(self.x0, self.y0 + top, self.width, height, fill=EMPTY)
        for span in mark.spans:
            with self.canvas.about(span.hover, span.path, span.query):
                self._span(span)
        for top, height in self.rows:
            self.canvas.rect(self.x0, self.y0 + top, self.width, height, stroke=FAINT, stroke_width=0.6)

    def _span_edges(self, mark: SpanEdges) -> None:
        for span in mark.spans:
            (top, height), x, end = self.rows[span.row], self.x(span.start), self.x(span.end)
            with self.canvas.about(span.hover, span.path, span.query):
                self.canvas.line(x, self.y0 + top, x, self.y0 + top + height, stroke=PAPER)
                if text_width(span.text, SMALL) <= end - x:
                    place = (x + end) / 2, self.y0 + top + height / 2 + 4.0
                    ink = text_on(by_name(span.colour))
                    self.canvas.text(*place, span.text, size=SMALL, anchor="middle", fill=ink)

    def _span(self, span: Span) -> None:
        (top, room), (lane, lanes), fill = self.rows[span.row], span.lane, by_name(span.colour)
        is_thin = self.y_axis.categories[span.row].thin
        x, y, height = self.x(span.start), self.y0 + top + room * lane / lanes, room / lanes
        width, ink = self.x(span.end) - x, text_on(fill)
        self.canvas.rect(x, y, width, height, fill=fill, stroke=None if is_thin else PAPER, stroke_width=0.6)
        if span.striped:
            draw_stripe(self.canvas, x, y + height, width, ink)
        if span.text and text_width(span.text, SMALL) <= width:
            base = y + height / 2 + (2.0 if span.striped else 4.0)
            self.canvas.text(x + width / 2, base, span.text, size=SMALL, anchor="middle", fill=ink)
