"""Reports in a real Chromium, opened from a disk without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from web.chromium import PATH, WHY, Activity, browser, watch_page

from shardwise.present.command_line import main

pytestmark = pytest.mark.skipif(PATH is None, reason=WHY)

PLANS = {
    "dense": ["plan", "llama-3.2-1b", "h100:8", "--batch-tokens", "512Ki", "--seq-len", "4096"],
    "pipeline": ["plan", "llama-3-8b", "h100:64", "--batch-tokens", "1Mi", "--seq-len", "8192", "--pin", "pp=4"],
    "experts": ["plan", "olmoe-1b-7b", "h100:16", "--batch-tokens", "1Mi", "--seq-len", "4096"],
    "tpu": ["plan", "gemma-2-2b", "tpu-v5e:4x4", "--batch-tokens", "512Ki", "--seq-len", "4096"],
    "sweep": ["plan", "llama-3.2-1b", "h100:8", "--batch-tokens", "512Ki", "--seq-len", "4096", "--sweep", "gpus=8,16,32"],
}  # fmt: skip


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


def open_page(chromium: Browser, file: Path, width: int = 1280) -> tuple[Page, Activity]:
    page = chromium.new_context(offline=True, viewport={"width": width, "height": 900}).new_page()
    activity = watch_page(page)
    page.goto(file.as_uri())
    return page, activity


@pytest.mark.parametrize("name", PLANS)
def test_a_report_opens_from_a_disk_and_asks_for_nothing(chromium: Browser, name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.html"
    assert main([*PLANS[name], "--report", str(file)]) == 0
    for width in (1280, 400):
        page, activity = open_page(chromium, file, width)
        expect(page.locator("main h1").first).to_be_visible()
        expect(page.locator("main .panel").first).to_be_visible()
        assert page.locator("main svg").count() >= 2
        assert activity.messages == []
        assert [request for request in activity.requests if not request.startswith(("file:", "data:"))] == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.context.close()


def test_numbers_of_a_report_say_where_they_are_from(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main([*PLANS["dense"], "--report", str(file)]) == 0
    page, _ = open_page(chromium, file)
    page.locator('[data-why="step_time_s"]').first.click()
    expect(page.locator("dialog[open]")).to_contain_text("the sum of the terms of time")
    page.keyboard.press("Escape")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.tools')).display") == "none"
    page.context.close()


BROKEN = [
    ('{"schema"', '{"schema', "not JSON"),
    ("shardwise.report/1", "shardwise.report/9", "is required"),
    ('"views"', '"sights"', "lacks"),
]


@pytest.mark.parametrize(("old", "new", "expected_text"), BROKEN)
def test_a_broken_payload_says_so(chromium: Browser, tmp_path: Path, old: str, new: str, expected_text: str) -> None:
    file = tmp_path / "plan.html"
    assert main([*PLANS["dense"], "--report", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    head, mark, body = text.partition('type="application/json">')
    file.write_text(head + mark + body.replace(old, new, 1), encoding="utf-8")
    page, _ = open_page(chromium, file)
    expect(page.get_by_role("heading", name="This report cannot be read")).to_be_visible()
    expect(page.locator("main")).to_contain_text(expected_text)
    page.context.close()


def test_a_report_with_another_script_does_not_run_it(chromium: Browser, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert main([*PLANS["dense"], "--report", str(file)]) == 0
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("</body>", "<script>document.title = 'other'</script></body>"), encoding="utf-8")
    page, activity = open_page(chromium, file)
    expect(page.locator("main h1").first).to_be_visible()
    assert page.title() != "other"
    assert any("Content Security Policy" in message for message in activity.messages)
    page.context.close()
