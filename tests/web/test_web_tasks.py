"""Tasks on the page: by address and by menu, with progress that follows the controls."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from web.chromium import PATH, WHY, browser, explorer, watch_page

from shardwise.present.explorer.book_tasks import TASKS

pytestmark = pytest.mark.skipif(PATH is None, reason=WHY)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with explorer() as address:
        yield address


def open_page(chromium: Browser, url: str, query: str, width: int = 1280) -> Page:
    page = chromium.new_context(viewport={"width": width, "height": 900}).new_page()
    page.goto(f"{url}?{query}")
    page.wait_for_selector("main h1, main h2")
    return page


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("name", TASKS)
def test_a_task_opens_by_its_address(chromium: Browser, url: str, name: str, width: int) -> None:
    page = open_page(chromium, url, f"task={name}", width)
    expect(page.locator(".task")).to_contain_text(TASKS[name].title)
    expect(page.locator(".task")).to_contain_text(TASKS[name].goal)
    expect(page.locator(".task > .met")).to_contain_text(re.compile(r"\d of \d reached"))
    page.get_by_text("hint", exact=True).click()
    expect(page.locator(".task a")).to_have_attribute("href", TASKS[name].url)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.context.close()


def test_a_task_is_opened_from_the_menu_and_done_by_the_keyboard(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, "model=gpt-2&cluster=h100:8&layout=dp=8")
    activity = watch_page(page)
    page.focus(".menu summary")
    page.keyboard.press("Enter")
    page.get_by_role("link", name=TASKS["short-bubble"].title).focus()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("task=short-bubble.*micro_batch_seqs=2"))
    expect(page.locator(".task > .met")).to_contain_text("3 of 4 reached")
    expect(page.locator(".best")).to_have_count(0)
    page.focus("#control-micro_batch_seqs")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(".requirements .number").first).to_have_text(re.compile(r"^10\.\d\d%$"))
    page.focus("#control-num_virtual_stages")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".task.done")).to_contain_text("Done: every number is reached.")
    expect(page.locator("#live")).to_contain_text("task done")
    expect(page.locator(".menu .done")).to_have_count(1)
    page.get_by_role("button", name="leave the task").click()
    expect(page.locator(".task")).to_have_count(0)
    assert "task=" not in page.url
    assert activity.messages == []
    page.context.close()


def test_the_answer_is_hidden_until_the_task_is_done(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, "task=hide-communication")
    expect(page.locator("main")).to_contain_text("hidden until the task is done")
    expect(page.locator(".takes")).to_have_count(0)
    page.context.close()


def test_a_task_goes_along_from_view_to_view(chromium: Browser, url: str) -> None:
    page = open_page(chromium, url, "task=critical-batch")
    expect(page.get_by_role("heading", name="Critical batch size")).to_be_visible()
    page.focus("#control-batch_tokens")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".task.done")).to_be_visible()
    page.get_by_role("link", name="Overview").click()
    expect(page.locator(".task.done")).to_be_visible()
    page.get_by_role("button", name="start again").click()
    expect(page).to_have_url(re.compile("batch_tokens=1Mi"))
    expect(page.locator(".task.done")).to_have_count(0)
    page.context.close()
