"""The cheat sheet: every number is one that the package computes, and on paper nothing is cut or overlaps."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

import shardwise as sw
from shardwise.book_formulas import rules
from shardwise.book_formulas.cheat_sheet import SheetItem
from shardwise.hardware.network.switches import Switched
from shardwise.model.parameters_and_flops import model_flops_per_token
from shardwise.present.charts.cheat_sheet_page import EDGE, PAPERS, sheet_drawing, sheet_html
from shardwise.present.charts.drawing import Drawing
from shardwise.present.charts.drawing import Path as Line
from shardwise.present.command_line import main
from shardwise.values.errors import InputError, MissingValueError

from .page import boxes, check_texts, parsed

EXAMPLES = Path(__file__).parents[3] / "examples" / "clusters"
SHEETS = [
    ("llama-3-70b", "h100:512"), ("deepseek-v3", "gb200:576"), ("llama-3-405b", "tpu-v5p:16x20x28"), ("gpt-2", "a100-40gb:8"),
    ("mixtral-8x7b", "mi300x:64"), ("llama-3-8b", "tpu-v5e:16x16*4"),
    ("llama-3-70b", str(EXAMPLES / "three-layer-ethernet.toml")), ("gemma-3-27b", "tpu-v7x:4x4x4"), ("llama-3-8b", "b200:1"),
]  # fmt: skip


def sheet_of(model: str, cluster: str) -> sw.CheatSheet:
    return sw.cheat_sheet(model, cluster)


def items_of(sheet: sw.CheatSheet) -> dict[str, SheetItem]:
    return {item.name: item for section in sheet.sections for item in section.items}


def require_on_paper(drawing: Drawing, paper: str) -> None:
    """No text is cut by the printers' margin or overlaps another or the line of a title; the page has the paper's size."""
    check_texts(drawing)
    root = parsed(drawing)
    size = float(root.get("width", "0")), float(root.get("height", "0"))
    assert size == (pytest.approx(PAPERS[paper].width, abs=0.01), pytest.approx(PAPERS[paper].height, abs=0.01))
    for content, left, top, right, bottom in boxes(drawing):
        assert left >= EDGE - 0.01, content
        assert right <= size[0] - EDGE + 0.01, content
        assert EDGE - 0.01 <= top < bottom <= size[1] - EDGE + 0.01, content
    rules_of_titles = [mark.points for mark in drawing.marks if isinstance(mark, Line)]
    for (left_end, y), (right_end, _) in rules_of_titles:
        for content, left, top, right, bottom in boxes(drawing):
            assert y <= top + 0.5 or y >= bottom or right <= left_end or left >= right_end, content


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize(("model", "cluster"), SHEETS)
def test_nothing_is_cut_and_nothing_overlaps(model: str, cluster: str, paper: str) -> None:
    sheet = sheet_of(model, cluster)
    drawing = sheet_drawing(sheet, PAPERS[paper])
    require_on_paper(drawing, paper)
    contents = [content for content, *_ in boxes(drawing)]
    for section in sheet.sections:
        assert section.title in contents
        assert all(item.name in contents and item.text in contents for item in section.items)
    assert len(contents) > 90


def test_a_sheet_that_does_not_fit_is_refused_with_the_reason() -> None:
    sheet = sheet_of("llama-3-8b", "h100:8")
    crowded = sw.CheatSheet(
        model_name=sheet.model_name, cluster=sheet.cluster, global_batch_tokens=1, seq_len=1, tokens=1.0, precision="bf16",
        sections=[*sheet.sections, *sheet.sections],
    )  # fmt: skip
    with pytest.raises(InputError, match=r"numbers of long names, which do not fit on one page of A4"):
        sheet_drawing(crowded, PAPERS["a4"])


def test_numbers_are_those_of_the_functions_that_plans_use() -> None:
    sheet = sw.cheat_sheet("llama-3-70b", "h100:512", global_batch_tokens="4Mi", seq_len=4096, tokens="15T")
    items, model, cluster = items_of(sheet), sw.load_model("llama-3-70b"), sw.load_cluster("h100:512")
    job = sw.Job(global_batch_tokens=2**22, seq_len=4096)
    book = {rule.name.replace("_", " "): rule.value for rule in sw.book_rules(model, cluster, job)}
    for name in ("fsdp min tokens per chip", "tp max degree", "tokens per chip"):
        assert items[name].value == book[name]
    assert items["parameters"].value == sw.num_params(model)
    assert items["FLOPs of a token"].value == model_flops_per_token(model, 4096)
    assert isinstance(cluster.topology, Switched)
    gather = sw.collective("all-gather", "1GB", axes=512, on="h100:512").report
    assert items["all-gather"].value == gather.time_s
    assert items["at 40% of the peak"].value == pytest.approx(
        rules.training_seconds(sw.num_params(model), 15e12, 512, 989e12, 0.4) / 86400
    )
    assert items["replicas of 8 nodes"].value == pytest.approx(989e12 / (8 * 400e9))


def test_the_books_figures_of_v5p_are_on_its_sheet() -> None:
    """How to Scale Your Model: 2,550 FLOPs a byte and 850 tokens per chip on a v5p with three axes."""
    items = items_of(sw.cheat_sheet("llama-3-70b", "tpu-v5p:16x20x28", global_batch_tokens="4Mi", seq_len=4096))
    assert items["FLOPs for a byte sent"].value == pytest.approx(2550)
    assert items["fsdp min tokens per chip"].value == pytest.approx(850)
    assert items["axis"].value == 180e9


def test_every_number_has_a_source_and_is_finite() -> None:
    for model, cluster in SHEETS:
        for item in items_of(sheet_of(model, cluster)).values():
            assert item.source, item
            assert item.value is None or math.isfinite(item.value), item


def test_the_files_ending_selects_the_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html, svg = tmp_path / "sheet.html", tmp_path / "sheet.svg"
    assert main(["cheat-sheet", "llama-3-8b", "h100:8", "--a4", str(html), "--letter", str(svg)]) == 0
    assert "Chip: h100" in capsys.readouterr().out
    page = html.read_text(encoding="utf-8")
    assert re.search(r"@page \{ size: A4 portrait; margin: 0; \}", page)
    assert "<script" not in page
    assert not re.search(r'(src|href)="', page)
    require_svg = parsed(svg.read_text(encoding="utf-8"))
    assert float(require_svg.get("width", "0")) == pytest.approx(816)
    assert "max-width" not in sheet_html(sheet_of("llama-3-8b", "h100:8"), PAPERS["a4"])


def test_invalid_input_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["cheat-sheet", "llama-3-8b", "h100:8", "--a4", "sheet.pdf"])
    assert ".html or .svg is required" in capsys.readouterr().err
    assert main(["cheat-sheet", "llama-3-8b", "h100:8", "--a4", str(tmp_path / "none" / "sheet.svg")]) == 2
    assert "cannot write" in capsys.readouterr().err
    with pytest.raises(MissingValueError, match="no sourced bf16 peak"):
        sw.cheat_sheet("gpt-2", "v100:4", precision="bf16")
