"""The cheat sheet in a real Chromium: one printed page of either paper, on which nothing is cut and nothing overlaps."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from web.chromium import PATH, WHY, browser, watch_page

import shardwise as sw
from shardwise.present.charts.cheat_sheet_page import PAPERS, sheet_html

pytestmark = pytest.mark.skipif(PATH is None, reason=WHY)

BOXES = """() => [...document.querySelectorAll('text')].map(text => {
    const box = text.getBoundingClientRect();
    return [text.textContent, box.left, box.top, box.right, box.bottom];
})"""
DESCENT = 0.16  # of a line's box: room above and below letters, which may touch


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.mark.parametrize("paper", PAPERS)
@pytest.mark.parametrize(
    ("model", "cluster"), [("llama-3-70b", "h100:512"), ("deepseek-v3", "gb200:576"), ("gpt-2", "tpu-v5e:4x4")]
)
def test_a_sheet_prints_on_one_page(model: str, cluster: str, paper: str, chromium: Browser, tmp_path: Path) -> None:
    file, size = tmp_path / "sheet.html", PAPERS[paper]
    file.write_text(sheet_html(sw.cheat_sheet(model, cluster), size), encoding="utf-8")
    page = chromium.new_page(viewport={"width": round(size.width), "height": round(size.height)})
    activity = watch_page(page)
    page.goto(file.as_uri())
    pdf = page.pdf(prefer_css_page_size=True, print_background=True)
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) == 1
    media = re.search(rb"/MediaBox\s*\[\s*0\s+0\s+([\d.]+)\s+([\d.]+)\s*\]", pdf)
    assert media is not None
    assert [float(points) / 72 * 25.4 for points in media.groups()] == pytest.approx(
        [size.width_mm, size.height_mm], abs=0.5
    )
    boxes = page.evaluate(BOXES)
    assert len(boxes) > 60
    for content, left, top, right, bottom in boxes:
        assert 0 <= left < right <= size.width, content
        assert 0 <= top < bottom <= size.height, content
    for (content, *a), (text, *b) in combinations(boxes, 2):
        room = DESCENT * min(a[3] - a[1], b[3] - b[1])
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] - room <= b[1] + room or b[3] - room <= a[1] + room, (content, text)
    assert activity.requests == [file.as_uri()]
    assert not activity.messages
    page.close()
