"""`shardwise figures` draws every figure of the books, legibly, beside the original's description."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from json_schemas import require_valid
from unit.draw.page import check_texts, marks_of, texts

import shardwise as sw
from shardwise.present.charts.chart import Cells, RuleLine, StackedBars
from shardwise.present.charts.draw_chart import draw
from shardwise.present.command_line import main
from shardwise.present.figures.figure import Book, Figure, figure_payload
from shardwise.present.figures.figures_page import FIGURES, figures_page
from shardwise.present.figures.ultrascale_playbook import best_layouts

LONG = "best-layouts"  # plans every model on every number of nodes


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["figures", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", [name for name in FIGURES if name != LONG])
def test_every_figure_is_drawn_and_legible_and_its_numbers_are_as_the_schema_says(name: str) -> None:
    drawing = sw.figure(name).drawing()
    check_texts(drawing)
    assert drawing.title
    assert drawing.description
    require_valid(json.loads(json.dumps(figure_payload(sw.figure(name)))))


def test_a_map_of_the_best_layouts() -> None:
    chart = best_layouts(("llama-3.2-1b", "llama-3-8b"), (1, 2))
    (panel,), (scale,) = chart.panels, chart.legend
    assert [category.label for category in panel.y.categories] == ["llama-3.2-1b", "llama-3-8b"]
    assert [category.label for category in panel.x.categories] == ["8", "16"]
    assert "predicted for" in scale.label
    drawing = draw(chart)
    check_texts(drawing)
    assert marks_of(chart, Cells)[0].cells[0].lines[0] in texts(drawing)


def test_crossings_named_in_the_text_are_drawn() -> None:
    """The texts beside the plots have numbers; the charts have the same."""
    (ratios,), (times,) = sw.figure("strategies-4x4x4").charts(), sw.figure("strategies-16x16x16").charts()
    assert [round(rule.at) for rule in marks_of(ratios, RuleLine)] == [434, 850]
    assert "434 and 850" in FIGURES["strategies-4x4x4"].here
    assert 1.6e6 < marks_of(times, RuleLine)[0].at < 1.65e6
    (zero,) = sw.figure("zero-stages").charts()
    totals = re.findall(r"[\d.]+\d", FIGURES["zero-stages"].here.partition(": ")[2])
    assert [f"{total / 1e9:.3g}" for total in marks_of(zero, StackedBars)[0].sums] == totals


def test_figures_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 0
    for name, drawn in FIGURES.items():
        assert f"  {name}: {drawn.section}" in out
        assert drawn.book.url in out


def test_one_figure_as_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for ending, begin in ((".svg", b"<svg"), (".png", b"\x89PNG")):
        target = tmp_path / f"bubbles{ending}"
        assert run(capsys, "pipeline-bubbles", "--out", str(target))[:2] == (0, f"{target}\n")
        assert target.read_bytes().startswith(begin)


def test_figures_and_a_page_in_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["zero-stages", "pipeline-1f1b"]
    code, out, _ = run(capsys, *names, "--out", str(tmp_path / "drawn"))
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [
        "index.html", "pipeline-1f1b.svg", "zero-stages.svg",
    ]  # fmt: skip
    assert len(out.splitlines()) == 3
    page = (tmp_path / "drawn" / "index.html").read_text(encoding="utf-8")
    for name in names:
        assert f'<img src="{name}.svg"' in page
        assert FIGURES[name].command in page
        assert FIGURES[name].section in page


def test_the_payload_of_one_has_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "zero-stages", "--json")
    report = json.loads(out)
    assert report.keys() == {"schema", "name", "book", "section", "url", "original", "here", "command", "charts"}
    assert report["schema"] == "shardwise.figure/2"
    assert sum(part["value"] for part in report["charts"][0]["panels"][0]["marks"][0]["bars"][0]) == 120e9
    _, out, _ = run(capsys, "--json")
    report = json.loads(out)
    assert report["schema"] == "shardwise.figures/1"
    assert [figure["name"] for figure in report["figures"]] == list(FIGURES)
    _, out, _ = run(capsys, "sharding-fsdp", "--json")
    assert json.loads(out)["charts"][0]["panels"][0]["marks"][0]["cells"][0]["lines"] == ["0"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["rooflin"], "figure: found 'rooflin' (did you mean 'roofline'?); one of roofline, "),
        (["roofline", "zero-stages", "--out", "a.svg"], "--out: found 'a.svg' for 2 figures; a folder, or one NAME"),
    ],
)
def test_unknown_figures_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert problem in err


def test_an_unwritable_folder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "zero-stages", "--out", str(tmp_path / "file"))
    assert code == 2
    assert "cannot write" in err


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)


def test_a_page_holds_no_script() -> None:
    hostile = "<script>alert(1)</script>"
    book = Book(title=hostile, url="https://example.org/")
    hostile_figure = Figure(name="x", book=book, section=hostile, original=hostile, here=hostile, charts=lambda: ())
    parser = _Tags()
    parser.feed(figures_page([hostile_figure]))
    assert "script" not in parser.tags
    assert "figure" in parser.tags
