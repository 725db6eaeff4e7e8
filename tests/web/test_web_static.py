"""The static build in a real Chromium, from a disk and from a web host: answers, choices, and nothing requested elsewhere."""

from __future__ import annotations

import functools
import http.server
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from web.chromium import PATH, WHY, browser, watch_page

from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.static_build import Example, write_static_build
from shardwise.values.units import format_seconds

pytestmark = pytest.mark.skipif(PATH is None, reason=WHY)

EXAMPLES = (Example("tiny-llama-15m", "h100:8", 1 << 16, 1024), Example("gpt-2", "h100:2", 1 << 16, 1024))
WIDTHS = (1280, 420)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as launched:
        yield launched


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    write_static_build(target, examples=EXAMPLES)
    return target


@pytest.fixture(scope="module", params=["disk", "host"])
def address(request: pytest.FixtureRequest, folder: Path) -> Iterator[str]:
    if request.param == "disk":
        yield (folder / "index.html").as_uri()
        return
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def open_page(chromium: Browser, address: str, width: int = 1280) -> Page:
    page = chromium.new_context(viewport={"width": width, "height": 900}).new_page()
    page.goto(address)
    page.wait_for_selector(".verdict .facts")
    return page


@pytest.mark.parametrize("width", WIDTHS)
def test_the_first_example_opens_on_its_best_layout(chromium: Browser, address: str, width: int) -> None:
    page = chromium.new_context(viewport={"width": width, "height": 900}).new_page()
    activity = watch_page(page)
    page.goto(address)
    expect(page.locator(".verdict h1")).to_contain_text("the best layout")
    expect(page.locator("svg[aria-label^='simulated step']")).to_be_visible()
    expect(page.locator(".static-note").first).to_contain_text("2 examples")
    expect(page.locator(".static-note").first).to_contain_text("Not in it: other models")
    assert activity.messages == []
    outside = [url for url in activity.requests if not url.startswith((address.removesuffix("index.html"), "data:"))]
    assert outside == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.context.close()


def test_a_choice_shows_its_layout_with_the_numbers_of_the_explorer(chromium: Browser, address: str) -> None:
    page = open_page(chromium, address)
    page.focus("#control-zero_stage")
    page.keyboard.press("End")
    expect(page).to_have_url(re.compile("zero_stage=3"))
    query = page.url.partition("?")[2]
    priced = Explorer(NameResolver()).answer("overview", query)["estimate"]["estimate"]
    expect(page.locator('.verdict .facts [data-why="step_time_s"]')).to_have_text(format_seconds(priced["step_time_s"]))
    expect(page.get_by_role("heading", name="Simulated step")).to_be_visible()
    expect(page.locator("main")).to_contain_text("simulates the best layout alone")
    page.get_by_role("link", name="Schedule").click()
    expect(page.locator("#unavailable")).to_contain_text("not in the static build")
    page.get_by_role("link", name="Notation").click()
    expect(page.get_by_role("heading", name="Every weight")).to_be_visible()
    expect(page.locator("#unavailable")).to_be_hidden()
    page.get_by_role("link", name="Overview").click()
    page.get_by_role("button", name="take it").first.click()
    expect(page.locator(".verdict h1")).to_contain_text("the best layout")
    page.get_by_role("link", name="Schedule").click()
    expect(page.get_by_role("heading", name="All schedules")).to_be_visible()
    page.context.close()


def test_another_example_opens_on_its_own_best_layout(chromium: Browser, address: str) -> None:
    page = open_page(chromium, address)
    page.select_option("#control-example", "gpt-2 on h100:2")
    expect(page).to_have_url(re.compile("model=gpt-2.*layout="))
    expect(page.locator(".verdict h1")).to_contain_text("the best layout")
    page.go_back()
    expect(page).to_have_url(re.compile("model=tiny-llama-15m"))
    page.context.close()


def test_numbers_say_where_they_are_from_and_states_are_copied(chromium: Browser, address: str) -> None:
    page = open_page(chromium, address)
    page.locator('.verdict .facts [data-why="step_time_s"]').click()
    expect(page.locator("dialog[open]")).to_contain_text("the sum of the terms of time")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="copy as").click()
    expect(page.locator("dialog[open] pre")).to_contain_text("shardwise estimate tiny-llama-15m h100:8")
    page.context.close()


def test_views_that_are_not_in_the_build_say_so(chromium: Browser, address: str) -> None:
    page = open_page(chromium, f"{address}?model=gpt-2&cluster=h100:2")
    expect(page.locator(".verdict h1")).to_contain_text("the best layout")
    page.goto(f"{address}?model=llama-3-8b&cluster=h100:64")
    expect(page.locator("main")).to_contain_text("this state is not in the static build")
    page.context.close()
    page = open_page(chromium, address)
    missing = page.locator(".takes")
    missing.first.wait_for()
    page.evaluate(
        """async () => {
            for (const dot of document.querySelectorAll('.takes')) {
                dot.dispatchEvent(new MouseEvent('click', {bubbles: true}));
                await new Promise(resolve => setTimeout(resolve, 30));
                if (!document.getElementById('unavailable').hidden) return;
            }
        }"""
    )
    expect(page.locator("#unavailable")).to_contain_text("not in the static build")
    expect(page.locator(".verdict .facts")).to_be_visible()
    page.context.close()
