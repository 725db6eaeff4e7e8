"""The same drawing by matplotlib: every mark at its place, texts as wide as computed, files of the format of their name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.present.charts.drawing import Canvas, Drawing, Text, text_width
from shardwise.present.charts.matplotlib_export import ENDINGS, encoded
from shardwise.present.charts.palette import BLUE, INK, ORANGE, PAPER
from shardwise.values.errors import InputError


def drawing() -> Drawing:
    canvas = Canvas(300, 200, "a $title$", "and what it says: [B, D] · [D, F] → 3 TB/s")
    canvas.rect(10, 100, 50, 20, fill=BLUE, radius=3)
    canvas.rect(80, 100, 50, 20, stroke=INK, stroke_width=2)
    canvas.path([(10, 150), (60, 160), (110, 150)], stroke=ORANGE, width=3, dash=(6, 4))
    canvas.area([(150, 150), (200, 150), (200, 180)], fill=ORANGE)
    canvas.circle(250, 150, 10, fill=ORANGE, stroke=PAPER)
    canvas.text(20, 180, "upwards", upward=True)
    canvas.text(290, 190, "to the right", anchor="end", size=11)
    return canvas


def test_every_mark_is_an_artist_at_its_place() -> None:
    figure = drawing().figure()
    assert tuple(figure.get_size_inches() * 100) == (drawing().width, drawing().height)
    (axes,) = figure.axes
    artists = sorted((*axes.patches, *axes.lines, *axes.texts), key=lambda artist: artist.get_zorder())
    assert len(artists) == len(drawing().marks)
    circle = axes.patches[-1]
    box = circle.get_window_extent()
    assert ((box.x0 + box.x1) / 2, drawing().height - (box.y0 + box.y1) / 2) == pytest.approx((250, 150))


def test_texts_are_no_wider_than_computed() -> None:
    """DejaVu Sans is the widest of the fonts that pictures name; matplotlib draws with it."""
    figure = drawing().figure()
    written = [mark for mark in drawing().marks if isinstance(mark, Text)]
    reckoned = {mark.content: text_width(mark.content, mark.size, bold=mark.bold) for mark in written}
    for text in figure.axes[0].texts:
        box = text.get_window_extent()
        assert max(box.width, box.height) <= 1.03 * reckoned[text.get_text()], text.get_text()
        assert max(box.width, box.height) >= 0.8 * reckoned[text.get_text()], text.get_text()


@pytest.mark.parametrize(("ending", "begin"), [(".svg", b"<svg"), (".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_files_have_the_format_of_their_names_and_are_deterministic(ending: str, begin: bytes) -> None:
    assert ending in ENDINGS
    written = encoded(drawing(), ending)
    assert written.startswith(begin)
    assert encoded(drawing(), ending) == written


def test_a_name_in_another_script_is_drawn() -> None:
    """matplotlib warns of characters that its font does not have; here warnings are errors."""
    assert encoded(Canvas(100, 100, "模型 <script>", "$x^"), ".png").startswith(b"\x89PNG")


def test_a_missing_matplotlib_is_an_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.present.charts.matplotlib_export.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'shardwise\[plot\]'"):
        drawing().figure()
    assert encoded(drawing(), ".svg")


def test_only_a_figure_loads_matplotlib() -> None:
    code = (
        "import shardwise, sys\n"
        "from shardwise.present.charts import chart, draw_chart, matplotlib_export\n"
        "assert 'matplotlib' not in sys.modules\n"
        "drawing = draw_chart.Canvas(10, 10, 'a', 'b')\n"
        "drawing.svg()\n"
        "assert 'matplotlib' not in sys.modules\n"
        "drawing.figure()\n"
        "assert 'matplotlib' in sys.modules and 'matplotlib.pyplot' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
